"""What the weights inside a vLLM engine add up to, for comparison with those that were sent. Runs in its workers.

vLLM joins q, k and v, gate and up, pads the vocabulary and gives every rank of an engine a part: all the same to a
fingerprint. On CPU it packs matrices into a layout of its own and drops the originals; their bits come back, all but
the sign of zero, as the product with the identity.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grpo_fn.shell.sampler.fingerprint import NOTHING, Fingerprint, weight_fingerprint

COLUMNS = 1024  # of a packed matrix that are asked for at once


class WeightShare(NamedTuple):
    """Which part of an engine's weights is this rank's: number `rank` of its ranks."""

    rank: int
    ranks: int


@torch.no_grad()
def engine_weights(model: nn.Module, *, dtype: torch.dtype, tied: bool, share: WeightShare) -> Fingerprint:
    """The fingerprint of this rank's part; over all ranks of the engine they add up to the whole model's.

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
                total += weight_fingerprint(answered_for(module, name, part, share).to(dtype))
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


def answered_for(module: nn.Module, name: str, part: Tensor, share: WeightShare) -> Tensor:
    """What of it no rank before this one holds as well."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if share.ranks == 1:
        return part
    divided = isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) or (
        isinstance(module, RowParallelLinear) and name == "weight"
    )
    if not divided or module.tp_size == 1:
        return part if share.rank == 0 else part[:0]
    if share.rank % getattr(module, "num_kv_head_replicas", 1):  # fewer heads of keys than ranks
        return part[: module.num_heads * module.head_size]
    return part
