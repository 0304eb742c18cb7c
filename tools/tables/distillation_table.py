"""The table of experiments/distillation, from its run folders.

python tools/tables/distillation_table.py RUNS [--teachers FOLDER] [--page PAGE]

RUNS has a folder for each run, `METHOD_lrRATE_sSEED`; METHOD is grpo, opd or exact, `_4` or the like behind it. A line
is a method, its completions and updates a step, a learning rate and a seed: held-out accuracy before, at its best and
after, the first evaluated step at which it was that of the seed's teacher, or less by its standard error at most, and
the seconds that the steps up to the latter took. The teacher of a seed is the model that `grpo_lrRATE_sSEED` ended
with, in FOLDER where that is given; RATE is 5e-5, or as --teacher_rate says. With PAGE the table stands there,
between `<!-- runs of NAME -->`, NAME being the last part of RUNS, and `<!-- end -->`.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from grpo_fn.core.json_lines import metrics_by_step

FOLDER = re.compile(r"(grpo|opd|exact)(?:_\d+)?_lr([\d.e+-]+)_s(\d+)")
ACCURACY = "eval/accuracy"
OF_A_STEP = "generation/rows", "optimizer/step"  # in the first step that has it


class Run(NamedTuple):
    """Held-out accuracy of a run, by step."""

    method: str
    rows: int  # completions a step
    updates: int  # a step
    rate: float
    seed: int
    accuracy: dict[int, float]
    seconds: dict[int, float]  # of the steps up to each


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="the folder of run folders")
    parser.add_argument("--teachers", type=Path, metavar="FOLDER", help="where teachers' runs are (default: RUNS)")
    parser.add_argument("--teacher_rate", type=float, default=5e-5, metavar="RATE", help="of teachers (default 5e-5)")
    parser.add_argument("--page", type=Path, metavar="PAGE", help="a page to write the table into")
    parser.add_argument("--problems", type=int, default=128, metavar="N", help="held-out problems (default 128)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or write it into a page; returns the exit code."""
    args = flags().parse_args(argv)
    home = args.teachers or args.runs
    runs, theirs = (found(folder) if folder.is_dir() else [] for folder in (args.runs, home))
    teachers = {run.seed: last(run) for run in theirs if (run.method, run.rate) == ("grpo", args.teacher_rate)}
    if not teachers:
        name = f"grpo_lr{args.teacher_rate:g}_sSEED"
        print(f"error: got no run {name} in {home}, wanted that of each teacher", file=sys.stderr)
        return 2
    lines = "\n".join(table(runs, teachers, args.problems))
    if args.page is None:
        print(lines)
        return 0
    begin, end = f"<!-- runs of {args.runs.name} -->\n", "<!-- end -->"
    text = args.page.read_text(encoding="utf-8") if args.page.exists() else ""
    head, marked, tail = text.partition(begin)
    if not marked or end not in tail:
        print(f"error: got {args.page} without {begin.strip()} and {end}, wanted both", file=sys.stderr)
        return 2
    args.page.write_text(f"{head}{begin}\n{lines}\n\n{tail[tail.index(end) :]}", encoding="utf-8")
    return 0


def found(folder: Path) -> list[Run]:
    """The finished runs."""
    runs = []
    for path in sorted(folder.iterdir()):
        if (said := FOLDER.fullmatch(path.name)) and (path / "summary.json").exists():
            rows = metrics_by_step(path, torn_end=False)
            accuracy = {int(step): row[ACCURACY] for step, row in rows.items() if ACCURACY in row}
            size, updates = (next(int(row[name]) for row in rows.values() if name in row) for name in OF_A_STEP)
            spent = accumulate(float(row.get("time/total") or 0.0) for row in rows.values())
            seconds = dict(zip(map(int, rows), spent, strict=True))
            runs.append(Run(said[1], size, updates, float(said[2]), int(said[3]), accuracy, seconds))
    return runs


def last(run: Run) -> float:
    return run.accuracy[max(run.accuracy)]


def table(runs: Sequence[Run], teachers: dict[int, float], problems: int) -> list[str]:
    """A markdown table, methods and rates together, a line a seed."""
    lines = [
        "| method | completions a step | updates a step | learning rate | seed | before | best | after | steps "
        "| teacher | teacher's at step | within its standard error | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(runs, key=lambda run: run[:5]):
        wanted = teachers.get(run.seed)
        near = 0.0 if wanted is None else math.sqrt(wanted * (1 - wanted) / problems)
        reached = [""] * 4
        if wanted is not None:
            there = first(run, wanted - near)
            spent = "" if there is None else f"{run.seconds[there]:.0f}"
            reached = [
                f"{wanted:.3f}",
                *("not reached" if s is None else s for s in (first(run, wanted), there)),
                spent,
            ]
        values = run.accuracy[min(run.accuracy)], max(run.accuracy.values()), last(run)
        cells = [run.method, run.rows, run.updates, f"{run.rate:g}", run.seed]
        cells += [*(f"{value:.3f}" for value in values), max(run.accuracy), *reached]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def first(run: Run, wanted: float) -> int | None:
    """The first evaluated step with that accuracy."""
    return min((step for step, value in run.accuracy.items() if value >= wanted - 1e-9), default=None)


if __name__ == "__main__":
    sys.exit(main())
