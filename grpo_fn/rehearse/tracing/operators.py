"""What one operator costs: floating-point operations, bytes read and written, and whether anything is launched.

A product of [m, k] and [k, n] is 2 m k n operations. Bytes are those of all
tensors that an operator reads or writes, each once, as a kernel has to move at least.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PRODUCTS, ATTENTION, ELEMENTWISE = "products", "attention", "elementwise"
KINDS = (PRODUCTS, ATTENTION, ELEMENTWISE)

# Makes a tensor or looks at one, and launches nothing.
IDLE = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"),
        *("aten::detach", "aten::lift_fresh", "aten::set_", "aten::is_same_size", "aten::_local_scalar_dense"),
        *("aten::resize_", "aten::is_pinned", "aten::record_stream", "aten::_version", "prim::device"),
    }
)


class Cost(NamedTuple):
    """Of one operator."""

    kind: str
    flops: int
    bytes: int
    dtype: torch.dtype  # of the numbers that are multiplied, or moved
    launches: int = 1


def launches(func: torch._ops.OpOverload) -> bool:
    """Whether the operator runs a kernel: one that returns another view of its input, or memory, does not."""
    if func._schema.name in IDLE:
        return False
    return not any(found.alias_info is not None and not found.alias_info.is_write for found in func._schema.returns)


def cost(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Cost:
    """What the operator does, from the shapes that it is given and that it returns."""
    given, made = all_tensors((args, kwargs)), all_tensors(out)
    moved = {x.untyped_storage()._cdata: 0 for x in (*given, *made)}
    for x in (*given, *made):  # a storage that is read in two views is read whole at most
        moved[x.untyped_storage()._cdata] = max(moved[x.untyped_storage()._cdata], shown_bytes(x))
    read = [x for x in (*given, *made) if x.dtype.is_floating_point]
    dtype = read[0].dtype if read else torch.float32
    name = func._schema.name
    if (attention := ATTENTION_FLOPS.get(name)) is not None:
        return Cost(ATTENTION, attention(*args, **kwargs), sum(moved.values()), dtype)
    if name in MATRIX:
        left, right = args[MATRIX[name] : MATRIX[name] + 2]
        return Cost(PRODUCTS, 2 * left.numel() * right.shape[-1], sum(moved.values()), left.dtype)
    if name in ROWS:  # of a table the rows that are taken, not all of it
        return Cost(ELEMENTWISE, 0, 2 * sum(map(shown_bytes, made)), dtype)
    if name in PLACES and isinstance(source := args[PLACES[name]], Tensor):  # read, beside the places that are written
        return Cost(ELEMENTWISE, 0, (3 if "add" in name else 2) * shown_bytes(source), dtype)
    return Cost(ELEMENTWISE, 0, sum(moved.values()), dtype)


# Matrix products, and which of their arguments is the first factor.
MATRIX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1, "aten::baddbmm_": 1}
ROWS = frozenset({"aten::embedding", "aten::index_select", "aten::index", "aten::gather"})
# In place at some places, and which of their arguments goes there; those that add read them, too.
PLACES = {
    "aten::index_copy_": 3,
    "aten::index_put_": 2,
    "aten::index_add_": 3,
    "aten::scatter_": 3,
    "aten::scatter_add_": 3,
}


def all_tensors(values: Any) -> list[Tensor]:
    """All tensors in lists, tuples and dictionaries."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def shown_bytes(x: Tensor) -> int:
    """Bytes of the numbers that the tensor shows: one that is expanded is read once."""
    return prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step or n == 0) * x.itemsize


# -- attention: a pair of a query and a key that it sees is two products of `dim` numbers, q k and p v, and five on the
# way back (q k again, dv, dp, dq, dk)

FORWARD, BACKWARD = 2, 5


def _pairs(queries: int, keys: int, window: int | None, *, causal: bool) -> int:
    """Queries of one row times the keys that each sees; its last query sees the last key."""
    if not causal and window is None:
        return queries * keys
    seen = range(keys - queries + 1, keys + 1)
    return sum(max(0, n if window is None else min(n, window)) for n in seen)


def _dense(products: int, query: Tensor, key: Tensor, *, causal: bool) -> int:
    """Of `[b H q D]` and `[b H k D]`. With a mask the kernel computes what is masked, too."""
    batch, heads, queries, dim = query.shape
    return 2 * products * dim * batch * heads * _pairs(queries, key.shape[2], None, causal=causal)


def _dense_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    return _dense(FORWARD, query, key, causal=causal)


def _dense_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout: float,
    causal: bool,
    **_: Any,
) -> int:
    return _dense(BACKWARD, query, key, causal=causal)


def _padded_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    logsumexp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *_: Any,
    **__: Any,
) -> int:
    return _dense(FORWARD, query, key, causal=causal)


def _padded_backward(slope: Tensor, query: Tensor, key: Tensor, *more: Any, **_: Any) -> int:
    causal = next((x for x in reversed(more) if isinstance(x, bool)), False)  # its last argument; left out where False
    return _dense(BACKWARD, query, key, causal=causal)


def _ragged(products: int, query: Tensor, starts: Tensor, key_starts: Tensor, window: Sequence[int] | None) -> int:
    """Of `[N H D]` whose rows begin at `starts`, keys at `key_starts`; the lengths of equal rows are counted once."""
    left = None if not window or window[0] < 0 else window[0] + 1
    rows = Counter(zip(starts.diff().tolist(), key_starts.diff().tolist(), strict=True))
    pairs = sum(n * _pairs(q, k, left, causal=True) for (q, k), n in rows.items())
    return 2 * products * query.shape[2] * query.shape[1] * pairs


def _ragged_forward(query: Tensor, key: Tensor, value: Tensor, *more: Any, **_: Any) -> int:
    starts, key_starts, _, _, _, _, window, *_ = *more, None, None
    return _ragged(FORWARD, query, starts, key_starts, window)


def _ragged_backward(slope: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any, **_: Any) -> int:
    _, _, starts, key_starts, *_, window = more
    return _ragged(BACKWARD, query, starts, key_starts, window)


ATTENTION_FLOPS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_efficient_attention": _padded_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": _padded_backward,
    "aten::_scaled_dot_product_cudnn_attention": _padded_forward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _padded_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _dense_forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _dense_backward,
    "torch_attn::_varlen_attn": _ragged_forward,
    "torch_attn::_varlen_attn_backward": _ragged_backward,
}
