"""Wall-clock time by phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from grpo_fn.shell.world import World

OTHER = "other"  # the phase of what is in none

Mark = Callable[[str], AbstractContextManager[object]]


class Stopwatch:
    """Adds up the seconds spent in named phases; `phase` is the one going on now.

    Every moment counts once: for the innermost span around it, or for OTHER. So the phases of a lap add up to it.
    Each span is also inside `mark(name)`, for a profiler that records more than seconds.
    """

    def __init__(self, *, now: Callable[[], float] = time.perf_counter, mark: Mark = nullcontext) -> None:
        self.phase = "start"
        self._now, self._mark = now, mark
        self._seconds: dict[str, float] = defaultdict(float)
        self._counted = OTHER  # what the seconds since the last turn count towards
        self._turned = self._lap = now()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what happens inside towards `name`, except for the spans in it, which count for themselves."""
        around, before, self.phase = self._turn(name), self.phase, name
        try:
            with self._mark(name):
                yield
        finally:
            self._turn(around)
        self.phase = before  # not when it raises: then the phase is part of the message

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap, as time/<phase>; time/total is their sum, up to rounding."""
        self._turn(self._counted)
        out = {f"time/{name}": seconds for name, seconds in {OTHER: 0.0, **self._seconds}.items()}
        out["time/total"] = self._turned - self._lap
        self._seconds.clear()
        self._lap = self._turned
        return out

    def _turn(self, name: str) -> str:
        """Count towards `name` from now on; returns what was counted towards until now."""
        before, now = self._counted, self._now()
        self._seconds[before] += now - self._turned
        self._counted, self._turned = name, now
        return before


class ErrorContext(AbstractContextManager):
    """Adds step, phase and rank to whatever is raised inside, and keeps the world's record of where it is."""

    def __init__(self, world: World, step: int, clock: Stopwatch) -> None:
        self.world, self.step, self.clock = world, step, clock

    def __enter__(self) -> None:
        self.world.where = self.place

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(f"at {self.place()}")

    def place(self) -> str:
        rank = f", rank {self.world.rank}" if self.world.size > 1 else ""
        return f"step {self.step}, phase {self.clock.phase}{rank}"
