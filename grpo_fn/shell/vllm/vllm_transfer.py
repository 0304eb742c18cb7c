"""The transfer of weights from the trainer to vLLM servers: through files, or through NCCL.

Both send chunk by chunk: the server learns of each by /update_weights and has loaded it before the next one is
gathered, so that neither side holds the model a second time. `worker_extension` is the other end.
"""

import hashlib
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil
import torch
from safetensors.torch import save
from torch import Tensor

from grpo_fn.shell.vllm.engine import check_installed, import_vllm

CHUNK_BYTES = 2**28  # of a chunk of weights; one is larger by less than a tensor

Chunk = list[tuple[str, Tensor]]
Info = dict[str, Any]  # what a server gets to know of one


def chunks(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Chunk]:
    """Weights in their order, in lists of at least `size` bytes (less than a tensor above it); the last may be less."""
    chunk, filled = [], 0
    for name, tensor in weights:
        chunk.append((name, tensor))
        filled += tensor.numel() * tensor.element_size()
        if filled >= size:
            yield chunk
            chunk, filled = [], 0
    if chunk:
        yield chunk


@runtime_checkable
class Transfer(Protocol):
    """One way. The main rank calls it, for one set of weights at a time; `begin`, `carry` and `end` may do nothing."""

    backend: str  # the engine that servers have to be started with

    def meeting(self, url: str, workers: int) -> tuple[Info, Callable[[], None]]:
        """The first request to a server with so many workers, and the trainer's part in it."""

    def begin(self) -> None:
        """A new set of weights: what was kept of the last one is forgotten."""

    def offer(self, chunk: Chunk) -> Info:
        """The announcement of a chunk to the servers; all of them have the previous chunk."""

    def carry(self, chunk: Chunk, urls: Sequence[str]) -> dict[str, str]:
        """The trainer's part while the servers receive it; the servers that failed, with their errors."""
        return {}

    def end(self) -> None:
        """The set is complete."""

    def again(self) -> list[Info] | None:
        """The second announcement of the complete set to a server; None if that is impossible."""

    def close(self) -> None:
        """No more weights."""


@dataclass
class FileTransfer(Transfer):
    """Through safetensors files in a folder that trainer and servers share, under one user.

    Args:
        folder: path of the folder, which holds the newest weights, for a server that comes back. /dev/shm is memory.

    Raises:
        ValueError: for a folder that is not there.
    """

    folder: str
    backend = "grpo_file"
    _own: Path | None = field(default=None, init=False)
    _sent: list[Info] = field(default_factory=list, init=False)
    _complete: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not Path(self.folder).is_dir():
            raise ValueError(f"transfer folder: got {self.folder!r}, which is not there; expected one servers share")

    def meeting(self, url: str, workers: int) -> tuple[Info, Callable[[], None]]:
        """Nothing but where the files are."""
        return {"folder": str(self._place())}, lambda: None

    def begin(self) -> None:
        """Delete the last set's files."""
        self._complete = False
        for info in self._sent:
            (self._place() / info["name"]).unlink(missing_ok=True)
        self._sent = []

    def offer(self, chunk: Chunk) -> Info:
        """Write it."""
        data = save(_apart(chunk))
        name = f"{len(self._sent)}.safetensors"
        (self._place() / name).write_bytes(data)
        self._sent.append({"name": name, "sha256": hashlib.sha256(data).hexdigest()})
        return self._sent[-1]

    def end(self) -> None:
        """From here on they can be given again."""
        self._complete = True

    def again(self) -> list[Info] | None:
        """The files."""
        return list(self._sent) if self._complete else None

    def close(self) -> None:
        """Delete everything."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def _place(self) -> Path:
        if self._own is None:
            _sweep(Path(self.folder))
            self._own = Path(tempfile.mkdtemp(prefix=f"{_mark(psutil.Process().pid)}-", dir=self.folder))
        return self._own


def _apart(chunk: Chunk) -> dict[str, Tensor]:
    """On the CPU, no two in one storage: safetensors refuses that, and a tied head is the embedding itself."""
    storages: set[int] = set()
    named = {}
    for name, tensor in chunk:
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in storages:
            own = own.clone()
        storages.add(own.untyped_storage().data_ptr())
        named[name] = own
    return named


def _mark(pid: int | str) -> str:
    return f"grpo_fn-weights-{socket.gethostname()}-{pid}"


def _sweep(folder: Path) -> None:
    """Delete what trainers on this host that were killed have left in the folder."""
    for left in folder.glob(_mark("*")):
        pid = left.name.removeprefix(_mark("")).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


# -- through NCCL, from GPU to GPU


POLL = 0.01  # seconds
BROADCAST_SECONDS = 120.0  # longest broadcast of a chunk; a server that takes longer is lost


def check_nccl_transfer() -> None:
    """Raise ValueError if a GPU or vLLM is missing, before anything is made."""
    if not torch.cuda.is_available():
        raise ValueError(
            "transfer: got vllm_transfer.NcclTransfer without a GPU here, expected vllm_transfer.FileTransfer"
        )
    check_installed("transfer")


@dataclass
class NcclTransfer(Transfer):
    """Broadcast from this rank's GPU to those of the servers; vLLM is installed beside the trainer.

    One group for each server: one that dies takes no other's with it. Nothing is kept: a server that comes back waits
    for the next set.

    Args:
        host: name or address of this machine as the servers reach it.

    Raises:
        ValueError: if a GPU or vLLM is missing.
    """

    host: str
    backend = "grpo_nccl"
    _device: int = field(default=0, init=False)  # threads do not inherit the current one
    _groups: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_nccl_transfer()
        import_vllm("transfer")
        self._device = torch.cuda.current_device()

    def meeting(self, url: str, workers: int) -> tuple[Info, Callable[[], None]]:
        """A group of this rank, as rank 0, and the server's workers."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        info = {"master_address": self.host, "master_port": port, "rank_offset": 1, "world_size": 1 + workers}

        def meet() -> None:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init

            torch.cuda.set_device(self._device)
            self._groups[url] = trainer_init(info)

        return info, meet

    def offer(self, chunk: Chunk) -> Info:
        """The tensors that will be broadcast."""
        return {
            "names": [name for name, _ in chunk],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
        }

    def carry(self, chunk: Chunk, urls: Sequence[str]) -> dict[str, str]:
        """Broadcast to every server on its own stream, and wait for all of them."""
        device = torch.device("cuda", self._device)
        sent = [tensor.to(device).contiguous() for _, tensor in chunk]
        done = {}
        for url in urls:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream())
            for tensor in sent:
                self._groups[url].broadcast(tensor, src=0, stream=stream)
            done[url] = stream.record_event()
        until = time.monotonic() + BROADCAST_SECONDS
        while (late := [url for url in urls if not done[url].query()]) and time.monotonic() < until:
            time.sleep(POLL)
        for url in late:
            self._groups.pop(url).destroy()
        return dict.fromkeys(late, f"got no end to a broadcast of weights within {BROADCAST_SECONDS:g} s")

    def close(self) -> None:
        """Leave all groups."""
        for group in self._groups.values():
            group.destroy()
        self._groups.clear()
