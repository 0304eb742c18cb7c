"""Trials: runs of `python -m grpo_fn.run` in one folder, some at a time and stopped together, and tables about them."""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from grpo_fn.command_line import CommandParser
from grpo_fn.core.display_text import escape_control

STOPPED, UNHEALTHY = 75, 76
INTERRUPTED = (STOPPED, -signal.SIGTERM)  # a trial without its signal handlers yet has nothing to save
POLL = 0.2  # seconds between looks at the running trials
GRACE = 600.0  # seconds that a trial has for saving after its SIGTERM
PLAIN = r"(?:[\w.,%+-]+(?: [\w.,%+-]+)*)?"  # text in which no markup acts, but for underscores
T = TypeVar("T")
TAIL = 12  # last lines shown of a trial that failed


class Trial(NamedTuple):
    """One run: what it binds on top of the files, as text."""

    name: str
    values: dict[str, str]


def trial_parser(command: str, description: str, *, positional: bool) -> CommandParser:
    """The flags of every command that runs trials; `positional`: gin files may stand without --gin_file."""
    parser = CommandParser(command, description)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder of all trials")
    parser.add_gin_flags(files="below every trial, as for grpo_fn.run", params="for every trial", positional=positional)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time; they share the cores")
    parser.add_argument("--timeout", type=float, default=86400.0, metavar="SECONDS", help="for a trial (default a day)")
    parser.add_argument("--dry_run", action="store_true", help="check and print the trials, start nothing")
    parser.add_argument("--report", action="store_true", help="make the tables of what is there")
    parser.add_quiet_flag("DIR/table.md has the tables, DIR/trials/NAME.out what a trial printed")
    return parser


def check_limits(args: argparse.Namespace) -> None:
    """Raise ValueError for flags of `trial_parser` with which nothing can run."""
    if not args.gin_file:
        raise ValueError("--gin_file: got none, expected the file of the run")
    if args.jobs < 1 or args.timeout <= 0:
        raise ValueError(f"--jobs, --timeout: got {args.jobs}, {args.timeout}, expected above 0")


def print_trials(args: argparse.Namespace, trials: Sequence[Trial], flags: Callable[[Trial], list[str]]) -> None:
    """The output of --dry_run."""
    print(f"{len(trials)} trials, {args.jobs} at a time")
    print(*(f"{trial.name}: {' '.join(flags(trial))}" for trial in trials), sep="\n")


# -- the folder


def open_trials(spec: Path) -> bool:
    """Make the folder of trials that the file `spec` describes; whether the file is there already.

    Raises ValueError for a folder with something else in it.
    """
    out = spec.parent
    known = spec.exists()
    if not known and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"got {out}, expected a new folder or one with {spec.name}")
    (out / "trials").mkdir(parents=True, exist_ok=True)
    return known


def read_spec(path: Path, make: Callable[[dict[str, Any]], T]) -> T:
    """The content of the file that describes a folder of trials. Raises ValueError for a file of another version."""
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"got {path}, which this version of grpo_fn cannot read ({type(error).__name__}: {error}), expected what "
            "it wrote itself: take another --out, or the version that made the folder"
        ) from error


def trial_path(out: Path, trial: Trial, suffix: str = "") -> Path:
    """The run folder of a trial; with `.out` what it printed, with `.exit` its exit code once it has ended."""
    return out / "trials" / f"{trial.name}{suffix}"


def is_done(out: Path, trial: Trial) -> bool:
    """Whether the trial has come to its end."""
    return (trial_path(out, trial) / "summary.json").exists()


# -- running them


class Running(NamedTuple):
    """A trial that is being run."""

    trial: Trial
    process: subprocess.Popen
    since: float


class TrialRunner:
    """Some trials at a time, until all have been run or a signal says stop; `args` are those of `trial_parser`.

    `flags` are those of `python -m grpo_fn.run` for a trial, its run folder aside.
    """

    def __init__(self, args: argparse.Namespace, trials: Sequence[Trial], flags: Callable[[Trial], list[str]]) -> None:
        self.out, self.flags, self.jobs, self.timeout = args.out, flags, args.jobs, args.timeout
        self.left = [trial for trial in trials if not is_done(self.out, trial)]
        self.running: list[Running] = []
        self.stopped_at = math.inf  # when the first signal came

    def work(self) -> bool:
        """Run what is not done; whether a signal stopped it."""
        before = {number: signal.signal(number, self._note_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.running or (self.left and self.stopped_at == math.inf):
                while self.left and self.stopped_at == math.inf and len(self.running) < self.jobs:
                    self.running.append(self._start(self.left.pop(0)))
                time.sleep(POLL)
                self.running = [running for running in self.running if not self._has_ended(running)]
        finally:
            for running in self.running:
                running.process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.stopped_at < math.inf

    def _note_stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_at = min(self.stopped_at, time.monotonic())

    def _start(self, trial: Trial) -> Running:
        """A trial in its own process, with its share of the cores; what it prints is added to NAME.out."""
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        trial_path(self.out, trial, ".exit").unlink(missing_ok=True)
        run_dir = str(trial_path(self.out, trial))
        with open(trial_path(self.out, trial, ".out"), "ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "grpo_fn.run", *self.flags(trial), "--run_dir", run_dir],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": str(threads), **os.environ},
                start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
            )
        print(f"{trial.name}: started", file=sys.stderr, flush=True)
        return Running(trial, process, time.monotonic())

    def _has_ended(self, running: Running) -> bool:
        """Whether a trial has ended; prints how. One past its deadline gets SIGTERM, then SIGKILL."""
        trial, process = running.trial, running.process
        code, late = process.poll(), time.monotonic() - min(self.stopped_at, running.since + self.timeout)
        if code is not None:
            trial_path(self.out, trial, ".exit").write_text(f"{code}\n")
            print(f"{trial.name}: {ending(self.out, trial, code)}", file=sys.stderr, flush=True)
            return True
        if late > GRACE:
            process.kill()
        elif late > 0:
            process.terminate()
        return False


def ending(out: Path, trial: Trial, code: int) -> str:
    """The end of a trial in words, with its last lines if it failed."""
    if code == 0:
        return "done"
    if code in INTERRUPTED:
        return "stopped; the same command resumes it"
    output = trial_path(out, trial, ".out")
    what = "ended by a rule of health" if code == UNHEALTHY else f"failed with exit code {code}"
    return "\n    ".join([f"{what}, see {output}", *output.read_text(errors="replace").splitlines()[-TAIL:]])


# -- tables


def column_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a table, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def table_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a markdown table that reads well unrendered, too: no character entities.

    A cell that holds more than words and numbers is code, which no markup acts in; its bars are escaped.
    """
    columns = column_names(rows)
    lines = [[plain_or_code(str(row.get(name, ""))) for name in columns] for row in rows]
    shown = [[plain_or_code(name) for name in columns], ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def plain_or_code(text: str) -> str:
    """A text as a cell of a markdown table: as it is where it is plain words and numbers, else as code."""
    text = escape_control(text.encode("utf-8", "replace").decode()).replace("\n", "\\n")
    return text if re.fullmatch(PLAIN, text) and not re.search(r"__|\b_|_\b", text) else code_span(text)


def code_span(text: str) -> str:
    """A line of text as code, in which no markup acts, in a table too; nothing of an empty one."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", "\\|") if text else ""


def plain_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for a terminal."""
    columns = column_names(rows)
    lines = [columns, *([str(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
