"""Writes checkpoints beside the training: every rank copies its pieces and continues, a thread of its own writes them.

A checkpoint is `tensors` in pieces (`tensor_shards`), small `blobs` and `meta` of the main rank, and a manifest with
the hash of every file. The main rank writes the manifest once every rank has reported its pieces on the disk, and
gives the folder its name; until then no rank's death leaves anything that looks like a checkpoint.

Not torch's `dcp.async_save`, whose planners and files these are: at each save it exchanges all plans (of 64 ranks with
1,000 pieces: 5.6 s of work on the main rank; here when they change), every rank copies what all hold (on two 105 MB
each, not 52), and in a process the first checkpoint takes 6 to 11 s.
"""

import errno
import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from grpo_fn.shell.atomic_io import NoSpace, check_space, finite_or_none, is_full, no_space
from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.checkpoint import store, tensor_shards
from grpo_fn.shell.checkpoint.store import Entry, entry, pack_blobs, seal
from grpo_fn.shell.world import GRACE, Elsewhere, LostRank, World

T = TypeVar("T")
Written = tuple[list[WriteResult], dict[str, Entry]]  # where the pieces lie, and the files' entries in the manifest

OVERHEAD = 2**11  # bytes of a file that a tensor needs besides its own, at most


@dataclass(frozen=True)
class SaveJob:
    """A checkpoint on its way to the disk."""

    path: Path  # where it will be
    folder: Path  # where it is until then
    step: int
    size: int  # bytes of tensors
    meta: Mapping[str, Any]
    prune: Callable[[], object] | None
    files: dict[str, bytes] = field(default_factory=dict)  # the blobs, on the main rank

    def bytes_needed(self) -> int:
        """Bytes of disk, with some to spare for headers and the manifest."""
        return self.size + sum(map(len, self.files.values())) + 2**16


class Trouble(NamedTuple):
    """A rank's error in words, so that it can be sent."""

    full: bool
    text: str
    path: str | None


class AsyncSaver(AbstractContextManager):
    """Saves into `root`, one checkpoint at a time; every rank makes one and calls the same methods of it."""

    def __init__(self, root: Path, world: World) -> None:
        self.root = root
        self.world = world
        self._group = world.group() if world.size > 1 else None  # the training's own talk goes on beside it
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._owner = world.exchange(name, what="naming who saves")[0]
        self._offers: list[SavePlan] = []
        self._shares: tensor_shards.ShardPlan | None = None
        self._buffers: dict[MetadataIndex, Tensor] = {}
        self._step = self._reported = -1  # of the newest one, and of the newest one that is known to be whole or lost
        self._worker = BackgroundWorker("checkpoint", timeout=None, torch_threads=1)
        self._writing: Future[None] | None = None

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        blobs: Mapping[str, Any],
        meta: Mapping[str, Any],
        prune: Callable[[], object] | None = None,
    ) -> None:
        """Copy what `root/step_N` is to hold and return; it is written meanwhile, and then the main rank calls `prune`.

        At every moment the folder is absent, as it was, or complete. `tensors` (on every rank its own part of a
        DTensor; a plain tensor is the same on all) may change as soon as this returns. `blobs` are plain containers,
        numbers and tensors, `meta` is JSON, where NaN and infinities become null; those of the main rank count.
        Raises, on every rank, ValueError or Elsewhere for blobs that would not come back as they are, NoSpace when
        the disk is full, and what `wait` raises of the checkpoint before; those saved before stay as they were.
        """
        self.wait()
        size = sum(t.numel() * t.element_size() + OVERHEAD for t in tensors.values())
        folder = store.temporary_name(self.root, "tmp", step, self._owner)
        job = SaveJob(self.root / f"step_{step}", folder, step, size, finite_or_none(meta), prune)
        try:
            self._prepare(job, tensors, blobs)
            self._stage(job, tensors)
        except BaseException:
            self._discard()
            raise
        self._step = step
        self._writing = self._worker.submit(self._write, job, what=f"the checkpoint of step {step}")

    @property
    def failed(self) -> bool:
        """Whether the checkpoint that was being written has come to nothing: `wait` says why."""
        done = self._writing is not None and self._writing.done()
        return done and self._writing.exception() is not None

    def wait(self) -> None:
        """Until the checkpoint that is being written is whole on the disk; raises what went wrong on any rank.

        NoSpace when a disk is full, LostRank when a rank is gone or it takes longer than the world's deadline.
        """
        try:
            self._worker.wait(timeout=self.world.deadline + GRACE if isfinite(self.world.deadline) else None)
        except TimeoutError as error:
            raise LostRank(
                f"rank {self.world.rank} of {self.world.size} waited for the checkpoint of step {self._step} to be "
                f"written, expected at most {self.world.deadline:g} s"
            ) from error
        writing, self._writing = self._writing, None
        if writing is not None:
            if writing.exception() is not None:
                self._reported = self._step
            writing.result()

    def newly_saved(self) -> int | None:
        """The step of a checkpoint that has become whole since the last call, on this rank."""
        if self._reported == self._step or self.failed or not (self._writing is None or self._writing.done()):
            return None
        self._reported = self._step
        return self._step

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.wait()
        except Exception as also:
            if error is None:
                raise
            error.add_note(f"and the checkpoint that was being written failed: {also}")
        finally:
            self._worker.shutdown(wait=False)  # a rank that lost another one does not wait for it again

    def _prepare(self, job: SaveJob, tensors: Mapping[str, Tensor], blobs: Mapping[str, Any]) -> None:
        """Check, make the folder, copy the blobs, and agree with the others on who writes which piece."""

        def ready() -> SavePlan | None:
            offer = tensor_shards.local_save_plan(tensors)
            if self.world.main:
                job.files.update(pack_blobs(blobs))
                self.root.mkdir(parents=True, exist_ok=True)
                store.clean_up_unfinished(self.root)
                check_space(job.path, job.bytes_needed())
                job.folder.mkdir()
            return None if self._offers and offer == self._offers[self.world.rank] else offer

        brought = self._together(ready, job, partial(self.world.exchange, what="preparing a checkpoint"))
        if any(offer is not None for offer in brought):
            offers = [new or earlier for new, earlier in zip(brought, self._offers or brought, strict=True)]
            self._shares, self._offers = tensor_shards.assign_pieces(offers), offers

    def _stage(self, job: SaveJob, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's pieces. Memory may end on one rank alone, so all exchange the outcome."""

        def copied() -> None:
            plan, pin = self._shares.plans[self.world.rank], self.world.device.type == "cuda"
            self._buffers = tensor_shards.stage(tensors, plan, self._buffers, pin=pin)

        self._together(copied, job, partial(self.world.exchange, what="copying a checkpoint"))

    def _write(self, job: SaveJob) -> None:
        """The thread's work. Both exchanges wait for the slowest rank, the second one for the main rank."""
        exchange = partial(self._exchange, job.step)
        try:
            written = self._together(partial(self._write_mine, job), job, exchange)
            self._together(partial(self._publish, job, written), job, exchange)
        except BaseException:
            self._discard()
            raise

    def _write_mine(self, job: SaveJob) -> Written:
        rank = self.world.rank
        if not job.folder.is_dir():
            raise ValueError(f"got no folder {job.folder} here, expected a run folder on a disk that all ranks share")
        results = tensor_shards.write_shards(job.folder, self._shares.plans[rank], self._buffers)
        return results, {path.name: entry(path) for path in tensor_shards.files(job.folder, rank)}

    def _publish(self, job: SaveJob, written: list[Written]) -> None:
        """On the main rank: the rest of the files, the folder's name, and those no longer kept."""
        if not self.world.main:
            return
        tensor_shards.write_index(job.folder, self._shares.index, [results for results, _ in written])
        for name, data in job.files.items():
            (job.folder / name).write_bytes(data)
        hashed = {name: file for _, entries in written for name, file in entries.items()}
        hashed[tensor_shards.INDEX] = entry(job.folder / tensor_shards.INDEX)
        seal(job.folder, job.step, job.meta, hashed)
        store.commit(job.folder, job.step)
        if job.prune is not None:
            job.prune()

    def _discard(self) -> None:
        if self.world.main:
            with suppress(OSError):  # a rank that is not lost after all may still write there: the next start tidies up
                store.clean_up_unfinished(self.root)

    def _exchange(self, step: int, own: T) -> list[T]:
        """As `World.exchange`, for the thread: over its own group."""
        if self._group is None:
            return [own]
        brought: list[Any] = [None] * self.world.size
        try:
            dist.all_gather_object(brought, own, group=self._group)
        except (dist.DistError, RuntimeError) as error:
            raise LostRank(
                f"rank {self.world.rank} of {self.world.size} lost another rank while the checkpoint of step {step} "
                f"was written: {error}"
            ) from error
        return brought

    def _together(self, f: Callable[[], T], job: SaveJob, exchange: Callable[[Any], list[Any]]) -> list[T]:
        """The values of `f` on all ranks; an exception on any rank is raised on all of them."""
        result, error, trouble = None, None, None
        try:
            result = f()
        except Exception as caught:
            error, trouble = caught, _trouble(caught, job)
        brought = exchange((result, trouble))
        troubles = {rank: trouble for rank, (_, trouble) in enumerate(brought) if trouble is not None}
        for rank, trouble in troubles.items():
            if trouble.full:
                where = f"rank {rank}: " if self.world.size > 1 else ""
                raise NoSpace(errno.ENOSPC, where + trouble.text, trouble.path) from error
        if error is not None:
            raise error
        if troubles:
            raise Elsewhere("; ".join(f"rank {rank}: {trouble.text}" for rank, trouble in troubles.items()))
        return [value for value, _ in brought]


def _trouble(error: Exception, job: SaveJob) -> Trouble:
    if is_full(error):
        full = error if isinstance(error, NoSpace) else no_space(job.path, job.bytes_needed())
        return Trouble(True, full.strerror, full.filename)
    return Trouble(False, f"{type(error).__name__}: {error}", None)
