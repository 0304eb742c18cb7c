"""Wall-clock time by phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


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
