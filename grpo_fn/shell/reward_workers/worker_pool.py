"""Worker processes that can be killed: nothing a model writes hangs or crashes the run.

A thread for each process keeps the time. A call that is late, kills its process or has it send a malformed reply is
lost, and it alone: the process is replaced, and the next calls go on. The threads are our own, as a ProcessPoolExecutor
can kill none of its processes and is broken once one dies, and Python waits at its end for a ThreadPoolExecutor's.
"""

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from threading import Condition, Thread
from types import NoneType
from typing import Any, NamedTuple, TypeVar

from grpo_fn.core.partials import unwrap_reward
from grpo_fn.shell.reward_workers.worker_process import MALFORMED, CallCancelled, WorkerLost, WorkerProcess

P = TypeVar("P", bound="WorkerPool")

STARTUP_SECONDS = 60.0  # to start Python and import the function; not part of a call's deadline
STARTS = 3  # workers lost one after the other before they had loaded a function: starting more would not help
LOAD = "load"  # the cause of a loss that every call of the function shares
CHUNK = 16  # calls sent at once, so that a worker does not wait for the parent after each
RETURNED_NONE = "the reward returned None"


class JudgeCost(NamedTuple):
    """What the answer of a judge has cost when it was asked, and whether it was of use."""

    requests: int
    retries: int  # requests that were sent again
    prompt_tokens: int
    completion_tokens: int
    failures: int  # 1: no answer came
    unreadable: int  # 1: there is no verdict in the answer
    seconds: float  # from its first request to its end


class Outcome(NamedTuple):
    """What became of a call. `reason` says why the value is None, or what a `ReasonedScore` says; else empty."""

    value: Any
    reason: str
    seconds: float  # wall clock
    cause: str = ""  # of a loss: timeouts, worker_crashes, protocol_errors, exceptions, judge or LOAD
    trace: str = ""  # of an exception
    cost: JudgeCost | None = None


class Call(NamedTuple):
    """A call that waits for its outcome."""

    payload: bytes  # the pickled function
    arguments: bytes  # pickled
    deadline: float  # wall clock, seconds
    future: Future[Any]


class WorkerPool(AbstractContextManager):
    """Worker processes that call functions, each call within a deadline, each process within a memory limit.

    Any thread may ask. Calls are begun in the order in which they came. Who cancels a future has no use for its call:
    it is not made, or killed where it was begun.
    """

    VALUES: tuple[type, ...] = (float, NoneType)  # that a worker may send

    def __init__(self, *, workers: int, deadline: float, memory_mb: int) -> None:
        self.workers, self.deadline, self.memory_mb = workers, deadline, memory_mb
        self._calls: deque[Call] = deque()
        self._changed = Condition()
        self._threads: list[Thread] = []
        self._closed = False

    def __enter__(self: P) -> P:
        processes = [WorkerProcess(self.memory_mb) for _ in range(self.workers)]
        self._threads = [Thread(target=self._serve, args=(one,), name="worker", daemon=True) for one in processes]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def is_open(self) -> bool:
        """Whether it takes calls."""
        return bool(self._threads) and not self._closed

    def submit_calls(self, payload: bytes, arguments: Sequence[bytes], deadline: float) -> list[Future[Any]]:
        """Have a function called with each of these arguments; a future holds what `result_of` makes of an outcome."""
        calls = [Call(payload, one, deadline, Future()) for one in arguments]
        with self._changed:
            if not self.is_open:
                raise RuntimeError("worker pool: got a call outside of `with pool:`, wanted it inside")
            self._calls.extend(calls)
            self._changed.notify(len(calls))
        return [call.future for call in calls]

    def result_of(self, outcome: Outcome) -> Any:
        """What the future of a call holds."""
        return outcome

    def _serve(self, worker: WorkerProcess) -> None:
        """Make calls until the pool is closed. In a thread of its own."""
        while calls := self._next_calls():
            try:
                self._make(calls, worker)
            except BaseException as error:  # no process can be started any more, say
                for call in calls:
                    if not call.future.done():
                        call.future.set_exception(error)
        worker.end()

    def _next_calls(self) -> list[Call]:
        """Wait for the next calls of one function, few where other workers are to have some; none once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed)
            if self._closed:
                cancel_calls(self._calls)
                self._calls.clear()
                return []
            count = min(CHUNK, max(1, len(self._calls) // (4 * self.workers)))
            calls = [self._calls.popleft()]
            while self._calls and len(calls) < count and self._calls[0].payload == calls[0].payload:
                calls.append(self._calls.popleft())
            return calls

    def _make(self, calls: Sequence[Call], worker: WorkerProcess) -> None:
        """Make these calls, as far as they are wanted, and replace a worker that is lost."""
        starts = 0
        while waiting := [call for call in calls if not call.future.done()]:
            current, lost = None, None
            try:
                self._load(waiting, worker)
                for place, current in enumerate(waiting):
                    reply = worker.reply(seconds=current.deadline, cancelled=partial(self._unwanted, [current]))
                    self._settle([current], outcome_of(reply, place, self.VALUES))
                return
            except CallCancelled:
                if self._closed:
                    return cancel_calls(waiting)
            except WorkerLost as error:
                lost = Outcome(None, error.reason, worker.seconds, error.cause)
            worker.end()
            worker.start()
            if lost is None:
                continue
            if current is not None:
                starts = 0
                self._settle([current], lost)
                continue
            starts += 1
            if lost.cause == LOAD:
                self._settle(waiting, lost)
            elif starts == STARTS:
                reason = (
                    f"got {lost.cause} ({lost.reason}) while {STARTS} workers in a row loaded it, wanted one ready "
                    f"within {STARTUP_SECONDS:g} s and {self.memory_mb} MB"
                )
                self._settle(waiting, lost._replace(reason=reason, cause=LOAD))

    def _load(self, calls: Sequence[Call], worker: WorkerProcess) -> None:
        """Send the function and all arguments; it is loaded when this returns."""
        unwanted = partial(self._unwanted, calls)
        message = pickle.dumps((calls[0].payload, [call.arguments for call in calls]))
        worker.send(message, seconds=STARTUP_SECONDS, cancelled=unwanted)
        match worker.reply(seconds=STARTUP_SECONDS, cancelled=unwanted):
            case ["ready"]:
                return
            case ["failed", str() as trace]:  # too little memory raises more than MemoryError
                raise WorkerLost(LOAD, f"could not be loaded in a worker of {self.memory_mb} MB:\n{trace}")
        raise WorkerLost("protocol_errors", MALFORMED)

    def _unwanted(self, calls: Sequence[Call]) -> bool:
        return self._closed or all(call.future.cancelled() for call in calls)

    def _settle(self, calls: Sequence[Call], outcome: Outcome) -> None:
        for call in calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_result(self.result_of(outcome))


def outcome_of(reply: Any, place: int, values: tuple[type, ...]) -> Outcome:
    """What a worker says of the call with this number. Raises WorkerLost for anything else."""
    match reply:
        case ["value", number, value, str() as said, float() as seconds] if number == place and type(value) in values:
            return Outcome(value, said or (RETURNED_NONE if value is None else ""), seconds)
        case ["raised", number, str() as reason, str() as trace, float() as seconds] if number == place:
            return Outcome(None, reason, seconds, "exceptions", trace)
    raise WorkerLost("protocol_errors", MALFORMED)


def cancel_calls(calls: Iterable[Call]) -> None:
    """Cancel calls that no worker will make, for everybody who waits for one."""
    for call in calls:
        if not call.future.done() and call.future.cancel():
            call.future.set_running_or_notify_cancel()


def check_more_than_0(pool: str, **numbers: int | float) -> None:
    """Raise ValueError for the first of a pool's numbers that is not."""
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{pool} {name}: got {value}, wanted more than 0")


def function_name(fn: Any) -> str:
    """Module and name of what is below all knobs and wrappers."""
    fn = unwrap_reward(fn)
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def pickled_function(fn: Any) -> bytes:
    """A function as workers find it. Raises ValueError for one that they cannot find by its name."""
    try:
        return pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        got = function_name(fn)
        raise ValueError(f"reward: got {got}, wanted a function that a module defines: {error}") from error
