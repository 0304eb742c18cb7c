"""Digests of tensors that are spread over the ranks, and the lines of digests.jsonl.

Every rank digests the pieces that lie with it (`block_digests`), all ranks' pieces together give the digest of the
whole (`combine_ranks`), which does not depend on where they lie: a piece that several ranks hold counts once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_fn.core.checksums import block_digest, combine_digests, seed_of, total_digest
from grpo_fn.core.json_lines import step_lines
from grpo_fn.core.types import Batch, Scores
from grpo_fn.shell.atomic_io import flush_file, to_json

FILE = "digests.jsonl"


class TensorBlock(NamedTuple):
    """Where a part of a tensor lies in the whole, and what it adds to the digest. Copies of a part are equal."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    share: int


Shares = dict[str, tuple[int, list[TensorBlock]]]  # of every tensor by name: its seed, and the pieces that are here


@dataclass
class StepChecksums:
    """What went through a policy: the learning signals, and of every update the gradients' shares."""

    signals: list[tuple[Batch, Scores]] = field(default_factory=list)
    gradients: list[Shares] = field(default_factory=list)


def block_digests(tensors: Mapping[str, Tensor]) -> Shares:
    """This rank's shares of the tensors' digests. Raises RuntimeError for a DTensor that is not summed up yet."""
    shares: Shares = {}
    for name, tensor in tensors.items():
        seed = seed_of(name, tensor.shape, tensor.dtype)
        here = local_blocks(tensor)
        shares[name] = seed, [TensorBlock(*where, block_digest(x, where[0], tensor.shape, seed)) for where, x in here]
    return shares


def local_blocks(tensor: Tensor) -> list[tuple[tuple[tuple[int, ...], tuple[int, ...]], Tensor]]:
    """What of the tensor lies here: ((offset, size), values)."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return [(((0,) * tensor.ndim, tuple(tensor.shape)), tensor)]
    chunks = tensor.__create_chunk_list__()  # what checkpoints go by
    return [((tuple(chunk.offsets), tuple(chunk.sizes)), tensor.to_local()) for chunk in chunks if 0 not in chunk.sizes]


def combine_ranks(ranks: Iterable[Shares]) -> int:
    """The digest of all tensors, from the shares of all ranks. Copies that are not equal all count."""
    tensors: dict[str, tuple[int, set[TensorBlock]]] = {}
    for here in ranks:
        for name, (seed, parts) in here.items():
            tensors.setdefault(name, (seed, set()))[1].update(parts)
    return combine_digests(
        total_digest(seed, (part.share for part in parts)) for _, (seed, parts) in sorted(tensors.items())
    )


def append(run_dir: Path, line: Mapping[str, Any]) -> None:
    """Add a step's line to digests.jsonl and wait until it is on the disk."""
    with open(run_dir / FILE, "ab") as file:
        file.write((to_json(line) + "\n").encode("ascii"))
    flush_file(run_dir / FILE)


def read_checksums(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of digests.jsonl by step; a run that is going on may be writing the last one.

    Raises ValueError for a line before the last that is no object with a step.
    """
    return {line.step: line.row for line in step_lines(run_dir / FILE, torn_end=True)}
