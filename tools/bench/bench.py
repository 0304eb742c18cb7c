"""Whole steps of grpo_fn against those of TRL's GRPOTrainer on this machine, program against program.

    python tools/bench --scale arithmetic,small --out experiments/bench/trl.md

prints a page of markdown for each scale: completions a second, peak memory, and where a step's time goes. Ratios of one
run are what counts; absolute figures are of the machine and the hour. experiments/bench/README.md says what runs.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from grpo_fn.command_line import exit_code
from grpo_fn.core.json_lines import metrics_by_step

if TYPE_CHECKING:
    from bench_work import Work

TOOLS = Path(__file__).resolve().parent
HOME = TOOLS.parents[1] / ".venv-trl"
EVALUATION = "time/evaluate"
WARM_UP = 2  # steps of every start that are not measured
DEADLINE = 3600.0  # seconds of one start
POLL = 0.05  # seconds between two looks at a program's memory


class Measured(NamedTuple):
    """One side, over one start or several; warm-up is left out."""

    steps: list[dict[str, float]]  # seconds, rows, length (mean of completions); time/... of ours
    peak: float  # bytes that the program and its helper processes had resident at most
    versions: dict[str, str]

    def rate(self) -> float:
        """Completions per second of the median step."""
        return median(self.of("rows")) / median(self.of("seconds"))

    def of(self, name: str) -> list[float]:
        """That figure of every step; 0 where it did not come up."""
        return [step.get(name, 0.0) for step in self.steps]


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scale", default="arithmetic,small", metavar="NAME,...", help="of bench_work.SCALES (default %(default)s)")
    add("--steps", type=int, default=10, help="measured steps of each side, in all (default %(default)s)")
    add("--rounds", type=int, default=2, help="starts of each side, in turn (default %(default)s)")
    add("--threads", type=int, default=2, help="of each side (default %(default)s)")
    add("--trl_python", type=Path, metavar="PATH", help="of an environment with TRL (default: .venv-trl, made)")
    add("--out", type=Path, metavar="FILE", help="write the page there as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the page and write it; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(partial(measure, flags().parse_args(argv), argv), interrupted="interrupted")


def measure(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure every scale. Raises ValueError for a scale that there is not."""
    from bench_work import SCALES  # needs torch

    names = args.scale.split(",")
    if unknown := {*names} - {*SCALES}:
        raise ValueError(f"--scale: got {', '.join(sorted(unknown))}, expected some of {', '.join(SCALES)}")
    python = args.trl_python or environment(HOME)
    lines = [f"`python tools/bench {shlex.join(argv)}`", "", machine(), ""]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            lines += [f"## {name}", "", *chapter(args, SCALES[name], python, Path(folder))]
    page = "\n".join(lines).rstrip() + "\n"
    print(page, end="")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page)
    return 0


def environment(home: Path) -> Path:
    """The Python of an environment that has TRL, made now when it is not there."""
    python = home / "bin" / "python"
    if not python.exists():
        print(f"making {home}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = ["-m", "pip", "install", "--quiet", "-r", str(TOOLS / "trl.requirements.txt")]
        subprocess.run([str(python), *install], check=True)
    return python


def machine() -> str:
    """What the figures were measured on."""
    import torch
    import transformers

    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    device = ", ".join(cards) or f"{os.cpu_count()} CPU cores, {platform.processor() or platform.machine()}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{device}; {versions}"


def chapter(args: argparse.Namespace, work: "Work", python: Path, folder: Path) -> Iterator[str]:
    """The page's lines about one scale. Both sides start in turn, so that what else the machine does meets each."""
    from bench_work import make

    shared = make(work, WARM_UP + ceil(args.steps / args.rounds), folder)
    starts: dict[str, list[Measured]] = {"ours": [], "TRL": []}
    for number in range(args.rounds):
        starts["ours"].append(ours(shared, folder / f"ours{number}", threads=args.threads))
        starts["TRL"].append(trl(shared, folder / f"trl{number}", python=python, threads=args.threads))
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    both = {side: together(several) for side, several in starts.items()}
    yield (
        f"{shared['parameters']:,} parameters, {work.dtype}; {work.prompts} x {work.group_size} completions of up to "
        f"{work.new_tokens} tokens after prompts of {shared['prompt_tokens']:.1f}; {len(both['ours'].steps)} steps of "
        f"each side; starts of each, in turn: {args.rounds}, each with {WARM_UP} to warm up; threads: "
        f"{args.threads}; tokens of a grpo_fn micro-batch: {work.micro_tokens:,}, logits of a chunk of its head: "
        f"{work.logits_chunk_elements:,}; rows of a micro-batch of TRL's: {work.trl_rows or 'all'}."
    )
    for side, result in both.items():
        yield f"{side}: {', '.join(' '.join(package) for package in result.versions.items())}."
    yield ""
    yield from against(work, both["ours"], both["TRL"])
    yield from phases(both["ours"])


def against(work: "Work", ours: Measured, theirs: Measured) -> Iterator[str]:
    """The table of both sides; a ratio is ours over theirs, and there is none where theirs is zero."""
    speed_bar = work.speed_bar and f"at least {work.speed_bar:.1f}x"
    memory_bar = work.memory_bar and f"at most {work.memory_bar:.2f}x"
    rows = [
        ("completions per second, median step", ".1f", Measured.rate, speed_bar),
        ("seconds a step, median", ".2f", lambda side: median(side.of("seconds")), None),
        ("tokens of a completion, mean", ".2f", lambda side: mean(side.of("length")), None),
        ("peak memory, GB", ".2f", lambda side: side.peak / 1e9, memory_bar),
    ]
    pairs = [(what, form, figure(ours), figure(theirs), bar) for what, form, figure, bar in rows]
    cells = [
        (what, f"{a:{form}}", f"{b:{form}}", f"{a / b:.2f}x" if b else "", bar or "") for what, form, a, b, bar in pairs
    ]
    yield from table(("", "ours", "TRL", "ratio", "bar"), cells)


def phases(ours: Measured) -> Iterator[str]:
    """The table of where the time of our median step goes."""
    whole = median(ours.of("seconds"))
    names = sorted({name for step in ours.steps for name in step if name.startswith("time/")})
    shown = {name: seconds for name in names if (seconds := median(ours.of(name))) >= 0.005 * whole}
    medians = ("seconds, median", *(f"{seconds:.3f}" for seconds in shown.values()))
    shares = ("share of a step", *(f"{seconds / whole:.0%}" for seconds in shown.values()))
    yield from table(("ours", *(name.removeprefix("time/") for name in shown)), [medians, shares])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


# -- the two programs


def together(several: list[Measured]) -> Measured:
    """The steps of several starts; the highest peak."""
    steps = [step for start in several for step in start.steps]
    return Measured(steps, max(start.peak for start in several), several[0].versions)


def ours(shared: dict[str, Any], folder: Path, *, threads: int) -> Measured:
    """`python -m grpo_fn.run` on the work, timed by its own metrics."""
    from bench_work import gin_flags  # needs torch

    folder.mkdir()
    run = folder / "run"
    command = [sys.executable, "-m", "grpo_fn.run", *gin_flags(shared), "--run_dir", str(run)]
    peak = watched(command, folder, threads=threads)
    return of_ours(metrics_by_step(run, torn_end=False), peak)


def of_ours(metrics: Mapping[int, dict[str, float | None]], peak: float) -> Measured:
    """The figures of metrics.jsonl. time/total is from the end of one step's record to the end of the next one's.

    The evaluation that ends every grpo_fn run is no part of a step: the other side has none.
    """
    steps = []
    for line in [line for step, line in metrics.items() if step > 0][WARM_UP:]:
        phases = {name: x for name, x in line.items() if name.startswith("time/") and name != EVALUATION}
        seconds, rows = phases.pop("time/total") - line.get(EVALUATION, 0.0), line["generation/rows"]
        steps.append({"seconds": seconds, "rows": rows, "length": line["generation/tokens"] / rows, **phases})
    return Measured(steps, peak, {name: version(name) for name in ("torch", "transformers")})


def trl(shared: dict[str, Any], folder: Path, *, python: Path, threads: int) -> Measured:
    """GRPOTrainer on the work, timed by a callback (bench_trl_side.py)."""
    folder.mkdir()
    (folder / "work.json").write_text(json.dumps(shared))
    out = folder / "out.json"
    command = [str(python), str(TOOLS / "bench_trl_side.py"), str(folder / "work.json"), str(out)]
    peak = watched(command, folder, threads=threads)
    record = json.loads(out.read_text())
    return Measured(record["steps"][WARM_UP:], peak, record["versions"])


def watched(command: list[str], folder: Path, *, threads: int) -> float:
    """Run a program to its end; returns the most bytes that it and the processes it started had resident.

    Raises RuntimeError with the end of what it printed when it fails, and TimeoutError when it takes too long.
    """
    settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    paths = [str(TOOLS), os.environ.get("PYTHONPATH", "")]
    settings |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
    log, until, looks, peak, helpers = folder / "log.txt", time.monotonic() + DEADLINE, 0, 0.0, 0.0
    with log.open("w") as printed:
        program = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **settings}, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            while program.poll() is None and time.monotonic() < until:
                peak = max(peak, high_water(program.pid))
                if looks % 20 == 0:  # to look for them means to look at every process of the machine
                    helpers = max(helpers, helpers_of(program.pid))
                looks += 1
                time.sleep(POLL)
        finally:
            late = program.poll() is None
            program.kill()
            program.wait()
    output = f"{' '.join(command[:3])}: {log.read_text()[-4000:]}"
    if late:
        raise TimeoutError(f"not over after {DEADLINE:.0f} s; {output}")
    if program.returncode:
        raise RuntimeError(f"ended with {program.returncode}; {output}")
    return peak + helpers


def high_water(pid: int) -> float:
    """The most bytes that a program had resident so far; 0 for one that is ending.

    Not ru_maxrss: what a process had before exec counts there, and that was this process.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def helpers_of(pid: int) -> float:
    """Bytes that the processes hold which a program has started."""
    try:
        return float(sum(child.memory_info().rss for child in psutil.Process(pid).children(recursive=True)))
    except psutil.Error:
        return 0.0
