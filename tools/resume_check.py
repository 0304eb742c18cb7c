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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from grpo_fn.command_line import add_gin_flags, exit_code
from grpo_fn.core.json_lines import metrics_by_step

POLL = 0.02  # seconds between looks at a run
TAIL = 12  # last lines shown of a run that failed
COMPARED = ("digests.jsonl", "eval", "model", "rollouts")  # byte by byte


class Start(NamedTuple):
    """One start of the command."""

    code: int  # its exit code; below 0 when a signal ended it
    entered: float  # seconds from the start until it had entered the run folder
    seconds: float  # until it was over


class Moment(NamedTuple):
    """When a start is killed."""

    step: int  # the last one in metrics.jsonl, 0 when the run has entered its folder
    seconds: float  # and so many later


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python tools/resume_check.py",
        description="Kill a run at random moments, resume it, and compare its end with that of a run left alone.",
    )
    add_gin_flags(parser, files="gin file, as for grpo_fn.run; repeatable", required=True)
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
    """Run both, compare them, and say what was found. Raises ValueError for bad input and for a run that fails."""
    if args.out.exists():
        raise ValueError(f"--out: got {args.out}, which is there, wanted a new folder")
    for name in ("kills", "ranks", "timeout"):
        if getattr(args, name) < (0 if name == "kills" else 1):
            raise ValueError(f"--{name}: got {getattr(args, name)}, wanted more")
    args.out.mkdir(parents=True)
    alone = finish(args, "undisturbed")
    work, steps = alone.seconds - alone.entered, steps_logged(args.out / "undisturbed")
    print(f"undisturbed: {alone.seconds:.1f} s, {work:.1f} s of them in the run folder, {steps} steps", flush=True)
    drawn, done = random.Random(args.seed), 0
    for number, moment in enumerate(sorted(drawn.uniform(0.0, steps) for _ in range(args.kills)), start=1):
        seconds = moment % 1 * work / max(1, steps)
        start = start_once(args, "killed", kill=Moment(int(moment), seconds))
        if start.code == 0:
            print(f"start {number}: over before it was killed", flush=True)
            break
        require_success(args, "killed", start, killed=True)
        done += 1
        print(f"start {number}: killed {seconds:.2f} s after step {int(moment)}", flush=True)
    else:
        finish(args, "killed")
    found = differences(args.out / "undisturbed", args.out / "killed")
    print("\n".join(found) or f"identical after {done} kills: metrics, {', '.join(COMPARED)}", flush=True)
    return 1 if found else 0


def finish(args: argparse.Namespace, name: str) -> Start:
    """A start that is left alone."""
    start = start_once(args, name, kill=None)
    require_success(args, name, start, killed=False)
    return start


def require_success(args: argparse.Namespace, name: str, start: Start, *, killed: bool) -> None:
    """Raise ValueError, with what it printed last, for a start that ended neither with 0 nor by our signal."""
    if start.code == 0 or (killed and start.code < 0):
        return
    tail = (args.out / f"{name}.out").read_text(errors="replace").splitlines()[-TAIL:]
    raise ValueError("\n    ".join([f"got exit code {start.code} of the run {args.out / name}, wanted 0", *tail]))


def start_once(args: argparse.Namespace, name: str, *, kill: Moment | None) -> Start:
    """Start the command and wait for its end; SIGKILL at the moment `kill`.

    Raises ValueError when it takes longer than --timeout.
    """
    files = [part for file in args.gin_file for part in ("--gin_file", file)]
    params = [part for param in args.gin_param for part in ("--gin_param", param)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command = [sys.executable, *(launcher if args.ranks > 1 else []), "-m", "grpo_fn.run", *files, *params]
    log = args.out / name / "log.txt"
    before = log.stat().st_size if log.exists() else 0
    began, entered, reached = time.monotonic(), None, None
    with open(args.out / f"{name}.out", "ab") as out:
        process = subprocess.Popen(
            [*command, "--run_dir", str(args.out / name)],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        while process.poll() is None:
            now = time.monotonic() - began
            if entered is None and log.exists() and log.stat().st_size > before:
                entered = now
            if kill is not None and entered is not None:
                if reached is None and steps_logged(args.out / name) >= kill.step:
                    reached = now
                if reached is not None and now >= reached + kill.seconds:
                    kill_all(process.pid)
            if now > args.timeout:
                raise ValueError(f"got no end of {args.out / name} within {args.timeout:g} s (--timeout), wanted one")
            time.sleep(POLL)
    finally:
        kill_all(process.pid)
    seconds = time.monotonic() - began
    return Start(process.poll(), seconds if entered is None else entered, seconds)


def steps_logged(run_dir: Path) -> int:
    """The last step that a run has written to metrics.jsonl; 0 for none, and for the evaluation before the first."""
    return max(metrics_by_step(run_dir, torn_end=True), default=0) if (run_dir / "metrics.jsonl").exists() else 0


def kill_all(pid: int) -> None:
    """SIGKILL to a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                one.kill()


def differences(wanted: Path, found: Path) -> list[str]:
    """What differs between two finished runs, in words; nothing when they are the same."""
    names = sorted(
        {
            str(path.relative_to(run))
            for run in (wanted, found)
            for part in COMPARED
            for path in ([run / part] if (run / part).is_file() else (run / part).rglob("*"))
            if path.is_file()
        }
    )
    listed = []
    for name in names:
        missing = [run for run in (wanted, found) if not (run / name).is_file()]
        if missing:
            listed.append(f"{name}: not in {missing[0]}")
        elif not filecmp.cmp(wanted / name, found / name, shallow=False):
            listed.append(f"{name}: differs")
    return listed + differing_metrics(*(metrics_by_step(run, torn_end=False) for run in (wanted, found)))


def differing_metrics(
    wanted: Mapping[int, Mapping[str, float | None]], found: Mapping[int, Mapping[str, float | None]]
) -> list[str]:
    """The first figure of each step that differs; what the machine did is left out."""
    from grpo_fn.lab.replay_diff import MACHINE  # here, as it needs torch

    listed = []
    for step in sorted({*wanted, *found}):
        one, other = (
            {name: value for name, value in run.get(step, {}).items() if not name.startswith(MACHINE)}
            for run in (wanted, found)
        )
        odd = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if odd:
            listed.append(
                f"metrics.jsonl, step {step}, {odd[0]}: {one.get(odd[0])}, and {other.get(odd[0])} when killed"
            )
    return listed


if __name__ == "__main__":
    sys.exit(main())
