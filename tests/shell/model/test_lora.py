"""Adapters: where they go, what they compute, how they start, and that PEFT and plain models agree with them."""

import json
import warnings
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from fakes import VOCABULARY
from families import FAMILIES, PUBLISHED, family, published
from hypothesis import given, settings
from peft import PeftModel
from profiles import quarter
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from grpo_fn.core import prng
from grpo_fn.shell.model.blocks import blocks
from grpo_fn.shell.model.lora import (
    LoRA,
    adapter_folder,
    adapters_line,
    attach,
    dropouts,
    is_adapter,
    merge_adapters,
    name_without_lora,
    reset,
    switched_off,
)

CPU = torch.device("cpu")
KEY = prng.key(5, device=CPU)
ALL = LoRA(rank=2, alpha=4.0, dropout=0.0, targets="all-linear")


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(14).reshape(2, 7)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.detach()


def linear_leaves(model: nn.Module) -> set[str]:
    named = dict(model.named_modules())
    return {
        name.rpartition(".")[2] for name, m in named.items() if isinstance(m, nn.Linear) and ".layers." in f".{name}"
    }


def stirred(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model with adapters that do something, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_adapter(name):
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


LEAVES = {name: sorted(linear_leaves(family(name))) for name in sorted(FAMILIES)}


@st.composite
def adapted(draw: st.DrawFn) -> tuple[str, LoRA]:
    name = draw(st.sampled_from(list(LEAVES)))
    some = st.lists(st.sampled_from(LEAVES[name]), min_size=1, unique=True).map(tuple)
    alpha = draw(st.floats(0.1, 8.0) | st.sampled_from([1.0, 16.0, 32.0]))
    return name, LoRA(
        rank=draw(st.integers(1, 20)), alpha=alpha, dropout=0.0, targets=draw(some | st.just("all-linear"))
    )


# -- attached


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_of_the_blocks_and_no_other_is_adapted(name: str) -> None:
    dtype, device = torch.bfloat16, "cpu" if name == "mistral" else "meta"
    model = family(name).to(device=device, dtype=dtype)
    before = dict(model.named_parameters())
    expected = {id(m) for block in blocks(model) for m in block.modules() if isinstance(m, nn.Linear)}
    assert attach(model, ALL) is model
    layers = {name for name, _ in model.named_modules() if name.endswith(".base_layer")}
    assert {id(model.get_submodule(name)) for name in layers} == expected
    after = dict(model.named_parameters())
    assert {name for name, p in after.items() if p.requires_grad} == {name for name in after if is_adapter(name)}
    assert {p.dtype for name, p in after.items() if is_adapter(name)} == {torch.float32}
    assert {p.device.type for p in after.values()} == {device}
    assert len(layers) * 2 == sum(map(is_adapter, after))
    kept = {name_without_lora(name): p for name, p in after.items() if not is_adapter(name)}
    assert all(kept[name] is p and p.dtype == dtype for name, p in before.items())
    assert kept.keys() == before.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_stays_a_hugging_face_model_that_computes_what_it_did(name: str) -> None:
    model = family(name)
    kind, split, count = type(model), model._no_split_modules, len(blocks(model))
    before = logits(model)
    attach(model, ALL)
    assert torch.equal(logits(model), before)
    assert (type(model), model._no_split_modules, len(blocks(model))) == (kind, split, count)
    assert model.get_decoder() is model.model
    assert model.get_output_embeddings() is model.lm_head
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    assert not model.training


@given(adapted())
@settings(max_examples=quarter())
def test_an_adapted_layer_adds_the_scaled_product(case: tuple[str, LoRA]) -> None:
    name, how = case
    model = stirred(attach(family(name), how))
    layer_name = next(name for name, _ in model.named_modules() if name.endswith(".base_layer"))
    layer = model.get_submodule(layer_name.removesuffix(".base_layer"))
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    assert a.shape[0] == b.shape[1] == how.rank
    x = torch.randn(3, a.shape[1])
    expected = layer.base_layer(x) + how.alpha / how.rank * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "proj"), r"got 'proj', which no module has; expected linear layers of .*, among \['down_proj', "),
        (("self_attn",), r"got 'self_attn', which is also model\.layers\.0\.self_attn; expected linear"),
        (("lm_head",), r"got 'lm_head', which is also lm_head; expected linear"),
    ],
)
def test_targets_that_are_no_linear_layers_are_an_error_and_change_nothing(targets: tuple, message: str) -> None:
    model = family("qwen2_tied")
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=f"LoRA targets: {message}"):
        attach(model, LoRA(rank=1, alpha=1.0, dropout=0.0, targets=targets))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


def test_names_that_peft_takes_for_experts_are_refused_before_anything_is_attached() -> None:
    model = published("deepseek_v3", VOCABULARY)
    message = (
        r"got 'up_proj', which PEFT takes for the experts of DeepseekV3ForCausalLM, .*, among \['kv_a_proj_with_mqa'"
    )
    with pytest.raises(ValueError, match=f"LoRA targets: {message}"):
        attach(model, LoRA(rank=1, alpha=1.0, dropout=0.0, targets=("o_proj", "up_proj")))
    assert not any(is_adapter(name) for name, _ in model.named_parameters())


def test_the_line_at_the_start_says_what_trains_and_that_experts_do_not() -> None:
    assert adapters_line(attach(family("qwen2_tied"), ALL)) == (
        "LoRA: adapters on 14 layers, down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert adapters_line(attach(published("qwen3_moe", VOCABULARY), ALL)) == (
        "LoRA: adapters on 8 layers, k_proj, o_proj, q_proj, v_proj; frozen without one: experts.down_proj, "
        "experts.gate_up_proj, mlp.gate"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "LoRA rank: got 0, expected at least 1"),
        ({"alpha": 0.0}, r"LoRA alpha: got 0\.0, expected a finite number above 0"),
        ({"alpha": float("inf")}, "LoRA alpha: got inf, expected"),
        ({"dropout": 1.0}, r"LoRA dropout: got 1\.0, expected a probability in \[0, 1\)"),
        ({"targets": "q_proj"}, "LoRA targets: got 'q_proj', expected 'all-linear' or a sequence of names"),
        ({"targets": ()}, "LoRA targets: got none, expected 'all-linear' or at least one name"),
    ],
)
def test_a_bad_setting_says_what_was_got_and_expected(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRA(**{**{"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": "all-linear"}, **change})


# -- initialised


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}


def test_a_starts_uniform_within_one_over_the_root_of_its_inputs_and_differs_from_layer_to_layer() -> None:
    model = attach(family("llama_scaled"), LoRA(rank=64, alpha=1.0, dropout=0.0, targets="all-linear"))
    reset(model, key=KEY, device=CPU)
    ours = {name: p for name, p in adapters(model).items() if ".lora_A." in name}
    for name, a in ours.items():
        bound = a.shape[1] ** -0.5
        assert 0.98 * bound < a.abs().max() <= bound, name
        assert abs(a.mean()) < 0.1 * bound
        assert a.var() == pytest.approx(bound**2 / 3, rel=0.1)
    assert len({a.flatten()[:8].sum().item() for a in ours.values()}) == len(ours)


@given(adapted(), st.integers(0, 2**63))
@settings(max_examples=min(10, quarter()))
def test_reset_is_a_function_of_the_key_whatever_was_there(case: tuple[str, LoRA], seed: int) -> None:
    name, how = case
    one, other = stirred(attach(family(name), how)), attach(family(name).to("meta"), how)
    key = prng.key(seed, device=CPU)
    for model in (one, other):
        reset(model, key=key, device=CPU)
    assert adapters(one).keys() == adapters(other).keys()
    for name, tensor in adapters(one).items():
        assert torch.equal(tensor, adapters(other)[name])
        assert (tensor == 0).all() == (".lora_B." in name)
    assert all(p.is_meta and not p.requires_grad for name, p in other.named_parameters() if not is_adapter(name))
    assert all(p.requires_grad for name, p in other.named_parameters() if is_adapter(name))
    reset(other, key=prng.fold_in(key, 1), device=CPU)
    assert not any(torch.equal(x, adapters(other)[name]) for name, x in adapters(one).items() if ".lora_A." in name)


# -- switched off, dropout


def test_switched_off_the_model_is_the_base_bit_for_bit() -> None:
    before = logits(family("phi3_fused"))
    model = stirred(attach(family("phi3_fused"), ALL))
    on = logits(model)
    assert not torch.allclose(on, before, atol=1e-3)
    asked = {name: p.requires_grad for name, p in model.named_parameters()}
    with switched_off(model):
        assert torch.equal(logits(model), before)
        with switched_off(model):
            assert torch.equal(logits(model), before)
        assert torch.equal(logits(model), before)
        assert {name: p.requires_grad for name, p in model.named_parameters()} == asked
    assert torch.equal(logits(model), on)
    with pytest.raises(KeyError), switched_off(model):
        raise KeyError
    assert torch.equal(logits(model), on)
    with pytest.raises(ValueError, match="got a model without LoRA adapters"), switched_off(family("mistral")):
        pass


def test_the_adapters_dropout_is_found_and_no_other() -> None:
    model = stirred(attach(family("phi3_fused"), LoRA(rank=2, alpha=4.0, dropout=0.5, targets=("o_proj",))))
    assert any(isinstance(m, nn.Dropout) for m in family("phi3_fused").modules())
    found = dropouts(model)
    assert [m.p for m in found] == [0.5] * 2
    quiet = logits(model)
    assert torch.equal(logits(model), quiet)
    for module in found:
        module.train()
    assert not torch.equal(logits(model), logits(model))
    with switched_off(model):
        assert torch.equal(logits(model), logits(model))
    assert dropouts(attach(family("phi3_fused"), ALL)) == []


# -- out again


@given(adapted())
@settings(max_examples=quarter())
def test_a_plain_model_with_the_merged_weights_computes_the_same(case: tuple[str, LoRA]) -> None:
    name, how = case
    model, fresh = stirred(attach(family(name), how)), FAMILIES[name](model_vocabulary())
    for p in fresh.parameters():
        p.data.zero_()
    tensors = dict(merge_adapters(model.state_dict(), how))
    assert tensors.keys() == fresh.state_dict().keys()
    fresh.load_state_dict(tensors)
    # In float64: what is left is the rounding of the merged weights, and not that of two ways through the layers.
    torch.testing.assert_close(logits(fresh.double()), logits(model.double()), rtol=1e-5, atol=1e-5)


def model_vocabulary() -> int:
    return family("qwen2_tied").config.vocab_size


def test_merging_happens_in_float32_and_keeps_the_bases_dtype() -> None:
    model = stirred(attach(family("qwen2_tied").bfloat16(), ALL))
    state = model.state_dict()
    name = "model.layers.0.mlp.up_proj"
    a, b = (state[f"{name}.lora_{x}.default.weight"] for x in "AB")
    expected = (state[f"{name}.base_layer.weight"].float() + 2.0 * b @ a).bfloat16()
    got = dict(merge_adapters(state, ALL))
    assert torch.equal(got[f"{name}.weight"], expected)
    assert {x.dtype for x in got.values()} == {torch.bfloat16}


@pytest.mark.parametrize("gone", ["lora_A.default.weight", "lora_B.default.weight", "base_layer.weight"])
def test_half_an_adapter_and_one_of_another_rank_are_errors(gone: str) -> None:
    state = attach(family("mistral"), ALL).state_dict()
    with pytest.raises(ValueError, match=r"q_proj: got A and B of shapes \(\(2, 16\), \(16, 2\)\), expected \(\(3, 16"):
        list(merge_adapters(state, LoRA(rank=3, alpha=1.0, dropout=0.0, targets="all-linear")))
    del state[f"model.layers.1.self_attn.q_proj.{gone}"]
    with pytest.raises(ValueError, match=rf"got \S+q_proj\.lora_[AB]\S+ without \S+{gone}, expected"):
        list(merge_adapters(state, ALL))


class Lazy(dict):
    """Notes which tensors are looked up."""

    looked_up: set[str]

    def __getitem__(self, name: str) -> Tensor:
        self.looked_up.add(name)
        return super().__getitem__(name)


def test_merging_looks_up_one_layer_at_a_time() -> None:
    lazy = Lazy(attach(family("llama_scaled"), ALL).state_dict())
    lazy.looked_up = set()
    for name, _ in merge_adapters(lazy, ALL):
        layer = name.removesuffix(".weight")
        assert {name_without_lora(x).partition(".lora_")[0].removesuffix(".weight") for x in lazy.looked_up} == {layer}
        lazy.looked_up.clear()


@pytest.mark.parametrize(
    ("name", "targets"),
    [("qwen2_tied", "all-linear"), ("phi3_fused", "all-linear"), ("gemma3_tied", ("layers.1.self_attn.q_proj",))],
)
def test_peft_opens_the_saved_adapters_and_computes_the_same(
    name: str, targets: str | tuple[str, ...], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    family(name).save_pretrained(base)
    how = LoRA(rank=3, alpha=7.5, dropout=0.25, targets=targets)
    model = stirred(attach(family(name), how))
    adapter_folder(dict(model.named_parameters()), how, str(base), tmp_path / "adapter")
    plain_model = AutoModelForCausalLM.from_pretrained(base, attn_implementation=model.config._attn_implementation)
    opened = PeftModel.from_pretrained(plain_model, tmp_path / "adapter").eval()
    assert torch.equal(logits(opened), logits(model))
    assert not torch.allclose(logits(opened), logits(family(name)), atol=1e-4)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["lora_dropout"]) == (3, 7.5, 0.25)
    assert (said["base_model_name_or_path"], said["task_type"]) == (str(base), "CAUSAL_LM")
    assert said["target_modules"] == sorted(said["target_modules"])
    assert said["inference_mode"] is True


WITH_EXPERTS = ("deepseek_v3", "qwen2_moe", "hunyuan_v1_moe", "gpt_oss")


@pytest.mark.slow_after(len(WITH_EXPERTS))
@pytest.mark.parametrize("name", [*WITH_EXPERTS, *(name for name in PUBLISHED if name not in WITH_EXPERTS)])
def test_a_published_familys_adapters_merge_into_its_weights_and_open_with_peft(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    published(name, VOCABULARY).save_pretrained(base)
    model = published(name, VOCABULARY)
    plain = model.state_dict().keys()
    attention = model.config._attn_implementation
    try:
        attach(model, ALL)
    except ValueError as error:
        assert "no linear layers" in str(error)  # noqa: PT017 - Conv1D of GPT-2
        return
    stirred(model)
    merged = dict(merge_adapters(model.state_dict(), ALL))
    assert merged.keys() == plain
    fresh = published(name, VOCABULARY)
    fresh.load_state_dict(merged)
    fresh.config._experts_implementation = model.config._experts_implementation = "eager"  # in float64, too
    torch.testing.assert_close(logits(fresh.double()), logits(model.double()), rtol=1e-5, atol=1e-5)
    adapter_folder(dict(model.float().named_parameters()), ALL, str(base), tmp_path / "adapter")
    plain_model = AutoModelForCausalLM.from_pretrained(base, attn_implementation=attention)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of adapters that are missing in the folder
        opened = PeftModel.from_pretrained(plain_model, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-4, atol=1e-4)
