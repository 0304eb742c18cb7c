"""Every preset of gin/algo on the arithmetic task, some seeds each, and the table of the results.

python tools/tables/preset_table.py --runs DIR                     run what is missing, print the table
python tools/tables/preset_table.py --runs DIR --table_only        print the table of the runs that are there

A run is `python -m grpo_fn.run --gin_file run/arithmetic.gin --gin_file algo/NAME.gin --gin_param SEED=S ...`; one that
was stopped goes on where it stopped. No preset is left out for what it does; those whose run is refused before it
starts, for want of a teacher, demonstrations, episodes or another setting, are named with the reason.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fn.core.json_lines import metrics_by_step

ALGOS = Path(__file__).resolve().parents[2] / "gin" / "algo"
RUN = "run/arithmetic.gin"
DEADLINE = 3600.0  # seconds for one run


class Run(NamedTuple):
    """What a finished run says of itself."""

    preset: str
    seed: int
    before: float
    after: float
    completions: float  # sampled in all
    refused: int  # steps without enough signal


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="where the run folders are, or will be")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="S")
    parser.add_argument("--presets", nargs="+", metavar="NAME", help="default: those of gin/algo that run")
    parser.add_argument("--gin_param", action="append", default=[], metavar="NAME=VALUE", help="for every run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each when above 1")
    parser.add_argument("--table_only", action="store_true")
    return parser


def presets() -> list[str]:
    """The names of all presets."""
    return sorted(path.stem for path in ALGOS.glob("*.gin"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table; 1 when a run failed."""
    args = flags().parse_args(argv)
    chosen = args.presets or presets()
    unknown = sorted({*chosen} - {*presets()})
    if unknown:
        print(f"error: --presets: got {unknown}, wanted some of {presets()}", file=sys.stderr)
        return 2
    if not args.table_only:
        try:
            refused = refusals(chosen, args.gin_param)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        for name, why in refused.items():
            print(f"{name}: left out, refused: {why}", file=sys.stderr, flush=True)
        if named := sorted({*(args.presets or [])} & {*refused}):
            print(f"error: --presets: got {named}, wanted some that the run does not refuse", file=sys.stderr)
            return 2
        chosen = [name for name in chosen if name not in refused]
    wanted = [(name, seed) for seed in args.seeds for name in chosen]
    failed = [] if args.table_only else run_all(wanted, args)
    print(table([run for name, seed in wanted if (run := result(folder(args.runs, name, seed), name, seed))]))
    return 1 if failed else 0


def gin_files(preset: str) -> list[str]:
    """The files of a preset's run."""
    return [RUN, f"algo/{preset}.gin"]


def refusals(names: Sequence[str], params: Sequence[str]) -> dict[str, str]:
    """Of the presets whose run is refused before it starts: why, as the run would say it.

    Raises ValueError for params with which no run starts, whatever the preset.
    """
    from grpo_fn.config import load_config
    from grpo_fn.trainer.checks.validate import validate
    from grpo_fn.trainer.sections import Settings

    validate(Settings(**load_config([RUN], params).kwargs()))
    refused = {}
    for name in names:
        settings = Settings(**load_config(gin_files(name), params).kwargs())
        try:
            validate(settings)
        except ValueError as error:
            refused[name] = str(error)
    return refused


def run_all(wanted: Sequence[tuple[str, int]], args: argparse.Namespace) -> list[str]:
    """Run every one that has no summary yet; the names of those that failed."""
    missing = [(name, seed) for name, seed in wanted if not (folder(args.runs, name, seed) / "summary.json").exists()]
    with ThreadPoolExecutor(args.jobs) as pool:
        codes = list(pool.map(lambda one: run(*one, args), missing))
    return [f"{name}-{seed}" for (name, seed), code in zip(missing, codes, strict=True) if code]


def run(preset: str, seed: int, args: argparse.Namespace) -> int:
    """One run to its end; its exit code."""
    where = folder(args.runs, preset, seed)
    where.parent.mkdir(parents=True, exist_ok=True)
    params = [part for param in [f"SEED={seed}", *args.gin_param] for part in ("--gin_param", param)]
    files = [part for name in gin_files(preset) for part in ("--gin_file", name)]
    threads = {"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {}
    with open(where.with_suffix(".out"), "a") as out:
        done = subprocess.run(
            [sys.executable, "-m", "grpo_fn.run", *files, *params, "--run_dir", str(where)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
            timeout=DEADLINE,
            check=False,
        )
    said = "" if done.returncode == 0 else f", exit code {done.returncode}, see {where.with_suffix('.out')}"
    print(f"{preset} seed {seed}: done{said}", file=sys.stderr, flush=True)
    return done.returncode


def folder(runs: Path, preset: str, seed: int) -> Path:
    """The run folder of a preset and a seed."""
    return runs / f"{preset}-{seed}"


def result(where: Path, preset: str, seed: int) -> Run | None:
    """What a finished run says; None of one that is not finished."""
    if not (where / "summary.json").exists():
        return None
    summary = json.loads((where / "summary.json").read_text())
    _, *steps = metrics_by_step(where, torn_end=False).values()
    return Run(
        preset,
        seed,
        summary["accuracy_before"],
        summary["accuracy_after"],
        sum(row["generation/rows"] for row in steps),
        sum(row["train/skipped_step"] for row in steps),
    )


def table(runs: Sequence[Run]) -> str:
    """A markdown table, a line a preset: accuracies as mean and, in brackets, smallest to largest over the seeds."""
    lines = [
        "| preset | seeds | before | after | gain | completions | refused steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted({run.preset for run in runs}):
        mine = [run for run in runs if run.preset == name]
        gain = [run.after - run.before for run in mine]
        cells: list[Any] = [
            f"`{name}`",
            len(mine),
            *(spread([getattr(run, field) for run in mine]) for field in ("before", "after")),
            f"{statistics.mean(gain):+.3f} ({min(gain):+.3f} to {max(gain):+.3f})",
            f"{statistics.mean(run.completions for run in mine):.0f}",
            f"{statistics.mean(run.refused for run in mine):.1f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Mean, smallest and largest."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
