"""Worker processes that can be killed: nothing a model writes hangs or crashes the run.

A thread for each process keeps the time. A call that is late, kills its process or has it send a malformed reply is
lost, and it alone: the process is replaced, and the next calls go on. The threads are our own, as a ProcessPoolExecutor
can kill none of its processes and is broken once one dies, and Python waits at its end for a ThreadPoolExecutor's.
"""

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import Condition, Lock, Thread
from types import NoneType
from typing import IO, Any, NamedTuple, TypeVar

from grpo_fn.core.display_text import escape_control
from grpo_fn.core.environment import Environment, Message, PlainData
from grpo_fn.core.partials import unwrap_reward
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import Answer, EnvironmentCall, decode_answer
from grpo_fn.shell.reward_workers.worker import HEADER

P = TypeVar("P", bound="WorkerPool")

STARTUP_SECONDS = 60.0  # to start Python and import the function; not part of a call's deadline
STARTS = 3  # workers lost one after the other before they had loaded a function: starting more would not help
LOAD = "load"  # the cause of a loss that every call of the function shares
CHUNK = 16  # calls sent at once, so that a worker does not wait for the parent after each
RETURNED_NONE = "the reward returned None"
POLL = 0.2  # seconds between two looks at whether an answer is still expected
LONGEST_REPLY = 2**20
MALFORMED = "worker sent a malformed reply"


# -- a process


MOST_PRINTED = 2**20  # bytes that a file keeps
MOST_SHOWN = 2**12  # bytes that are shown where there is no file


class PrintedText:
    """What workers print, up to a limit, control characters as escapes: in a file, or without a path on standard error.

    The file is made when something is printed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._lock = path, Lock()
        self._left = MOST_SHOWN if path is None else MOST_PRINTED

    def add(self, data: bytes) -> None:
        """Keep the data up to the limit; from any thread."""
        with self._lock:
            if not self._left:
                return
            text = escape_control(data[: self._left].decode("utf-8", "replace"))
            self._left -= min(len(data), self._left)
            if not self._left:
                text += "\n... what workers print beyond this is not kept\n"
            with suppress(OSError, ValueError):  # a full disk and a console that is gone end no call
                if self.path is None:
                    sys.stderr.write(text)
                else:
                    with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                        file.write(text)

    def read(self, stream: IO[bytes]) -> None:
        """Keep all that comes until the stream ends, and close it."""
        with stream:
            while data := os.read(stream.fileno(), 65536):
                self.add(data)


class WorkerLost(Exception):
    """A worker is of no use any more: the counter it goes to, and why."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(cause, reason)
        self.cause, self.reason = cause, reason


class CallCancelled(Exception):
    """The answer is of no use any more; the worker is still at the call."""


class WorkerProcess:
    """A process under a memory limit. It dies with the thread that started it."""

    def __init__(self, memory_mb: int, printed: PrintedText) -> None:
        self.memory_mb, self.printed = memory_mb, printed
        self.start()

    def start(self) -> None:
        """Start the process, which loads nothing yet."""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_fn.shell.reward_workers.worker", str(self.memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the run; and its children die with it
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self._printing = Thread(target=self.printed.read, args=(self.process.stderr,), name="printed", daemon=True)
        self._printing.start()
        os.set_blocking(self.stdin.fileno(), False)
        self._incoming = b""
        self._began, self.importing = time.monotonic(), ""  # the call it is at, and the package that it imports

    @property
    def seconds(self) -> float:
        """How long it has been at the call."""
        return time.monotonic() - self._began

    def send(self, message: bytes, seconds: float, cancelled: Callable[[], bool]) -> None:
        """Begin a call: send it all. Raises as `reply` does."""
        self._began, self.importing = time.monotonic(), ""
        outgoing = memoryview(HEADER.pack(len(message)) + message)
        with suppress(BrokenPipeError):  # the end of its standard output says the rest
            while outgoing:
                self._wait(self.stdin.fileno(), select.POLLOUT, seconds, cancelled)
                outgoing = outgoing[os.write(self.stdin.fileno(), outgoing) :]

    def reply(self, seconds: float, cancelled: Callable[[], bool]) -> Any:
        """The next reply, `seconds` after the last one at the latest; what it imports meanwhile is noted.

        Raises WorkerLost for a worker that is late or dead or sends no reply, CallCancelled once `cancelled` says so.
        """
        while True:
            while (reply := self._received()) is None:
                self._wait(self.stdout.fileno(), select.POLLIN, seconds, cancelled)
                data = os.read(self.stdout.fileno(), 65536)
                if not data:
                    raise WorkerLost("worker_crashes", self._ending())
                self._incoming += data
            match reply:
                case ["importing", str() as package]:
                    self.importing = package
                case ["memory"]:
                    raise WorkerLost("worker_crashes", f"worker died: over the memory limit of {self.memory_mb} MB")
                case _:
                    self._began, self.importing = time.monotonic(), ""
                    return reply

    def end(self) -> None:
        """Kill it and whatever it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
        self.process.wait()
        self.stdin.close()
        self.stdout.close()
        self._printing.join(1.0)  # a process that it left behind may hold the pipe

    def _received(self) -> Any:
        """The first reply that has come in whole; None where there is none."""
        if len(self._incoming) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._incoming)
        if size > LONGEST_REPLY:
            raise WorkerLost("protocol_errors", MALFORMED)
        end = HEADER.size + size
        if len(self._incoming) < end:
            return None
        body, self._incoming = self._incoming[HEADER.size : end], self._incoming[end:]
        try:
            return json.loads(body)
        except ValueError as error:
            raise WorkerLost("protocol_errors", MALFORMED) from error

    def _wait(self, stream: int, event: int, seconds: float, cancelled: Callable[[], bool]) -> None:
        """Until the stream is ready."""
        poll = select.poll()
        poll.register(stream, event)
        while not poll.poll(1000 * max(0.0, min(POLL, seconds - self.seconds))):
            if cancelled():
                raise CallCancelled
            if self.seconds >= seconds:
                late = f"late: no answer within {seconds:g} s"
                if self.importing:
                    late += f", while it imported {self.importing}: import it at the top of the reward's module, on "
                    late += "loading time"
                raise WorkerLost("timeouts", late)

    def _ending(self) -> str:
        """How the process ended, whose output has."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "worker died: it closed its output"
        return f"worker died: killed by {signal.Signals(-code).name}" if code < 0 else f"worker died: exit code {code}"


# -- the pool


class Outcome(NamedTuple):
    """What became of a call. `reason` says why the value is None, or what a `ReasonedScore` says; else empty."""

    value: Any
    reason: str
    seconds: float  # wall clock
    cause: str = ""  # of a loss: timeouts, worker_crashes, protocol_errors, exceptions, judge or LOAD
    trace: str = ""  # of an exception
    cost: Mapping[str, float] | None = None  # of a judge's answer, by key of recording.JUDGE_METRICS


class Chunk(NamedTuple):
    """Calls of one function that a worker makes one after the other: a future for each costs more than a fast call."""

    payload: bytes  # the pickled function
    arguments: Sequence[bytes]  # pickled, of each call
    deadline: float  # wall clock of each call, seconds
    future: Future[Any]


class BegunCall(NamedTuple):
    """A call that was submitted: its place among the outcomes that a future holds."""

    future: Future[Any]
    place: int


class WorkerPool(AbstractContextManager):
    """Worker processes that call functions, each call within a deadline, each process within a memory limit.

    Any thread may ask. Chunks are begun in the order in which they came. Who cancels a future has no use for its calls:
    they are not made, or killed where they were begun.
    """

    VALUES: tuple[type, ...] = (float, NoneType)  # that a worker may send
    TRIES = 1  # of a call whose worker is lost

    def __init__(self, *, workers: int, deadline: float, memory_mb: int) -> None:
        self.workers, self.deadline, self.memory_mb = workers, deadline, memory_mb
        self.printed = PrintedText(None)
        self._chunks: deque[Chunk] = deque()
        self._changed = Condition()
        self._threads: list[Thread] = []
        self._closed = False

    def __enter__(self: P) -> P:
        processes = [WorkerProcess(self.memory_mb, self.printed) for _ in range(self.workers)]
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

    def submit_calls(self, payload: bytes, arguments: Sequence[bytes], deadline: float) -> list[BegunCall]:
        """Have a function called with each of these arguments.

        A future holds what `result_of` makes of the outcomes of a chunk.
        """
        chunks, begin = [], 0
        while begin < len(arguments):  # smaller ones at the end, so that no worker is left with many
            end = begin + min(CHUNK, max(1, (len(arguments) - begin) // (4 * self.workers)))
            chunks.append(Chunk(payload, arguments[begin:end], deadline, Future()))
            begin = end
        with self._changed:
            if not self.is_open:
                raise RuntimeError("worker pool: got a call outside of `with pool:`, expected it inside")
            self._chunks.extend(chunks)
            self._changed.notify(len(chunks))
        return [BegunCall(chunk.future, place) for chunk in chunks for place in range(len(chunk.arguments))]

    def result_of(self, outcomes: list[Outcome]) -> Any:
        """What the future of a chunk holds."""
        return outcomes

    def _serve(self, worker: WorkerProcess) -> None:
        """Make calls until the pool is closed. In a thread of its own."""
        while (chunk := self._next_chunk()) is not None:
            try:
                outcomes = self._make(chunk, worker)
                if chunk.future.set_running_or_notify_cancel():
                    chunk.future.set_result(self.result_of(outcomes))
            except CallCancelled:
                give_up(chunk.future)
            except BaseException as error:  # no process can be started any more, say
                if chunk.future.running() or chunk.future.set_running_or_notify_cancel():
                    chunk.future.set_exception(error)
        worker.end()

    def _next_chunk(self) -> Chunk | None:
        """Wait for the next chunk that is not cancelled; None once the pool is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._chunks or self._closed)
                if self._closed:
                    while self._chunks:
                        give_up(self._chunks.popleft().future)
                    return None
                if not (chunk := self._chunks.popleft()).future.cancelled():
                    return chunk

    def _make(self, chunk: Chunk, worker: WorkerProcess) -> list[Outcome]:
        """Make the calls of a chunk, and replace a worker that is lost. Raises CallCancelled for a cancelled chunk."""
        outcomes: list[Outcome] = []
        starts, tries = 0, 0

        def unwanted() -> bool:
            return self._closed or chunk.future.cancelled()

        while len(outcomes) < len(chunk.arguments):
            left, loaded = chunk.arguments[len(outcomes) :], False
            try:
                self._load(chunk.payload, left, worker, unwanted)
                loaded, starts = True, 0
                for place in range(len(left)):
                    outcomes.append(outcome_of(worker.reply(chunk.deadline, unwanted), place, self.VALUES))
            except CallCancelled:
                if not self._closed:
                    worker.end()
                    worker.start()
                raise
            except WorkerLost as error:
                lost = Outcome(None, error.reason, worker.seconds, error.cause)
                worker.end()
                worker.start()
                starts += 1
                if loaded:
                    tries += 1
                    if tries == self.TRIES:
                        outcomes.append(lost)
                        tries = 0
                elif lost.cause == LOAD:
                    outcomes += [lost] * len(left)
                elif starts == STARTS:
                    reason = (
                        f"got {lost.cause} ({lost.reason}) while {STARTS} workers in a row loaded it, expected one "
                        f"ready within {STARTUP_SECONDS:g} s and {self.memory_mb} MB"
                    )
                    outcomes += [lost._replace(reason=reason, cause=LOAD)] * len(left)
        return outcomes

    def _load(
        self, payload: bytes, arguments: Sequence[bytes], worker: WorkerProcess, unwanted: Callable[[], bool]
    ) -> None:
        """Send the function and all arguments; it is loaded when this returns."""
        worker.send(pickle.dumps((payload, arguments)), STARTUP_SECONDS, unwanted)
        match worker.reply(STARTUP_SECONDS, unwanted):
            case ["ready"]:
                return
            case ["failed", str() as trace]:  # too little memory raises more than MemoryError
                raise WorkerLost(LOAD, f"could not be loaded in a worker of {self.memory_mb} MB:\n{trace}")
        raise WorkerLost("protocol_errors", MALFORMED)


def give_up(future: Future[Any]) -> None:
    """Cancel it, and wake everybody who waits for it."""
    future.cancel()
    future.set_running_or_notify_cancel()


def outcome_of(reply: Any, place: int, values: tuple[type, ...]) -> Outcome:
    """What a worker says of the call with this number. Raises WorkerLost for anything else."""
    match reply:
        case ["value", number, value, str() as said, float() as seconds] if number == place and type(value) in values:
            return Outcome(value, said or (RETURNED_NONE if value is None else ""), seconds)
        case ["raised", number, str() as reason, str() as trace, float() as seconds] if number == place:
            return Outcome(None, reason, seconds, "exceptions", trace)
    raise WorkerLost("protocol_errors", MALFORMED)


def check_more_than_0(pool: str, **numbers: int | float) -> None:
    """Raise ValueError for the first of a pool's numbers that is not."""
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{pool} {name}: got {value}, expected more than 0")


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
        raise ValueError(f"reward: got {got}, expected a function that a module defines: {error}") from error


# -- Environments in worker processes that can be killed: a tool that hangs or dies costs the row a turn, not the run.


METRICS = ("time/environments", "time/environment_wait", "episode/environment_failures")


class EnvironmentPool(WorkerPool):
    """Worker processes that call an environment. `figures` says what went wrong and the seconds that calls took.

    A call whose worker is killed or late is made once more; an answer that is lost then costs its row.

    Args:
        environment: what is called; its functions are found by name in the workers.
        workers: processes.
        deadline: wall clock of a call, seconds.
        memory_mb: address space of each process, MB.

    Raises:
        ValueError: for a number that is not more than 0, and functions that workers cannot find by name.
    """

    VALUES = (str,)
    TRIES = 2

    def __init__(self, environment: Environment, *, workers: int, deadline: float, memory_mb: int) -> None:
        check_more_than_0("environment pool", workers=workers, deadline=deadline, memory_mb=memory_mb)
        super().__init__(workers=workers, deadline=deadline, memory_mb=memory_mb)
        self.payload = pickled_function(EnvironmentCall(environment))
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def start(self, problem: Problem, key: int) -> Future[Answer]:
        """The beginning of an episode."""
        return self._ask("start", problem, key)

    def step(self, state: PlainData, message: Message, key: int) -> Future[Answer]:
        """The answer to a message."""
        return self._ask("step", state, message, key)

    def count(self, name: str, amount: float) -> None:
        """Add to what `figures` says."""
        with self._lock:
            self._counts[name] += amount

    def figures(self) -> dict[str, float]:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in METRICS}

    def result_of(self, outcomes: list[Outcome]) -> Answer:
        """The answer in what a worker sent; one that says why, where there is none."""
        (outcome,) = outcomes
        try:
            answer = decode_answer(outcome.value) if not outcome.cause else Answer(failure=outcome.reason)
        except (ValueError, TypeError):
            answer = Answer(failure=MALFORMED, lost=True)
        if outcome.cause not in ("", "exceptions"):
            answer = Answer(failure=outcome.reason, lost=True)
        self.count("time/environments", outcome.seconds)
        self.count("episode/environment_failures", float(bool(answer.failure)))
        return answer

    def _ask(self, kind: str, *given: Any) -> Future[Answer]:
        (begun,) = self.submit_calls(self.payload, [pickle.dumps((kind, *given))], self.deadline)
        return begun.future
