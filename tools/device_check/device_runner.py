"""Checks one after another, each in its own process and with a deadline, whatever the one before did. No torch."""

import faulthandler
import importlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

OK, FAILED, LEFT_OUT = "ok", "failed", "left out"
START = 120.0  # seconds that a process may take to import what it needs, and to end after a check's deadline


class Setting(NamedTuple):
    """Where the checks run. `scratch` is a folder that they share; `tiny` stands for toy shapes."""

    device: str
    tiny: bool
    scratch: str


class Check(NamedTuple):
    """`place` is module:function, `(Setting, **options) -> list[Figure]`; it raises when what it looks at is wrong."""

    name: str
    part: str  # the command that it belongs to
    place: str
    deadline: float  # seconds
    options: Mapping[str, Any] = MappingProxyType({})
    only_cuda: bool = False  # a CPU could not show it at all, or would take minutes


class Figure(NamedTuple):
    """Something measured. A goal is wished for, and no failure when it is missed."""

    name: str
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
    figures: Sequence[Figure]
    message: str  # the error, or why it was left out
    seconds: float


class LeftOut(Exception):
    """What the check needs is not here; the message says what."""


def outcomes_here(checks: Sequence[Check], setting: Setting, limit: float) -> Iterator[Outcome]:
    """In this process, without deadlines."""
    return (outcome_of(check, setting) for check in checks)


def outcomes_apart(checks: Sequence[Check], setting: Setting, limit: float) -> Iterator[Outcome]:
    """Each in its own process; after `limit` seconds none is begun, and none continues."""
    until = time.monotonic() + limit
    for check in checks:
        if (left := until - time.monotonic()) > 0:
            yield outcome_of_process(check, setting, left)
        else:
            yield Outcome(check, LEFT_OUT, (), f"the {limit:g} s of the run were over", 0.0)


def outcome_of_process(check: Check, setting: Setting, left: float) -> Outcome:
    """The outcome of a check in a process that has so many seconds left: it ends itself when it is late."""
    result = Path(setting.scratch) / f"{check.name}.json"
    own = json.dumps([check._replace(options=dict(check.options)), setting, str(result)])
    began, state = time.monotonic(), FAILED
    try:
        code = subprocess.run([sys.executable, __file__, own], timeout=min(left, START + check.deadline)).returncode
        if result.exists():
            figures, *rest = json.loads(result.read_text())
            return Outcome(check, rest[0], [Figure(*figure) for figure in figures], *rest[1:])
        message = f"the process ended with {code}, its deadline is {check.deadline:g} s; its last words are above"
    except subprocess.TimeoutExpired:
        message = f"got no end within {START + check.deadline:g} s"
        if left < START + check.deadline:  # it was not given what it may take
            state, message = LEFT_OUT, f"had {left:.0f} of its {check.deadline:g} s before the run's limit"
    return Outcome(check, state, (), message, time.monotonic() - began)


def outcome_of(check: Check, setting: Setting) -> Outcome:
    """The outcome of a check in this process."""
    if check.only_cuda and setting.device == "cpu":
        return Outcome(check, LEFT_OUT, (), "needs CUDA", 0.0)
    began = time.perf_counter()
    module, _, name = check.place.partition(":")
    figures: Sequence[Figure] = ()
    try:
        figures = getattr(importlib.import_module(module), name)(setting, **check.options)
        state, message = OK, ""
    except LeftOut as reason:
        state, message = LEFT_OUT, str(reason)
    except Exception as error:
        traceback.print_exc()
        first = str(error).split("\n")[0][:300]
        state, message = FAILED, f"{type(error).__name__}: {first}".removesuffix(": ")
    return Outcome(check, state, figures, message, time.perf_counter() - began)


def main(own: str) -> None:
    """The process of a check: its outcome is written to a file. A late one prints its stacks, and ends."""
    check, setting, result = json.loads(own)
    check = Check(*check)
    sys.modules["device_runner"] = sys.modules["__main__"]  # one class LeftOut, for the check and for this file
    try:
        importlib.import_module(check.place.partition(":")[0])  # torch's own start is no part of a check
    except ImportError:
        traceback.print_exc()  # and the check says it again
    faulthandler.dump_traceback_later(check.deadline, exit=True)
    outcome = outcome_of(check, Setting(*setting))
    faulthandler.cancel_dump_traceback_later()
    Path(result).write_text(json.dumps([outcome.figures, outcome.state, outcome.message, outcome.seconds]))


if __name__ == "__main__":
    main(sys.argv[1])
