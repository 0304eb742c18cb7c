"""BackgroundWorker: calls made one after another in their own thread, beside the training."""

import sys
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from threading import Condition, Event, Thread
from typing import Any, TypeVar

import torch

T = TypeVar("T")

CLOSE_TIMEOUT = 10.0  # seconds that a call may take to return once the worker is shut down
START_TIMEOUT = 10.0  # seconds; a thread that has begun needs microseconds
FRAMES = 4  # of a thread that hangs, innermost last, which are shown


class BackgroundWorker(Executor):
    """One daemon thread that makes the calls submitted to it, in their order.

    Not a ThreadPoolExecutor: Python waits at its end for the threads of those, so a call that hangs would keep the
    process. `timeout` seconds is how long to wait for calls, None for ever. `torch_threads` is how many threads torch
    computes with in this one, None for as many as anywhere; other threads, those to come included, keep their number.
    """

    def __init__(
        self, name: str, *, timeout: float | None, torch_threads: int | None = None, max_pending: int = sys.maxsize
    ) -> None:
        self.name, self.timeout, self.max_pending = name, timeout, max_pending
        self.stopping = Event()  # a call that takes long looks at it
        self._calls: deque[tuple[str, Future[Any], Callable[[], Any]]] = deque()  # the first one is being made
        self._changed = Condition()
        self._closed = False
        # A new thread's device is the first GPU, whichever this one uses.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        everywhere, ready = torch.get_num_threads(), Event()
        self._thread = Thread(target=self._run, args=(torch_threads, ready), name=name, daemon=True)
        self._thread.start()
        if torch_threads is not None:
            ready.wait(START_TIMEOUT)
            torch.set_num_threads(everywhere)

    def submit(self, fn: Callable[..., T], /, *args: Any, what: str = "a call", **kwargs: Any) -> Future[T]:
        """Have fn(*args, **kwargs) called, which does `what`, after all that was submitted before.

        Waits while `max_pending` calls are not done. Raises TimeoutError as `wait` does, RuntimeError after `shutdown`.
        """
        future: Future[T] = Future()
        with self._changed:
            self._wait_for(lambda: len(self._calls) < self.max_pending or self._closed, self.timeout)
            if self._closed:
                raise RuntimeError(f"{self.name}: got {what} after the shutdown, expected it before")
            self._calls.append((what, future, partial(fn, *args, **kwargs)))
            self._changed.notify_all()
        return future

    def wait(self, *, timeout: float | None = None) -> None:
        """Until all that was submitted is done, also what failed.

        Raises TimeoutError, which names the call being made, after `timeout` seconds or else the worker's own.
        """
        with self._changed:
            self._wait_for(lambda: not self._calls, self.timeout if timeout is None else timeout)

    def overdue(self, seconds: float) -> TimeoutError:
        """The error of a call that is not done in time, with the innermost frames of its thread."""
        with self._changed:
            what = self._calls[0][0] if self._calls else self.name
        error = TimeoutError(f"got no result of {what} within {seconds:g} s, expected one by then")
        if (frame := sys._current_frames().get(self._thread.ident)) is not None:
            error.add_note(f"its thread is at\n{''.join(traceback.format_stack(frame)[-FRAMES:]).rstrip()}")
        return error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; the thread ends after those that are left, for which `wait` waits CLOSE_TIMEOUT seconds.

        `cancel_futures` cancels them, and has the one being made see that it is to stop (`stopping`). One that does
        not return in time is abandoned: it ends with the process.
        """
        with self._changed:
            self._closed = True
            if cancel_futures:
                self.stopping.set()
                for _, future, _ in self._calls:
                    future.cancel()
            self._changed.notify_all()
        if wait:
            self._thread.join(CLOSE_TIMEOUT)

    def _wait_for(self, ready: Callable[[], bool], timeout: float | None) -> None:
        if not self._changed.wait_for(ready, timeout):
            raise self.overdue(timeout)

    def _run(self, torch_threads: int | None, ready: Event) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        if torch_threads is not None:
            torch.get_num_threads()  # the first call of a thread sets its number to that of all
            torch.set_num_threads(torch_threads)  # here, and for threads yet to come
            ready.set()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Make the next call, for which it waits; False when there is none any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed)
            if not self._calls:
                return False
            what, future, fn = self._calls[0]
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(fn())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(RuntimeError(f"{what} ended by {type(error).__name__}: {error}"))
        with self._changed:
            self._calls.popleft()
            self._changed.notify_all()
        return True
