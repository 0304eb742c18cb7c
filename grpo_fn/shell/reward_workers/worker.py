"""One reward worker: `python -m grpo_fn.shell.reward_workers.worker MEMORY_MB`, started and fed by `worker_pool`.

A message is a 4-byte big-endian length and that many bytes. In: a pickled `(function, rows)`, where the function and
each row `(problem, completion)` are pickles themselves, so that a row is opened only when its turn has come. Out:
JSON, `["ready"]` when the function is loaded, then for each row in order `["value", row, number or null, what a
`ReasonedScore` says, seconds]` (of an environment text, not a number), or `["raised", row, the exception in one line,
traceback, seconds]` when the function raised; `["importing", package]` before that, while it imports one. On
`["failed", traceback]`, the function could not be loaded, and `["memory"]` the worker ends. It ends as well when its
standard input does.

This file imports nothing heavy: a worker starts in a fraction of a second.
"""

import builtins
import ctypes
import json
import numbers
import os
import pickle
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

HEADER = struct.Struct(">I")
LONGEST_REASON = 200  # characters
LARGEST = 3.4e38  # of a reward: float32 ends there
LONGEST_TRACE = 8000


def serve_requests(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more."""
    functions: dict[bytes, Any] = {}
    forked: list[bool] = []
    os.register_at_fork(after_in_child=lambda: forked.append(True))
    while (message := read_message(requests)) is not None:
        payload, rows = pickle.loads(message)
        if payload not in functions:
            functions[payload] = pickle.loads(payload)
        write_message(replies, ["ready"])
        for index, row in enumerate(rows):
            with report_imports(replies):
                reply = score_row(index, functions[payload], row)
            if forked:  # by the reward, and this is the child: its parent answers
                os._exit(0)
            write_message(replies, reply)


@contextmanager
def report_imports(replies: BinaryIO) -> Iterator[None]:
    """Say `["importing", package]` when a package is first imported meanwhile, and with "" when that is done.

    A large one outlasts the deadline of the first row in every worker: the parent can say what the row was at.
    """
    plain, outermost = builtins.__import__, []

    def reporting(name: str, *given: Any, **named: Any) -> Any:
        if outermost or not name or name.partition(".")[0] in sys.modules:
            return plain(name, *given, **named)
        outermost.append(name)
        write_message(replies, ["importing", name])
        try:
            return plain(name, *given, **named)
        finally:
            outermost.clear()
            write_message(replies, ["importing", ""])

    builtins.__import__ = reporting
    try:
        yield
    finally:
        builtins.__import__ = plain


def score_row(index: int, fn: Any, row: bytes) -> list[Any]:
    """The reply to one row. Raises MemoryError, after which the process is not to be trusted."""
    start = time.perf_counter()
    try:
        given, check = await_reward(fn(*pickle.loads(row))), getattr(fn, "check_value", check_reward_value)
        value, reason = check(given), getattr(given, "reason", "")
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join("".join(traceback.format_exception_only(error)).split())[:LONGEST_REASON]
        return ["raised", index, reason, traceback.format_exc()[-LONGEST_TRACE:], time.perf_counter() - start]
    said = reason[:LONGEST_REASON] if isinstance(reason, str) else ""  # a number of numpy's, say, has none
    return ["value", index, value, said, time.perf_counter() - start]


def await_reward(value: Any) -> Any:
    """What a reward returned, awaited when it is awaitable: each row in its own event loop."""
    if not isinstance(value, Awaitable):
        return value
    import asyncio  # here, as most rewards do without it

    async def whole() -> Any:
        return await value

    try:
        return asyncio.run(whole())
    except asyncio.CancelledError as error:  # no Exception: it would take the worker with it
        raise RuntimeError("the reward was cancelled from inside") from error


def check_reward_value(value: Any) -> float | None:
    """The reward as a plain number. Raises ValueError for anything but None and a number that float32 can hold."""
    if value is None:
        return None
    if str(getattr(value, "dtype", "")) == "bool" and value.shape == ():  # numpy's is no number to Python
        value = bool(value)
    if not isinstance(value, numbers.Real) or not abs(value) <= LARGEST:
        raise ValueError(f"reward: got {type(value).__name__} {str(value)[:80]}, expected a finite number or None")
    return float(value)


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message, None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else None


def write_message(stream: BinaryIO, reply: list[Any]) -> None:
    """Send one reply at once."""
    body = json.dumps(reply).encode()
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def confine(memory_mb: int) -> None:
    """Limit this process's address space, leave no core file, and die with the parent even in the middle of a row."""
    # A row that hangs never reads the end of standard input. To Linux the parent is the thread that started the worker.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def private_stream(fd: int, mode: str, replacement: int) -> BinaryIO:
    """The stream at `fd` under its own number; what uses `fd` from now on gets `replacement`."""
    stream = os.fdopen(os.dup(fd), mode)
    os.dup2(replacement, fd)
    return stream


def main() -> None:
    """Serve on standard input and output, out of reach of a reward function that prints, reads or forks."""
    nothing = os.open(os.devnull, os.O_RDWR)
    requests, replies = private_stream(0, "rb", nothing), private_stream(1, "wb", 2)
    for stream in (requests, replies):  # a child that a reward forks can neither read a request nor answer one
        os.register_at_fork(after_in_child=partial(os.dup2, nothing, stream.fileno()))
    confine(int(sys.argv[1]))
    try:
        serve_requests(requests, replies)
    except MemoryError:
        write_message(replies, ["memory"])
    except Exception:
        write_message(replies, ["failed", traceback.format_exc()[-LONGEST_TRACE:]])
    replies.flush()
    os._exit(0)  # at once: a thread that a reward left behind must not keep the process


if __name__ == "__main__":
    main()
