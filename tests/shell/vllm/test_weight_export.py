"""What an engine is sent is the policy's model, whole, under the names of its folder."""

from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from fakes import MODELS, VOCABULARY
from hypothesis import given, settings
from policies import CPU, local
from torch import nn

from grpo_fn.core import prng
from grpo_fn.shell.model import hf, lora
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.sampler.interface import SamplerContext
from grpo_fn.shell.vllm.fingerprint import HEAD
from grpo_fn.shell.vllm.vllm_sampler import export_weights
from grpo_fn.shell.world import alone

HOW = LoRA(rank=2, alpha=6.0, dropout=0.0, targets="all-linear")
KEY = prng.key(5, device="cpu")


def context(model: nn.Module, **knobs) -> SamplerContext:
    chosen = {"folder": "", "config": model.config, "dtype": torch.float32, "world": alone(CPU), "adapters": None}
    return SamplerContext(**{**chosen, **knobs}, full_model=partial(hf.empty_model, model.config))


def adapted(name: str, seed: int) -> nn.Module:
    """Adapters that do something."""
    model = lora.attach(MODELS[name](VOCABULARY), HOW)
    lora.reset(model, key=KEY, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, x in model.named_parameters():
            if key.endswith(lora.B):
                x.copy_(torch.randn(x.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", list(MODELS))
def test_a_fresh_model_takes_them_and_a_tied_head_alone_comes_twice(name):
    model = MODELS[name](VOCABULARY)
    other = hf.empty_model(model.config).to_empty(device="cpu")
    pairs = list(export_weights(local(model), context(model)))
    sent = dict(pairs)
    assert HEAD in sent
    assert len(pairs) == len(sent) == len(hf.named_tensors(model)) + model.config.tie_word_embeddings
    other.load_state_dict({k: v for k, v in sent.items() if k in other.state_dict()})
    assert set(other.state_dict()) <= sent.keys()
    for key, weight in model.state_dict().items():
        assert torch.equal(sent[key], weight)


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=5)
@given(seed=st.integers(0, 99))
def test_adapters_are_merged_under_plain_names(name, seed):
    model = adapted(name, seed)
    plain = MODELS[name](VOCABULARY)
    sent = dict(export_weights(local(model), context(model, adapters=HOW)))
    assert sent.keys() >= plain.state_dict().keys()
    assert not [key for key in sent if "lora" in key or "base_layer" in key]
    plain.load_state_dict({k: v for k, v in sent.items() if k in plain.state_dict()})
    ids = torch.arange(10)[None]
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@given(dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), name=st.sampled_from(list(MODELS)))
def test_exported_weights_have_the_dtype_of_the_computation(dtype, name):
    model = MODELS[name](VOCABULARY)
    its = replace(context(model), dtype=dtype)
    for key, x in export_weights(local(model), its):
        assert x.dtype == dtype, key


def test_a_weight_is_gathered_when_its_turn_comes():
    """And let go before the next: the whole model is never there twice."""
    model = MODELS["qwen3_untied"](VOCABULARY)
    policy = local(model)
    going = export_weights(policy, context(model))
    next(going)
    with torch.no_grad():
        for x in model.parameters():
            x.fill_(3.0)
    assert all(bool((x == 3.0).all()) for _, x in going)
