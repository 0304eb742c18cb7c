"""A small grid or random search over gin values, some runs at a time, and the table of their results.

python tools/sweep --gin_file run/arithmetic.gin --grid optimizer.adamw.lr=1e-5,5e-5 --grid SEED=0,1,2 --out DIR
python tools/sweep --report --out DIR

Every point of the grid is a trial; with --random, every point for each of --trials draws. A trial is a run folder,
DIR/trials/NAME, made by `python -m grpo_fn.run`. The same command again keeps those that are done, goes on with those
that were interrupted and tries those that failed once more. DIR/table.md and table.csv have a line a setting over its
seeds (SEED, train.train.seed), best first; DIR/trials.csv one a trial; DIR/tensorboard fills TensorBoard's HPARAMS tab.

Exit codes: 0 all done, 1 some trial failed, 2 bad input, 75 stopped by SIGTERM or SIGINT, passed to every trial.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from sweep_runner import STOPPED, Runner
from sweep_spec import Trial, check_bindings, entered, params, run_flags, spec, wanted
from sweep_table import outcome, report

from grpo_fn.command_line import add_gin_flags


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the sweep's folder")
    add_gin_flags(parser, files="as for grpo_fn.run", params="for every trial")
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=A,B,...", help="every value; repeatable")
    parser.add_argument(
        "--random",
        action="append",
        default=[],
        metavar="NAME=DIST",
        help="uniform(low,high), loguniform(low,high), integer(low,high) or choice(a,b,...); repeatable",
    )
    parser.add_argument("--trials", type=int, metavar="N", help="draws of the random values (default 8)")
    parser.add_argument("--draw_seed", type=int, default=0, metavar="S", help="of the draws; draw i stays what it is")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time; they share the cores")
    parser.add_argument("--timeout", type=float, default=86400.0, metavar="SECONDS", help="for a trial (default a day)")
    parser.add_argument("--metric", default="eval/accuracy", help="whose last value counts (default eval/accuracy)")
    parser.add_argument("--lowest", action="store_true", help="the lowest value is the best")
    parser.add_argument("--dry_run", action="store_true", help="print the trials, check their bindings, start nothing")
    parser.add_argument("--report", action="store_true", help="print the table of the trials that are there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, report; returns the exit code."""
    args = flags().parse_args(argv)
    try:
        if args.report:
            sweep = json.loads(spec(args.out).read_text())
            trials = [Trial(**one) for one in sweep["trials"]]
        else:
            trials = wanted(args)
            check_bindings(args, trials)
            if args.dry_run:
                print(f"{len(trials)} trials, {args.jobs} at a time")
                print(
                    *(f"{one.name}: {' '.join(f'{k}={v}' for k, v in one.values.items())}" for one in trials), sep="\n"
                )
                return 0
            trials = entered(args, trials)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stopped = not args.report and runner(args, trials).work()
    outcomes = [outcome(args.out, one, args.metric) for one in trials]
    done = [one for one in outcomes if one.state == "done"]
    if done and not any(math.isfinite(one.value) for one in done):
        print(f"error: --metric: got {args.metric}, which no finished trial has, wanted a metric", file=sys.stderr)
        return 2
    print(report(args.out, outcomes, args.metric, args.lowest))
    return STOPPED if stopped else int(any(one.state != "done" for one in outcomes))


def runner(args: argparse.Namespace, trials: Sequence[Trial]) -> Runner:
    """What runs the trials, each with the sweep's files and bindings and its own on top."""
    return Runner(
        args.out,
        trials,
        lambda one: run_flags(args.gin_file, params(args.gin_param, one)),
        jobs=args.jobs,
        timeout=args.timeout,
    )
