"""One worker process as the process that started it sees it: calls go in, and answers come out within a deadline."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from grpo_fn.shell.reward_workers.worker import HEADER

POLL = 0.2  # seconds between two looks at whether an answer is still wanted
LONGEST_REPLY = 2**20
MALFORMED = "worker sent a malformed reply"


class WorkerLost(Exception):
    """A worker is of no use any more: the counter it goes to, and why."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(cause, reason)
        self.cause, self.reason = cause, reason


class CallCancelled(Exception):
    """The answer is no longer expected, and the worker is still at the call."""


class WorkerProcess:
    """A process under a memory limit. It dies with the thread that started it."""

    def __init__(self, memory_mb: int) -> None:
        self.memory_mb = memory_mb
        self.start()

    def start(self) -> None:
        """Start the process, which loads nothing yet."""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_fn.shell.reward_workers.worker", str(self.memory_mb)],
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
                raise WorkerLost("timeouts", self._lateness(seconds))

    def _lateness(self, seconds: float) -> str:
        late = f"late: no answer within {seconds:g} s"
        if not self.importing:
            return late
        at_the_top = "import it at the top of the reward's module, on loading time"
        return f"{late}, while it imported {self.importing}: {at_the_top}"

    def _ending(self) -> str:
        """How the process ended, whose output has."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "worker died: it closed its output"
        return f"worker died: killed by {signal.Signals(-code).name}" if code < 0 else f"worker died: exit code {code}"
