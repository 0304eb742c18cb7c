"""Tensors in pieces on many ranks, as the files of torch.distributed.checkpoint in one folder.

Every rank offers the pieces it holds (`local_save_plan`); of all offers each piece is given to one rank
(`assign_pieces`), which copies it to the CPU (`stage`) and writes it (`write_shards`); one rank writes the index of all
files (`write_index`). Reading takes what it needs from whichever files have it, so that any number of ranks, sharded in
any way, reads what any other wrote. Nothing here talks to other ranks.
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

INDEX = ".metadata"  # the library's own name
ALIGNMENT = 64  # bytes
Shape = tuple[int, ...]


class ShardPlan(NamedTuple):
    """The shards of each rank, in rank order, and the index without the offsets in the files."""

    plans: list[SavePlan]
    index: Metadata


def local_save_plan(tensors: Mapping[str, Tensor]) -> SavePlan:
    """The pieces that this rank holds. Raises ValueError for a DTensor that is not summed up yet."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"got {name} placed {tensor.placements}, expected it reduced before it is saved")
    plan = _planner(tensors).create_local_plan()
    pieces = [(item, item.tensor_data) for item in plan.items]
    # Where there are too few rows for all ranks, some come away with an empty piece: those are left out.
    return replace(plan, items=[item for item, data in pieces if prod(data.chunk.sizes) or not prod(data.size)])


def assign_pieces(offers: Sequence[SavePlan]) -> ShardPlan:
    """Give every piece that several ranks hold to one of them; the same on every rank for the same offers."""
    plans, index = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(list(offers))
    return ShardPlan(_Writer("").prepare_global_plan(plans), index)


@torch.no_grad()
def stage(
    tensors: Mapping[str, Tensor], plan: SavePlan, buffers: Mapping[MetadataIndex, Tensor], *, pin: bool
) -> dict[MetadataIndex, Tensor]:
    """Copies on the CPU of the pieces in `plan`, in the `buffers` of the last time where they fit."""
    planner = _planner(tensors)
    pieces = {item.index: planner.resolve_data(item).detach() for item in plan.items}
    kept = {
        at: buffers[at]
        for at, x in pieces.items()
        if at in buffers and (buffers[at].shape, buffers[at].dtype) == (x.shape, x.dtype)
    }
    missing = {at: x for at, x in pieces.items() if at not in kept}
    fresh = pinned_like(missing.values()) if pin else [torch.empty_like(x, device="cpu") for x in missing.values()]
    staged = kept | dict(zip(missing, fresh, strict=True))
    for at, piece in pieces.items():
        staged[at].copy_(piece, non_blocking=pin)
    if pin:
        torch.cuda.synchronize()
    return staged


def pinned_like(pieces: Iterable[Tensor]) -> list[Tensor]:
    """Tensors like these in memory that a GPU copies to by itself.

    They are cut from few blocks: torch rounds every pinned one up to a power of two, and the system takes a millisecond
    and more for each.
    """
    pieces = [*pieces]
    sizes = [x.numel() * x.itemsize for x in pieces]
    blocks, places = block_layout(sizes)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in blocks]
    return [
        memory[block][at : at + size].view(x.dtype).view(x.shape)
        for x, size, (block, at) in zip(pieces, sizes, places, strict=True)
    ]


def block_layout(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Blocks for pieces of these bytes: their sizes, powers of two, and of every piece its block and its place in it.

    The largest first, each into the first block with space. A block is as large as an eighth of all, or as the largest
    piece; the last ones only as large as what is in them.
    """
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    whole = max(next_power(-(-sum(aligned) // 8)), next_power(max(aligned, default=1)))
    filled: list[int] = []
    places = [(0, 0)] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda piece: -aligned[piece]):
        block = next((i for i, n in enumerate(filled) if n + aligned[piece] <= whole), len(filled))
        filled += [0] * (block == len(filled))
        places[piece] = block, filled[block]
        filled[block] += aligned[piece]
    return [next_power(n) for n in filled], places


def next_power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def write_shards(folder: Path, plan: SavePlan, staged: Mapping[MetadataIndex, Tensor]) -> list[WriteResult]:
    """Write the pieces of `plan` and wait until they are on the disk; where each one lies is for `write_index`."""
    return _Writer(folder).write_data(plan, _Staged(staged)).wait()


def files(folder: Path, rank: int) -> list[Path]:
    """The files that `write_shards` made of the plan of that rank."""
    return sorted(folder.glob(f"__{rank}_*"))


def write_index(folder: Path, index: Metadata, written: Sequence[list[WriteResult]]) -> None:
    """Write which tensors there are and where their pieces lie, with what `write_shards` returned on every rank."""
    _Writer(folder).finish(replace(index), list(written))


def folder_tensors(folder: Path) -> dict[str, tuple[Shape, torch.dtype]]:
    """Every tensor in the folder with its whole shape and its dtype."""
    entries = _Reader(folder).read_metadata().state_dict_metadata
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}


@torch.no_grad()
def load_into_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy into the tensors, of a DTensor into the piece that is here, what the folder holds under their names."""
    reader, planner = _Reader(folder), DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    index = reader.read_metadata()
    planner.set_up_planner(dict(tensors), index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


class _Staged(DefaultSavePlanner):
    """Hands out the copies instead of the tensors, which may have changed by now."""

    def __init__(self, staged: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self.staged = staged

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.staged[write_item.index]


class _Writer(FileSystemWriter):
    """Writes what lies on the CPU already.

    Without copying ahead, which would ask for a CUDA stream in the thread that saves: every rank would take a context
    on the first GPU for it.
    """

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)

    def storage_meta(self) -> None:
        """No word of the folder's name in the index: it is about to change."""


class _Reader(FileSystemReader):
    """Reads the index, which is a pickle, without running whatever a stranger may have put into it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self.path / INDEX, "rb") as file:
            return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Exact names alone: a dotted one would reach whatever an allowed class can see."""
        if (module, name) in _DESCRIPTIONS:
            return super().find_class(module, name)
        value = vars(torch).get(name) if module == "torch" else None
        if value is torch.Size or isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"got {module}.{name} in {INDEX}, expected nothing but descriptions of tensors")


_DESCRIPTIONS = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}


def _planner(tensors: Mapping[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    return planner
