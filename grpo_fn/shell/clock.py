"""Wall-clock time by phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from grpo_fn.shell.world import World


class Stopwatch:
    """Adds up the seconds spent in named phases; `phase` is the one going on now."""

    def __init__(self) -> None:
        self.phase = "start"
        self._seconds: dict[str, float] = defaultdict(float)
        self._lap = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what happens inside towards `name`."""
        before, self.phase, start = self.phase, name, time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start
        self.phase = before  # not when it raises: then the phase is part of the message

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap, as time/<phase>, and of all together as time/total."""
        now = time.perf_counter()
        out = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        out["time/total"] = now - self._lap
        self._seconds.clear()
        self._lap = now
        return out


class noting(AbstractContextManager):
    """Adds the step, the phase and the rank to whatever is raised inside, and tells the world where it is."""

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
