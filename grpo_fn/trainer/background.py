"""One piece of work at a time beside the training, in a thread of the main rank; every rank polls its result."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.world import World

T = TypeVar("T")
U = TypeVar("U")

ShouldStop = Callable[[], bool]  # whether the work that is given it is needed no more


class Background(AbstractContextManager):
    """Work of the main rank, beside which all ranks continue; they call the same methods of it.

    Left, it cancels what is at work. Work that then does not return soon is abandoned in its daemon thread. It should
    return: a thread that is inside torch when Python ends takes the process down with it, and its exit code.
    """

    def __init__(self, world: World, *, deadline: float) -> None:
        if not deadline > 0:
            raise ValueError(f"deadline of work beside the training: got {deadline} s, expected more than 0")
        self.deadline = deadline
        self.name: str | None = None  # of what is at work; the same on every rank
        self._world = world
        self._start = 0.0
        self._worker: BackgroundWorker | None = None  # of what is at work, on the main rank
        self._future: Future[tuple[Any, float]] = Future()

    def start_task(self, name: str, work: Callable[[ShouldStop], Any]) -> None:
        """Start `work` in a thread of the main rank; it gets a function that returns whether to stop, to call often.

        Raises RuntimeError when another one is at work.
        """
        if self.name is not None:
            raise RuntimeError(f"got {name} to begin beside {self.name}, expected one at a time")
        self.name = name
        if self._world.main:
            self._start = time.monotonic()
            self._worker = BackgroundWorker(name, timeout=self.deadline)
            self._future = self._worker.submit(_timed, work, self._worker.stopping.is_set, what=f"the {name}")
            self._worker.shutdown(wait=False)

    def poll_result(self, take: Callable[[T, float], U], *, patience: float) -> U | None:
        """The result of `take(value, seconds)` for the work's value, on the main rank; None while the work runs.

        The main rank waits for it up to `patience` seconds, the others for the main rank: keep it far below the
        world's deadline. None as well when nothing is at work. What the work or `take` raises is raised on every rank,
        TimeoutError when it takes longer than the deadline; then nothing is at work any more. `take` has to return
        something: None means to come again.
        """
        if self.name is None:
            return None
        name, result = self.name, None
        try:
            result = self._world.agree(lambda: self._outcome(take, patience), what=f"news of the {name}")
        except BaseException as error:
            self.cancel()
            error.add_note(f"in the {name}, beside the training")
            raise
        if result is not None:
            self.name = None
        return result

    def cancel(self) -> None:
        """Ask what is at work to stop, and wait a moment for it."""
        worker, self._worker, self.name = self._worker, None, None
        if worker is not None:
            worker.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _outcome(self, take: Callable[[T, float], U], patience: float) -> U | None:
        left = self._start + self.deadline - time.monotonic()
        if wait([self._future], max(0.0, min(patience, left))).done:
            return take(*self._future.result())
        if left > patience:
            return None
        raise self._worker.overdue(self.deadline)


def _timed(work: Callable[[ShouldStop], T], should_stop: ShouldStop) -> tuple[T, float]:
    """The value of the work, and its seconds."""
    start = time.monotonic()
    return work(should_stop), time.monotonic() - start
