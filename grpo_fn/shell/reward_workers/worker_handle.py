"""A worker process as the pool sees it: the bytes on their way to and from it, and the rows that it still owes."""

import json
import math
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
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.shell.reward_workers.worker import HEADER

STARTUP_SECONDS = 60.0  # to start Python and import the reward function; not part of a row's deadline
LONGEST_REPLY = 2**20
RETURNED_NONE = "the reward returned None"
MALFORMED = "worker sent a malformed reply"


class Loss(NamedTuple):
    """What a row was lost to."""

    cause: str  # timeouts, worker_crashes, protocol_errors, exceptions or judge
    reason: str
    text: str  # for people


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
    """What became of a row. `reason` says why the value is None, or what a `ReasonedScore` says; else empty."""

    value: float | None
    reason: str
    seconds: float  # wall clock
    loss: Loss | None = None
    cost: JudgeCost | None = None


@dataclass(eq=False, slots=True)
class PoolRow:
    """A row on its way; equal rows share one."""

    problem: Problem
    completion: Completion
    pickle: bytes
    outcome: Outcome | None = None


class WorkerLost(Exception):
    """A worker is of no use any more: the counter it goes to, and why."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(cause, reason)
        self.cause, self.reason = cause, reason


@runtime_checkable
class Descriptor(Protocol):
    """Anything with a file descriptor."""

    def fileno(self) -> int: ...


class WorkerHandle:
    """One process and the rows of the chunk that it is at."""

    def __init__(self, memory_mb: int) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_fn.shell.reward_workers.worker", str(memory_mb)],
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
        self.rows: deque[PoolRow] = deque()
        self.place = 0  # of the next row within its chunk
        self.importing = ""  # the package that the row it is at is importing
        self.loading, self.proven = False, False  # a function now; any function ever
        self.began, self.due = 0.0, 0.0  # when the row it is at began, at the earliest, and when it is late

    def assign(self, payload: bytes, rows: Sequence[PoolRow]) -> None:
        """Send a pickled function and the rows to call it with."""
        body = pickle.dumps((payload, [row.pickle for row in rows]))
        self.outgoing, self.rows, self.place = HEADER.pack(len(body)) + body, deque(rows), 0
        self.loading = True
        self.begin(STARTUP_SECONDS)
        self.flush()

    def begin(self, seconds: float) -> None:
        """From now on it has so many seconds to say something."""
        self.began = time.monotonic()
        self.due = self.began + seconds

    def settle(self, outcome: Outcome) -> None:
        """The row it was at is done."""
        self.rows.popleft().outcome = outcome
        self.place, self.importing = self.place + 1, ""

    def flush(self) -> None:
        """Send what the pipe takes."""
        try:
            self.outgoing = self.outgoing[os.write(self.stdin.fileno(), self.outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = b""  # the end of its standard output says the rest

    def replies(self) -> Iterator[list[Any]]:
        """The complete replies that have come in, one by one: those before a malformed one still count.

        Raises WorkerLost at the end of the stream or for a malformed reply.
        """
        data = os.read(self.stdout.fileno(), 65536)
        if not data:
            raise WorkerLost("worker_crashes", self._ending())
        self.incoming += data
        while len(self.incoming) >= HEADER.size:
            (size,) = HEADER.unpack_from(self.incoming)
            if size > LONGEST_REPLY:
                raise WorkerLost("protocol_errors", MALFORMED)
            if len(self.incoming) < HEADER.size + size:
                break
            body, self.incoming = self.incoming[HEADER.size : HEADER.size + size], self.incoming[HEADER.size + size :]
            try:
                reply = json.loads(body)
            except ValueError as error:
                raise WorkerLost("protocol_errors", MALFORMED) from error
            yield reply

    def _ending(self) -> str:
        """How the process ended, whose output has."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "worker died: it closed its output"
        return f"worker died: killed by {signal.Signals(-code).name}" if code < 0 else f"worker died: exit code {code}"

    def end(self, grace: float) -> None:
        """Close its input, wait up to `grace` seconds for it to end, then kill it and whatever it started."""
        self.stdin.close()
        ready_among(reading=[self.stdout], writing=[], seconds=grace)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
        self.process.wait()
        self.stdout.close()


def ready_among(*, reading: Sequence[Descriptor], writing: Sequence[Descriptor], seconds: float) -> set[int]:
    """The descriptors that can be read or written without waiting, as soon as there is one or after `seconds`."""
    poll = select.poll()
    for stream in reading:
        poll.register(stream, select.POLLIN)
    for stream in writing:
        poll.register(stream, select.POLLOUT)
    return {fd for fd, _ in poll.poll(None if math.isinf(seconds) else max(0.0, 1000 * seconds))}
