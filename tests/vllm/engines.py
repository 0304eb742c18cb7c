"""Small models on disk and samplers whose engine is real."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fakes import VOCABULARY, problem, tokenizer
from policies import CPU
from torch import nn
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo_fn.core.problem import Problem
from grpo_fn.core.sampling import categorical
from grpo_fn.core.types import Rollout
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.hf import encode_prompt
from grpo_fn.shell.sampler.interface import FixedWeights, SamplerContext, SamplerOptions
from grpo_fn.shell.vllm.vllm_sampler import VllmSampler, colocated_sampler
from grpo_fn.shell.world import alone

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
}
POSITIONS = 512
ENDS = [VOCABULARY - 1, 7, 40]  # tokens that end a completion
SPREAD = 0.3
OPTIONS = {
    "token_sampler": partial(categorical, temperature=1.0),
    "encode": encode_prompt,
    "max_new_tokens": 8,
    "stop": (),
    "max_rows": 64,
}
KNOBS = {
    "max_model_len": None,
    "tensor_parallel": 1,
    "gpu_memory_utilization": 0.3,
    "kv_cache_bytes": 2**26,
    "enforce_eager": True,
    "generate_timeout": 60.0,
}


class Case(NamedTuple):
    """A model as the trainer has it, and a sampler that was made from its folder."""

    model: nn.Module
    context: SamplerContext
    sampler: VllmSampler

    def renewed(self, seed: int) -> None:
        """Other weights, which the engine has been given."""
        refill(self.model, seed)
        self.sampler.load(self.policy())

    def policy(self) -> FixedWeights:
        """The model as it stands, to be sent."""
        return FixedWeights(self.model, self.context.world)

    def gap(self, rollout: Rollout, temperature: float = 1.0) -> float:
        """The largest difference between what the sampler and transformers say of a sampled token, in nats."""
        with torch.no_grad():
            logp = torch.log_softmax(self.model(rollout.tokens).logits.float() / temperature, -1)
        own = logp[:, :-1].gather(-1, rollout.tokens[:, 1:, None])[..., 0]
        return float((own - rollout.logp_sampled[:, 1:])[rollout.mask[:, 1:]].abs().max())


def small(name: str, *, tied: bool, **sizes: int) -> nn.Module:
    """A model of two layers whose heads are as narrow as vLLM's attention on CPU takes them."""
    configs, models = FAMILIES[name]
    given = {
        **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": POSITIONS},
        **({"head_dim": 32} if name == "gemma2" else {}),
        **{"bos_token_id": None, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 1},
    }
    # transformers leaves soft caps out of its fused attention
    eager = {"attn_implementation": "eager"}
    with torch.random.fork_rng(devices=[]):
        model = models(configs(**{**given, **sizes}, **eager, tie_word_embeddings=tied)).eval()
    refill(model, 0)
    return model


def refill(model: nn.Module, seed: int) -> None:
    """Weights under which every nonlinearity, bias and norm matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = SPREAD * torch.randn(weight.shape, generator=generator)
            weight.copy_(noise if weight.ndim > 1 else 1 + noise)


def seat_of(model: nn.Module, folder: Path, *, dtype: torch.dtype) -> SamplerContext:
    """The sampler context of a model that is written to the folder."""
    model.generation_config.eos_token_id = ENDS
    hf.export(model, tokenizer(), folder)
    config = AutoConfig.from_pretrained(folder)
    return SamplerContext(
        folder=str(folder), config=config, dtype=dtype, world=alone(CPU), adapters=None, full_model=lambda: model
    )


def colocated(context: SamplerContext, **changes: Any) -> VllmSampler:
    """A sampler with an engine in this process, made with OPTIONS and KNOBS, and some of them changed."""
    options = {name: changes.pop(name, value) for name, value in OPTIONS.items()}
    return colocated_sampler(context, SamplerOptions(tokenizer=tokenizer(), **options), **{**KNOBS, **changes})


@contextmanager
def case(name: str, folder: Path, *, tied: bool, dtype: torch.dtype = torch.float32, **knobs: Any) -> Iterator[Case]:
    """The small model and a sampler of it, for a while."""
    model = small(name, tied=tied)
    context = seat_of(model, folder, dtype=dtype)
    with closing(colocated(context, **knobs)) as sampler:
        yield Case(model, context, sampler)


def asked(texts: Sequence[str], first: int = 100) -> list[Problem]:
    return [problem(first + i, text) for i, text in enumerate(texts)]


def completions(rollout: Rollout) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(rollout.tokens, rollout.mask, strict=True)]
