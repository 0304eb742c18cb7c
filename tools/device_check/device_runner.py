"""Checks one after another in a process of their own, each with a deadline.

A check that fails takes its process with it: the next one begins in a fresh one, whatever was done to the device.

Nothing here needs torch; what a check needs it imports where it runs.
"""

import gc
import importlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

OK, FAILED, LEFT_OUT = "ok", "failed", "left out"
START = 120.0  # seconds that a process may take to begin
GRACE = 5.0  # seconds between the stacks that a late check prints and its end


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where the checks run. `scratch` is a folder that they share; `tiny` stands for toy shapes."""

    device: str
    tiny: bool
    scratch: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """`where` is module:function, `(Setting) -> list[Figure]`; it raises when what it looks at is wrong.

    `only_cuda` says why it needs CUDA, and is empty where it does not. One that is `alone` has a process of its own.
    """

    name: str
    what: str
    where: str
    deadline: float  # seconds
    part: str = ""  # the command that it belongs to
    only_cuda: str = ""
    alone: bool = False


class Figure(NamedTuple):
    """Something measured. A goal is wished for, and no failure when it is missed."""

    what: str
    value: float | str
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        enough = self.at_least is None or float(self.value) >= self.at_least
        return enough and (self.at_most is None or float(self.value) <= self.at_most)


class Outcome(NamedTuple):
    """The result of a check."""

    check: Check
    state: str
    figures: tuple[Figure, ...]
    said: str  # the error, or why it was left out
    seconds: float


class LeftOut(Exception):
    """What the check needs is not here; the message says what."""


def here(checks: Sequence[Check], setting: Setting, limit: float) -> Iterator[Outcome]:
    """In this process, without deadlines."""
    return (attempted(check, setting) for check in checks)


def apart(checks: Sequence[Check], setting: Setting, limit: float) -> Iterator[Outcome]:
    """In processes of their own; after `limit` seconds no further check is begun: the rest is left out."""
    begun, waiting = time.monotonic(), [*checks]
    while waiting:
        if time.monotonic() - begun > limit:
            yield from (Outcome(check, LEFT_OUT, (), f"the {limit:g} s of the run were over", 0.0) for check in waiting)
            return
        together = [*takewhile(lambda check: not check.alone, waiting)] or waiting[:1]
        for outcome in in_one_process(together, setting, begun + limit):
            waiting.remove(outcome.check)
            yield outcome


def in_one_process(checks: Sequence[Check], setting: Setting, until: float) -> Iterator[Outcome]:
    """As far as one process gets: to the first check that fails, is late, or ends it."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=work, args=(its, checks, setting), name="checks")
    process.start()
    its.close()
    try:
        started = answer(mine, process, "beginning", START)
        for check in checks:
            if isinstance(started, str):
                yield Outcome(check, FAILED, (), started, START)
                return
            since = time.monotonic()
            if since > until:
                return
            deadline = min(check.deadline, until - since)
            with suppress(ConnectionError):  # then there is no answer either
                mine.send(replace(check, deadline=deadline))
            got = answer(mine, process, check.name, deadline + GRACE)
            if isinstance(got, str):
                # Late because the run's limit cut its time short, it was not given what it may take.
                cut = deadline < check.deadline and time.monotonic() - since >= deadline
                said = f"had {deadline:.0f} of its {check.deadline:g} s before the run's limit" if cut else got
                got = Outcome(check, LEFT_OUT if cut else FAILED, (), said, time.monotonic() - since)
                yield got
                return
            yield got._replace(check=check)
            if got.state == FAILED:
                return
    finally:
        mine.close()  # which ends an idle one
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()


def answer(pipe: Connection, process: Any, what: str, seconds: float) -> Any:
    """What comes through the pipe; the error as a text when nothing does."""
    try:
        if pipe.poll(seconds):
            return pipe.recv()
    except (EOFError, ConnectionError):
        process.join(GRACE)
        return f"{what}: the process ended with {process.exitcode}; its last words are above"
    return f"{what}: no answer within {seconds:g} s; its stacks are above"


def work(pipe: Connection, checks: Sequence[Check], setting: Setting) -> None:
    """The process: do the checks that come through the pipe, until one fails or the pipe is closed."""
    try:
        pipe.send(os.getpid())
        while True:
            outcome = attempted(pipe.recv(), setting, stacks=True)
            pipe.send(outcome)
            if outcome.state == FAILED:
                return
            tidy()
    except (EOFError, ConnectionError):  # the parent has ended
        return


def attempted(check: Check, setting: Setting, *, stacks: bool = False) -> Outcome:
    """What comes of the check here and now. With `stacks` a late one prints where it stands."""
    if check.only_cuda and setting.device == "cpu":
        return Outcome(check, LEFT_OUT, (), f"needs CUDA: {check.only_cuda}", 0.0)
    begun = time.perf_counter()
    try:
        with stacks_after(check.deadline) if stacks else nullcontext():
            state, figures, said = OK, tuple(found(check.where)(setting)), ""
    except LeftOut as reason:
        state, figures, said = LEFT_OUT, (), str(reason)
    except Exception as error:
        traceback.print_exc()
        state, figures, said = FAILED, (), one_line(error)
    return Outcome(check, state, figures, said, time.perf_counter() - begun)


@contextmanager
def stacks_after(seconds: float) -> Iterator[None]:
    """Print where every thread stands, unless the context is left before."""
    from grpo_fn.shell.world import print_stacks

    timer = threading.Timer(seconds, print_stacks)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def found(where: str) -> Callable[[Setting], Sequence[Figure]]:
    """The function."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def one_line(error: Exception) -> str:
    """The error in one line."""
    lines = str(error).split("\n")
    return f"{type(error).__name__}: {lines[0][:300]}" if lines[0] else type(error).__name__


def tidy() -> None:
    """What the check held of the device is free again."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
