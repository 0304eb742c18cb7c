"""Threads beside the one that computes: they write, wait and hand on.

Torch's OpenMP gives every thread that computes with it a team of its own. As soon as there are more threads in teams
than processors, libgomp lets all of them sleep between two pieces of work instead of spin for a moment, the training's,
too: decoding, which is thousands of small pieces, takes a third longer once another thread has computed something.
"""

from collections.abc import Callable
from threading import Event, Thread

import torch

SETTLED = 10.0  # seconds; a thread that has begun needs microseconds


def helper(work: Callable[[], object], *, name: str) -> Thread:
    """A started thread that does `work`, in which torch computes without a team; it does not keep the process alive.

    Threads that come later get as many threads of torch's as they would have got.
    """
    threads, alone = torch.get_num_threads(), Event()

    def begin() -> None:
        torch.get_num_threads()  # the first call of a thread sets its number to that of all
        torch.set_num_threads(1)  # here, and for threads yet to come
        alone.set()
        work()

    thread = Thread(target=begin, name=name, daemon=True)
    thread.start()
    alone.wait(SETTLED)
    torch.set_num_threads(threads)
    return thread
