"""Runs in their own processes, each forked from a server that has everything imported: real signals, no waiting."""

import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from crew import serving
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_fn import run
from grpo_fn.config import load_config
from grpo_fn.shell.checkpoint import store as checkpoint
from grpo_fn.trainer.sections import Settings
from grpo_fn.trainer.validate import validate

torch.set_num_threads(1)
SERVER = multiprocessing.get_context("forkserver")
TESTS = Path(__file__).resolve().parents[1]
SMALL = TESTS / "e2e" / "small.gin"


def command(cache: Path, run_dir: Path | None, *flags: str, **changes: Any) -> list[str]:
    """The arguments of the small run; `changes` are gin names with `__` for the dot, and their values."""
    bindings = {"models.TinyModel.cache": repr(str(cache))}
    bindings |= {name.replace("__", "."): value for name, value in changes.items()}
    where = [] if run_dir is None else ["--run_dir", str(run_dir)]
    params = [part for name, value in bindings.items() for part in ("--gin_param", f"{name}={value}")]
    return ["--gin_file", "run/arithmetic.gin", "--gin_file", str(SMALL), *params, *where, *flags]


def refusal(argv: Sequence[str]) -> str:
    """What such a command is refused with before a run folder or a model is made, in this process."""
    args = run.flags().parse_args(argv)
    with pytest.raises((ValueError, OSError)) as caught:
        validate(Settings(**load_config(args.gin_file, args.gin_param).kwargs()))
    return str(caught.value)


def start(argv: Sequence[str], out: Path, doom: Callable[[], None] | None = None) -> BaseProcess:
    """Start a run in its own process; what it prints goes to the file `out`. `doom` is called in it first."""
    serving()
    process = SERVER.Process(target=_work, args=(list(argv), str(out), doom, os.getcwd()))
    process.start()
    return process


def finish(argv: Sequence[str], out: Path, doom: Callable[[], None] | None = None, seconds: float = 120) -> int:
    """The exit code of such a run; -9 when SIGKILL ended it."""
    process = start(argv, out, doom)
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"the run is not over after {seconds} s; it printed:\n{out.read_text()}")
    return process.exitcode


def ended(argv: Sequence[str], out: Path, dooms: Sequence[Callable[[], None]] = ()) -> list[int]:
    """The exit codes of the same command, started once for every doom, and then to its end."""
    codes = [finish(argv, out, doom) for doom in (*dooms, None)]
    assert codes[-1] == 0, out.read_text()
    return codes


class Forked:
    """Such a run, for a program that takes it for a subprocess.Popen of `python -m grpo_fn.run`; `pid` is its own."""

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], **settings: Any) -> None:
        assert command[:3] == [sys.executable, "-m", "grpo_fn.run"], command
        self._process = start(command[3:], Path(stdout.name))
        self.poll, self.pid = lambda: self._process.exitcode, self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill


def _work(argv: list[str], out: str, doom: Callable[[], None] | None, folder: str) -> None:
    os.chdir(folder)
    # After a fork torch replaces its pool of threads when asked for it; of two threads that ask at once one finds none.
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(out, "a") as file, redirect_stdout(file), redirect_stderr(file):
        if doom is not None:
            doom()
        try:
            code = run.main(argv)
        except Exception:
            traceback.print_exc()
            code = 1
    sys.exit(code)


class AtFileEvent:
    """Doom: the process gets `number` as it is about to open, rename, make or remove its n-th file in a folder."""

    EVENTS = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"})

    def __init__(self, run_dir: Path, n: int, number: int) -> None:
        self.place, self.left, self.number = str(run_dir), n, number

    def __call__(self) -> None:
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple) -> None:
        if event in self.EVENTS and isinstance(args[0], str | os.PathLike) and self.place in os.fspath(args[0]):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.number)


class AtPhase:
    """Doom: the process gets `number` as it enters a phase for the n-th time, or some seconds later."""

    def __init__(self, phase: str, n: int, number: int, later: float = 0.0, times: int = 1) -> None:
        self.phase, self.left, self.number, self.later, self.times = phase, n, number, later, times

    def __call__(self) -> None:
        from grpo_fn.shell.logging.stopwatch import Stopwatch

        span = Stopwatch.span

        def watched(clock: Stopwatch, name: str) -> Any:
            self.left -= name == self.phase
            if self.left == 0 and name == self.phase:
                if self.later:
                    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), self.number))
                    signal.setitimer(signal.ITIMER_REAL, self.later)
                else:
                    for _ in range(self.times):
                        os.kill(os.getpid(), self.number)
            return span(clock, name)

        Stopwatch.span = watched


def after_step(step: int, harm: Callable[[], None]) -> None:
    """Doom: the harm comes when everything about a step is done, and the next has not begun."""
    from grpo_fn.trainer.loop import ErrorContext

    leave = ErrorContext.__exit__

    def watched(inside: ErrorContext, *error: Any) -> None:
        leave(inside, *error)
        if inside.step == step:
            harm()

    ErrorContext.__exit__ = watched


def signal_after_step(step: int, number: int) -> Callable[[], None]:
    """Doom: the process gets `number` then."""
    return partial(after_step, step, partial(signal.raise_signal, number))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def timeless(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine: seconds, memory and speed."""
    clocks = ("time/", "system/", "generation/tokens_per_second", "generation/wait_seconds")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in metrics(run_dir)]


def board(run_dir: Path) -> EventAccumulator:
    """What TensorBoard itself reads there."""
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def outcome(run_dir: Path) -> dict[str, Any]:
    """All of a finished run that has to be the same however often it was interrupted."""
    summary = json.loads((run_dir / "summary.json").read_text())
    newest = max((run_dir / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    return {
        "model": (run_dir / "model" / "model.safetensors").read_bytes(),
        "tensors": {name: x.numpy().tobytes() for name, x in checkpoint.read_tensors(newest, "").items()},
        "policy": (newest / "policy.pt").read_bytes(),
        "carried": (newest / "carried.pt").read_bytes(),
        "ahead": (newest / "ahead.pt").read_bytes(),
        "eval": {path.name: path.read_bytes() for path in (run_dir / "eval").iterdir()},
        "metrics": timeless(run_dir),
        "summary": {k: v for k, v in summary.items() if k != "wall_seconds"},
        "rollouts": {path.name: path.read_bytes() for path in (run_dir / "rollouts").iterdir()},
        "kept": sorted(path.name for path in (run_dir / "checkpoints").glob("step_*")),
    }
