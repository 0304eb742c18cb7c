"""Where the threads of a process stand, for one that is late. Nothing but Python's own library is imported."""

import sys
import threading
import traceback


def print_stacks() -> None:
    """Where every thread of this process stands, on standard error.

    By a thread that holds Python's lock: `faulthandler`, which needs none, ended the process at frames of torch.compile
    (torch 2.11, Python 3.12).
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        print(f"thread {names.get(ident, ident)}:", *traceback.format_stack(frame), file=sys.stderr, flush=True)
