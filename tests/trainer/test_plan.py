"""What a plan says of a run, of a device that is here and of one that is not; and the first lines of a start."""

import re
import time
from dataclasses import fields, replace

import pytest
import torch
from fakes import VOCABULARY, qwen2_tied
from transformers import Qwen2Config

from grpo_fn.config import load_config
from grpo_fn.core.problem import Problem
from grpo_fn.shell.model import blocks
from grpo_fn.shell.model.attention import attention_note
from grpo_fn.shell.policy.mesh import BlockPlan, Parallelism, plan_blocks
from grpo_fn.shell.world import World, alone
from grpo_fn.tasks.task import generated_task
from grpo_fn.trainer.plan import (
    ValidatedPlan,
    device_notes,
    dry_run_lines,
    kv_bytes,
    planned_device,
    precision_notes,
    rank_line,
    report_start,
    run_lines,
    settle_blocks,
)
from grpo_fn.trainer.sections import Settings
from grpo_fn.trainer.validate import validate

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
SMALL = Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
LARGE = Qwen2Config(hidden_size=256, intermediate_size=768, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)


def settings_of(*files: str, **knobs: object) -> Settings:
    """Of the arithmetic run, with files and knobs over it."""
    bound = [f"{name.replace('__', '.')}={value}" for name, value in knobs.items()]
    return Settings(**load_config(["run/arithmetic.gin", *files], bound).kwargs())


@pytest.fixture(scope="module")
def settings() -> Settings:
    """24 prompts x 16 samples of 32 tokens, 256 rows at once, 3 epochs of 2 minibatches, 40 steps."""
    knobs = {"step__Algorithm__prompts": 24, "step__Algorithm__group_size": 16, "step__Algorithm__epochs": 3}
    knobs |= {"step__Algorithm__minibatches": 2, "sections__Sampling__max_rows": 256, "STEPS": 40}
    return settings_of(**knobs, MAX_NEW_TOKENS=32)


def checked(**changes: object) -> ValidatedPlan:
    """Of a model with a million parameters and 2,048 bytes of keys and values a token, and 128 held-out problems."""
    shape = Qwen2Config(hidden_size=64, num_hidden_layers=4, num_attention_heads=1, num_key_value_heads=1)
    plan = object.__new__(ValidatedPlan)
    usual = dict.fromkeys((field.name for field in fields(ValidatedPlan)), None)
    task = generated_task(lambda key, index: None, [Problem(0, "?", "", {})] * 128, 480)
    numbers = {"config": shape, "dtype": torch.float32, "parameters": 10**6, "trained": 10**6, "average": False}
    vars(plan).update({**usual, "task": task, **numbers, **changes})
    return plan


def test_the_plan_says_what_follows_from_its_numbers(settings) -> None:
    assert run_lines(settings, checked(), 480) == [
        "rows a step           24 prompts x 16 samples = 384",
        "optimizer updates     3 epochs x 2 minibatches = 6 a step, 240 in all",
        "problems drawn        960 in 40 steps = 2.00 epochs of 480",
        "held-out problems     128",
        "parameters            1,000,000",
        "disk, one checkpoint  0.012 GB",
    ]
    assert "parameters            1,000,000, of which 1,000 train" in run_lines(settings, checked(trained=1000), 480)


def test_disk_holds_two_checkpoints_with_the_average_and_the_model() -> None:
    assert checked().need_bytes() == 2 * 12 * 10**6 + 4 * 10**6 + 2**24
    assert checked(trained=1000, average=True).checkpoint_bytes() == 4 * 4 * 1000


def test_the_cache_is_of_the_rows_that_one_rank_decodes_at_once(settings) -> None:
    assert kv_bytes(settings, checked(), 1) == 256 * 32 * 2048  # max_rows
    assert kv_bytes(settings, checked(), 5) == 5 * 16 * 32 * 2048  # of 24 prompts


# -- a device


@pytest.mark.parametrize(
    ("name", "cards", "expected"),
    [("auto", False, CPU), ("auto", True, torch.device("cuda")), ("cuda:1", True, torch.device("cuda:1"))],
)
def test_the_device_is_the_named_one_or_the_best_there_is(monkeypatch, name, cards, expected) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards)
    assert planned_device(name) == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planned_device("cuda:0") is None


def test_a_dry_run_for_a_card_says_what_float32_costs_what_attends_and_the_memory_of_a_device(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    qwen2_tied(VOCABULARY).config.save_pretrained(tmp_path)
    for files, dtype in (([], torch.float32), (["scale/bf16.gin"], torch.bfloat16)):
        knobs = {"train__train__model": f"'{tmp_path}'", "sections__Compute__device": "'cuda'"}
        settings = settings_of(*files, **knobs)
        plan = validate(settings)
        lines = dry_run_lines(settings, plan, ranks=2, hosts=1)
        assert lines[:6] == run_lines(settings, plan, plan.task.size)
        assert lines[6].startswith("memory, each of 2      replicate 1 x shard 2 x tensor 1; estimated:")
        assert [line for line in lines if line.startswith("float32 on a GPU")] == precision_notes(dtype, None)
        assert bool(precision_notes(dtype, None)) == (dtype is torch.float32)
        assert attention_note("sdpa", dtype, None)[0] in lines
        assert any("not counted" in line and "a checkpoint's copy of what trains" in line for line in lines)


# -- blocks


def plan(
    parallelism: Parallelism,
    device: torch.device | None,
    *,
    config: Qwen2Config = LARGE,
    deterministic: bool = False,
) -> BlockPlan:
    """Of blocks that are worth compiling, unless the test says otherwise."""
    return plan_blocks(parallelism, device, config=config, deterministic=deterministic)


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
    spread = settings_of().parallelism
    planned = plan(spread, device)
    compile_ = planned.parallelism.compile
    assert (compile_.func, compile_.keywords) == (blocks.torch_compile, {"mode": "default"})
    assert planned.notes == ("blocks are compiled, the default on CUDA",)
    ruled_out = {
        "sections.Compute.deterministic is True": plan(spread, device, deterministic=True),
        "mesh.Parallelism.tp is 2": plan(settings_of("scale/tensor_parallel.gin").parallelism, device),
        "a block has ": plan(spread, device, config=SMALL),
    }
    for reason, planned in ruled_out.items():
        assert planned.parallelism.compile is blocks.eager, reason
        (line,) = planned.notes
        assert line.startswith(f"blocks run as written, not compiled as is the default on CUDA: {reason}")


def test_on_a_cpu_blocks_run_as_written_and_a_choice_of_the_configuration_stays() -> None:
    spread = settings_of().parallelism
    assert plan(spread, CPU) == (replace(spread, compile=blocks.eager), ())
    for chosen in (replace(spread, compile=blocks.eager), settings_of("scale/compiled.gin").parallelism):
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
    spread = settings_of().parallelism
    planned = plan(spread, CARD)
    assert planned.parallelism.compile is blocks.eager
    assert reason in planned.notes[0]
    assert plan(spread, None).parallelism.compile is not blocks.eager  # not this machine


# -- the first lines of a start


def one_of_two(rank: int) -> World:
    """A rank that exchanges nothing."""
    world = alone(CPU)
    world.rank, world.size = rank, 2
    return world


def test_a_rank_is_one_line_with_its_device_mesh_precision_and_share_of_the_rows(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings = settings_of("scale/full_shard.gin", sections__PolicyUpdate__min_micro_batches=4)
    settings, notes = settle_blocks(settings, SMALL, CPU)
    assert notes == ()
    assert re.fullmatch(
        r"rank 1  \S+  cpu \(\d+ threads, \d+ GB\)  replicate 1 x shard 2 x tensor 1  float32, sdpa, eager  "
        r"192 of 384 rows an update, at least 4 micro-batch",
        rank_line(settings, one_of_two(1)),
    )


def test_the_main_rank_alone_reports_with_the_seconds_and_a_console_that_is_gone_ends_nothing(
    capsys, monkeypatch
) -> None:
    report_start(alone(CPU), time.perf_counter() - 65.0)("loading the model")
    assert re.fullmatch(r" 65\.\d s  loading the model\n", capsys.readouterr().out)
    report_start(one_of_two(1), 0.0)("loading the model")
    assert capsys.readouterr().out == ""

    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stdout", Gone())
    report_start(alone(CPU), 0.0)("loading the model")


def test_ranks_whose_trials_chose_different_head_kernels_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    (head,) = device_notes(alone(CPU), torch.float32)
    assert head.startswith("LM head: torch's operations")
    monkeypatch.setattr(World, "exchange", lambda self, mine, *, what: [mine, "TritonKernels"])
    said = r"head's kernels.*: got TritonKernels on rank 1, expected PlainKernels as on"
    with pytest.raises(RuntimeError, match=said):
        device_notes(alone(CPU), torch.float32)
