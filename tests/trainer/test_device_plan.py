"""What a plan says about a device that is here, and about one that is not."""

import pytest
import torch
from fakes import VOCABULARY, qwen2_tied

from grpo_fn.shell.model.lora import LoRA
from grpo_fn.trainer.checks import device_plan
from grpo_fn.trainer.checks.device_plan import (
    decoding_note,
    planned_chunk,
    planned_device,
    precision_notes,
    projection_notes,
)

CPU, CARD = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "cards", "wanted"),
    [("auto", False, CPU), ("auto", True, CARD), ("cpu", True, CPU), ("cuda:1", True, torch.device("cuda:1"))],
)
def test_the_device_is_the_named_one_or_the_best_there_is(monkeypatch, name, cards, wanted) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards)
    assert planned_device(name) == wanted


def test_a_card_that_is_not_here_is_planned_for_with_the_largest_chunks(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planned_device("cuda:0") is None
    assert planned_chunk(2**28, None) == 2**28
    assert planned_chunk(2**28, CPU) < 2**28


@pytest.mark.parametrize("device", [CARD, None])
def test_float32_on_a_card_is_said_to_be_slow_and_what_helps(device) -> None:
    (line,) = precision_notes(torch.float32, device)
    assert "scale/bf16.gin" in line
    assert precision_notes(torch.bfloat16, device) == []
    assert precision_notes(torch.float32, CPU) == []


def test_how_decoding_attends_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str | None] = [None, "no Triton"]
    monkeypatch.setattr(device_plan, "split_kv_unsupported_reason", lambda device: reasons.pop(0))
    assert decoding_note(torch.device("cuda", 0)) == "decoding attends in the split-KV kernel"
    assert decoding_note(torch.device("cuda", 0)) == "decoding attends in matrix products (no Triton)"
    assert "where Triton imports" in decoding_note(None)


def test_projections_in_one_product_are_named_and_why_others_are_not() -> None:
    config = qwen2_tied(VOCABULARY).config
    assert projection_notes(config, None, torch.device("cpu")) == []
    (whole,) = projection_notes(config, None, None)
    assert whole == "decoding has q_proj + k_proj + v_proj in one product, gate_proj + up_proj in one product"
    adapters = LoRA(rank=2, alpha=2.0, dropout=0.0, targets=("up_proj",))
    (some,) = projection_notes(config, adapters, torch.device("cuda", 0))
    assert "q_proj + k_proj + v_proj in one product" in some
    assert "gate_proj + up_proj apart (got layers of Linear (adapters), wanted torch.nn.Linear)" in some
