"""Tiny models of every family: a few by hand, each with a trait of its own, and all that are published."""

from collections.abc import Callable

import torch
from fakes import MODELS, VOCABULARY, _filled, _sizes
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
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


# -- the published families: tiny, and with all that a fault could hide behind
#
# The published kinds of layers, windows and indices shorter than a row of 40 tokens, few enough experts that each is
# used, weights far from a fresh model's (whose attention is near uniform and whose gates are near one half), and
# several tokens that end a row.

# What the configurations that know a name are given.
SIZES: dict[str, object] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
    **{"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 128, "ffn_dim": 128, "word_embed_proj_dim": 64},
    **{"moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "moe_num_experts": 4, "moe_topk": 2, "moe_k": 2},
    **{"moe_num_shared_experts": 1, "intermediate_size_mlp": 128, "attention_chunk_size": 16},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_ssm": 128},
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "mamba_expand": 2},
    **{"state_size": 16, "expand": 2, "mamba_d_conv": 4},
    **{"hidden_size_per_layer_input": 16, "laurel_rank": 8, "altup_num_inputs": 2},
    **{"qkv_bias": False, "bias": False},
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
SCALED_ROPE = {"rope_theta": 1e4, "factor": 4.0}
GRANITE = {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
ALIKE = {"num_key_value_heads": 4}  # as many heads of keys as of queries
GEMMA_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}

# Every family, by the model_type of its text model or a name made from it, and what its configuration has besides.
PUBLISHED: dict[str, dict[str, object]] = {
    # dense
    **{
        name: {}
        for name in ("llama", "mistral", "ministral3", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text")
    },
    **{name: {} for name in ("glm", "glm4", "smollm3", "olmo2", "olmo3", "cohere", "cohere2", "exaone4", "seed_oss")},
    **{name: {} for name in ("apertus", "arcee", "bitnet", "ernie4_5", "helium", "internlm3", "nanochat", "nemotron")},
    **{name: {} for name in ("starcoder2", "vaultgemma", "diffllama", "doge")},
    **dict.fromkeys(("gpt2", "gpt_neox", "opt", "phi", "stablelm"), ALIKE),
    "bloom": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gptj": {"rotary_dim": 8},
    "granite": GRANITE,
    "hunyuan_v1_dense": {"rope_parameters": DEFAULT_ROPE},
    "minicpm3": {"scale_emb": 3.0, "dim_model_base": 16, "num_key_value_heads": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "expansion_ratio": 2},
    "gemma3n_text": {**GEMMA_LAYERS, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16},
    "llama4_text": {"num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
    # RoPE
    "llama_yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama_dynamic": {"rope_parameters": {**SCALED_ROPE, "rope_type": "dynamic"}},
    "phi3_longrope": {
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            **{**SCALED_ROPE, "rope_type": "longrope", "original_max_position_embeddings": 128},
            **{"short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
        },
    },
    # mixtures of experts
    **{name: {} for name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "minimax_m2", "gpt_oss", "dots1")},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"), ALIKE),
    "longcat_flash": {
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 1,
        "num_layers": 1,
        **ALIKE,
    },
    **{name: {} for name in ("afmoe", "cohere2_moe", "ernie4_5_moe", "exaone_moe", "hy_v3", "solar_open")},
    "hunyuan_v1_moe": {"rope_parameters": DEFAULT_ROPE},
    "granitemoe": GRANITE,
    "granitemoe_swa": {},
    "minimax": {},
    # attention to an index of keys
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), ALIKE),
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        **{"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16, "qk_rope_head_dim": 8, "hc_mult": 2},
    },
    # recurrences and convolutions beside attention, or alone
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        **{"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 16, "linear_num_heads": 4},
        **{"num_experts_per_token": 2, "num_key_value_heads": 4},
    },
    "nemotron_h": {"moe_shared_expert_intermediate_size": 32},
    "lfm2": {
        **{"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        **{"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
        "rope_parameters": DEFAULT_ROPE,
    },
    "lfm3": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, **GRANITE},
    "falcon_h1": {
        **{"embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "attention_out_multiplier": 0.7},
        **{"ssm_out_multiplier": 0.8, "key_multiplier": 0.6},
    },
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        "use_mamba_kernels": False,
    },
    "bamba": {"attn_layer_indices": [1]},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "recurrent_gemma": {"attention_window_size": 16, "num_hidden_layers": 3, "lru_width": 64},
    "xlstm": {"num_heads": 4},
}
TYPES = {"llama_yarn": "llama", "llama_dynamic": "llama", "phi3_longrope": "phi3"}  # whose name is not their type's


def published(name: str, vocabulary: int) -> nn.Module:
    """A tiny model of a published family, its weights the same at every call."""
    kind = CONFIG_MAPPING[TYPES.get(name, name)]
    known = {*(default := kind().to_dict()), *getattr(kind, "attribute_map", {})}
    last = vocabulary - 1
    tokens = {"vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary, "bos_token_id": None}
    sizes = {**SIZES, **tokens, "eos_token_id": last, "pad_token_id": last}
    if kinds := default.get("layer_types"):
        layers = (list(dict.fromkeys(kinds)) * 2)[: max(2, len({*kinds}))]
        sizes |= {"layer_types": layers, "num_hidden_layers": len(layers)}
    config = kind(**{**{key: value for key, value in sizes.items() if key in known}, **PUBLISHED[name]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            spread = (0.5 if "embed" in key or "wte" in key else 0.9) / weight.shape[-1] ** 0.5
            weight.add_(noise * (spread if weight.ndim > 1 else 0.15))
    if model.generation_config is not None:
        model.generation_config.eos_token_id = [last, *range(0, last, 17)]
    return model.eval()
