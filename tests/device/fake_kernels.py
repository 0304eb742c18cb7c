"""Kernels that only CUDA has, written out for the fake device, as strict about their arguments as the real ones are.

Triton's have no CUDA here to be compiled for: our operators of it are run by the functions below, as one launch each.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from fake_cuda import backend
from torch import Tensor

from grpo_fn.shell.sampler.local import cuda_steps

LIBRARY = torch.library.Library("aten", "IMPL")
HALVES = (torch.bfloat16, torch.float16)


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


def check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    """Raise RuntimeError for what the kernel refuses."""
    if q.dtype not in HALVES or {q.dtype} != {k.dtype, v.dtype}:
        raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not cu_q.dtype == cu_k.dtype == torch.int32:
        raise RuntimeError(f"cu_seqlens must have dtype int32, got {cu_q.dtype} and {cu_k.dtype}")
    if not all(x.is_cuda for x in (q, k, v, cu_q, cu_k)):
        raise RuntimeError("Input tensors must be on CUDA device")
    if any(x.stride(-1) != 1 for x in (q, k, v)) or q.shape[-1] % 8 or q.shape[1] % k.shape[1]:
        raise RuntimeError("Input tensor must have a contiguous last dimension of 8 n and heads that divide")


class Rows:
    """Queries, keys and values in float32, and each row's weights `[H q k]` between its queries and keys."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool, how: Any) -> None:
        check(q, k, v, cu_q, cu_k)
        groups = q.shape[1] // k.shape[1]
        q, k, v, cu_q, cu_k = (backend.on_host(x) for x in (q, k, v, cu_q, cu_k))
        self.scale = q.shape[-1] ** -0.5 if how.get("scale") is None else how["scale"]
        self.q = q.float().transpose(0, 1)
        self.k, self.v = (x.float().repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
        left, right = how.get("window_size_left"), how.get("window_size_right")
        self.rows = []
        ends = (some.tolist() for cu in (cu_q, cu_k) for some in (cu[:-1], cu[1:]))
        for a, b, c, d in zip(*ends, strict=True):
            at = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)  # the last sees the last
            seen = at >= 0 if causal or right is not None else torch.ones_like(at, dtype=torch.bool)
            seen = seen if left is None or left < 0 else seen & (at <= left)
            scores = self.q[:, a:b] @ self.k[:, c:d].transpose(1, 2) * self.scale
            self.rows.append((slice(a, b), slice(c, d), scores.masked_fill(~seen, -math.inf).softmax(-1)))


def one_launch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a single launch, whatever it does inside."""

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        backend.count_launch(f"aten::_{function.__name__}")
        backend.enter_launch()
        try:
            return function(*args, **kwargs)
        finally:
            backend.leave_launch()

    return counted


@kernel("_flash_attention_forward")
@one_launch
def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output, a log-sum-exp that the backward pass below has no use for, two states of a generator, an empty mask."""
    made = Rows(q, k, v, cu_q, cu_k, causal, how)
    out, state = torch.empty_like(q), torch.zeros(2, dtype=torch.uint64, device=q.device)
    for queries, keys, weights in made.rows:
        backend.on_host(out)[queries] = (weights @ made.v[:, keys]).transpose(0, 1).to(q.dtype)
    lse = torch.zeros(q.shape[1], len(q), device=q.device)
    return out, lse, state, state.clone(), torch.empty(0, device=q.device)


@kernel("_flash_attention_backward")
@one_launch
def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of queries, keys and values."""
    made = Rows(q, k, v, cu_q, cu_k, causal, how)
    do = backend.on_host(grad).float().transpose(0, 1)
    dq, dk, dv = (torch.zeros_like(x) for x in (made.q, made.k, made.v))
    for queries, keys, weights in made.rows:
        dp = do[:, queries] @ made.v[:, keys].transpose(1, 2)
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) * made.scale
        dq[:, queries] += ds @ made.k[:, keys]
        dk[:, keys] += ds.transpose(1, 2) @ made.q[:, queries]
        dv[:, keys] += weights.transpose(1, 2) @ do[:, queries]
    by_head = [x.transpose(0, 1).unflatten(1, (like.shape[1], -1)).sum(2) for x, like in ((dq, q), (dk, k), (dv, v))]
    return tuple(x.to(q.dtype).to(q.device) for x in by_head)


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
        raise RuntimeError(f"got {row.dtype}, {lane.dtype}, {start.dtype} and {length.dtype}, expected 64-bit integers")
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


torch.library.impl(cuda_steps.OPERATOR, "cpu", split_kv_attention)
cuda_steps.kernel_import_problem = lambda: None
