"""Kernels that only CUDA has, written out for the fake device, as strict about their arguments as the real ones are.

Triton's have no CUDA here to be compiled for: our operators of it are run by the functions below, as one launch each.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from fake_cuda import backend
from torch import Tensor

from grpo_fn.shell.sampler.local import split_kv

LIBRARY = torch.library.Library("aten", "IMPL")
HALVES = (torch.bfloat16, torch.float16)
ANY_ORDER = "Flash Attention defaults to a non-deterministic algorithm."  # as torch says it


def kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function as the operator's kernel for CUDA."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARY.impl(name, function, "CUDA")
        return function

    return register


@kernel("_reshape_alias")
def reshape_alias(x: Tensor, size: list[int], stride: list[int]) -> Tensor:
    """A view."""
    return torch.as_strided(x, size, stride, x.storage_offset())


@kernel("unfold")
def unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """A view."""
    dim %= max(1, x.ndim)
    shape, stride = [*x.shape] or [1], [*x.stride()] or [1]
    sizes = [*shape[:dim], (shape[dim] - size) // step + 1, *shape[dim + 1 :], size]
    strides = [*stride[:dim], stride[dim] * step, *stride[dim + 1 :], stride[dim]]
    return torch.as_strided(x, sizes, strides, x.storage_offset())


# -- FlashAttention-2 over rows of unequal length, as torch's varlen_attn calls it


class Row:
    """One row's queries, keys and values in float32, `[H q D]` and `[H k D]`, and the weights between them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: tuple[int, int]) -> None:
        groups = q.shape[1] // k.shape[1]
        self.q, self.k, self.v = (
            x.float().transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        )
        left, right = window
        column = torch.arange(self.k.shape[1])
        at = torch.arange(self.q.shape[1])[:, None] + self.k.shape[1] - self.q.shape[1]  # the last sees the last
        seen = torch.ones(len(at), len(column), dtype=torch.bool)
        if causal or right == 0:
            seen &= column <= at
        if left >= 0:
            seen &= column >= at - left
        scores = (self.q @ self.k.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
        self.weights, self.lse = scores.softmax(-1), scores.logsumexp(-1)


def spans(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Each row's queries and keys."""
    q, k = cu_q.tolist(), cu_k.tolist()
    return ((slice(a, b), slice(c, d)) for a, b, c, d in zip(q, q[1:], k, k[1:], strict=False))


def check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    """Raise RuntimeError for what the kernel refuses."""
    if q.dtype not in HALVES or {q.dtype} != {k.dtype, v.dtype}:
        raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not cu_q.dtype == cu_k.dtype == torch.int32:
        raise RuntimeError(f"cu_seqlens must have dtype int32, got {cu_q.dtype} and {cu_k.dtype}")
    if not all(x.is_cuda for x in (q, k, v, cu_q, cu_k)):
        raise RuntimeError("Input tensors must be on CUDA device")
    if any(x.stride(-1) != 1 for x in (q, k, v)) or q.shape[-1] % 8:
        raise RuntimeError("Input tensor must have contiguous last dimension, of a multiple of 8")
    if q.shape[1] % k.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


def one_launch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a single launch, whatever it does inside."""

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        backend.count_launch(f"aten::_{function.__name__}")
        with inside_of_a_launch():
            return function(*args, **kwargs)

    return counted


@contextmanager
def inside_of_a_launch() -> Iterator[None]:
    """Nothing here is counted."""
    backend.enter_launch()
    try:
        yield
    finally:
        backend.leave_launch()


def on_host(*tensors: Tensor) -> list[Tensor]:
    """The same memory as tensors of the CPU."""
    return [backend.on_host(x) for x in tensors]


@kernel("_flash_attention_forward")
@one_launch
def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp, two states of a generator, an empty mask."""
    check(q, k, v, cu_q, cu_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q), device=q.device)
    q_, k_, v_, cu_q_, cu_k_, out_, lse_ = on_host(q, k, v, cu_q, cu_k, out, lse)
    window = (window_size_left if window_size_left is not None else -1, -1 if window_size_right is None else 0)
    for rows, keys in spans(cu_q_, cu_k_):
        row = Row(q_[rows], k_[keys], v_[keys], causal, scale, window)
        out_[rows], lse_[:, rows] = (row.weights @ row.v).transpose(0, 1).to(q.dtype), row.lse
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return out, lse, state, state.clone(), torch.empty(0, device=q.device)


@kernel("_flash_attention_backward")
@one_launch
def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values."""
    check(q, k, v, cu_q, cu_k)
    if torch.get_deterministic_debug_mode() == 1:  # with warn_only
        warnings.warn(ANY_ORDER, UserWarning, stacklevel=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = (window_size_left if window_size_left is not None else -1, -1 if window_size_right is None else 0)
    grad_, q_, k_, v_, cu_q_, cu_k_ = on_host(grad, q, k, v, cu_q, cu_k)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for rows, keys in spans(cu_q_, cu_k_):
        row = Row(q_[rows], k_[keys], v_[keys], causal, scale, window)
        do = grad_[rows].float().transpose(0, 1)
        dp = do @ row.v.transpose(1, 2)
        ds = row.weights * (dp - (dp * row.weights).sum(-1, keepdim=True)) * scale
        dq[rows] += (ds @ row.k).transpose(0, 1)
        dk[keys] += by_key_head(ds.transpose(1, 2) @ row.q, k.shape[1])
        dv[keys] += by_key_head(row.weights.transpose(1, 2) @ do, k.shape[1])
    return tuple(g.to(x.dtype).to(x.device) for g, x in zip((dq, dk, dv), (q, k, v), strict=True))


def by_key_head(x: Tensor, heads: int) -> Tensor:
    """`[H k D]` of all query heads, summed over those that share a key head: `[k K D]`."""
    return x.transpose(0, 1).unflatten(1, (heads, -1)).sum(2)


# -- attention of a decoding step, as split_kv_triton.py computes it


def split_kv_attention(
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
) -> Tensor:
    """Row by row, over what it sees and nothing else. A slot without a row sees its own columns alone."""
    if not row.dtype == lane.dtype == start.dtype == length.dtype == torch.int64:
        raise RuntimeError(f"got {row.dtype}, {lane.dtype}, {start.dtype} and {length.dtype}, wanted 64-bit integers")
    if any(x.stride(-1) != 1 for x in (prompt_key, prompt_value, key, value)):
        raise RuntimeError("Keys and values must have contiguous last dimension")
    out = value.new_empty(*query.shape[:2], value.shape[3])
    groups = query.shape[1] // key.shape[1]
    for b, (seat, begun, now) in enumerate(zip(lane.tolist(), start.tolist(), length.tolist(), strict=True)):
        prompt = slice(0, begun if int(row[seat]) == b else 0)
        seen = [
            torch.cat([theirs[seat // wide, :, prompt], own[b, :, : now - begun + 1]], 1).float()
            for theirs, own in ((prompt_key, key), (prompt_value, value))
        ]
        k, v = (x[:, 0 if window is None else max(0, x.shape[1] - window) :] for x in seen)
        scores = torch.einsum("hgd,hkd->hgk", query[b].float().unflatten(0, (-1, groups)), k) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        out[b] = torch.einsum("hgk,hke->hge", scores.softmax(-1), v).flatten(0, 1).to(value.dtype)
    return out


torch.library.impl(split_kv.OPERATOR, "cpu", split_kv_attention)
split_kv.kernel_import_problem = lambda: None
