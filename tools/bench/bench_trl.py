"""`tools/bench trl`: our program and TRL's GRPOTrainer on the same work, started in turn; and the table of both."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from statistics import median

import bench_sides
from bench import in_turn, table
from bench_sides import Measured
from bench_work import SCALES, Work, make

TOOLS = Path(__file__).resolve().parent
HOME = TOOLS.parents[1] / ".venv-trl"
REQUIREMENTS = TOOLS / "trl.requirements.txt"


def trl(args: argparse.Namespace) -> Iterator[str]:
    """Completions per second and peak memory against TRL's GRPOTrainer, program against program."""
    unknown = {*args.scale.split(",")} - {*SCALES}
    if unknown:
        raise ValueError(f"--scale: got {', '.join(sorted(unknown))}, wanted some of {', '.join(SCALES)}")
    python = args.trl_python or environment(HOME)
    for name in args.scale.split(","):
        with tempfile.TemporaryDirectory() as folder:
            yield from chapter(args, name, python, Path(folder))


def chapter(args: argparse.Namespace, name: str, python: Path, folder: Path) -> Iterator[str]:
    """What one scale comes to."""
    work = SCALES[name]
    shared = make(work, args.warm_up + ceil(args.steps / args.rounds), folder)
    same = {"warm_up": args.warm_up, "threads": args.threads, "deadline": args.timeout}
    sides = {
        "ours": lambda n: bench_sides.ours(shared, folder / f"ours{n}", **same),
        "TRL": lambda n: bench_sides.trl(shared, folder / f"trl{n}", python=python, **same),
    }
    both = {side: bench_sides.together(starts) for side, starts in in_turn(sides, args.rounds).items()}
    yield from (f"## {name}", "")
    yield (
        f"{shared['parameters']:,} parameters, {work.dtype}; {work.prompts} x {work.group_size} completions of up to "
        f"{work.new_tokens} tokens after prompts of {shared['prompt_tokens']:.1f}; {len(both['ours'].steps)} steps of "
        f"each side; starts of each, in turn: {args.rounds}, each with {args.warm_up} to warm up; threads: "
        f"{args.threads}; tokens of a micro-batch of ours: {work.micro_tokens:,}, logits of a chunk of its head: "
        f"{work.logits_chunk_elements:,}; rows of a micro-batch of TRL's: {work.trl_rows or 'all'}."
    )
    yield from (f"{side}: {', '.join(' '.join(used) for used in one.versions.items())}." for side, one in both.items())
    yield ""
    yield from against(work, both["ours"], both["TRL"])
    yield from phases(both["ours"])


def environment(home: Path) -> Path:
    """The Python of an environment that has TRL, made now when it is not there."""
    python = home / "bin" / "python"
    if not python.exists():
        print(f"making {home}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)], check=True)
    return python


def against(work: Work, ours: Measured, theirs: Measured) -> Iterator[str]:
    """The table of both sides; a ratio is ours over theirs, and there is none where theirs is zero."""
    both = (ours, theirs)
    rows = [
        ("completions per second, median step", ".1f", *(side.rate() for side in both)),
        ("seconds a step, median", ".2f", *(median(side.of("seconds")) for side in both)),
        ("tokens of a completion, mean", ".2f", *(side.mean("length") for side in both)),
        ("calls of the tool in an episode, mean", ".2f", *(side.mean("calls") for side in both)),
        ("peak memory, GB", ".2f", *(side.peak / 1e9 for side in both)),
    ]
    bars = {
        "completions per second, median step": work.speed_bar and f"at least {work.speed_bar:.1f}x",
        "peak memory, GB": work.memory_bar and f"at most {work.memory_bar:.2f}x",
    }
    yield from table(
        ("", "ours", "TRL", "ratio", "bar"),
        [
            (what, f"{a:{form}}", f"{b:{form}}", f"{a / b:.2f}x" if b else "", bars.get(what) or "")
            for what, form, a, b in rows
        ],
    )


def phases(ours: Measured) -> Iterator[str]:
    """Where the time of our median step goes."""
    whole = median(ours.of("seconds"))
    names = sorted({name for step in ours.steps for name in step if name.startswith("time/")})
    shown = {name: seconds for name in names if (seconds := median(ours.of(name))) >= 0.005 * whole}
    yield from table(
        ("ours", *(name.removeprefix("time/") for name in shown)),
        [
            ("seconds, median", *(f"{seconds:.3f}" for seconds in shown.values())),
            ("share of a step", *(f"{seconds / whole:.0%}" for seconds in shown.values())),
        ],
    )
