"""What curricula gain over uniform sampling at equal samples: paired seeds on levels of word problems, and the table.

python tools/tables/curriculum_table.py --runs DIR                  run what is missing, print the table
python tools/tables/curriculum_table.py --runs DIR --table_only     print the table of the runs that are there

A run is `python -m grpo_fn.run --gin_file experiments/levels/run.gin --gin_param SEED=S --gin_param
train.train.curriculum=@curricula.NAME()`, in this process; rows.gin in the place of run.gin for what chooses among
single problems. Runs of a seed begin with the same model and take as many samples; what differs is which levels or
problems they ask. A run that was stopped goes on where it stopped.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_fn.core.json_lines import metrics_by_step
from grpo_fn.run import main as run_main

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "levels"


class Arm(NamedTuple):
    """A curriculum of the table: its run, and the uniform sampling over the same levels or rows that it is to beat."""

    file: str
    curriculum: str
    baseline: str


CURRICULA = {
    "uniform_arms": Arm("run.gin", "@curricula.uniform_arms()", "uniform_arms"),
    "threshold_levels": Arm("run.gin", "@curricula.threshold_levels()", "uniform_arms"),
    "learnability_bandit": Arm("run.gin", "@curricula.learnability_bandit()", "uniform_arms"),
    "progress_bandit": Arm("run.gin", "@curricula.progress_bandit()", "uniform_arms"),
    "uniform_rows": Arm("rows.gin", "@curricula.uniform_arms()", "uniform_rows"),
    "pool_in_band": Arm("rows.gin", "@pass_rate_pool.pool_in_band()", "uniform_rows"),
}
# 97.5 % points of Student's t by degrees of freedom, for 95 % intervals of paired differences.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)


class LevelRun(NamedTuple):
    """What a finished run says of itself."""

    curriculum: str
    seed: int
    before: float
    after: float
    area: float  # mean accuracy over the evaluations after the first
    levels: dict[str, float]  # held-out accuracy at the end, by level
    shares: dict[str, float]  # of the problems that were asked, by level
    samples: float


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="where the run folders are, or will be")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], metavar="S")
    parser.add_argument("--curricula", nargs="+", default=[*CURRICULA], metavar="NAME", help="default: all of them")
    parser.add_argument("--gin_param", action="append", default=[], metavar="NAME=VALUE", help="for every run")
    parser.add_argument("--table_only", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table; 1 when a run failed."""
    args = flags().parse_args(argv)
    unknown = sorted({*args.curricula} - {*CURRICULA})
    if unknown:
        print(f"error: --curricula: got {unknown}, wanted some of {[*CURRICULA]}", file=sys.stderr)
        return 2
    wanted = [(name, seed) for seed in args.seeds for name in args.curricula]
    failed = [one for one in wanted if not args.table_only and run_arm(*one, args)]
    print(table([run for name, seed in wanted if (run := level_run(args.runs / f"{name}-{seed}", name, seed))]))
    return 1 if failed else 0


def run_arm(name: str, seed: int, args: argparse.Namespace) -> int:
    """One run to its end, unless it is done; its exit code."""
    where = args.runs / f"{name}-{seed}"
    if (where / "summary.json").exists():
        return 0
    chosen = [f"SEED={seed}", f"train.train.curriculum={CURRICULA[name].curriculum}", *args.gin_param]
    params = [part for param in chosen for part in ("--gin_param", param)]
    return run_main(["--gin_file", str(FOLDER / CURRICULA[name].file), *params, "--run_dir", str(where)])


def level_run(where: Path, name: str, seed: int) -> LevelRun | None:
    """What a finished run says; None of one that is not finished."""
    if not (where / "summary.json").exists():
        return None
    first, *steps = metrics_by_step(where, torn_end=False).values()
    measured = [row for row in steps if "eval/accuracy" in row]
    last, shares = measured[-1], [key for key in steps[0] if key.startswith("curriculum/share/")]
    return LevelRun(
        curriculum=name,
        seed=seed,
        before=first["eval/accuracy"],
        after=last["eval/accuracy"],
        area=statistics.mean(row["eval/accuracy"] for row in measured),
        levels={key.removeprefix("eval/task/"): last[key] for key in last if key.startswith("eval/task/")},
        shares={key.removeprefix("curriculum/share/"): statistics.mean(row[key] for row in steps) for key in shares},
        samples=sum(row["generation/rows"] for row in steps),
    )


def table(runs: Sequence[LevelRun]) -> str:
    """A markdown table, a line a curriculum: accuracies, and differences from uniform paired by seed with intervals."""
    lines = [
        "| curriculum | seeds | samples | before | after | mean over the run | after, less uniform "
        "| mean, less uniform | share of the samples by level | accuracy by level at the end |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(run.curriculum for run in runs):
        mine, baseline = [run for run in runs if run.curriculum == name], CURRICULA[name].baseline
        plain = {run.seed: run for run in runs if run.curriculum == baseline}
        pairs = [(run, plain[run.seed]) for run in mine if run.seed in plain and name != baseline]
        cells = [
            f"`{name}`",
            f"{len(mine)}",
            f"{statistics.mean(run.samples for run in mine):.0f}",
            *(f"{statistics.mean(getattr(run, field) for run in mine):.3f}" for field in ("before", "after", "area")),
            difference([a.after - b.after for a, b in pairs]),
            difference([a.area - b.area for a, b in pairs]),
            by_level([run.shares for run in mine]),
            by_level([run.levels for run in mine]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(values: Sequence[float]) -> str:
    """The mean of paired differences and its 95 % interval by Student's t; nothing of none."""
    if not values:
        return ""
    mean = statistics.mean(values)
    if not 2 <= len(values) <= len(STUDENT) + 1:
        return f"{mean:+.3f}"
    half = STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def by_level(figures: Sequence[dict[str, float]]) -> str:
    """The means of each level, one after the other."""
    return " ".join(f"{statistics.mean(one[level] for one in figures):.2f}" for level in figures[0])


if __name__ == "__main__":
    sys.exit(main())
