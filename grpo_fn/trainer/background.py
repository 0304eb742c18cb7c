"""One piece of work at a time beside the training, in a thread of the main rank; every rank hears how it stands."""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from grpo_fn.shell.world import World

T = TypeVar("T")
U = TypeVar("U")

LEAVE = 10.0  # seconds that a thread which is to end may take to hear of it


class GivenUp(BaseException):
    """Raised inside work that nobody waits for any more. No Exception: nothing on its way may take it for one."""


class Background(AbstractContextManager):
    """Work of the main rank, beside which all ranks go on; they call the same methods of it.

    Left, it gives up what is at work: a thread that is inside torch when Python ends takes the process down with it,
    and its exit code.
    """

    def __init__(self, world: World, *, deadline: float) -> None:
        if not deadline > 0:
            raise ValueError(f"deadline of work beside the training: got {deadline} s, wanted more than 0")
        self.deadline = deadline
        self.name: str | None = None  # of what is at work; the same on every rank
        self._world = world
        self._began = 0.0
        self._thread: Thread | None = None
        self._future: Future[tuple[Any, float]] = Future()

    def begin(self, name: str, work: Callable[[], Any]) -> None:
        """Start `work` in a thread of the main rank. Raises RuntimeError when another one is at work."""
        if self.name is not None:
            raise RuntimeError(f"got {name} to begin beside {self.name}, wanted one at a time")
        self.name = name
        if self._world.main:
            self._began, self._future = time.monotonic(), Future()
            timed = partial(_timed, self._future, work)
            self._thread = Thread(target=timed, name=name, daemon=True)
            self._thread.start()

    def taken(self, take: Callable[[T, float], U], *, patience: float) -> U | None:
        """What `take(value, seconds)` makes, on the main rank, of what the work returned; None while it is at work.

        The main rank waits for it up to `patience` seconds, the others for the main rank: keep it far below the
        world's deadline. None as well when nothing is at work. What the work or `take` raises is raised on every rank,
        TimeoutError when it takes longer than the deadline; then nothing is at work any more. `take` has to return
        something: None means to come again.
        """
        if self.name is None:
            return None
        name, made = self.name, None
        try:
            made = self._world.agree(partial(self._outcome, take, patience), what=f"news of the {name}")
        except BaseException as error:
            self.leave()
            error.add_note(f"in the {name}, beside the training")
            raise
        if made is not None:
            self.name = None
        return made

    def leave(self) -> None:
        """Give up what is at work."""
        thread, self._thread, self.name = self._thread, None, None
        if thread is not None and thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(GivenUp))
            thread.join(LEAVE)

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _outcome(self, take: Callable[[T, float], U], patience: float) -> U | None:
        left = self._began + self.deadline - time.monotonic()
        try:
            value, seconds = self._future.result(max(0.0, min(patience, left)))
        except TimeoutError:
            if self._future.done():  # its own
                raise
            if left > patience:
                return None
            raise TimeoutError(
                f"got no result of the {self.name} within {self.deadline:g} s, wanted one by then"
            ) from None
        except BaseException as error:
            if isinstance(error, Exception) or not self._future.done():  # or an interrupt, which is for this thread
                raise
            raise RuntimeError(f"the {self.name} ended by {type(error).__name__}: {error}") from error
        return take(value, seconds)


def _timed(future: Future[tuple[Any, float]], work: Callable[[], Any]) -> None:
    began = time.monotonic()
    with suppress(GivenUp):  # it may come at any moment, this one too
        try:
            value = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result((value, time.monotonic() - began))
