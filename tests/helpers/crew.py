"""Gloo ranks that a test session keeps: `crew(4).run(f, x)` is what `f(world, x)` returned on each of four ranks.

They are forked, when first asked for, from the server that `warm` prepares, so a crew costs what its group costs. `f`
is a module-level function, or a partial of one. A crew of which any rank raised, died or hung is put away, and the
next one that asks gets a new one. No rank outlives the process that asked for it.
"""

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from grpo_fn.shell.world import World

PATIENCE = 120.0  # seconds that a call may take
GRACE = 2.0  # seconds that the other ranks get to say something once one has failed
CPU = torch.device("cpu")


class Outcome(NamedTuple):
    """What became of a call on one rank."""

    value: Any
    error: str  # the type's name; empty when it returned
    text: str
    trace: str
    seconds: float
    status: int | None  # how the process ended by itself; None when it did not
    said: str  # on stdout and stderr, since the crew began

    @property
    def failed(self) -> bool:
        return bool(self.error) or self.status is not None


class CrewError(AssertionError):
    """A call failed on some rank; the message holds every rank's traceback."""


class Crew:
    """So many ranks, waiting for functions to run."""

    def __init__(self, size: int, *, deadline: float) -> None:
        context = serving()
        self.size = size
        self._temporary = tempfile.TemporaryDirectory(prefix="crew-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self.alive = True
        self.ends: list[Connection] = []
        self.ranks: list[Any] = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(self.folder, rank, size, deadline, there), daemon=True)
            process.start()
            there.close()
            self.ends.append(here)
            self.ranks.append(process)

    def run(self, f: Callable[..., Any], *args: Any, patience: float = PATIENCE) -> list[Any]:
        """What f(world, *args) returned on every rank, in their order; CrewError when it did not on one of them."""
        outcomes = self.outcomes(f, *args, patience=patience, grace=GRACE)
        if any(o.failed for o in outcomes):
            raise CrewError("\n".join(f"rank {rank}: {_shown(o)}" for rank, o in enumerate(outcomes) if o.failed))
        return [o.value for o in outcomes]

    def outcomes(
        self, f: Callable[..., Any], *args: Any, patience: float = PATIENCE, grace: float = PATIENCE
    ) -> list[Outcome]:
        """What became of it on every rank, each given `patience` seconds, and `grace` once another one has failed."""
        asked = pickle.dumps((f, args))
        for end in self.ends:
            with suppress(BrokenPipeError):
                end.send((sys.path, asked))
        found: dict[int, Outcome] = {}
        until = time.monotonic() + patience
        while len(found) < self.size and time.monotonic() < until:
            waiting = {end: rank for rank, end in enumerate(self.ends) if rank not in found}
            for end in wait(list(waiting), timeout=max(0.0, until - time.monotonic())):
                rank = waiting[end]
                found[rank] = self._receive(rank)
                if found[rank].failed:
                    until = min(until, time.monotonic() + grace)
        late = Outcome(None, "Hung", "did not answer in time", "", patience, None, "")
        outcomes = [found.get(rank, late._replace(said=self._said(rank))) for rank in range(self.size)]
        if any(o.failed for o in outcomes):
            self.dismiss()
        return outcomes

    def dismiss(self) -> None:
        """End every rank, whatever it is doing."""
        self.alive = False
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join()
        for end in self.ends:
            end.close()
        self._temporary.cleanup()

    def _receive(self, rank: int) -> Outcome:
        try:
            value, error, text, trace, seconds = pickle.loads(self.ends[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.ranks[rank].join(GRACE)
            return Outcome(None, "", "", "", 0.0, self.ranks[rank].exitcode, self._said(rank))
        return Outcome(value, error, text, trace, seconds, None, self._said(rank))

    def _said(self, rank: int) -> str:
        try:
            return _log(self.folder, rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""


def serving() -> Any:
    """The context of the server, which runs, with this process's sys.path: on Python 3.11 it would not have it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _shown(outcome: Outcome) -> str:
    ended = "" if outcome.status is None else f"ended with status {outcome.status}"
    return f"{outcome.trace or outcome.text or ended}\n{outcome.said[-5000:]}"


_CREWS: dict[int, Crew] = {}


def crew(size: int, *, deadline: float = 60.0) -> Crew:
    """This process's crew of that size, begun when there is none. `deadline` is that of a new one's world."""
    if size not in _CREWS or not _CREWS[size].alive:
        _CREWS[size] = Crew(size, deadline=deadline)
    return _CREWS[size]


# -- in a rank


def serve(folder: Path, rank: int, size: int, deadline: float, end: Connection) -> None:
    """Join the others, then run what is asked until the other end of the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()  # the stacks of a rank that a signal ends are in its log, and so in `Outcome.said`
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    world = World(rank, size, CPU, deadline=deadline)
    while True:
        try:
            path, asked = end.recv()
        except EOFError:
            os._exit(0)
        sys.path[:] = path
        end.send_bytes(_answer(world, asked))


def _answer(world: World, asked: bytes) -> bytes:
    begun, value = time.monotonic(), None
    try:
        f, args = pickle.loads(asked)
        value, error, text, trace = f(world, *args), "", "", ""
    except BaseException as caught:
        error, text, trace = type(caught).__name__, str(caught), traceback.format_exc()
    seconds = time.monotonic() - begun
    try:
        return pickle.dumps((value, error, text, trace, seconds))
    except Exception as odd:
        return pickle.dumps((None, type(odd).__name__, str(odd), traceback.format_exc(), seconds))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(0)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"
