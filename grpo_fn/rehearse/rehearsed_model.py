"""The run's model without its weights: the real arrangement over ranks, storages without data.

Two things a run finds out by looking at numbers: whether the head is a plain matrix product, and whether rows may be
shown to the model end to end. They are asked of a small copy, with numbers: a layer of each kind, a short vocabulary.
"""

import copy
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM, PretrainedConfig

from grpo_fn.core.batch import Share, by_reading
from grpo_fn.rehearse.tracing.counting import CountingMode
from grpo_fn.shell.model import load_weights
from grpo_fn.shell.model.attention import (
    HALVES,
    SCORES_IN_MEMORY,
    AttentionSpec,
    PackedAttention,
    bucketed_attention,
    counted_attention,
    install,
    varlen,
)
from grpo_fn.shell.model.logprob_model import LogprobModel, has_linear_head
from grpo_fn.shell.model.packed_input import ModelInput, PackedInput, end_to_end, packing_unsupported_reason
from grpo_fn.shell.policy.load_and_shard import ModelSpec
from grpo_fn.shell.sampler.local.decode_step import decoding_unsupported_reason

VOCABULARY, INNER = 128, 64  # of the small copy
FROZEN = "frozen copies"


@dataclass(frozen=True, kw_only=True)
class RehearsedSpec(ModelSpec):
    """What there is to know of a model whose weights are not read."""

    mode: CountingMode

    def full_model(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model with its adapters on one device, without data."""
        model = self.meta_model(dtype)
        if self.adapters is not None:
            self.attach_adapters(model)
        give_storage(model)
        install(model)  # as asking a model whether it can be decoded in slots does
        return model

    def attach_adapters(self, model: nn.Module) -> nn.Module:
        """The model itself, on the meta device, with adapters in its layers."""
        with unset_fake_temporarily():
            return super().attach_adapters(model)

    def read_whole(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model on one device, without data."""
        model = self.meta_model(dtype)
        with self.mode.holding(FROZEN):
            give_storage(model)
        return model

    def meta_model(self, dtype: torch.dtype) -> nn.Module:
        """The model's shape, made with numbers: buffers that a model computes are looked at."""
        with unset_fake_temporarily():
            return load_weights.meta_causal_lm(self.config, dtype=dtype, attention=counted_attention(self.attention))

    def read_shards(self, module: nn.Module, device: torch.device) -> None:
        """Storages without data for this rank's part, adapters included."""
        with self.mode.holding("weights" if any(p.requires_grad for p in module.parameters()) else FROZEN):
            give_storage(module)

    def reset_adapters(self, model: nn.Module, device: torch.device) -> None:
        """Storages without data."""
        give_storage(model)


def give_storage(module: nn.Module) -> None:
    """Replace what is on the meta device by tensors without data, a tied one under all of its names."""
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if p.device.type == "meta":
            names.setdefault(id(p), []).append(name)
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        if buffer.dtype.is_floating_point:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, torch.empty(buffer.shape, dtype=buffer.dtype))
    for same in names.values():
        old = module.get_parameter(same[0])
        new = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=old.requires_grad)
        for name in same:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, new)


# -- what a run asks its model, asked of a small copy


@dataclass(frozen=True)
class ModelAnswers:
    """What looking at a model's numbers shows."""

    linear_head: bool
    unpacked: str | None  # why rows are padded; None: they are shown end to end
    grown_cache: str | None  # why it is not decoded in slots; None: it is


def ask_small_copy(config: PretrainedConfig, attention: str) -> ModelAnswers:
    """What the model would say of itself.

    Args:
        config: of the model.
        attention: `sections.Compute.attention`.

    Returns:
        The answers of a copy with a layer of each kind.

    Raises:
        ValueError: for a model of which no small copy can be made.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ["alike"]))
    changed = {"num_hidden_layers": len(kinds), "vocab_size": VOCABULARY, "intermediate_size": INNER}
    changed |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if getattr(text, "layer_types", None):
        changed["layer_types"] = kinds
    for name, value in changed.items():
        if hasattr(text, name):
            setattr(text, name, value)
    try:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            counted = counted_attention(attention)
            model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation=counted).eval()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"--rehearse: got a {type(config).__name__} of which no copy of {len(kinds)} layers can be made "
            f"({type(error).__name__}: {error}); wanted a causal language model of ordinary layers"
        ) from error
    linear, device = has_linear_head(model), torch.device("cpu")
    install(model)
    return ModelAnswers(linear, packing_unsupported_reason(model, device), decoding_unsupported_reason(model, device))


# -- rows end to end, as a card would compute them


def efficient_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: AttentionSpec
) -> Float[Tensor, "b H q E"]:
    """Torch's memory-efficient attention, called as `scaled_dot_product_attention` does on a card."""
    bias, causal = card_bias(q, k, mask), mask is None and q.shape[2] > 1
    return ATEN._scaled_dot_product_efficient_attention(
        q, k, v, bias, q.requires_grad, how.dropout, causal, scale=how.scale
    )[0]


def cudnn_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: AttentionSpec) -> Float[Tensor, "b H q E"]:
    """CuDNN's attention, called as `scaled_dot_product_attention` does on a card."""
    bias, causal = card_bias(q, k, mask), mask is None and q.shape[2] > 1
    return ATEN._scaled_dot_product_cudnn_attention(
        q, k, v, bias, q.requires_grad, how.dropout, causal, False, scale=how.scale
    )[0]


def card_bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask for every head, as a view."""
    return None if mask is None else mask.expand(*q.shape[:3], k.shape[2])


ATEN = torch.ops.aten
PADDED_KERNELS = {"sdpa_efficient": efficient_kernel, "sdpa_cudnn": cudnn_kernel}


class CardAttention(PackedAttention):
    """Rows in the kernels that a card has, of which shapes are enough here.

    Those for unequal rows take halves. Torch's memory-efficient and cuDNN's take rows of similar length, padded; what
    is written out, `sdpa_math` included, is the same operators on any device.
    """

    name = "sdpa"  # `sections.Compute.attention`

    @torch.compiler.disable
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: AttentionSpec) -> Tensor:
        """As `PackedAttention` does on CUDA."""
        if self.name in PADDED_KERNELS and how.cap is None:
            self.asked.append(how.window)
            streams = [x[0].transpose(0, 1) for x in (query, key, value)]
            return bucketed_attention(*streams, self, how, core=PADDED_KERNELS[self.name])[None]
        if query.dtype not in HALVES or self.name in SCORES_IN_MEMORY or how.cap is not None:
            return super().attend(module, query, key, value, how)
        self.asked.append(how.window)
        return varlen(*(x[0].transpose(0, 1) for x in (query, key, value)), self, how)[None]


class RehearsedPacking:
    """Rows end to end without asking the model whether it may be shown them so: the small copy was asked."""

    fit = True

    def __init__(self, model: nn.Module, share: Share, *, card: str | None) -> None:
        install(model)
        self.share, self.card = share, card
        self.parts = partial(by_reading, share=share)

    def __call__(self, tokens: Tensor, mask: Tensor) -> ModelInput:
        """The rows as the model takes them."""
        made = end_to_end(tokens, mask, share=self.share)
        if self.card is not None:
            layout = made.model_kwargs["layout"]
            made.model_kwargs["layout"] = CardAttention(layout.spans, layout.at, device=layout.device)
            made.model_kwargs["layout"].name = self.card
        return made


def answered_logprob_model(model: nn.Module, made: partial, answers: ModelAnswers, *, card: str | None) -> LogprobModel:
    """The module that is sharded and trained, which knows already what it would find out.

    Args:
        model: without data.
        made: makes it, as `ModelSpec.logprob_model`.
        answers: of the small copy.
        card: `sections.Compute.attention`, as a card computes it; None: what a CPU computes.
    """
    found = made(model)
    found._linear = answers.linear_head
    packing = found.input_packing
    if isinstance(packing, PackedInput):
        packing.fit = answers.unpacked is None
        if packing.fit:
            found.input_packing = RehearsedPacking(model, packing.share, card=card)
    return found
