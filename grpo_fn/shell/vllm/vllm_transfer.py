"""How weights get from the trainer to vLLM servers: through files, or through NCCL.

Both send chunk by chunk: the server learns of each by /update_weights, and loads it while the next one is gathered,
so the model is whole on one side only. `worker_extension` is the other end.
"""

import hashlib
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil
from safetensors.torch import save
from torch import Tensor

Chunk = list[tuple[str, Tensor]]
Info = dict[str, Any]  # what a server gets to know of one


def chunks(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Chunk]:
    """Weights in their order, in lists of at least `size` bytes (less than a tensor above it); the last may be less."""
    chunk, held = [], 0
    for name, tensor in weights:
        chunk.append((name, tensor))
        held += tensor.numel() * tensor.element_size()
        if held >= size:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def check_size(chunk_bytes: int) -> None:
    """Raise ValueError for chunks of nothing."""
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes: got {chunk_bytes}, wanted at least 1")


@runtime_checkable
class Transfer(Protocol):
    """One way. The main rank calls it, for one set of weights at a time; what a way has no need of does nothing."""

    backend: str  # the engine that servers have to be started with
    chunk_bytes: int

    def meeting(self, url: str, workers: int) -> tuple[Info, Callable[[], None]]:
        """What a server of so many workers gets at the first request, and what the trainer does meanwhile."""

    def begin(self) -> None:
        """A new set of weights: what was kept of the last one is forgotten."""

    def offer(self, chunk: Chunk) -> Info:
        """What the servers get to know of a chunk."""

    def carry(self, chunk: Chunk, urls: Sequence[str]) -> dict[str, str]:
        """What the trainer does while the servers take it; the servers that this failed with, and how."""
        return {}

    def chunk_received(self) -> None:
        """All servers have the chunk that was offered last."""

    def end(self) -> None:
        """The set is complete."""

    def again(self) -> list[Info] | None:
        """What announces the complete set to a server a second time; None where that is not possible."""

    def close(self) -> None:
        """No more weights."""


def file_transfer(*, folder: str, chunk_bytes: int, keep: bool) -> "File":
    """Through safetensors files in a folder that trainer and servers share, under one user.

    Args:
        folder: path of the folder. /dev/shm is memory: with `keep` it holds the whole model.
        chunk_bytes: size of a file, bytes; a file is larger by less than a tensor.
        keep: True keeps the newest weights for a server that comes back; False: it waits for the next ones.

    Returns:
        The transfer.

    Raises:
        ValueError: for a folder that is not there and a chunk_bytes below 1.
    """
    return File(folder, chunk_bytes, keep)


@dataclass
class File(Transfer):
    """See `file_transfer`."""

    folder: str
    chunk_bytes: int
    keep: bool
    backend: str = "grpo_file"
    _own: Path | None = None
    _sent: list[Info] = field(default_factory=list)
    _complete: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a folder that is not there."""
        check_size(self.chunk_bytes)
        if not Path(self.folder).is_dir():
            raise ValueError(f"transfer folder: got {self.folder!r}, which is not there; wanted one servers share")

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

    def chunk_received(self) -> None:
        """Delete the file, unless it is to be kept."""
        if not self.keep:
            (self._place() / self._sent[-1]["name"]).unlink(missing_ok=True)

    def end(self) -> None:
        """From here on they can be given again."""
        self._complete = True

    def again(self) -> list[Info] | None:
        """The files."""
        return list(self._sent) if self.keep and self._complete else None

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
    seen: set[int] = set()
    named = {}
    for name, tensor in chunk:
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        named[name] = own
    return named


def _mark(pid: int | str) -> str:
    return f"grpo_fn-weights-{socket.gethostname()}-{pid}"


def _sweep(folder: Path) -> None:
    """Delete what trainers on this host have left here that were killed."""
    for left in folder.glob(_mark("*")):
        pid = left.name.removeprefix(_mark("")).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
