"""Projections of the same states in one product: the same numbers, the same parameters, no more memory."""

import copy
from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from fakes import VOCABULARY, _filled, _sizes, qwen2_tied
from families import FAMILIES
from hypothesis import given
from test_continuous_batching import SMALL, TEXTS, ending
from test_local_sampler import KEY, assert_as_alone, problems, sampler
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_fn.shell.model.blocks import blocks, full_checkpointing
from grpo_fn.shell.model.lora import LoRA, attach
from grpo_fn.shell.sampler.local import joined_projections
from grpo_fn.shell.sampler.local.cuda_steps import choose_joined_model
from grpo_fn.shell.sampler.local.decode_step import EAGER_CODE, DecodeEngine, put_entries
from grpo_fn.shell.sampler.local.joined_projections import (
    JoinedLinear,
    joined_model,
    joined_modules,
    joining_note,
    projections,
)
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler, SharedDecoder

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # of the largest entry
JOINED = [name for name in FAMILIES if name != "phi3_fused"]


def several_heads(vocabulary: int) -> nn.Module:
    """Heads of keys that are not one: their entries lie apart in a joined product."""
    sizes = {**_sizes(vocabulary), "num_attention_heads": 4, "num_key_value_heads": 2}
    return _filled(Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)))


# -- numbers


@given(
    width=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    rows=st.integers(1, 9),
    bias=st.booleans(),
    dtype=st.sampled_from([*ROUNDING]),
    seed=st.integers(0, 2**31),
)
def test_a_joined_product_is_each_projections_product(width, sizes, rows, bias, dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(width, size, bias=bias, dtype=dtype) for size in sizes]
    for layer in layers:
        for p in layer.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator))
    before = [{name: p.clone() for name, p in layer.named_parameters()} for layer in layers]
    states = torch.randn(rows, 1, width, generator=generator).to(dtype)
    with torch.no_grad():
        made = joined_modules(layers)
        for step in range(2):
            expected = [layer(states) for layer in layers]
            for one, other in zip([module(states) for module in made], expected, strict=True):
                bound = ROUNDING[dtype] * max(1.0, float(other.abs().max()))
                torch.testing.assert_close(one, other, rtol=0, atol=bound)
            if step == 0:
                for layer, was in zip(layers, before, strict=True):
                    assert all(torch.equal(p, was[name]) for name, p in layer.named_parameters())
                    for p in layer.parameters():  # as an optimizer does, in place
                        p.mul_(-1.5)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 7), st.booleans())
def test_entries_are_put_where_they_belong(n: int, heads: int, columns: int, size: int, apart: bool) -> None:
    whole = torch.arange(n * 3 * heads * size, dtype=torch.float32).view(n, 1, -1) + 1
    part = whole[..., : heads * size] if apart else whole[..., : heads * size].contiguous()
    new = part.view(n, 1, heads, size).transpose(1, 2)
    buffer, column = torch.zeros(n + 1, heads, columns, size), torch.arange(n) % columns
    places = (torch.arange(n * heads).view(n, heads) * columns + column[:, None]).flatten()
    put_entries(buffer, places, new)
    assert torch.equal(buffer[torch.arange(n), :, column], new[:, :, 0])
    assert int((buffer != 0).sum()) == n * heads * size


@pytest.mark.parametrize("name", JOINED)
def test_every_familys_steps_are_those_of_whole_rows(name: str) -> None:
    module = FAMILIES[name](VOCABULARY)
    step_model = choose_joined_model(module, None)  # with a warning, an error here, where it is not used
    assert step_model is not module
    assert joining_note(module) == "q_proj + k_proj + v_proj in one product, gate_proj + up_proj in one product"
    assert sum(isinstance(x, JoinedLinear) for x in step_model.modules()) == 2 * len(blocks(module))


def test_tokens_are_those_of_the_plain_loop_also_when_weights_have_moved() -> None:
    module = several_heads(VOCABULARY)
    module.generation_config.eos_token_id = ending("qwen2_tied").generation_config.eos_token_id
    s = LocalSampler(**{**vars(sampler(max_rows=3)), "model": module, "shared": SharedDecoder()})
    joined = decoded_joined(s)
    before = joined.sample(problems(TEXTS), 2, key=KEY)
    assert_as_alone(s, TEXTS, before)
    kept = [p.data for p in s.model.parameters()]  # or the new ones might take their place
    for p, old in zip(s.model.parameters(), kept, strict=True):
        p.data = old * 2.0
    again = joined.sample(problems(TEXTS), 2, key=KEY)
    assert not torch.equal(again.tokens, before.tokens)
    assert_as_alone(s, TEXTS, again)


def decoded_joined(s: LocalSampler) -> LocalSampler:
    held, step_model = SharedDecoder(), joined_model(s.model)
    held.model = s.model
    held.engine = DecodeEngine(s.model, sizes=SMALL, code=EAGER_CODE, step_model=step_model)
    return LocalSampler(**{**vars(s), "shared": held})


# -- nothing else notices


def held_bytes(model: nn.Module) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in model.parameters()}
    return sum(storages.values())


def test_names_bits_and_memory_are_what_they_were() -> None:
    module = qwen2_tied(VOCABULARY)
    was, parameters, held = copy.deepcopy(module), [*module.parameters()], held_bytes(module)
    step_model = joined_model(module)
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    assert held_bytes(module) == held
    inside = {x.untyped_storage().data_ptr() for x in (*step_model.parameters(), *step_model.buffers())}
    known = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}
    assert inside == known  # the view holds nothing of its own
    state = module.state_dict()
    assert [*state] == [*was.state_dict()]
    assert all(torch.equal(x, state[name]) for name, x in was.state_dict().items())


def test_training_has_the_bits_that_it_had() -> None:
    module = several_heads(VOCABULARY)
    for block in blocks(module):
        full_checkpointing(block)  # by which a block has its own forward
    ids = torch.arange(24).view(2, 12)

    def step(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        for _ in range(2):
            model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    alone, beside = copy.deepcopy(module), copy.deepcopy(module)
    step_model = joined_model(beside)
    for one, other in zip(step(alone), step(beside), strict=True):
        assert torch.equal(one, other)
    first = next(x for x in step_model.modules() if isinstance(x, JoinedLinear))
    assert torch.equal(first.weight, torch.cat([layer.weight for layer in first.layers]))


# -- where it is not done


def reasons(module: nn.Module) -> set[str | None]:
    return {reason for found, reason in projections(module) if "q_proj" in found.names}


def one_weight_twice(attention: nn.Module) -> None:
    attention.v_proj.weight = attention.k_proj.weight


def own_forward(attention: nn.Module) -> None:
    attention.forward = partial(type(attention).forward, attention)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda attention: attention.k_proj.register_parameter("bias", None), "or a bias in some"),
        (lambda attention: attention.v_proj.register_forward_hook(lambda *_: None), "got layers with hooks"),
        (lambda attention: attention.v_proj.to(torch.bfloat16), "got weights of several dtypes"),
        (None, "layers of Linear (adapters), expected torch.nn.Linear"),
        (one_weight_twice, "got one weight twice"),
        (own_forward, "got a module with its own forward"),
    ],
)
def test_projections_that_cannot_be_joined_are_named(change: Callable[[nn.Module], object] | None, said: str) -> None:
    module = qwen2_tied(VOCABULARY)
    if change is None:
        attach(module, LoRA(rank=2, alpha=4.0, dropout=0.0, targets=("q_proj",)))
    else:
        for block in blocks(module):
            change(block.self_attn)
    (reason,) = {reason for found, reason in projections(module) if "q_proj" in found.names}
    assert said in reason
    step_model = joined_model(module)
    assert sum(isinstance(x, JoinedLinear) for x in step_model.modules()) == len(blocks(module))
    assert "gate_proj + up_proj in one product" in joining_note(module)
    assert f"q_proj + k_proj + v_proj apart ({reason})" in joining_note(module)


def test_a_model_with_nothing_to_join_is_itself() -> None:
    module = FAMILIES["phi3_fused"](VOCABULARY)
    assert joined_model(module) is module
    assert joining_note(module) == "no projections that could be one product"


@pytest.mark.parametrize(
    ("order", "said"), [(("k_proj", "q_proj", "v_proj"), "ValueError"), (("q_proj", "v_proj", "k_proj"), "logits")]
)
def test_another_order_of_asking_is_found_in_a_trial(monkeypatch, order, said) -> None:
    module = qwen2_tied(VOCABULARY)
    monkeypatch.setattr(joined_projections, "JOINED", (order,))
    with pytest.warns(RuntimeWarning, match=f"decoding has a product for each projection: .*{said}"):
        assert choose_joined_model(module, None) is module
