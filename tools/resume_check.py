"""Kill a run at random moments, resume it each time, and compare its end with that of a run left alone.

python tools/resume_check.py --gin_file run/arithmetic.gin --kills 10 --out runs/resume_check

Both runs take the same configuration: OUT/undisturbed once without a kill, OUT/killed with SIGKILL to all of its
processes at moments drawn from --seed over all of its steps, in order. Exit code 0 when model, metrics, rollouts,
evaluations and digests are identical to the last byte (seconds and figures of the machine aside), 1 with what differs
when they are not, 2 for bad input or a run that fails by itself.
"""

import argparse
import filecmp
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from grpo_fn.command_line import CommandParser, exit_code
from grpo_fn.core.json_lines import metrics_by_step

POLL = 0.02  # seconds between looks at a run
TAIL = 12  # last lines shown of a run that failed
COMPARED = ("digests.jsonl", "eval", "model", "rollouts")  # byte by byte


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser("tools/resume_check.py", __doc__)
    parser.add_gin_flags(files="gin file, as for grpo_fn.run; repeatable", required=True)
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="how often it is killed (default 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes of the run (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder for both runs")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="SECONDS", help="for each start (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run both and compare them."""
    args = flags().parse_args(argv)
    return exit_code(lambda: check(args), interrupted="interrupted; the runs in --out stay as they are")


def check(args: argparse.Namespace) -> int:
    """Run both, compare them, and print what differs. Raises ValueError for bad input and for a run that fails."""
    if args.out.exists():
        raise ValueError(f"--out: got {args.out}, which exists, expected a new folder")
    for name, least in (("kills", 0), ("ranks", 1), ("timeout", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name}: got {getattr(args, name)}, expected at least {least}")
    args.out.mkdir(parents=True)
    whole, draw = start(args, "undisturbed") or 0.0, random.Random(args.seed)
    steps = steps_logged(args.out / "undisturbed")
    print(f"undisturbed: {whole:.1f} s in the run folder, {steps} steps", flush=True)
    kills = 0
    for moment in sorted(draw.uniform(0.0, steps) for _ in range(args.kills)):
        step, late = int(moment), moment % 1 * whole / max(1, steps)
        if start(args, "killed", kill=(step, late)) is not None:
            print(f"start {kills + 1}: over before it was killed", flush=True)
            break
        kills += 1
        print(f"start {kills}: killed {late:.2f} s after step {step}", flush=True)
    else:
        start(args, "killed")
    lines = differences(args.out / "undisturbed", args.out / "killed")
    print("\n".join(lines) or f"identical after {kills} kills: metrics, {', '.join(COMPARED)}", flush=True)
    return 1 if lines else 0


def start(args: argparse.Namespace, name: str, *, kill: tuple[int, float] | None = None) -> float | None:
    """Start the command and wait for its end; SIGKILL so many seconds after it has logged a step, which `kill` names.

    Step 0 is logged when the run has entered its folder. Returns the seconds from then to its own end, None if it was
    killed. Raises ValueError when it takes longer than --timeout, or ends neither with 0 nor by that signal.
    """
    files = [part for file in args.gin_file for part in ("--gin_file", file)]
    params = [part for param in args.gin_param for part in ("--gin_param", param)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    run, output = args.out / name, args.out / f"{name}.out"
    command = [sys.executable, *(launcher if args.ranks > 1 else []), "-m", "grpo_fn.run", *files, *params]
    log = run / "log.txt"
    size = log.stat().st_size if log.exists() else 0
    began, entered, reached = time.monotonic(), None, None
    with output.open("ab") as out:
        process = subprocess.Popen(
            [*command, "--run_dir", str(run)], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    try:
        while process.poll() is None:
            now = time.monotonic()
            if entered is None and log.exists() and log.stat().st_size > size:
                entered = now
            if kill is not None and entered is not None:
                if reached is None and steps_logged(run) >= kill[0]:
                    reached = now
                if reached is not None and now >= reached + kill[1]:
                    kill_all(process.pid)
            if now > began + args.timeout:
                raise ValueError(f"got no end of {run} within {args.timeout:g} s (--timeout), expected one")
            time.sleep(POLL)
    finally:
        kill_all(process.pid)
    code, end = process.poll(), time.monotonic()
    if code > 0 or (code < 0 and kill is None):
        tail = output.read_text(errors="replace").splitlines()[-TAIL:]
        raise ValueError("\n    ".join([f"got exit code {code} of the run {run}, expected 0", *tail]))
    return end - (entered or end) if code == 0 else None


def steps_logged(run_dir: Path) -> int:
    """The last step that a run has written to metrics.jsonl; 0 for none, and for the evaluation before the first."""
    return max(metrics_by_step(run_dir, torn_end=True), default=0) if (run_dir / "metrics.jsonl").exists() else 0


def kill_all(pid: int) -> None:
    """SIGKILL to a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                member.kill()


def differences(whole: Path, other: Path) -> list[str]:
    """What differs between two finished runs, in words; nothing when they are the same."""
    from grpo_fn.lab.replay_diff import MACHINE  # needs torch

    paths = [path for run in (whole, other) for part in COMPARED for path in [run / part, *(run / part).rglob("*")]]
    names = {str(path.relative_to(whole if path.is_relative_to(whole) else other)) for path in paths if path.is_file()}
    lines = []
    for name in sorted(names):
        if missing := [run for run in (whole, other) if not (run / name).is_file()]:
            lines.append(f"{name}: not in {missing[0]}")
        elif not filecmp.cmp(whole / name, other / name, shallow=False):
            lines.append(f"{name}: differs")
    runs = [metrics_by_step(run, torn_end=False) for run in (whole, other)]
    for step in sorted({*runs[0], *runs[1]}):
        a, b = ({name: x for name, x in run.get(step, {}).items() if not name.startswith(MACHINE)} for run in runs)
        if odd := [name for name in a | b if a.get(name) != b.get(name)]:
            lines.append(f"metrics.jsonl, step {step}, {odd[0]}: {a.get(odd[0])}, and {b.get(odd[0])} when killed")
    return lines


if __name__ == "__main__":
    sys.exit(main())
