"""A checksum of weights, blind to their layout: fused, split, transposed or padded with zeros, it stays the same.

It is blind to the sign of zero, too: a layout that can only be looked at through a product has lost that.

It is a sum over all elements, so engines that join q, k and v into one matrix, or give every rank a part of it, can be
compared with the trainer that does not; adding up the parts' fingerprints gives the whole one's.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

HEAD = "lm_head.weight"  # also the name under which a tied embedding is sent a second time
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AT_ONCE = 2**22  # elements; their 64-bit copies are all the memory it needs


class Fingerprint(NamedTuple):
    """With b the bits of an element as an integer: sum b and sum b^2 over all elements, modulo 2^64."""

    first: int
    second: int

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        """That of both together."""
        return Fingerprint(*((a + b + 2**63) % 2**64 - 2**63 for a, b in zip(self, other, strict=True)))

    def __str__(self) -> str:
        """Both numbers in hexadecimal, without a sign."""
        return "-".join(f"{x % 2**64:016x}" for x in self)


NOTHING = Fingerprint(0, 0)


@torch.no_grad()
def weight_fingerprint(tensor: Tensor) -> Fingerprint:
    """That of one tensor's elements, in whatever order. Zero counts for nothing, minus zero neither."""
    total = NOTHING
    for part in tensor.detach().reshape(-1).split(AT_ONCE):
        bits = part.contiguous().view(_BITS[part.element_size()])
        if part.is_floating_point():
            bits = bits.masked_fill(bits == torch.iinfo(bits.dtype).min, 0)  # the sign alone: minus zero
        bits = bits.long()
        total += Fingerprint(int(bits.sum()), int((bits * bits).sum()))
    return total


# -- what the weights inside a vLLM engine add up to, for comparison with those that were sent: runs in its workers
#
# vLLM joins q, k and v, gate and up, pads the vocabulary and gives every rank of an engine a part: all the same to a
# fingerprint. On CPU it packs matrices into its own layout and drops the originals; their bits come back, all but
# the sign of zero, as the product with the identity.


COLUMNS = 1024  # of a packed matrix that are unpacked at once


@torch.no_grad()
def engine_weights(model: nn.Module, *, dtype: torch.dtype, tied: bool, rank: int, ranks: int) -> Fingerprint:
    """The fingerprint of the part that a rank has; over all `ranks` of the engine they add up to the whole model's.

    As with what is sent, a tied matrix counts twice: as the embedding, and in whatever form the head computes with it.
    What several ranks hold alike counts on the first of them. `dtype` is what the weights were sent in.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = [(module, isinstance(module, LinearBase | ParallelLMHead)) for module in model.modules()]
    if tied and not has_head(model):  # the embedding is it
        modules += [(module, True) for module, _ in modules if isinstance(module, VocabParallelEmbedding)][:1]
    total = NOTHING
    for module, multiplies in modules:
        for name, parameter in module.named_parameters(recurse=False):
            packed = multiplies and name == "weight" and hasattr(module, "cpu_linear")
            for part in unpack_columns(module, dtype) if packed else (parameter,):
                total += weight_fingerprint(own_part(module, name, part, rank, ranks).to(dtype))
    return total


def has_head(model: nn.Module) -> bool:
    """Whether it has a head beside the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return any(isinstance(module, ParallelLMHead) for module in model.modules())


def unpack_columns(module: nn.Module, dtype: torch.dtype) -> Iterator[Tensor]:
    """The matrix that the module multiplies with, a few columns at a time."""
    width = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    for start in range(0, width, COLUMNS):
        columns = torch.arange(start, min(start + COLUMNS, width))
        unit = torch.zeros(len(columns), width, dtype=dtype)
        unit[columns - start, columns] = 1
        yield module.cpu_linear(unit, module.weight, None).T


def own_part(module: nn.Module, name: str, part: Tensor, rank: int, ranks: int) -> Tensor:
    """The part that no earlier rank holds."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if ranks == 1:
        return part
    divided = isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) or (
        isinstance(module, RowParallelLinear) and name == "weight"
    )
    if not divided or module.tp_size == 1:
        return part if rank == 0 else part[:0]
    if rank % getattr(module, "num_kv_head_replicas", 1):  # fewer heads of keys than ranks
        return part[: module.num_heads * module.head_size]
    return part
