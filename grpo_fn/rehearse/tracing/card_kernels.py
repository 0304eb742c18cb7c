"""Kernels that only a card has, as operators on shapes: what they return, and what each costs.

The head's Triton kernels read a chunk of logits once, or read and write it once. The split-KV kernel reads a prompt's
keys and values for all rows of its group: once for every `TILE` query heads of it. Costs are counted as the kernels are
written (`head_chunk/triton_kernels.py`, `split_kv_triton.py`); caches that would spare a second read are left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_fn.rehearse.tracing.operators import ATTENTION, ELEMENTWISE, Cost
from grpo_fn.shell.model import logprob_model
from grpo_fn.shell.model.attention import HALVES
from grpo_fn.shell.model.logprob_model import ChunkKernels, ChunkStats, PlainKernels
from grpo_fn.shell.sampler.local import float32_head, kv_cache
from grpo_fn.shell.sampler.local.split_kv import OPERATOR, SPLIT

TILE = 64  # as in `split_kv_triton.py`, which cannot be imported without Triton
REDUCE, SLOPE = "grpo_fn_rehearsal::head_reduce", "grpo_fn_rehearsal::head_slope"
WIDE = torch.float32.itemsize

torch.library.define(REDUCE, "(Tensor z, Tensor target) -> Tensor[]")
torch.library.define(SLOPE, "(Tensor z, Tensor target, Tensor[] rows, Tensor(a!) out) -> ()")


@torch.library.register_fake(REDUCE)
def _reduce(z: Tensor, target: Tensor) -> list[Tensor]:
    return [z.new_empty(len(z)) for _ in ChunkStats._fields]


@torch.library.register_fake(SLOPE)
def _slope(z: Tensor, target: Tensor, rows: list[Tensor], out: Tensor) -> None: ...


@torch.library.register_fake(OPERATOR)
def _split_kv(query: Tensor, prompt_key: Tensor, prompt_value: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return value.new_empty(*query.shape[:2], value.shape[3])


class CardHeadKernels:
    """The head's Triton kernels as shapes: `triton_kernels.TritonKernels`."""

    def spare(self, buffer: Tensor) -> Tensor:
        """Nothing is needed beside the logits."""
        return buffer[:0]

    def reduce(self, z: Tensor, target: Tensor, *, temperature: float, spare: Tensor) -> ChunkStats:
        """One read of z."""
        return ChunkStats(*torch.ops.grpo_fn_rehearsal.head_reduce(z, target))

    def logp(self, z: Tensor, target: Tensor, *, temperature: float, spare: Tensor) -> Tensor:
        """By the same kernel."""
        return self.reduce(z, target, temperature=temperature, spare=spare).logp

    def slope(
        self,
        z: Tensor,
        target: Tensor,
        dlogp: Tensor,
        dentropy: Tensor | None,
        stats: ChunkStats,
        *,
        temperature: float,
        fresh: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        """One read of z, one write of the result, in place of fresh logits where the dtype is theirs."""
        out = z if fresh and dtype is z.dtype else torch.empty_like(z, dtype=dtype)
        rows = [dlogp, stats.entropy, stats.top, stats.total, *([] if dentropy is None else [dentropy])]
        torch.ops.grpo_fn_rehearsal.head_slope(z, target, rows, out)
        return out


def _of_halves(x: Tensor) -> bool:
    return x.dtype in HALVES


@contextmanager
def products_of_a_card() -> Iterator[None]:
    """Within it the head and decoding steps multiply as on CUDA: of halves the result is float32, nothing is cast."""
    modules = (
        (logprob_model, "_wide_products"),
        (kv_cache, "products_in_float32"),
        (float32_head, "products_in_float32"),
    )
    before = [getattr(module, name) for module, name in modules]
    for module, name in modules:
        setattr(module, name, _of_halves)
    try:
        yield
    finally:
        for (module, name), was in zip(modules, before, strict=True):
            setattr(module, name, was)


@contextmanager
def head_kernels(kernels: ChunkKernels) -> Iterator[None]:
    """Within it the head has these kernels; with float64, which Triton's do not take, torch's operations."""
    before = logprob_model.kernels_for
    logprob_model.kernels_for = lambda x: PlainKernels() if x.dtype is torch.float64 else kernels
    try:
        yield
    finally:
        logprob_model.kernels_for = before


# -- costs


def reduce_cost(z: Tensor, target: Tensor) -> Cost:
    """A read of every logit and target, four numbers written for each row."""
    return Cost(ELEMENTWISE, 0, z.nbytes + target.nbytes + len(ChunkStats._fields) * len(z) * WIDE, z.dtype)


def slope_cost(z: Tensor, target: Tensor, rows: list[Tensor], out: Tensor) -> Cost:
    """A read of every logit, a write of every slope."""
    return Cost(ELEMENTWISE, 0, z.nbytes + out.nbytes + target.nbytes + sum(x.nbytes for x in rows), z.dtype)


def split_kv_cost(
    query: Tensor,
    prompt_key: Tensor,
    prompt_value: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor,
    lane: Tensor,
    start: Tensor,
    length: Tensor,
    wide: int,
    scale: float,
    cap: float | None,
    window: int | None,
) -> Cost:
    """Both kernels of a layer's step: `start`, `length`, `row` and `lane` have values."""
    (n, heads, columns, dim), out = key.shape, value.shape[3]
    grouped, prompts, reach = query.shape[1] // heads, len(prompt_key), prompt_key.shape[2]
    mine = row[lane] == torch.arange(n)  # slots with a row
    drawn = (length - start + 1).clamp(max=columns)
    seen = start.where(mine, 0)
    if window is not None:
        drawn, seen = drawn.clamp(max=window), torch.minimum(seen, (window - drawn).clamp(min=0))
    longest = torch.zeros(prompts, dtype=torch.long).scatter_reduce_(0, lane // wide, seen, "amax")
    tiles = -(-wide * grouped // TILE)
    entry = heads * (dim + out) * key.itemsize
    parts = -(-reach // SPLIT) + -(-columns // SPLIT)
    between = n * heads * grouped * parts * (out + 2) * WIDE  # sums, largest scores and weights: written, then read
    read = entry * (tiles * int(longest.sum()) + int(drawn.sum())) + query.nbytes
    written = n * heads * grouped * out * value.itemsize
    flops = 2 * heads * grouped * (dim + out) * int((seen + drawn).sum())
    return Cost(ATTENTION, flops, read + 2 * between + written, query.dtype, launches=2)


COSTS: dict[str, Callable[..., Cost]] = {REDUCE: reduce_cost, SLOPE: slope_cost, OPERATOR: split_kv_cost}
