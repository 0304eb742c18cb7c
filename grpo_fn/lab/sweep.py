"""A small grid or random search over gin values, some runs at a time, and the table of their results.

python -m grpo_fn.lab.sweep --gin_file run/arithmetic.gin --grid optimizer.adamw.lr=1e-5,5e-5 --grid SEED=0,1 --out DIR
python -m grpo_fn.lab.sweep --report --out DIR

Every point of the grid is a trial; with --random, every point for each of --trials draws. A trial is a run folder,
DIR/trials/NAME, made by `python -m grpo_fn.run`. The same command again keeps those that are done, goes on with those
that were interrupted and tries those that failed once more. DIR/table.md and table.csv have a line a setting over its
seeds (SEED, train.train.seed), best first; DIR/trials.csv one a trial.

Exit codes: 0 all done, 1 some trial failed, 2 bad input, 75 stopped by SIGTERM or SIGINT, passed to every trial.
"""

import argparse
import csv
import hashlib
import io
import itertools
import json
import math
import random
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fn.command_line import exit_code
from grpo_fn.config import load_config
from grpo_fn.core.json_lines import metrics_by_step
from grpo_fn.lab.paired import paired_cells, paired_difference
from grpo_fn.lab.trials import (
    INTERRUPTED,
    STOPPED,
    UNHEALTHY,
    Trial,
    TrialRunner,
    check_limits,
    column_names,
    is_done,
    open_trials,
    plain_table,
    run_flags,
    table_markdown,
    trial_code,
    trial_folder,
    trial_output,
    trial_parser,
)
from grpo_fn.shell.atomic_io import write_bytes, write_json

SPEC = "sweep.json"  # where a sweep's folder says what it is
PAIRED = (
    "to first: paired difference to the first line over the seeds of both, with Student's 95 % interval; worth: how "
    "many unpaired seeds a paired one is worth (the ratio of variances). The first line was chosen by these numbers."
)
SEEDS = ("SEED", "train.train.seed")  # what a setting is repeated over


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = trial_parser("grpo_fn.lab.sweep", __doc__)
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=A,B,...", help="every value; repeatable")
    parser.add_argument(
        "--random",
        action="append",
        default=[],
        metavar="NAME=DIST",
        help="uniform(low,high), loguniform(low,high), integer(low,high) or choice(a,b,...); repeatable",
    )
    parser.add_argument("--trials", type=int, metavar="N", help="draws of the random values (default 8)")
    parser.add_argument("--metric", default="eval/accuracy", help="whose last value counts (default eval/accuracy)")
    parser.add_argument("--lowest", action="store_true", help="the lowest value is the best")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, report; returns the exit code."""
    return exit_code(partial(sweep, flags().parse_args(argv)), interrupted="interrupted")


def sweep(args: argparse.Namespace) -> int:
    """Run what is missing, report. Raises ValueError or OSError for bad input."""
    if args.report:
        trials = [Trial(**values) for values in json.loads((args.out / SPEC).read_text())["trials"]]
    else:
        trials = sweep_trials(args)
        check_bindings(args, trials)
        if args.dry_run:
            print(f"{len(trials)} trials, {args.jobs} at a time")
            print(*(f"{one.name}: {' '.join(f'{k}={v}' for k, v in one.values.items())}" for one in trials), sep="\n")
            return 0
        trials = open_sweep(args, trials)
    stopped = False
    if not args.report:
        trial_flags = partial(sweep_flags, args)
        stopped = TrialRunner(args.out, trials, trial_flags, jobs=args.jobs, timeout=args.timeout).work()
    outcomes = [trial_outcome(args.out, one, args.metric) for one in trials]
    done = [one for one in outcomes if one.state == "done"]
    if done and not any(math.isfinite(one.value) for one in done):
        raise ValueError(f"--metric: got {args.metric}, which no finished trial has, expected a metric")
    print(sweep_report(args.out, outcomes, args.metric, args.lowest))
    return STOPPED if stopped else int(any(one.state != "done" for one in outcomes))


# -- the trials: points of a grid, draws of random values, and the folder that lists them


def sweep_trials(args: argparse.Namespace) -> list[Trial]:
    """The trials that the command line describes. Raises ValueError for none, and for a name that has two values."""
    check_limits(args)
    if args.trials is not None and args.trials < 1:
        raise ValueError(f"--trials: got {args.trials}, expected above 0")
    if args.trials is not None and not args.random:
        raise ValueError("--trials: got it without --random, expected both: a grid says itself how many trials it has")
    grid = {name: split_values(text) for name, text in map(name_and_value, args.grid)}
    dists = dict(map(name_and_value, args.random))
    names = [name_and_value(text)[0] for text in (*args.grid, *args.random)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"got {', '.join(twice)} more than once in --grid and --random, expected each name once")
    if not names:
        raise ValueError("got neither --grid nor --random, expected something to try")
    if empty := [name for name, values in grid.items() if not all(values)]:
        raise ValueError(f"--grid: got an empty value of {', '.join(empty)}, expected NAME=A,B,...")
    draws = range(8 if args.trials is None else args.trials) if dists else [0]
    drawn = [{name: draw_value(dist, f"0/{i}/{name}") for name, dist in dists.items()} for i in draws]
    points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    trials = [sweep_trial({**values, **point}) for values in drawn for point in points]
    return list({one.name: one for one in trials}.values())


def name_and_value(text: str) -> tuple[str, str]:
    """NAME and what stands behind the first `=`."""
    name, sign, value = text.partition("=")
    if not sign or not re.fullmatch(r"[\w./]+", name.strip()):
        raise ValueError(f"got {text!r}, expected NAME=...")
    return name.strip(), value.strip()


def split_values(text: str) -> list[str]:
    """The parts between commas that stand outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        if c == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def draw_value(dist: str, seed: str) -> str:
    """A value of the distribution, the same for the same seed. Raises ValueError for one that there is not."""
    found = re.fullmatch(r"(\w+)\((.*)\)", dist)
    kind, values = (found[1], split_values(found[2])) if found else ("", [])
    chance = random.Random(seed)
    if kind == "choice" and all(values):
        return chance.choice(values)
    try:
        low, high = map(float, values)
    except ValueError:
        low, high = 1.0, 0.0
    if low < high < math.inf and kind == "uniform":
        return f"{chance.uniform(low, high):.4g}"
    if 0 < low < high < math.inf and kind == "loguniform":
        return f"{math.exp(chance.uniform(math.log(low), math.log(high))):.4g}"
    if low < high < math.inf and kind == "integer" and low.is_integer() and high.is_integer():
        return str(chance.randint(int(low), int(high)))
    raise ValueError(
        f"--random: got {dist!r}, expected uniform(low,high), loguniform(low,high) with low > 0, integer(low,high) "
        "or choice(a,b,...)"
    )


def sweep_trial(values: dict[str, str]) -> Trial:
    """A trial goes by its values, so that it is found again when a sweep is widened."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
    short = "_".join(f"{name.rpartition('.')[2]}={value}" for name, value in sorted(values.items()))
    return Trial(f"{re.sub(r'[^A-Za-z0-9.=_+-]', '', short)[:60]}-{digest}", values)


def check_bindings(args: argparse.Namespace, trials: Sequence[Trial]) -> None:
    """Every name and value against the functions that they are for. Raises ValueError before anything starts."""
    for one in trials:
        try:
            load_config(args.gin_file, sweep_bindings(args, one))
        except ValueError as error:
            raise ValueError(f"trial {one.name}: {error}") from error


def sweep_bindings(args: argparse.Namespace, one: Trial) -> list[str]:
    """The bindings of a trial."""
    return [*args.gin_param, *(f"{name}={value}" for name, value in one.values.items())]


def sweep_flags(args: argparse.Namespace, one: Trial) -> list[str]:
    """The flags of a trial: the sweep's files and bindings, and its own on top."""
    return run_flags(args.gin_file, sweep_bindings(args, one))


def open_sweep(args: argparse.Namespace, trials: Sequence[Trial]) -> list[Trial]:
    """Make the sweep's folder, or widen one with the same files; all its trials, older ones first.

    Raises ValueError when the folder is that of another sweep, or of something else.
    """
    spec, base = args.out / SPEC, {"gin_files": args.gin_file, "gin_params": args.gin_param}
    before: dict[str, Trial] = {}
    if open_trials(spec):
        known = json.loads(spec.read_text())
        if {key: known[key] for key in base} != base:
            raise ValueError(
                f"got {args.out}, a sweep of {known['gin_files']} with {known['gin_params']}, expected the same"
            )
        before = {values["name"]: Trial(**values) for values in known["trials"]}
    every = [*{**before, **{one.name: one for one in trials}}.values()]
    write_json(spec, {**base, "trials": [one._asdict() for one in every]})
    return every


# -- the tables over seeds, as text and CSV


class TrialOutcome(NamedTuple):
    """What a trial says of itself."""

    trial: Trial
    state: str  # "done", "unfinished", "unhealthy" (ended by a rule of health) or "failed"
    value: float  # of the metric, at the end of a done trial


class Setting(NamedTuple):
    """A setting over its seeds."""

    values: dict[str, str]
    by_seed: dict[tuple[str, ...], float]  # the values of SEEDS -> the score of the trial that is done
    missing: int

    @property
    def scores(self) -> list[float]:
        return [*self.by_seed.values()]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores) if self.scores else math.nan


def trial_outcome(out: Path, one: Trial, metric: str) -> TrialOutcome:
    """What a trial's folder says: the metric's last value, if the run is done."""
    if not is_done(out, one):
        code = trial_code(out, one)
        ended = int(code.read_text()) if code.exists() else STOPPED
        state = "unhealthy" if ended == UNHEALTHY else "unfinished" if ended in INTERRUPTED else "failed"
        return TrialOutcome(one, state, math.nan)
    rows = metrics_by_step(trial_folder(out, one), torn_end=False).values()
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return TrialOutcome(one, "done", float(values[-1]) if values else math.nan)


def settings_by_score(outcomes: Sequence[TrialOutcome], lowest: bool) -> list[Setting]:
    """Trials that differ in their seeds alone, put together; the best mean first, those without any value last."""
    by_values: dict[str, list[TrialOutcome]] = {}
    for one in outcomes:
        key = json.dumps({k: v for k, v in one.trial.values.items() if k not in SEEDS}, sort_keys=True)
        by_values.setdefault(key, []).append(one)
    settings = []
    for key, group in by_values.items():
        scores = {
            tuple(one.trial.values.get(name, "") for name in SEEDS): one.value
            for one in group
            if math.isfinite(one.value)
        }
        settings.append(Setting(json.loads(key), scores, len(group) - len(scores)))
    sign = 1 if lowest else -1
    return sorted(settings, key=lambda one: sign * one.mean if one.scores else math.inf)


def sweep_report(out: Path, outcomes: Sequence[TrialOutcome], metric: str, lowest: bool) -> str:
    """Write the tables; returns what a terminal shows."""
    settings = settings_by_score(outcomes, lowest)
    rows = [{**setting_cells(one), **against_best(settings[0], one)} for one in settings]
    each = [{"trial": one.trial.name, **one.trial.values, "state": one.state, metric: one.value} for one in outcomes]
    head = f"{metric} at the end, {'lowest' if lowest else 'highest'} mean first"
    notes = [PAIRED, ""] if any("pairs" in row for row in rows) else []
    notes += [
        f"{one.state}: {one.trial.name}, see {trial_output(out, one.trial)}" for one in outcomes if one.state != "done"
    ]
    texts = ["\n".join([head, "", table(rows), "", *notes]).rstrip() for table in (table_markdown, plain_table)]
    write_bytes(out / "table.md", f"{texts[0]}\n".encode())
    write_bytes(out / "table.csv", comma_separated(rows).encode())
    write_bytes(out / "trials.csv", comma_separated(each).encode())
    return texts[1]


def setting_cells(one: Setting) -> dict[str, Any]:
    """A line of the table. std is that of a sample (n - 1)."""
    scores = one.scores
    return {
        **one.values,
        "n": len(scores),
        "mean": f"{one.mean:.4g}" if scores else "",
        "std": f"{statistics.stdev(scores):.3g}" if len(scores) > 1 else "",
        "min": f"{min(scores):.4g}" if scores else "",
        "max": f"{max(scores):.4g}" if scores else "",
        "missing": one.missing,
    }


def against_best(best: Setting, one: Setting) -> dict[str, Any]:
    """The paired difference to the first line, over the seeds that both have; nothing of fewer than two."""
    shared = [] if one is best else [seed for seed in best.by_seed if seed in one.by_seed]
    if len(shared) < 2:
        return {}
    paired = paired_difference([best.by_seed[seed] for seed in shared], [one.by_seed[seed] for seed in shared])
    cells = paired_cells(paired)
    return {"pairs": paired.n, "to first": cells["difference"], "95 %": cells["95 %"], "worth": cells["worth"]}


def comma_separated(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, column_names(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
