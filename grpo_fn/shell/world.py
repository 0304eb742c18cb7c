"""The ranks of a run: who this process is among them, and the few ways in which they talk to one another.

Objects (texts, figures, errors) travel over a gloo group, tensors over the device's. Every call in which a rank waits
for others has a deadline and a name, so that a run never hangs in silence: either the backend raises, which becomes
`LostRank`, or a watching thread ends the process and says where it was.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from grpo_fn.shell.background_worker import BackgroundWorker

T = TypeVar("T")

EXIT_LOST = 71  # EX_OSERR of sysexits.h: another rank is gone or does not answer; the run continues from its checkpoint
BEATS = 4  # messages within a deadline from a main rank that is at work while the others wait
GRACE = 5.0  # seconds that the backend has to raise by itself, which says more, before the watching thread ends it
NCCL_GRACE = (
    2 * GRACE
)  # seconds after the deadline before NCCL's own watchdog aborts, which says neither step nor phase


class LostRank(RuntimeError):
    """Another rank is gone, or has not answered within the deadline."""


class Elsewhere(RuntimeError):
    """Another rank found something wrong; the message is the one that it gave."""


class World:
    """All ranks of a run, seen from one of them. Alone (`alone`) it costs nothing and does not communicate."""

    def __init__(self, rank: int, size: int, device: torch.device, *, deadline: float) -> None:
        if deadline <= 0:
            raise ValueError(f"deadline: got {deadline} s, expected more than 0")
        self.rank, self.size, self.device, self.deadline = rank, size, device, deadline
        self.where: Callable[[], str] = lambda: "the start"  # step and phase, set by the loop
        self.mark: Callable[[str], AbstractContextManager[object]] = nullcontext  # around all talk, for a profiler
        self._waits: list[tuple[float, str]] = []  # since when, for what; the innermost last
        self._queued: list[
            tuple[float, str, torch.cuda.Event]
        ] = []  # collectives that a GPU has not done yet, in order
        self._objects: dist.ProcessGroup | None = None
        if size > 1:
            self._objects = self.group()
            threading.Thread(target=self._watch, daemon=True, name="watch").start()

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks, for objects, with this world's deadline. Every rank has to ask for it."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.deadline))

    def exchange(self, value: T, *, what: str) -> list[T]:
        """The values of all ranks, in rank order, their tensors on this rank's device."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.talking(what):
            dist.all_gather_object(values, tree_map_only(Tensor, lambda x: x.cpu(), value), group=self._objects)
        return [tree_map_only(Tensor, lambda x: x.to(self.device), x) for x in values]

    def agree(self, f: Callable[[], T], *, what: str) -> T:
        """The value of `f` on the main rank, on every rank; its exception is raised on every rank."""
        value, error = _attempt(f) if self.main else (None, None)
        value, failure = self.exchange((value, None if error is None else str(error)), what=what)[0]
        if error is not None:
            raise error
        if failure is not None:
            raise Elsewhere(f"rank 0: {failure}")
        return value

    def agree_at_length(self, f: Callable[[], T], *, what: str) -> T:
        """As `agree`, for what may take the main rank longer than the deadline: the others learn that it continues."""
        if self.size == 1:
            return f()
        if not self.main:
            while self.exchange(None, what=what)[0]:
                pass
            return self.agree(f, what=what)
        worker = BackgroundWorker(what, timeout=None)
        future = worker.submit(f, what=what)
        while not wait([future], timeout=self.deadline / BEATS).done:
            self.exchange(True, what=what)
        worker.shutdown(wait=False)
        self.exchange(False, what=what)
        return self.agree(future.result, what=what)

    def together(self, f: Callable[[], T], *, what: str) -> T:
        """The value of `f` on this rank once it has returned on every rank; if it raised on one rank, all raise."""
        value, error = _attempt(f)
        errors = self.exchange(None if error is None else f"{type(error).__name__}: {error}", what=what)
        if error is not None:
            raise error
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]:
            raise Elsewhere(f"{what}: " + "; ".join(failed))
        return value

    def same(self, value: Any, *, what: str) -> None:
        """Raise RuntimeError on all ranks unless they bring the same: they would deadlock, or train on other data."""
        values = self.exchange(value, what=what)
        if odd := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise RuntimeError(f"{what}: got {values[odd[0]]} on rank {odd[0]}, expected {values[0]} as on rank 0")

    @contextmanager
    def talking(self, what: str) -> Iterator[None]:
        """Everything in which this rank may wait for others happens inside: it has a name and a deadline."""
        if self.size == 1:
            with self.mark(what):
                yield
            return
        self._waits.append((time.monotonic(), what))
        try:
            with self.mark(what):
                yield
            self._note_queued(*self._waits[-1])
        except (dist.DistError, RuntimeError) as error:
            if not isinstance(error, dist.DistError) and not any(word in str(error).lower() for word in _LOST):
                raise
            waited = time.monotonic() - self._waits[-1][0]
            raise LostRank(
                f"rank {self.rank} of {self.size} lost another rank after {waited:.1f} s in {what}: {error}"
            ) from error
        finally:
            self._waits.pop()

    def leave(self) -> None:
        """Part in peace: for the end of a run in which nothing went wrong."""
        if self.size > 1 and dist.is_initialized():
            with self.talking("leaving"):
                dist.barrier(self._objects)
            dist.destroy_process_group()

    def _note_queued(self, since: float, what: str) -> None:
        """A GPU's collectives are queued when their call returns, not done: the watching thread looks after them."""
        if self.device.type == "cuda":
            while self._queued and self._queued[0][2].query():
                self._queued.pop(0)
            event = torch.cuda.Event()
            event.record()
            self._queued.append((since, what, event))

    def _watch(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own current device
        while True:
            time.sleep(min(1.0, self.deadline / 10))
            waits = [(since, what, self.deadline + GRACE, _never) for since, what in self._waits[-1:]]
            # An event is asked only when it is late: to ask while another library captures may break its capture.
            waits += [(since, what, self.deadline, event.query) for since, what, event in self._queued[:1]]
            for since, what, allowed, done in waits:
                if (waited := time.monotonic() - since) > allowed and not done():
                    self._give_up(waited, what)

    def _give_up(self, waited: float, what: str) -> None:
        message = (
            f"rank {self.rank} of {self.size} at {self.where()}: waited {waited:.0f} s for the other ranks in {what}, "
            f"expected at most {self.deadline:g}; the same command resumes from the newest checkpoint"
        )
        print(message, file=sys.stderr, flush=True)
        with suppress(Exception):  # the exit code is the same without
            print_stacks()
        os._exit(EXIT_LOST)


def leave_lost(error: "Elsewhere | LostRank", *, then: str) -> int:
    """The exit code when another rank found bad input; ends the process with EXIT_LOST when a rank is gone."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, Elsewhere) and not notes:  # the rank that found it says so
        return 2
    print(f"{', '.join([str(error), *notes])}; {then}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_LOST)  # taking Python down, a backend that has lost its peers may wait for them, or abort


def alone(device: torch.device) -> World:
    """The world of a single process."""
    return World(0, 1, device, deadline=float("inf"))


def join_world(name: str, *, deadline: float) -> World:
    """The world that torchrun describes in the environment; alone without it.

    `name` is the device: "auto" is the GPU of this rank where there is one. Raises ValueError for a device that is not
    there, LostRank when the others do not come within the deadline.
    """
    size, rank, local = (int(os.environ.get(key, at)) for key, at in _TORCHRUN.items())
    device = find_device(name, local if size > 1 else 0)
    if device.type == "cuda":  # FSDP2, streams and graphs take the current device, not that of their tensors
        torch.cuda.set_device(device)
    if size == 1:
        return alone(device)
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=rendezvous_store(timedelta(seconds=deadline)),
            rank=rank,
            world_size=size,
            timeout=backend_timeout(device, deadline),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError) as error:
        raise LostRank(f"rank {rank} of {size} did not find the others within {deadline:g} s: {error}") from error
    return World(rank, size, device, deadline=deadline)


def backend_timeout(device: torch.device, deadline: float) -> timedelta:
    """After which a collective of the device's backend fails: on NCCL later than this process has ended itself."""
    return timedelta(seconds=deadline + NCCL_GRACE * (device.type == "cuda"))


def rendezvous_store(timeout: timedelta) -> dist.Store:
    """The store in which the ranks find one another's addresses.

    torchrun keeps one for all attempts of a job, with the addresses of the dead in it (pytorch#135712), so every
    attempt has its own corner. Where all ranks are on one host: hosts do not count attempts alike, and
    tools/launch/agent.py sees to it that theirs is a new one.
    """
    store, _, size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("LOCAL_WORLD_SIZE") != str(size):
        return store
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def find_device(name: str, local: int) -> torch.device:
    """The named device, or for "auto" GPU number `local` where there is one.

    Raises ValueError for a device that is not there.
    """
    if name == "auto":
        name = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # an unknown name; a build without that backend; no such card
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"got device {name!r}, expected one that exists here: auto, {', '.join(there)}") from error


def _never() -> bool:
    return False


_TORCHRUN = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
# What gloo, NCCL and the rendezvous say when a peer is gone or late; anything else is a fault of the program.
_LOST = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe")


def _attempt(f: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return f(), None
    except Exception as error:
        return None, error


# -- where the threads of a late process stand


def print_stacks() -> None:
    """Where every thread of this process stands, on standard error.

    By a thread that holds Python's lock: `faulthandler`, which needs none, ended the process at frames of torch.compile
    (torch 2.11, Python 3.12).
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        print(f"thread {names.get(ident, ident)}:", *traceback.format_stack(frame), file=sys.stderr, flush=True)
