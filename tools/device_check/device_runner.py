"""Checks one after another, each in a process of its own and with a deadline, whatever the one before did. No torch."""

import importlib
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Check:
    """`where` is module:function, `(Setting, **options) -> list[Figure]`; it raises when what it looks at is wrong."""

    name: str
    part: str  # the command that it belongs to
    where: str
    deadline: float  # seconds
    options: Mapping[str, Any] = field(default_factory=dict)
    only_cuda: bool = False  # a CPU could not show it at all, or would take minutes


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
        sides = [] if self.at_least is None else [float(self.value) >= self.at_least]
        sides += [] if self.at_most is None else [float(self.value) <= self.at_most]
        return all(sides) if sides else None


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
    """Each in a process of its own; after `limit` seconds none is begun, and none goes on."""
    until = time.monotonic() + limit
    for check in checks:
        if time.monotonic() < until:
            yield in_a_process(check, setting, until)
        else:
            yield Outcome(check, LEFT_OUT, (), f"the {limit:g} s of the run were over", 0.0)


def in_a_process(check: Check, setting: Setting, until: float) -> Outcome:
    """The outcome of a check in a process that is ended when it is late, or when the run's time is over."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, check, setting), name=check.name)
    began, state = time.monotonic(), FAILED
    process.start()
    sender.close()
    try:
        for what, seconds in (("beginning", START), (check.name, check.deadline + GRACE)):
            since = time.monotonic()
            if not receiver.poll(max(0.0, min(seconds, until - since))):
                said = f"{what}: no answer within {seconds:g} s; its stacks are above"
                if since + seconds > until:  # it was not given what it may take
                    waited = time.monotonic() - began
                    state, said = LEFT_OUT, f"had {waited:.0f} of its {check.deadline:g} s before the run's limit"
                break
            outcome = receiver.recv()
        else:
            return outcome
    except (EOFError, ConnectionError):
        process.join(GRACE)
        said = f"{what}: the process ended with {process.exitcode}; its last words are above"
    finally:
        receiver.close()
        process.join(0.0 if state == LEFT_OUT else GRACE)
        process.kill()  # nothing, where it has ended
        process.join()
    return Outcome(check, state, (), said, time.monotonic() - began)


def work(pipe: Connection, check: Check, setting: Setting) -> None:
    """The process: report that it has begun, then the outcome of the check. A late one prints where it stands."""
    with suppress(ImportError):  # which the attempt reports
        importlib.import_module(check.where.partition(":")[0])  # torch's own start is no part of a check
    pipe.send("begun")
    with stacks_after(check.deadline):
        pipe.send(attempted(check, setting))


def attempted(check: Check, setting: Setting) -> Outcome:
    """The outcome of a check in this process."""
    if check.only_cuda and setting.device == "cpu":
        return Outcome(check, LEFT_OUT, (), "needs CUDA", 0.0)
    began = time.perf_counter()
    module, _, name = check.where.partition(":")
    try:
        function: Callable[..., Sequence[Figure]] = getattr(importlib.import_module(module), name)
        state, figures, said = OK, tuple(function(setting, **check.options)), ""
    except LeftOut as reason:
        state, figures, said = LEFT_OUT, (), str(reason)
    except Exception as error:
        traceback.print_exc()
        first = str(error).split("\n")[0][:300]
        state, figures, said = FAILED, (), f"{type(error).__name__}: {first}".removesuffix(": ")
    return Outcome(check, state, figures, said, time.perf_counter() - began)


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
