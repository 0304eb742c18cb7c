"""A pytest plugin: a session that leaves threads which would keep its process fails, naming them, and its process ends.

Python waits for every thread that is no daemon before a process exits, and says nothing meanwhile.
"""

import os
import sys
import threading
import time
import traceback
from concurrent.futures import thread as thread_pools

import pytest

SECONDS = 30.0  # that threads have to end in, all of them together


def leftover_threads(seconds: float) -> list[threading.Thread]:
    """Threads that are still there after so many seconds; those of executors are ended by Python."""
    until = time.monotonic() + seconds
    left = [x for x in threading.enumerate() if x is not threading.main_thread() and not x.daemon]
    left = [x for x in left if x not in thread_pools._threads_queues]
    for one in left:
        one.join(max(0.0, until - time.monotonic()))
    return [one for one in left if one.is_alive()]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process with 1 where threads are left; a worker of xdist is ended by xdist."""
    if hasattr(config, "workerinput") or not (left := leftover_threads(SECONDS)):
        return
    frames = sys._current_frames()
    for one in left:
        stack = traceback.format_stack(frames[one.ident]) if one.ident in frames else []
        print(
            f"got the thread {one.name!r} {SECONDS:.0f} s after the last test, expected it to have ended",
            file=sys.stderr,
        )
        print("".join(stack[-5:]), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
