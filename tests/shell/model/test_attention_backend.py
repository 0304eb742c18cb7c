"""Attention by name: what is refused before any work, and which kernels attend where a name has been accepted."""

import pytest
import torch
from fakes import MODELS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.nn.functional import scaled_dot_product_attention

from grpo_fn.shell.model import attention, packed_input
from grpo_fn.shell.model.attention import (
    BACKENDS,
    attention_name,
    attention_note,
    check_attention,
    check_attention_choice,
)
from grpo_fn.shell.model.hf import load_model
from grpo_fn.shell.model.load_weights import meta_causal_lm
from grpo_fn.shell.model.logprob_model import LogprobModel

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "dtype", "deterministic", "why"),
    [
        ("flash", FULL, False, r"got 'flash', wanted one of eager, sdpa, .*flash_attention_3"),
        ("flex_attention", HALF, False, r"got 'flex_attention', wanted one of"),
        *(
            (name, FULL, False, rf"got '{name}' in float32, wanted .*bf16")
            for name in BACKENDS
            if BACKENDS[name].halves
        ),
        *(
            (
                name,
                HALF,
                True,
                rf"got '{name}', whose gradients .* any order, with .*deterministic, wanted one of eager",
            )
            for name in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn")
        ),
    ],
)
def test_a_choice_that_no_machine_could_keep_is_refused(name: str, dtype: torch.dtype, deterministic: bool, why: str):
    with pytest.raises(ValueError, match=r"^sections\.Compute\.attention: " + why):
        check_attention_choice(name, dtype, deterministic=deterministic)


def card(patch: pytest.MonkeyPatch, capability: tuple[int, int], *, cudnn: int = 91900, packages: bool = True) -> None:
    """A card of that capability in this machine."""
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    patch.setattr(attention, "find_spec", lambda name: object() if packages else None)


@pytest.mark.parametrize(
    ("name", "capability", "why"),
    [
        ("sdpa_flash", (7, 5), r"compute capability 7\.5, wanted compute capability 8\.0 or later"),
        ("sdpa_cudnn", (7, 0), r"compute capability 7\.0, wanted compute capability 8\.0 or later"),
        ("flash_attention_2", (7, 5), r"compute capability 7\.5, wanted compute capability 8\.0 or later"),
        ("flash_attention_3", (8, 9), r"compute capability 8\.9, wanted compute capability 9\.0, or"),
        ("flash_attention_3", (10, 0), r"compute capability 10\.0, wanted compute capability 9\.0, or"),
    ],
)
def test_a_card_that_lacks_the_kernel_is_named(monkeypatch, name: str, capability: tuple[int, int], why: str):
    card(monkeypatch, capability)
    with pytest.raises(ValueError, match=rf"got '{name}' on a card of {why}"):
        check_attention(name, CUDA, HALF, deterministic=False)


def test_what_is_not_installed_or_not_a_card_is_named(monkeypatch):
    card(monkeypatch, (9, 0), cudnn=8907)
    with pytest.raises(ValueError, match=r"got 'sdpa_cudnn' with cuDNN 8907, wanted 90000 or later"):
        check_attention("sdpa_cudnn", CUDA, HALF, deterministic=False)
    for name in ("sdpa_flash", "sdpa_efficient", "flash_attention_3"):
        with pytest.raises(ValueError, match=rf"got '{name}' on cpu, wanted a CUDA device of compute capability"):
            check_attention(name, CPU, HALF, deterministic=False)
    card(monkeypatch, (9, 0), packages=False)
    for name, module in (("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")):
        with pytest.raises(ValueError, match=rf"got '{name}' without the module {module}, wanted .*pip install"):
            check_attention(name, CUDA, HALF, deterministic=False)


@pytest.mark.parametrize("deterministic", [True, False])
def test_on_a_hopper_card_all_of_them_are_taken_but_those_that_do_not_repeat(monkeypatch, deterministic: bool):
    card(monkeypatch, (9, 0))
    for name, backend in BACKENDS.items():
        if backend.repeats or not deterministic:
            check_attention(name, CUDA, HALF, deterministic=deterministic)
    for name in ("eager", "sdpa", "sdpa_math"):
        check_attention(name, CPU, FULL, deterministic=deterministic)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_packed_rows_of_halves_on_a_card_go_where_the_name_says(monkeypatch, flash_attn: bool):
    monkeypatch.setattr(attention, "flash_varlen_function", lambda: print if flash_attn else None)
    with FakeTensorMode():
        query = torch.empty(1, 2, 8, 8, dtype=HALF, device=CUDA)
    default = attention.flash_attention if flash_attn else attention.varlen
    whole = {
        "sdpa": default,
        "flash_attention_2": default,
        "flash_attention_3": attention.flash_attention_3,
        "sdpa_flash": attention.varlen,
    }
    for name in BACKENDS:
        found = attention.choose_kernel(query, name, None)
        if name in whole:
            assert found is whole[name]
        elif name == "eager":
            assert found.keywords == {"core": attention.eager_attention}
        else:
            assert found.keywords["core"].keywords == {"backend": name}
    for name in ("sdpa_flash", "sdpa_cudnn"):  # no kernel of torch's caps scores
        assert attention.choose_kernel(query, name, 30.0).keywords == {"core": attention.eager_attention}


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if backend.module is None])
def test_transformers_makes_a_model_of_every_name_that_needs_no_package(name: str):
    config = MODELS["qwen2_tied"](11).config
    model = meta_causal_lm(config, attention=name, dtype=FULL)
    assert attention_name(model.config._attn_implementation) == name


@pytest.mark.parametrize("packing", [packed_input.pad_rows, packed_input.pack_shared_prompts])
def test_a_backend_of_torch_is_all_that_may_attend_and_computes_the_same(monkeypatch, tmp_path, packing):
    allowed: list[set[SDPBackend]] = []

    def recorded(*args: object, **kwargs: object) -> Tensor:
        allowed.append({*_cur_sdpa_kernel_backends()})
        return scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded)  # packed rows
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)  # transformers
    weights, found = MODELS["qwen2_tied"](11), {}
    weights.save_pretrained(tmp_path)
    only = {"sdpa_math": {SDPBackend.MATH}, "sdpa_flash": {SDPBackend.FLASH_ATTENTION}}  # which a CPU has, too
    for name in ("sdpa", *only):
        model = load_model(str(tmp_path), dtype=FULL, device=CPU, attention=name)
        logprob = LogprobModel(model, temperature=1.0, logits_chunk_elements=2**20, input_packing=packing)
        tokens = torch.arange(1, 9).expand(2, -1)
        mask = (torch.arange(8) > 2).expand(2, -1)
        allowed.clear()
        found[name] = logprob(tokens, mask)[0].detach()
        assert allowed
        assert all((one == only[name]) if name in only else len(one) > 1 for one in allowed)
    for name in only:
        torch.testing.assert_close(found[name], found["sdpa"], rtol=0, atol=1e-6)
    assert SDPBackend.FLASH_ATTENTION in _cur_sdpa_kernel_backends(), "as before"


RAGGED, PADDED = "kernel for rows of unequal length", "padded buckets"
IN_HALVES = {
    "eager": f"{PADDED}, written out",
    "sdpa": f"flash-attn's {RAGGED} where it imports, else torch's",
    "sdpa_math": f"{PADDED}, by torch's MATH",
    "sdpa_flash": f"torch's flash {RAGGED}",
    "sdpa_efficient": f"{PADDED}, by torch's EFFICIENT_ATTENTION",
    "sdpa_cudnn": f"{PADDED}, by torch's CUDNN_ATTENTION",
    "flash_attention_2": f"flash-attn's {RAGGED} where it imports, else torch's",
    "flash_attention_3": f"flash-attn 3's {RAGGED}",
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_plan_says_what_attends_on_a_card(name: str):
    said = [f"packed rows attend in {IN_HALVES[name]} (sections.Compute.attention = '{name}')"]
    assert attention_note(name, HALF, None) == attention_note(name, torch.float16, CUDA) == said
    assert attention_note(name, HALF, CPU) == []


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if not backend.halves])
def test_a_plan_says_that_float32_attends_in_padded_buckets(name: str):
    how = f"{PADDED}, by scaled_dot_product_attention" if name == "sdpa" else IN_HALVES[name]
    said = [f"packed rows attend in {how} (sections.Compute.attention = '{name}')"]
    assert attention_note(name, FULL, CUDA) == said
