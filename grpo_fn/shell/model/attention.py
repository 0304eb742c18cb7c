"""Attention over rows that lie end to end, put beside the attention that a model was built with.

Transformers looks attention up by the name in a model's config. `install` gives the model a name of ours under which a
call with a `layout` is computed as that says (`PackedAttention` here in training, `kv_cache.DecodeAttention` while
decoding), and any other by what stood there before. The name stays for good: a block that is computed again in the
backward pass looks it up again.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_fn.shell.model.attention_kernels.attention_backend import attention_name, held_to
from grpo_fn.shell.model.attention_kernels.attention_layout import AttentionSpec, Layout
from grpo_fn.shell.model.attention_kernels.ragged_attention import (
    flash_attention,
    flash_attention_3,
    flash_varlen_function,
    varlen,
)

OURS = "+rows"  # behind the name of what stood there before
EAGER = "eager"
# What models pass to attention besides, none of which changes what it computes. A layout says more than positions do.
IDLE = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
)
HALVES = (torch.bfloat16, torch.float16)

Attend = Callable[..., Float[Tensor, "N H D"]]
Phase = Literal["training", "prefill", "decode"]  # the last two write keys and values into a cache


class AttentionContext(Protocol):
    """What travels with a model's call as its `layout`: it knows which tokens see which."""

    phase: ClassVar[Phase]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: AttentionSpec
    ) -> Float[Tensor, "B T H D"]:
        """Attention of one layer, whose `module` this is; of each tensor `[B H T D]`."""


def install(model: nn.Module) -> None:
    """Have the model's attention take a `layout`. Raises ValueError for an attention that is known only by its name."""
    before = model.config._attn_implementation
    if before.endswith(OURS):
        return
    if before != EAGER and before not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(f"attention: got {before!r}, wanted {EAGER} or one of {', '.join(ALL_ATTENTION_FUNCTIONS)}")
    AttentionInterface.register(before + OURS, partial(attention, before=before))
    AttentionMaskInterface.register(before + OURS, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.config._attn_implementation = before + OURS


def unusable_mask(device: torch.device) -> Tensor:
    """An attention mask that transformers hands on as it is and that fits no scores: what uses it fails."""
    return torch.empty(1, 1, 0, 0, device=device)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, before: str, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: `[1 H N D]` each with a layout, `[B H T D]` without."""
    layout: AttentionContext | None = kwargs.pop("layout", None)
    if layout is not None:
        return layout.attend(module, query, key, value, parse_spec(query, attention_name(before), kwargs)), None
    if before == EAGER:  # each model's own, beside its classes
        return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, mask, **kwargs)
    return ALL_ATTENTION_FUNCTIONS[before](module, query, key, value, mask, **kwargs)


def parse_spec(query: Tensor, backend: str, kwargs: dict[str, Any]) -> AttentionSpec:
    """What the model asks for. Raises ValueError for anything that is not done here."""
    odd = [name for name, x in kwargs.items() if name not in KNOWN and name not in IDLE and x is not None]
    if odd or kwargs.get("is_causal") is False:
        raise ValueError(f"got attention with {', '.join(sorted(odd)) or 'is_causal=False'}, wanted {', '.join(KNOWN)}")
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window, cap = kwargs.get("sliding_window"), kwargs.get("softcap")
    return AttentionSpec(window, scale, kwargs.get("dropout", 0.0), cap, backend)


KNOWN = frozenset({"dropout", "scaling", "sliding_window", "softcap", "is_causal"})


class PackedAttention(Layout):
    """Rows that lie end to end in one stream, the one row `[1 H N D]` of the batch."""

    phase: ClassVar[Phase] = "training"

    @torch.compiler.disable
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: AttentionSpec) -> Tensor:
        """Every token of the stream sees what it sees of its row.

        Compiled code stops here: the sizes of the buckets differ from micro-batch to micro-batch, and each would be
        compiled anew.
        """
        self.asked.append(how.window)
        streams = [x[0].transpose(0, 1) for x in (query, key, value)]
        return choose_kernel(query, how.backend, how.cap)(*streams, self, how)[None]


def choose_kernel(query: Tensor, backend: str, cap: float | None) -> Attend:
    """What the backend's name says, and by default the fastest that computes it.

    Kernels for unequal rows are for halves on CUDA, and torch's know no cap: such scores are written out.
    """
    if query.device.type == "cuda" and query.dtype in HALVES:
        if backend == "flash_attention_3":
            return flash_attention_3
        if backend in ("sdpa", "flash_attention_2") and flash_varlen_function() is not None:
            return flash_attention
        if backend in ("sdpa", "flash_attention_2", "sdpa_flash") and cap is None:
            return varlen
    if backend == EAGER or cap is not None:
        return partial(bucketed_attention, core=eager_attention)
    return partial(bucketed_attention, core=partial(sdpa_attention, backend=backend))


# -- rows of similar length side by side


def bucketed_attention(
    query: Float[Tensor, "N H D"],
    key: Float[Tensor, "N K D"],
    value: Float[Tensor, "N K E"],
    layout: Layout,
    how: AttentionSpec,
    *,
    core: Callable[..., Float[Tensor, "b H q E"]],
) -> Float[Tensor, "N H E"]:
    """Rows of similar length are padded to one and computed by `core`; key heads are repeated for their query heads."""
    groups, found = query.shape[1] // key.shape[1], []
    for number, bucket in enumerate(layout.buckets):
        q, k, v = gather_tokens(query, bucket.query), gather_tokens(key, bucket.key), gather_tokens(value, bucket.key)
        q, k, v = (
            x.transpose(1, 2) for x in (q, *(x.repeat_interleave(groups, 2) if groups > 1 else x for x in (k, v)))
        )
        found.append(core(q, k, v, layout.mask(number, how.window, query.dtype), how).transpose(1, 2))
    return layout.stream_order(found)


def gather_tokens(stream: Float[Tensor, "N ..."], index: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The stream's entries at those places. Its pullback adds up what a prompt gets from all that read it."""
    # On CUDA the pullback of index_select adds in any order, that of indexing in one; on CPU the first is fast.
    flat = index.flatten()
    found = stream[flat] if stream.is_cuda else stream.index_select(0, flat)
    return found.unflatten(0, index.shape)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: AttentionSpec, *, backend: str = "sdpa"
) -> Float[Tensor, "b H q E"]:
    """Torch's own kernels, which know no cap; by default as torch chooses."""
    causal = mask is None and q.shape[2] > 1
    with held_to(backend):
        return scaled_dot_product_attention(q, k, v, mask, how.dropout, causal, scale=how.scale)


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: AttentionSpec
) -> Float[Tensor, "b H q E"]:
    """softmax(cap tanh(q k^T scale / cap) + mask) v, the softmax in float32 or better."""
    scores = q @ k.transpose(2, 3) * how.scale
    scores = scores if how.cap is None else how.cap * torch.tanh(scores / how.cap)
    if mask is None:
        mask = torch.full(scores.shape[2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    weights = (scores + mask).softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    return dropout(weights, how.dropout) @ v
