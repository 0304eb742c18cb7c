"""Attention over rows of unequal length, in kernels that take them as they lie: halves on CUDA only."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import AuxRequest
from torch.nn.functional import embedding_bag

from grpo_fn.shell.model.attention_kernels.attention_layout import AttentionSpec, Layout

WARNING = 1  # torch's number for deterministic algorithms with `warn_only`


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, how: AttentionSpec
) -> Float[Tensor, "N H E"]:
    """The flash-attn package. A row's queries are the last of its keys, which is how it aligns a causal mask."""
    rows = layout.ragged_rows
    return flash_varlen_function()(
        query,
        *gather_keys_and_values(key, value, layout),
        rows.queries,
        rows.keys,
        *rows.longest,
        dropout_p=how.dropout,
        softmax_scale=how.scale,
        causal=True,
        window_size=(-1 if how.window is None else how.window - 1, 0),
        softcap=how.cap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def flash_attention_3(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, how: AttentionSpec
) -> Float[Tensor, "N H E"]:
    """FlashAttention-3, of the module flash_attn_interface. Raises ValueError for dropout, which it lacks."""
    from flash_attn_interface import flash_attn_varlen_func

    if how.dropout:
        raise ValueError(f"got attention with dropout {how.dropout} in flash_attention_3, wanted 0, or another kernel")
    rows = layout.ragged_rows
    return flash_attn_varlen_func(
        query.contiguous(),
        *gather_keys_and_values(key, value, layout),
        rows.queries,
        rows.keys,
        *rows.longest,
        softmax_scale=how.scale,
        causal=True,
        window_size=(-1 if how.window is None else how.window - 1, 0),
        softcap=how.cap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


@cache
def flash_varlen_function() -> Callable[..., Tensor] | None:
    """`flash_attn_varlen_func` of the flash-attn package; None, once with a warning, where it cannot be imported.

    The name may be there without it: flash-attn 4 installs `flash_attn.cute` alone, and a wheel built for another
    torch ends with an OSError.
    """
    if find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError) as error:
        warnings.warn(
            f"attention runs on torch's kernels, without flash-attn: {type(error).__name__}, {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return flash_attn_varlen_func


def varlen(query: Tensor, key: Tensor, value: Tensor, layout: Layout, how: AttentionSpec) -> Float[Tensor, "N H E"]:
    """The same kernels, as torch has them: without a cap. Raises ValueError for dropout, which they lack, too."""
    if how.dropout:
        raise ValueError(f"got attention with dropout {how.dropout} on rows of unequal length, wanted 0, or flash-attn")
    rows, groups = layout.ragged_rows, query.shape[1] // key.shape[1]
    k, v = gather_keys_and_values(key, value, layout)
    # Before the flag came torch did not compare the heads, and the kernel below it is the same.
    more = {"enable_gqa": True} if groups > 1 and has_gqa_flag() else {}
    window = (-1 if how.window is None else how.window - 1, 0)
    known = RaggedCall((rows.queries, rows.keys, *rows.longest), how.scale, window, more)
    if torch.get_deterministic_debug_mode() == WARNING:
        return RepeatableVarlen.apply(query.contiguous(), k, v, known)
    return known(query.contiguous(), k, v)


class RaggedCall(NamedTuple):
    """What `varlen_attn` is called with besides queries, keys and values."""

    lengths: tuple[Tensor, Tensor, int, int]
    scale: float
    window: tuple[int, int]
    more: dict[str, bool]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **also: AuxRequest) -> Any:
        """The output; with `return_aux`, what was asked for besides."""
        from torch.nn.attention.varlen import varlen_attn

        how = {"scale": self.scale, "window_size": self.window, **self.more, **also}
        return varlen_attn(query, key, value, *self.lengths, **how)


class RepeatableVarlen(torch.autograd.Function):
    """`varlen_attn` whose gradients are the same bits again under `use_deterministic_algorithms(True, warn_only=True)`.

    With `warn_only` torch's kernel warns and adds up in any order all the same, though it has a deterministic way.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, known: RaggedCall) -> Tensor:
        """As the call says."""
        out, lse = known(query, key, value, return_aux=AuxRequest(lse=True))
        ctx.known = known
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of queries, keys and values, by the kernel's deterministic way."""
        known: RaggedCall = ctx.known
        seed = torch.zeros(2, dtype=torch.uint64, device=slope.device)  # of dropout, which there is none of
        causal = known.window == (-1, 0)
        with strict_determinism():
            slopes = torch.ops.torch_attn._varlen_attn_backward(
                slope, *ctx.saved_tensors, *known.lengths, causal, seed, known.scale, [*known.window]
            )
        return *slopes, None


@contextmanager
def strict_determinism() -> Iterator[None]:
    """Deterministic kernels without `warn_only`, which some of torch's take for leave to use their others."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


@cache
def has_gqa_flag() -> bool:
    """Whether torch takes fewer heads of keys than of queries only where a flag says so."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters  # from torch 2.12


def gather_keys_and_values(
    key: Float[Tensor, "N K D"], value: Float[Tensor, "N K E"], layout: Layout
) -> tuple[Float[Tensor, "R K D"], Float[Tensor, "R K E"]]:
    """The keys and values that the rows see, row after row, as views of one gather."""
    both = torch.cat([key, value], -1)
    readers = layout.readers if both.requires_grad else ()
    found = GatherTokens.apply(both, layout.ragged_rows.key, *readers) if readers else both[layout.ragged_rows.key]
    return found.split([key.shape[2], value.shape[2]], -1)


class GatherTokens(torch.autograd.Function):
    """A stream's entries at some places, with a pullback that sorts nothing: who reads each token is known.

    Each token's sum is taken by one thread, in the rows' order and in float32 for halves: the same bits again.
    """

    @staticmethod
    def forward(stream: Tensor, index: Tensor, place: Tensor, begin: Tensor) -> Tensor:
        """The entries; `place` and `begin` are for the way back."""
        return stream[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep what the way back needs."""
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        """Of every token, the sum over all that read it."""
        place, begin = ctx.saved_tensors
        total = embedding_bag(place, slope.flatten(1), begin, mode="sum", include_last_offset=True)
        return total.unflatten(1, slope.shape[1:]), None, None, None
