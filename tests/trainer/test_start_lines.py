"""The first lines of a run: progress on the main rank alone, and one line for each rank."""

import re
import time
from dataclasses import MISSING, fields
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from grpo_fn.config import load_config
from grpo_fn.shell.model.attention import attention_note
from grpo_fn.shell.policy.mesh import BlockPlan
from grpo_fn.shell.world import World, alone
from grpo_fn.trainer import plan as plans
from grpo_fn.trainer import sections
from grpo_fn.trainer.plan import (
    Plan,
    device_text,
    no_report,
    plan_lines,
    precision_notes,
    rank_line,
    report_start,
    settle_blocks,
)

CPU = torch.device("cpu")
CONFIG = Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)


def one_of_two(rank: int) -> World:
    """A rank that exchanges nothing."""
    world = alone(CPU)
    world.rank, world.size = rank, 2
    return world


@pytest.fixture(scope="module")
def settings() -> sections.Settings:
    files = ["run/arithmetic.gin", "scale/full_shard.gin"]
    made = sections.Settings(**load_config(files, ["sections.PolicyUpdate.min_micro_batches=4"]).kwargs())
    return settle_blocks(made, CONFIG, CPU)[0]


def test_a_rank_is_one_line_with_its_device_mesh_precision_and_share_of_the_rows(settings, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    line = rank_line(settings, one_of_two(1))
    assert re.fullmatch(
        r"rank 1  \S+  cpu \(\d+ threads, \d+ GB\)  replicate 1 x shard 2 x tensor 1  float32, sdpa, eager  "
        r"192 of 384 rows an update, at least 4 micro-batch",
        line,
    )


def test_a_card_has_its_name_and_memory(monkeypatch) -> None:
    class Card:
        name, total_memory = "NVIDIA H100", 80 * 10**9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card())
    assert device_text(torch.device("cuda", 3)) == "cuda:3 (NVIDIA H100, 80 GB)"


def test_the_main_rank_reports_with_the_seconds_since_the_start(capsys) -> None:
    report_start(alone(CPU), time.perf_counter() - 65.0)("loading the model")
    assert re.fullmatch(r" 65\.\d s  loading the model\n", capsys.readouterr().out)
    assert report_start(one_of_two(1), 0.0) is no_report
    no_report("loading the model")
    assert capsys.readouterr().out == ""


def test_a_console_that_is_gone_ends_no_start(monkeypatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stdout", Gone())
    report_start(alone(CPU), 0.0)("loading the model")


def test_a_start_on_a_card_says_what_float32_costs_and_what_rows_attend_in(settings, monkeypatch) -> None:
    card = torch.device("cuda", 0)
    choice = SimpleNamespace(kernels=None, text="torch's operations")
    monkeypatch.setattr(plans, "choose_head_kernels", lambda device: choice)
    monkeypatch.setattr(plans, "plan_blocks", lambda parallelism, *_, **__: BlockPlan(parallelism, ()))
    plan = Plan(**dict.fromkeys((x.name for x in fields(Plan) if x.default is MISSING), 1))
    world = alone(CPU)
    world.device = card
    for dtype in (torch.float32, torch.bfloat16):
        costs = [line for line in plan_lines(plan, [], 1, world, dtype) if line.startswith("float32 on a GPU")]
        assert costs == precision_notes(dtype, card)
    assert settle_blocks(settings, CONFIG, card)[1] == (*attention_note("sdpa", torch.float32, card),)
    assert settle_blocks(settings, CONFIG, CPU)[1] == ()


def test_ranks_whose_trials_chose_different_head_kernels_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (x.name for x in fields(Plan) if x.default is MISSING)
    plan = Plan(**dict.fromkeys(names, 1))
    (head,) = plan_lines(plan, [], 1, alone(CPU), torch.float32)[-1:]
    assert head.startswith("the head computes with torch's operations")
    monkeypatch.setattr(World, "exchange", lambda self, mine, *, what: [mine, "TritonKernels"])
    with pytest.raises(
        RuntimeError, match=r"head's kernels.*: got TritonKernels on rank 1, expected PlainKernels as on"
    ):
        plan_lines(plan, [], 1, alone(CPU), torch.float32)
