"""Weights from the trainer's GPU to those of vLLM servers, by NCCL."""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_fn.shell.vllm.process_guards import check_installed, restore_compile_threads
from grpo_fn.shell.vllm.vllm_transfer import Chunk, Info, Transfer, check_size

POLL = 0.01  # seconds


def check_here() -> None:
    """Raise ValueError where a GPU or vLLM is missing, before anything is made."""
    if not torch.cuda.is_available():
        raise ValueError("transfer: got nccl_transfer.nccl without a GPU here, wanted vllm_transfer.file_transfer")
    check_installed("transfer")


def nccl(*, host: str, chunk_bytes: int, seconds: float) -> "Nccl":
    """Broadcast from this rank's GPU to those of the servers; vLLM is installed beside the trainer.

    Args:
        host: name or address of this machine as the servers reach it.
        chunk_bytes: size of a chunk of weights, bytes; a chunk is larger by less than a tensor.
        seconds: longest broadcast of a chunk; a server that takes longer is lost.

    Returns:
        The transfer.

    Raises:
        ValueError: for a chunk_bytes below 1, and where a GPU or vLLM is missing.
    """
    return Nccl(host, chunk_bytes, seconds)


@dataclass
class Nccl(Transfer):
    """See `nccl_transfer.nccl`. One group for each server: one that dies takes no other's with it.

    Nothing is kept: a server that comes back waits for the next set.
    """

    host: str
    chunk_bytes: int
    seconds: float
    backend: str = "grpo_nccl"
    _device: int = 0  # threads do not inherit the current one
    _groups: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError where vLLM or a GPU is missing."""
        check_size(self.chunk_bytes)
        check_here()
        try:
            with restore_compile_threads():
                import vllm  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"transfer: nccl_transfer.nccl wants vllm installed beside the trainer: {error}"
            ) from error
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
        """Which tensors will be broadcast."""
        return {
            "names": [name for name, _ in chunk],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
        }

    def carry(self, chunk: Chunk, urls: Sequence[str]) -> dict[str, str]:
        """Broadcast to every server on a stream of its own, and wait for all of them."""
        device = torch.device("cuda", self._device)
        sent = [tensor.to(device).contiguous() for _, tensor in chunk]
        done = {}
        for url in urls:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream())
            for tensor in sent:
                self._groups[url].broadcast(tensor, src=0, stream=stream)
            done[url] = stream.record_event()
        until = time.monotonic() + self.seconds
        while (late := [url for url in urls if not done[url].query()]) and time.monotonic() < until:
            time.sleep(POLL)
        for url in late:
            self._groups.pop(url).destroy()
        return dict.fromkeys(late, f"got no end to a broadcast of weights within {self.seconds:g} s")

    def close(self) -> None:
        """Leave all groups."""
        for group in self._groups.values():
            group.destroy()
        self._groups.clear()
