"""Two or more configurations from the same start, with the same problems, order and random numbers, step by step.

python tools/pair A.gin B.gin [C.gin ...] --gin_file run/arithmetic.gin --seeds 0 1 2 --out DIR
python tools/pair --report --out DIR

Every arm is the files of --gin_file with one file of its own on top; the first is what the others are compared with.
An arm and a seed are a run folder, DIR/trials/ARM-seed_S, made by `python -m grpo_fn.run`. All arms of a seed begin
with one model: where the configuration makes it, it is made once and kept in DIR/starts. The same command again keeps
what is done and goes on with the rest; more seeds or arms widen it. DIR/paired.jsonl has a line for each arm, metric
and step: the mean difference, its 95 % interval over the seeds, and how many unpaired seeds a paired one is worth;
DIR/table.md and DIR/report.html show them.

Exit codes: 0 all done, 1 some run failed, 2 bad input, 75 stopped by SIGTERM or SIGINT, passed to every run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sweep"))

from grpo_fn.command_line import add_gin_flags

if TYPE_CHECKING:
    from pair_spec import Pairing

METRICS = ("reward/mean", "eval/accuracy")


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="*", metavar="ARM.gin", help="two or more; each goes by its file's name")
    add_gin_flags(parser, files="below every arm, as for grpo_fn.run", params="for every run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder of all runs")
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"], metavar="S", help="default 0 1 2")
    parser.add_argument(
        "--seed_knob",
        default="SEED",
        metavar="NAME",
        help="what a seed binds (default SEED); train.train.seed leaves the seed of a model that is made as it is",
    )
    parser.add_argument(
        "--start", metavar="MODEL", help="model folder, hub name, run or checkpoint that all begin with"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time; they share the cores")
    parser.add_argument("--timeout", type=float, default=86400.0, metavar="SECONDS", help="for a run (default a day)")
    parser.add_argument("--metric", action="append", default=[], help=f"repeatable (default {' '.join(METRICS)})")
    parser.add_argument("--dry_run", action="store_true", help="check the arms, print the runs, start nothing")
    parser.add_argument("--report", action="store_true", help="make the tables of what is there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, compare; returns the exit code."""
    args = flags().parse_args(argv)
    from pair_report import measured, reported
    from pair_spec import check_alike, entered, stored, trials, wanted

    try:
        asked = stored(args.out) if args.report else wanted(args)
        if not args.report:
            check_alike(asked)
            if args.dry_run:
                print(f"{len(trials(asked))} runs, {args.jobs} at a time")
                print(*(f"{one.name}: {' '.join(asked.flags(one))}" for one in trials(asked)), sep="\n")
                return 0
            asked = entered(args.out, asked)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stopped = not args.report and work(args, asked)
    try:
        found = measured(args.out, asked, args.metric or METRICS)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if not args.report else 2
    print(reported(args.out, asked, found))
    from sweep_runner import STOPPED

    return STOPPED if stopped else int(found.missing > 0)


def work(args: argparse.Namespace, asked: "Pairing") -> bool:
    """Run what is not done; whether a signal stopped it."""
    from pair_spec import trials
    from sweep_runner import Runner

    return Runner(args.out, trials(asked), asked.flags, jobs=args.jobs, timeout=args.timeout).work()
