"""A tiny model of every family whose folders are trained, and the like of them with other traits."""

from collections.abc import Callable

from fakes import MODELS, VOCABULARY, _filled, _sizes
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)


def llama_scaled(vocabulary: int) -> nn.Module:
    """Untied, with frequencies that are not the default's."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    return _filled(LlamaForCausalLM(LlamaConfig(**_sizes(vocabulary), rope_parameters=rope)))


def mistral(vocabulary: int) -> nn.Module:
    return _filled(MistralForCausalLM(MistralConfig(**_sizes(vocabulary), sliding_window=4)))


def phi3_fused(vocabulary: int) -> nn.Module:
    """Queries, keys and values in one product; gate and up in another; dropout inside the block."""
    return _filled(Phi3ForCausalLM(Phi3Config(**_sizes(vocabulary), resid_pdrop=0.3, attention_dropout=0.2)))


def gemma3_tied(vocabulary: int) -> nn.Module:
    """Tied, queries and keys normalised, two sets of frequencies."""
    kinds = ["sliding_attention", "full_attention"]
    return _filled(
        Gemma3ForCausalLM(Gemma3TextConfig(**_sizes(vocabulary), head_dim=8, sliding_window=4, layer_types=kinds))
    )


FAMILIES: dict[str, Callable[[int], nn.Module]] = {
    **MODELS,
    **{f.__name__: f for f in (llama_scaled, mistral, phi3_fused, gemma3_tied)},
}


def family(name: str) -> nn.Module:
    return FAMILIES[name](VOCABULARY)
