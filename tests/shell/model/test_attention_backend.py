"""Attention by name: what is refused before any work, and which kernels attend where a name has been accepted."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GptOssConfig, Qwen3Config

from grpo_fn.shell.model import attention
from grpo_fn.shell.model.attention import (
    FLASH,
    NAMES,
    AttentionSpec,
    attention_note,
    check_attention,
    check_attention_choice,
    model_attention,
)

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("flash", FULL, r"got 'flash', expected one of auto, eager, sdpa, .*flash_attention_3"),
        ("flash_attention_2", FULL, r"got 'flash_attention_2' in float32, expected .*bf16"),
    ],
)
def test_a_choice_that_no_machine_could_keep_is_refused(name: str, dtype: torch.dtype, why: str):
    with pytest.raises(ValueError, match=r"^sections\.Compute\.attention: " + why):
        check_attention_choice(name, dtype)


def test_a_model_gets_the_attention_that_it_has_and_one_that_it_lacks_is_refused_by_the_knobs_name():
    assert [model_attention("auto", config()) for config in (Qwen3Config, GptOssConfig)] == ["sdpa", "eager"]
    assert model_attention("eager", GptOssConfig()) == "eager"
    with pytest.raises(ValueError, match=r"^sections\.Compute\.attention: got 'sdpa' for GptOss.*, expected 'auto'"):
        model_attention("sdpa", GptOssConfig())


def card(patch: pytest.MonkeyPatch, capability: tuple[int, int], *, packages: bool = True) -> None:
    """A card of that capability in this machine."""
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(attention, "find_spec", lambda name: object() if packages else None)


@pytest.mark.parametrize(
    ("name", "capability", "why"),
    [
        ("flash_attention_2", (7, 5), r"compute capability 7\.5, expected compute capability 8\.0 or later"),
        ("flash_attention_3", (10, 0), r"compute capability 10\.0, expected compute capability 9\.0, or"),
    ],
)
def test_a_card_that_lacks_the_kernel_is_named(monkeypatch, name: str, capability: tuple[int, int], why: str):
    card(monkeypatch, capability)
    with pytest.raises(ValueError, match=rf"got '{name}' on a card of {why}"):
        check_attention(name, CUDA, HALF)


def test_a_missing_package_or_card_of_an_attention_is_named(monkeypatch):
    card(monkeypatch, (9, 0))
    for name in NAMES:
        check_attention(name, CUDA, HALF)
    for name in FLASH:
        with pytest.raises(ValueError, match=rf"got '{name}' on cpu, expected a CUDA device of compute capability"):
            check_attention(name, CPU, HALF)
    card(monkeypatch, (9, 0), packages=False)
    for name, module in (("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")):
        with pytest.raises(ValueError, match=rf"got '{name}' without the module {module}, expected .*pip install"):
            check_attention(name, CUDA, HALF)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_packed_rows_of_halves_on_a_card_go_where_the_name_says(monkeypatch, flash_attn: bool):
    monkeypatch.setattr(attention, "flash_varlen_function", lambda: print if flash_attn else None)
    with FakeTensorMode():
        query = torch.empty(1, 2, 8, 8, dtype=HALF, device=CUDA)
    default = attention.flash_attention if flash_attn else attention.varlen
    asks = partial(AttentionSpec, None, 1.0, 0.0)
    with_sinks = asks(None, "sdpa", torch.zeros(2))
    assert attention.choose_kernel(query, with_sinks).keywords == {"core": attention.eager_attention}
    for name in ("sdpa", "flash_attention_2"):
        assert attention.choose_kernel(query, asks(None, name)) is default
    assert attention.choose_kernel(query, asks(None, "flash_attention_3")) is attention.flash_attention_3
    assert attention.choose_kernel(query, asks(None, "eager")).keywords == {"core": attention.eager_attention}
    if not flash_attn:  # no kernel of torch's caps scores
        assert attention.choose_kernel(query, asks(30.0, "sdpa")).keywords == {"core": attention.eager_attention}


RAGGED, PADDED = "kernel for rows of unequal length", "padded buckets"
IN_HALVES = {
    "auto": f"flash-attn's {RAGGED} where it imports, else torch's",
    "eager": f"{PADDED}, written out",
    "sdpa": f"flash-attn's {RAGGED} where it imports, else torch's",
    "flash_attention_2": f"flash-attn's {RAGGED} where it imports, else torch's",
    "flash_attention_3": f"flash-attn 3's {RAGGED}",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_says_what_attends_on_a_card(name: str):
    said = [f"packed rows attend in {IN_HALVES[name]} (sections.Compute.attention = '{name}')"]
    assert attention_note(name, HALF, None) == attention_note(name, torch.float16, CUDA) == said
    assert attention_note(name, HALF, CPU) == []
    in_float32 = f"{PADDED}, by scaled_dot_product_attention"
    assert (in_float32 in attention_note(name, FULL, CUDA)[0]) == (name != "eager")
