"""Weights in the pieces in which they go to vLLM servers."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

Chunk = list[tuple[str, Tensor]]
Info = dict[str, Any]  # what a server is told of one


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
