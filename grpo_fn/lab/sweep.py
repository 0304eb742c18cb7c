"""A small grid or random search over gin values, some runs at a time, and the table of their results.

grpo_fn sweep run/arithmetic.gin --grid optimizer.adamw.lr=1e-5,5e-5 --grid SEED=0,1 --out DIR
grpo_fn sweep --report --out DIR

Every point of the grid is a trial; with --random, every point for each of --trials draws. A trial is a run folder,
DIR/trials/NAME, made by `python -m grpo_fn.run`. The same command again keeps those that are done, resumes those that
were interrupted and tries those that failed once more. DIR/table.md and table.csv have a line a setting over its
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

from grpo_fn.command_line import CommandParser, exit_code, run_words
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
    print_trials,
    read_spec,
    table_markdown,
    trial_parser,
    trial_path,
)
from grpo_fn.shell.atomic_io import write_bytes, write_json

SPEC = "sweep.json"  # where a sweep's folder says what it is
PAIRED = (
    "to first: paired difference to the first line over the seeds of both, with Student's 95 % interval; worth: how "
    "many unpaired seeds a paired one is worth (the ratio of variances). The first line was chosen by these numbers."
)
DRAWS = 8  # of the random values, without --trials
SEEDS = ("SEED", "train.train.seed")  # what a setting is repeated over


def flags() -> CommandParser:
    """The command line."""
    parser = trial_parser("grpo_fn.lab.sweep", __doc__, positional=True)
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=A,B,...", help="every value; repeatable")
    parser.add_argument(
        "--random",
        action="append",
        default=[],
        metavar="NAME=DIST",
        help="uniform(low,high), loguniform(low,high), integer(low,high) or choice(a,b,...); repeatable",
    )
    parser.add_argument("--trials", type=int, metavar="N", help=f"draws of the random values (default {DRAWS})")
    parser.add_argument("--metric", default="eval/accuracy", help="whose last value counts (default eval/accuracy)")
    parser.add_argument("--lowest", action="store_true", help="the lowest value is the best")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, report; returns the exit code."""
    args = flags().parse_args(argv)
    return exit_code(partial(sweep, args), interrupted="interrupted", quiet=args.quiet)


def sweep(args: argparse.Namespace) -> int:
    """Run what is missing, report. Raises ValueError or OSError for bad input."""
    stopped = False
    if args.report:
        trials = read_sweep(args.out).trials
    else:
        trials = sweep_trials(args)
        check_bindings(args, trials)

        def trial_flags(trial: Trial) -> list[str]:
            return run_words(args.gin_file, trial_bindings(args, trial))

        if args.dry_run:
            print_trials(args, trials, trial_flags)
            return 0
        trials = open_sweep(args, trials)
        stopped = TrialRunner(args, trials, trial_flags).work()
    outcomes = [trial_outcome(args.out, trial, args.metric) for trial in trials]
    done = [outcome.value for outcome in outcomes if outcome.state == "done"]
    if done and not any(map(math.isfinite, done)):
        raise ValueError(f"--metric: got {args.metric}, which no finished trial has, expected a metric")
    print(sweep_report(args.out, outcomes, args.metric, args.lowest))
    return STOPPED if stopped else int(len(done) < len(outcomes))


# -- the trials: points of a grid, draws of random values, and the folder that lists them


def sweep_trials(args: argparse.Namespace) -> list[Trial]:
    """The trials that the command line describes. Raises ValueError for none, and for a name that has two values."""
    check_limits(args)
    if args.trials is not None and not args.random:
        raise ValueError(f"--trials: got {args.trials} without --random, expected --random NAME=DIST to draw from")
    count = DRAWS if args.trials is None else args.trials
    if count < 1:
        raise ValueError(f"--trials: got {count}, expected above 0")
    grid = {name: split_values(text) for name, text in map(name_and_value, args.grid)}
    dists = dict(map(name_and_value, args.random))
    if len({*grid, *dists}) < len(args.grid) + len(args.random):
        raise ValueError(f"got {' '.join([*args.grid, *args.random])}, expected each name once in --grid and --random")
    if not (grid or dists):
        raise ValueError("got neither --grid nor --random, expected something to try")
    if empty := [name for name, values in grid.items() if not all(values)]:
        raise ValueError(f"--grid: got an empty value of {', '.join(empty)}, expected NAME=A,B,...")
    draws = [
        {name: draw_value(dist, f"0/{i}/{name}") for name, dist in dists.items()} for i in range(count if dists else 1)
    ]
    points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    trials = [sweep_trial({**values, **point}) for values in draws for point in points]
    return list({trial.name: trial for trial in trials}.values())


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
    match = re.fullmatch(r"(\w+)\((.*)\)", dist)
    kind, values = (match[1], split_values(match[2])) if match else ("", [])
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
    for trial in trials:
        try:
            load_config(args.gin_file, trial_bindings(args, trial))
        except ValueError as error:
            raise ValueError(f"trial {trial.name}: {error}") from error


def trial_bindings(args: argparse.Namespace, trial: Trial) -> list[str]:
    """The sweep's bindings, and those of a trial on top."""
    return [*args.gin_param, *(f"{name}={value}" for name, value in trial.values.items())]


class Sweep(NamedTuple):
    """The description in a sweep's folder."""

    gin_files: list[str]
    gin_params: list[str]
    trials: list[Trial]


def read_sweep(out: Path) -> Sweep:
    """The sweep of a folder. Raises OSError or ValueError for a folder of something else."""
    return read_spec(
        out / SPEC,
        lambda spec: Sweep(**{**spec, "trials": [Trial(**values) for values in spec["trials"]]}),
    )


def open_sweep(args: argparse.Namespace, trials: Sequence[Trial]) -> list[Trial]:
    """Make the sweep's folder, or widen one with the same files; all its trials, older ones first.

    Raises ValueError when the folder is that of another sweep, or of something else.
    """
    known = Sweep(args.gin_file, args.gin_param, [])
    if open_trials(args.out / SPEC):
        known = read_sweep(args.out)
        if (known.gin_files, known.gin_params) != (args.gin_file, args.gin_param):
            raise ValueError(f"got {args.out}, a sweep of {known.gin_files} with {known.gin_params}, expected the same")
    every = [*{trial.name: trial for trial in (*known.trials, *trials)}.values()]
    write_json(args.out / SPEC, {**known._asdict(), "trials": [trial._asdict() for trial in every]})
    return every


# -- the tables over seeds, as text and CSV


class TrialOutcome(NamedTuple):
    """A trial's own metrics."""

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


def trial_outcome(out: Path, trial: Trial, metric: str) -> TrialOutcome:
    """The metric's last value in a trial's folder, if the run is done."""
    if not is_done(out, trial):
        exit_file = trial_path(out, trial, ".exit")
        code = int(exit_file.read_text()) if exit_file.exists() else STOPPED
        state = "unhealthy" if code == UNHEALTHY else "unfinished" if code in INTERRUPTED else "failed"
        return TrialOutcome(trial, state, math.nan)
    rows = metrics_by_step(trial_path(out, trial), torn_end=False).values()
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return TrialOutcome(trial, "done", float(values[-1]) if values else math.nan)


def settings_by_score(outcomes: Sequence[TrialOutcome], lowest: bool) -> list[Setting]:
    """Trials that differ in their seeds alone, put together; the best mean first, those without any value last."""
    by_values: dict[str, list[TrialOutcome]] = {}
    for outcome in outcomes:
        values = {name: value for name, value in outcome.trial.values.items() if name not in SEEDS}
        by_values.setdefault(json.dumps(values, sort_keys=True), []).append(outcome)
    settings = []
    for key, group in by_values.items():
        scores = {
            tuple(outcome.trial.values.get(name, "") for name in SEEDS): outcome.value
            for outcome in group
            if math.isfinite(outcome.value)
        }
        settings.append(Setting(json.loads(key), scores, len(group) - len(scores)))
    sign = 1 if lowest else -1
    return sorted(settings, key=lambda setting: sign * setting.mean if setting.scores else math.inf)


def sweep_report(out: Path, outcomes: Sequence[TrialOutcome], metric: str, lowest: bool) -> str:
    """Write the tables; returns what a terminal shows."""
    settings = settings_by_score(outcomes, lowest)
    rows = [{**setting_cells(setting), **against_best(settings[0], setting)} for setting in settings]
    each = [{"trial": trial.name, **trial.values, "state": state, metric: value} for trial, state, value in outcomes]
    head = f"{metric} at the end, {'lowest' if lowest else 'highest'} mean first"
    notes = [PAIRED, ""] if any("pairs" in row for row in rows) else []
    notes += [
        f"{state}: {trial.name}, see {trial_path(out, trial, '.out')}"
        for trial, state, _ in outcomes
        if state != "done"
    ]
    texts = ["\n".join([head, "", table(rows), "", *notes]).rstrip() for table in (table_markdown, plain_table)]
    write_bytes(out / "table.md", f"{texts[0]}\n".encode())
    write_bytes(out / "table.csv", comma_separated(rows).encode())
    write_bytes(out / "trials.csv", comma_separated(each).encode())
    return texts[1]


def setting_cells(setting: Setting) -> dict[str, Any]:
    """A line of the table. std is that of a sample (n - 1)."""
    scores = setting.scores
    return {
        **setting.values,
        "n": len(scores),
        "mean": f"{setting.mean:.4g}" if scores else "",
        "std": f"{statistics.stdev(scores):.3g}" if len(scores) > 1 else "",
        "min": f"{min(scores):.4g}" if scores else "",
        "max": f"{max(scores):.4g}" if scores else "",
        "missing": setting.missing,
    }


def against_best(best: Setting, setting: Setting) -> dict[str, Any]:
    """The paired difference to the first line, over the seeds that both have; nothing of fewer than two."""
    shared = [] if setting is best else [seed for seed in best.by_seed if seed in setting.by_seed]
    if len(shared) < 2:
        return {}
    paired = paired_difference([best.by_seed[seed] for seed in shared], [setting.by_seed[seed] for seed in shared])
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
