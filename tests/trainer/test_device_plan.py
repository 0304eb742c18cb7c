"""What a plan says about a device that is here, and about one that is not."""

from dataclasses import replace

import pytest
import torch
from fakes import VOCABULARY, qwen2_tied
from transformers import Qwen2Config

from grpo_fn.config import load_config
from grpo_fn.shell.model import blocks
from grpo_fn.shell.model.attention import attention_note
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy.mesh import BlockPlan, Parallelism, plan_blocks
from grpo_fn.trainer import plan as plans
from grpo_fn.trainer import sections
from grpo_fn.trainer.checks.dry_run import dry_run_lines
from grpo_fn.trainer.checks.validate import validate
from grpo_fn.trainer.plan import decoding_notes, planned_device, precision_notes

CPU, CARD = torch.device("cpu"), torch.device("cuda")
SMALL = Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
LARGE = Qwen2Config(hidden_size=256, intermediate_size=768, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)


@pytest.mark.parametrize(
    ("name", "cards", "expected"),
    [("auto", False, CPU), ("auto", True, CARD), ("cpu", True, CPU), ("cuda:1", True, torch.device("cuda:1"))],
)
def test_the_device_is_the_named_one_or_the_best_there_is(monkeypatch, name, cards, expected) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards)
    assert planned_device(name) == expected


def test_a_card_that_is_not_here_is_planned_for(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planned_device("cuda:0") is None


@pytest.mark.parametrize("device", [CARD, None])
def test_float32_on_a_card_is_said_to_be_slow_and_what_helps(device) -> None:
    (line,) = precision_notes(torch.float32, device)
    assert "scale/bf16.gin" in line
    assert precision_notes(torch.bfloat16, device) == []
    assert precision_notes(torch.float32, CPU) == []


def test_a_dry_run_for_a_card_says_what_float32_costs_what_attends_and_what_memory_is_not_counted(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    qwen2_tied(VOCABULARY).config.save_pretrained(tmp_path)
    for files, dtype in (([], torch.float32), (["scale/bf16.gin"], torch.bfloat16)):
        knobs = [f"train.train.model='{tmp_path}'", "sections.Compute.device='cuda'"]
        settings = sections.Settings(**load_config(["run/arithmetic.gin", *files], knobs).kwargs())
        lines = dry_run_lines(settings, validate(settings), ranks=1, hosts=1)
        assert [line for line in lines if line.startswith("float32 on a GPU")] == precision_notes(dtype, None)
        assert attention_note("sdpa", dtype, None)[0] in lines
        assert any("not counted" in line and "a checkpoint's copy of what trains" in line for line in lines)


def test_how_decoding_attends_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str | None] = [None, "no Triton"]
    monkeypatch.setattr(plans, "split_kv_unsupported_reason", lambda device: reasons.pop(0))
    config, card = qwen2_tied(VOCABULARY).config, torch.device("cuda", 0)
    assert decoding_notes(config, None, card)[0] == "decoding attends in the split-KV kernel"
    assert decoding_notes(config, None, card)[0] == "decoding attends in matrix products (no Triton)"
    assert "where Triton imports" in decoding_notes(config, None, None)[0]


def test_projections_in_one_product_are_named_and_why_others_are_not() -> None:
    config = qwen2_tied(VOCABULARY).config
    assert len(decoding_notes(config, None, torch.device("cpu"))) == 1
    _, whole = decoding_notes(config, None, None)
    assert whole == "decoding has q_proj + k_proj + v_proj in one product, gate_proj + up_proj in one product"
    adapters = LoRA(rank=2, alpha=2.0, dropout=0.0, targets=("up_proj",))
    _, some = decoding_notes(config, adapters, None)
    assert "q_proj + k_proj + v_proj in one product" in some
    assert "gate_proj + up_proj apart (got layers of Linear (adapters), expected torch.nn.Linear)" in some


def plan(
    parallelism: Parallelism,
    device: torch.device | None,
    *,
    config: Qwen2Config = LARGE,
    deterministic: bool = False,
) -> BlockPlan:
    """Of blocks that are worth compiling, unless the test says otherwise."""
    return plan_blocks(parallelism, device, config=config, deterministic=deterministic)


def spread(*files: str) -> Parallelism:
    """Of the arithmetic run, with files over it."""
    return sections.Settings(**load_config(["run/arithmetic.gin", *files], []).kwargs()).parallelism


@pytest.fixture
def able_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card, and a machine, for which blocks can be compiled."""
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(blocks, "find_spec", lambda name: object())
    monkeypatch.setattr(blocks, "which", lambda name: f"/usr/bin/{name}")


@pytest.mark.usefixtures("able_card")
@pytest.mark.parametrize("device", [CARD, None])
def test_blocks_are_compiled_on_a_card_unless_the_configuration_rules_it_out(device: torch.device | None) -> None:
    planned = plan(spread(), device)
    assert (planned.parallelism.compile.func, planned.parallelism.compile.keywords) == (
        blocks.torch_compile,
        {"mode": "default"},
    )
    assert planned.notes == ("blocks are compiled, the default on CUDA",)
    ruled_out = {
        "sections.Compute.deterministic is True": plan(spread(), device, deterministic=True),
        "mesh.Parallelism.tp is 2": plan(spread("scale/tensor_parallel.gin"), device),
    }
    ruled_out["a block has "] = plan(spread(), device, config=SMALL)
    for reason, planned in ruled_out.items():
        assert planned.parallelism.compile is blocks.eager, reason
        (line,) = planned.notes
        assert line.startswith(f"blocks run as written, not compiled as is the default on CUDA: {reason}")


def test_on_a_cpu_blocks_run_as_written_and_a_choice_of_the_configuration_stays() -> None:
    planned = plan(spread(), CPU)
    assert planned.parallelism == replace(spread(), compile=blocks.eager)
    assert planned.notes == ()
    for chosen in (replace(spread(), compile=blocks.eager), spread("scale/compiled.gin")):
        for device in (CPU, CARD, None):
            assert plan(chosen, device) == (chosen, ())


@pytest.mark.usefixtures("able_card")
@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        (lambda patch: patch.setenv("TORCH_COMPILE_DISABLE", "1"), "TORCH_COMPILE_DISABLE is 1"),
        (lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1)), "6.1 of the card"),
        (lambda patch: patch.setattr(blocks, "find_spec", lambda name: None), "Triton is not installed"),
        (lambda patch: patch.setattr(blocks, "which", lambda name: None), "no C compiler: got none of "),
    ],
)
def test_blocks_run_as_written_where_the_machine_cannot_compile_them(monkeypatch, lacking, reason) -> None:
    lacking(monkeypatch)
    planned = plan(spread(), CARD)
    assert planned.parallelism.compile is blocks.eager
    assert reason in planned.notes[0]
    assert plan(spread(), None).parallelism.compile is not blocks.eager  # not this machine
