"""Rewards in worker processes that can be killed: nothing a model writes hangs or crashes the run.

The parent alone keeps the time. A worker answers row by row; one that is late, dies or talks nonsense is killed and
replaced, and only the row it was working on becomes None.
"""

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any, NamedTuple

from grpo_fn.problem import Completion, Problem, RewardFn
from grpo_fn.shell.reward_worker import HEADER

STARTUP_SECONDS = 60.0  # to start Python and import the reward function; not part of a row's deadline
STILLBORN = 3  # fresh workers lost one after the other before their first row: starting more would not help
CHUNK = 16  # rows sent at once, so that a worker does not wait for the parent after each
LONGEST_REPLY = 2**20


class RewardError(RuntimeError):
    """A reward function raised."""


class _Lost(Exception):
    """A worker is of no use any more; says which counter it goes to."""


class _Worker:
    """One process, the bytes on their way to and from it, and the rows it still owes."""

    def __init__(self, memory_mb: int) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_fn.shell.reward_worker", str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the run; and its children die with it
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        self.outgoing, self.incoming = b"", b""
        self.rows: deque[int] = deque()
        self.place = 0  # of the next row within its chunk
        self.loading, self.proven = False, False  # a function now; any function ever
        self.due = 0.0

    def assign(self, payload: bytes, rows: Sequence[int], pickles: Sequence[bytes]) -> None:
        body = pickle.dumps((payload, [pickles[row] for row in rows]))
        self.outgoing, self.rows, self.place = HEADER.pack(len(body)) + body, deque(rows), 0
        self.loading, self.due = True, time.monotonic() + STARTUP_SECONDS
        self.flush()

    def flush(self) -> None:
        try:
            self.outgoing = self.outgoing[os.write(self.stdin.fileno(), self.outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = b""  # its end of standard output tells the rest

    def replies(self) -> Iterator[list[Any]]:
        """The complete replies that have come in, one by one: those before some nonsense still count.

        Raises _Lost at the end of the stream or on nonsense.
        """
        data = os.read(self.stdout.fileno(), 65536)
        if not data:
            raise _Lost("deaths")
        self.incoming += data
        while len(self.incoming) >= HEADER.size:
            (size,) = HEADER.unpack_from(self.incoming)
            if size > LONGEST_REPLY:
                raise _Lost("errors")
            if len(self.incoming) < HEADER.size + size:
                break
            body, self.incoming = self.incoming[HEADER.size : HEADER.size + size], self.incoming[HEADER.size + size :]
            try:
                reply = json.loads(body)
            except ValueError as error:
                raise _Lost("errors") from error
            yield reply

    def end(self, grace: float) -> None:
        """Close its input, wait up to `grace` seconds for it to end, then kill it and whatever it started."""
        self.stdin.close()
        ready_among(reading=[self.stdout], writing=[], seconds=grace)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
        self.process.wait()
        self.stdout.close()


class RewardPool:
    """`workers` processes that score rows within `deadline` seconds of wall clock and `memory_mb` MB each.

    A context manager; `score` is a `grpo_fn.problem.Scorer`. A reward must be a pure function of problem and
    completion: equal rows are scored once. `counts` says how many rows were lost so far, and to what: `timeouts`,
    `deaths` (a crash, or the memory limit) and `errors` (an answer that makes no sense).
    """

    def __init__(self, *, workers: int, deadline: float, memory_mb: int) -> None:
        for name, value in (("workers", workers), ("deadline", deadline), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ValueError(f"reward pool {name}: got {value}, wanted more than 0")
        self.deadline, self.memory_mb, self.size = deadline, memory_mb, workers
        self.counts = {"timeouts": 0, "deaths": 0, "errors": 0}
        self._workers: list[_Worker] = []
        self._stillborn = 0

    def __enter__(self) -> "RewardPool":
        self._workers = [_Worker(self.memory_mb) for _ in range(self.size)]
        return self

    def __exit__(self, *_: object) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stdin.close()
        for worker in workers:
            worker.end(1.0)

    def score(self, fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        """`fn` of every row, in order; None where it says so and where its worker was lost.

        Raises RewardError, naming the row, when `fn` itself raises; ValueError when `fn` cannot be found by its name
        in another process; RuntimeError when a fresh worker cannot load it, as under too small a memory limit.
        """
        if not self._workers:
            raise RuntimeError("reward pool: got a call to score outside of `with pool:`, wanted it inside")
        rows = list(zip(problems, completions, strict=True))
        pickles: dict[bytes, int] = {}
        row_of = [pickles.setdefault(pickle.dumps(row), len(pickles)) for row in rows]
        example = dict(zip(row_of, rows, strict=True))
        job = _Job(fn, _by_name(fn), list(pickles), example, [None] * len(pickles), deque(range(len(pickles))))
        try:
            while job.waiting or any(worker.rows for worker in self._workers):
                self._turn(job)
        except BaseException:
            for place, worker in enumerate(self._workers):
                if worker.rows:
                    self._replace(place)
            raise
        return [job.results[row] for row in row_of]

    def _turn(self, job: "_Job") -> None:
        """Hand out work, wait for the first thing to happen, and take in all that has happened."""
        chunk = max(1, min(CHUNK, len(job.pickles) // (4 * self.size)))
        for worker in self._workers:
            if job.waiting and not worker.rows:
                rows = [job.waiting.popleft() for _ in range(min(chunk, len(job.waiting)))]
                worker.assign(job.payload, rows, job.pickles)
        busy = [(place, worker) for place, worker in enumerate(self._workers) if worker.rows]
        ready = ready_among(
            reading=[worker.stdout for _, worker in busy],
            writing=[worker.stdin for _, worker in busy if worker.outgoing],
            seconds=min(worker.due for _, worker in busy) - time.monotonic(),
        )
        for place, worker in busy:
            try:
                if worker.stdin.fileno() in ready:
                    worker.flush()
                if worker.stdout.fileno() in ready:
                    self._take(worker, job)
                elif time.monotonic() >= worker.due:
                    raise _Lost("timeouts")
            except _Lost as lost:
                self._mourn(place, str(lost), job)

    def _take(self, worker: _Worker, job: "_Job") -> None:
        for reply in worker.replies():
            match reply:
                case ["ready"] if worker.loading:
                    worker.loading, worker.proven, self._stillborn = False, True, 0
                case ["value", place, None | float() as value] if worker.rows and place == worker.place:
                    job.results[worker.rows.popleft()] = value
                    worker.place += 1
                case ["raised", str() as trace]:
                    raise RewardError(job.complaint(worker, trace))
                case ["memory"]:
                    raise _Lost("deaths")
                case _:
                    raise _Lost("errors")
            worker.due = time.monotonic() + self.deadline

    def _mourn(self, place: int, reason: str, job: "_Job") -> None:
        """Give up the row the worker was at, put the rest of its rows back and start another worker."""
        worker = self._workers[place]
        if not worker.loading:
            self.counts[reason] += 1
            worker.rows.popleft()
        elif not worker.proven:
            self._stillborn += 1
        if self._stillborn >= STILLBORN:
            raise RuntimeError(
                f"reward worker: got {reason} while {STILLBORN} fresh ones loaded {_name(job.fn)}, wanted one ready "
                f"within {STARTUP_SECONDS:g} s and {self.memory_mb} MB"
            )
        job.waiting.extendleft(reversed(worker.rows))
        self._replace(place)

    def _replace(self, place: int) -> None:
        self._workers[place].end(0.0)
        self._workers[place] = _Worker(self.memory_mb)


class _Job(NamedTuple):
    """One call of `score`."""

    fn: RewardFn
    payload: bytes
    pickles: list[bytes]  # the different rows
    example: dict[int, tuple[Problem, Completion]]
    results: list[float | None]
    waiting: deque[int]

    def complaint(self, worker: _Worker, trace: str) -> str:
        if worker.loading:
            return f"{_name(self.fn)} could not be loaded in a reward worker:\n{trace}"
        problem, completion = self.example[worker.rows[0]]
        return f"{_name(self.fn)} raised on problem {problem.uid}, completion {completion.text[:200]!r}:\n{trace}"


def ready_among(*, reading: Sequence[IO[bytes]], writing: Sequence[IO[bytes]], seconds: float) -> set[int]:
    """The descriptors that can be read or written without waiting, as soon as there is one or after `seconds`."""
    poll = select.poll()
    for stream in reading:
        poll.register(stream, select.POLLIN)
    for stream in writing:
        poll.register(stream, select.POLLOUT)
    return {fd for fd, _ in poll.poll(max(0.0, 1000 * seconds))}


def _by_name(fn: RewardFn) -> bytes:
    try:
        return pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"reward: got {_name(fn)}, wanted a function that a module defines: {error}") from error


def _name(fn: Any) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
