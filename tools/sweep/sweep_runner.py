"""The trials of a sweep run some at a time, each in a process of its own, and stopped together."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from sweep_spec import Trial

STOPPED, UNHEALTHY = 75, 76
INTERRUPTED = (STOPPED, -signal.SIGTERM)  # a trial without its signal handlers yet has nothing to save
POLL = 0.2  # seconds between looks at the running trials
GRACE = 600.0  # seconds that a trial has for saving after its SIGTERM
TAIL = 12  # last lines shown of a trial that failed


class Running(NamedTuple):
    """A trial that is being run."""

    trial: Trial
    process: subprocess.Popen
    since: float


class Runner:
    """Some trials at a time, until all have been run or a signal says stop.

    `flags` are those of `python -m grpo_fn.run` for a trial, its run folder aside; `timeout` is a trial's, in seconds.
    """

    def __init__(
        self, out: Path, trials: Sequence[Trial], flags: Callable[[Trial], list[str]], *, jobs: int, timeout: float
    ) -> None:
        self.out, self.flags, self.jobs, self.timeout = out, flags, jobs, timeout
        self.left = [one for one in trials if not (folder(out, one) / "summary.json").exists()]
        self.running: list[Running] = []
        self.stopped_at = math.inf  # when the first signal came

    def work(self) -> bool:
        """Run what is not done; whether a signal stopped it."""
        before = {number: signal.signal(number, self._note_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.running or (self.left and self.stopped_at == math.inf):
                while self.left and self.stopped_at == math.inf and len(self.running) < self.jobs:
                    one = self.left.pop(0)
                    self.running.append(start(self.out, one, self.flags(one), self.jobs))
                time.sleep(POLL)
                self.running = [one for one in self.running if not self._over(one)]
        finally:
            for one in self.running:
                one.process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.stopped_at < math.inf

    def _note_stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_at = min(self.stopped_at, time.monotonic())

    def _over(self, one: Running) -> bool:
        """Whether a trial has ended; says how. One past its deadline gets SIGTERM, then SIGKILL."""
        code, late = one.process.poll(), time.monotonic() - min(self.stopped_at, one.since + self.timeout)
        if code is not None:
            exit_file(self.out, one.trial).write_text(f"{code}\n")
            say(f"{one.trial.name}: {ending(self.out, one.trial, code)}")
            return True
        if late > GRACE:
            one.process.kill()
        elif late > 0:
            one.process.terminate()
        return False


def start(out: Path, one: Trial, flags: Sequence[str], jobs: int) -> Running:
    """A trial in a process of its own, with its share of the cores; what it prints is added to NAME.out."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    exit_file(out, one).unlink(missing_ok=True)
    with open(output(out, one), "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_fn.run", *flags, "--run_dir", str(folder(out, one))],
            stdout=file,
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
