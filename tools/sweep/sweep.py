"""A small grid or random search over gin values, some runs at a time, and the table of what came of it.

python tools/sweep --gin_file run/arithmetic.gin --grid optimizer.adamw.lr=1e-5,5e-5 --grid SEED=0,1,2 --out DIR
python tools/sweep --report --out DIR

Every point of the grid is a trial; with --random, every point for each of --trials draws. A trial is a run folder,
DIR/trials/NAME, made by `python -m grpo_fn.run`. The same command again keeps those that are done, goes on with those
that were interrupted and tries those that failed once more. DIR/table.md and table.csv have a line a setting over its
seeds (SEED, train.train.seed), best first; DIR/trials.csv one a trial; DIR/tensorboard fills TensorBoard's HPARAMS tab.

Exit codes: 0 all done, 1 some trial failed, 2 bad input, 75 stopped by SIGTERM or SIGINT, which every trial was told.
"""

import argparse
import ast
import csv
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ("SEED", "train.train.seed")  # what a setting is repeated over
STOPPED, UNHEALTHY = 75, 76
INTERRUPTED = (STOPPED, -signal.SIGTERM)  # a trial that had not begun to listen has nothing to save
POLL = 0.2  # seconds between looks at the running trials
GRACE = 600.0  # seconds that a trial which was told to stop has for saving
TAIL = 12  # last lines shown of a trial that failed


class Trial(NamedTuple):
    """One run of the sweep: what it binds on top of the files, as text."""

    name: str
    values: dict[str, str]


class Outcome(NamedTuple):
    """What a trial says of itself."""

    trial: Trial
    state: str  # "done", "unfinished", "unhealthy" (ended by a rule of health) or "failed"
    value: float  # of the metric, at the end of a done trial


class Setting(NamedTuple):
    """A setting over its seeds."""

    values: dict[str, str]
    scores: list[float]  # of the trials that are done
    missing: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores) if self.scores else math.nan


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the sweep's folder")
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE", help="as for grpo_fn.run")
    parser.add_argument("--gin_param", action="append", default=[], metavar="NAME=VALUE", help="for every trial")
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
    parser.add_argument(
        "--deadline", type=float, default=86400.0, metavar="SECONDS", help="for a trial (default a day)"
    )
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
    stopped = not args.report and Runner(args, trials).work()
    outcomes = [outcome(args.out, one, args.metric) for one in trials]
    done = [one for one in outcomes if one.state == "done"]
    if done and not any(math.isfinite(one.value) for one in done):
        print(f"error: --metric: got {args.metric}, which no finished trial has, wanted a metric", file=sys.stderr)
        return 2
    print(report(args.out, outcomes, args.metric, args.lowest))
    return STOPPED if stopped else int(any(one.state != "done" for one in outcomes))


# Which trials ---------------------------------------------------------------------------------------------------------


def wanted(args: argparse.Namespace) -> list[Trial]:
    """The trials that the command line asks for. Raises ValueError for what asks for none, or twice for one name."""
    if not args.gin_file:
        raise ValueError("--gin_file: got none, wanted the file of the run")
    if args.jobs < 1 or args.deadline <= 0 or (args.trials is not None and args.trials < 1):
        raise ValueError(
            f"--jobs, --deadline, --trials: got {args.jobs}, {args.deadline}, {args.trials}, wanted above 0"
        )
    if args.trials is not None and not args.random:
        raise ValueError("--trials: got it without --random, wanted both: a grid says itself how many trials it has")
    grid = {name: split(text) for name, text in map(named, args.grid)}
    dists = dict(map(named, args.random))
    names = [named(text)[0] for text in (*args.grid, *args.random)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"got {', '.join(twice)} more than once in --grid and --random, wanted each name once")
    if not names:
        raise ValueError("got neither --grid nor --random, wanted something to try")
    if empty := [name for name, values in grid.items() if not all(values)]:
        raise ValueError(f"--grid: got an empty value of {', '.join(empty)}, wanted NAME=A,B,...")
    draws = range(8 if args.trials is None else args.trials) if dists else [0]
    drawn = [{name: draw(dist, f"{args.draw_seed}/{i}/{name}") for name, dist in dists.items()} for i in draws]
    points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    found = [trial({**values, **point}) for values in drawn for point in points]
    return list({one.name: one for one in found}.values())


def named(text: str) -> tuple[str, str]:
    """NAME and what stands behind the first `=`."""
    name, sign, value = text.partition("=")
    if not sign or not re.fullmatch(r"[\w./]+", name.strip()):
        raise ValueError(f"got {text!r}, wanted NAME=...")
    return name.strip(), value.strip()


def split(text: str) -> list[str]:
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


def draw(dist: str, seed: str) -> str:
    """A value of the distribution, the same for the same seed. Raises ValueError for one that there is not."""
    found = re.fullmatch(r"(\w+)\((.*)\)", dist)
    kind, values = (found[1], split(found[2])) if found else ("", [])
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
        f"--random: got {dist!r}, wanted uniform(low,high), loguniform(low,high) with low > 0, integer(low,high) "
        "or choice(a,b,...)"
    )


def trial(values: dict[str, str]) -> Trial:
    """A trial goes by its values, so that it is found again when a sweep is widened."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
    short = "_".join(f"{name.rpartition('.')[2]}={value}" for name, value in sorted(values.items()))
    return Trial(f"{re.sub(r'[^A-Za-z0-9.=_+-]', '', short)[:60]}-{digest}", values)


def check_bindings(args: argparse.Namespace, trials: Sequence[Trial]) -> None:
    """Every name and value against the functions that they are for. Raises ValueError before anything starts."""
    from grpo_fn.config import load

    for one in trials:
        try:
            load(args.gin_file, params(args.gin_param, one))
        except ValueError as error:
            raise ValueError(f"trial {one.name}: {error}") from error


def params(common: Sequence[str], one: Trial) -> list[str]:
    """The bindings of a trial."""
    return [*common, *(f"{name}={value}" for name, value in one.values.items())]


def spec(out: Path) -> Path:
    """Where a sweep says what it is."""
    return out / "sweep.json"


def entered(args: argparse.Namespace, trials: Sequence[Trial]) -> list[Trial]:
    """Make the sweep's folder, or widen one with the same files; all its trials, older ones first.

    Raises ValueError when the folder is that of another sweep, or of something else.
    """
    from grpo_fn.shell.atomic_io import write_json

    base = {"gin_files": args.gin_file, "gin_params": args.gin_param}
    before: dict[str, Trial] = {}
    if spec(args.out).exists():
        there = json.loads(spec(args.out).read_text())
        if {key: there[key] for key in base} != base:
            raise ValueError(
                f"got {args.out}, a sweep of {there['gin_files']} with {there['gin_params']}, wanted the same"
            )
        before = {one["name"]: Trial(**one) for one in there["trials"]}
    elif args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ValueError(f"got {args.out}, wanted a new folder or that of a sweep")
    (args.out / "trials").mkdir(parents=True, exist_ok=True)
    every = [*{**before, **{one.name: one for one in trials}}.values()]
    write_json(spec(args.out), {**base, "trials": [one._asdict() for one in every]})
    return every


# Running them ---------------------------------------------------------------------------------------------------------


class Running(NamedTuple):
    """A trial that is being run."""

    trial: Trial
    process: subprocess.Popen
    since: float


class Runner:
    """Some trials at a time, until all have been run or a signal says stop."""

    def __init__(self, args: argparse.Namespace, trials: Sequence[Trial]) -> None:
        self.args = args
        self.left = [one for one in trials if not (folder(args.out, one) / "summary.json").exists()]
        self.running: list[Running] = []
        self.told = math.inf  # when a signal came

    def work(self) -> bool:
        """Run what is not done; whether it was told to stop."""
        before = {number: signal.signal(number, self._told) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.running or (self.left and self.told == math.inf):
                while self.left and self.told == math.inf and len(self.running) < self.args.jobs:
                    self.running.append(start(self.args, self.left.pop(0)))
                time.sleep(POLL)
                self.running = [one for one in self.running if not self._over(one)]
        finally:
            for one in self.running:
                one.process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.told < math.inf

    def _told(self, number: int, frame: FrameType | None) -> None:
        self.told = min(self.told, time.monotonic())

    def _over(self, one: Running) -> bool:
        """Whether a trial has ended; says how. One past its deadline is told to stop, and killed when it does not."""
        code, late = one.process.poll(), time.monotonic() - min(self.told, one.since + self.args.deadline)
        if code is not None:
            exit_file(self.args.out, one.trial).write_text(f"{code}\n")
            say(f"{one.trial.name}: {ending(self.args.out, one.trial, code)}")
            return True
        if late > GRACE:
            one.process.kill()
        elif late > 0:
            one.process.terminate()
        return False


def start(args: argparse.Namespace, one: Trial) -> Running:
    """A trial in a process of its own, with its share of the cores; what it prints is added to NAME.out."""
    files = [part for file in args.gin_file for part in ("--gin_file", file)]
    bound = [part for param in params(args.gin_param, one) for part in ("--gin_param", param)]
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    exit_file(args.out, one).unlink(missing_ok=True)
    with open(output(args.out, one), "ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_fn.run", *files, *bound, "--run_dir", str(folder(args.out, one))],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            start_new_session=True,  # Ctrl-C is for us; we pass it on once
        )
    say(f"{one.name}: started")
    return Running(one, process, time.monotonic())


def ending(out: Path, one: Trial, code: int) -> str:
    """How a trial ended, for people; with its last lines when it failed."""
    if code == 0:
        return "done"
    if code in INTERRUPTED:
        return "stopped; the same command goes on"
    lines = output(out, one).read_text(errors="replace").splitlines()[-TAIL:]
    what = "ended by a rule of health" if code == UNHEALTHY else f"failed with exit code {code}"
    return "\n    ".join([f"{what}, see {output(out, one)}", *lines])


def folder(out: Path, one: Trial) -> Path:
    """The run folder of a trial."""
    return out / "trials" / one.name


def output(out: Path, one: Trial) -> Path:
    """What the trial printed."""
    return out / "trials" / f"{one.name}.out"


def exit_file(out: Path, one: Trial) -> Path:
    """Its exit code, once it has ended."""
    return out / "trials" / f"{one.name}.exit"


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


# What came of them ----------------------------------------------------------------------------------------------------


def outcome(out: Path, one: Trial, metric: str) -> Outcome:
    """What a trial's folder says: the metric's last value, if the run is done."""
    where = folder(out, one)
    if not (where / "summary.json").exists():
        code = exit_file(out, one)
        ended = int(code.read_text()) if code.exists() else STOPPED
        return Outcome(
            one, {UNHEALTHY: "unhealthy"}.get(ended, "unfinished" if ended in INTERRUPTED else "failed"), math.nan
        )
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return Outcome(one, "done", float(values[-1]) if values else math.nan)


def settings(outcomes: Sequence[Outcome], lowest: bool) -> list[Setting]:
    """Trials that differ in their seeds alone, put together; the best mean first, those without any value last."""
    by_values: dict[str, list[Outcome]] = {}
    for one in outcomes:
        key = json.dumps({k: v for k, v in one.trial.values.items() if k not in SEEDS}, sort_keys=True)
        by_values.setdefault(key, []).append(one)
    found = []
    for key, group in by_values.items():
        scores = [one.value for one in group if math.isfinite(one.value)]
        found.append(Setting(json.loads(key), scores, len(group) - len(scores)))
    sign = 1 if lowest else -1
    return sorted(found, key=lambda one: sign * one.mean if one.scores else math.inf)


def report(out: Path, outcomes: Sequence[Outcome], metric: str, lowest: bool) -> str:
    """Write the tables and what TensorBoard shows; returns the table in markdown."""
    from grpo_fn.shell.atomic_io import write_bytes
    from grpo_fn.shell.logging.metrics_writer import table

    rows = [figures(one) for one in settings(outcomes, lowest)]
    each = [{"trial": one.trial.name, **one.trial.values, "state": one.state, metric: one.value} for one in outcomes]
    unfinished = [one for one in outcomes if one.state != "done"]
    said = [f"{metric} at the end, {'lowest' if lowest else 'highest'} mean first", "", table(rows)]
    said += ["", *(f"{one.state}: {one.trial.name}, see {output(out, one.trial)}" for one in unfinished)]
    text = "\n".join(said).rstrip() + "\n"
    write_bytes(out / "table.md", text.encode())
    write_bytes(out / "table.csv", comma_separated(rows).encode())
    write_bytes(out / "trials.csv", comma_separated(each).encode())
    hparams(out / "tensorboard", outcomes, metric)
    return plain(rows, said[0], said[4:])


def figures(one: Setting) -> dict[str, Any]:
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


def comma_separated(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV, columns in order of first appearance."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plain(rows: Sequence[Mapping[str, Any]], head: str, rest: Sequence[str]) -> str:
    """The table for a terminal."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([str(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([head, "", *shown, *(["", *rest] if rest else [])])


def hparams(board: Path, outcomes: Sequence[Outcome], metric: str) -> None:
    """One entry a finished trial in TensorBoard's HPARAMS tab; what an earlier report wrote there goes."""
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(board, ignore_errors=True)
    done = [one for one in outcomes if one.state == "done"]
    if not done:
        return
    with SummaryWriter(str(board)) as writer:
        for one in done:
            values = {name: value_of(text) for name, text in one.trial.values.items()}
            writer.add_hparams(values, {f"final/{metric}": one.value}, run_name=one.trial.name)


def value_of(text: str) -> float | str | bool:
    """A number or a truth value where the text is one."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str) else text
