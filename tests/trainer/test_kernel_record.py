"""The kernels that a rank has chosen on its card: the same on all ranks, on record, and compared by what goes on."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import family

from grpo_fn.lab.replay_diff import RecordedStep, ReplayedStep, circumstances
from grpo_fn.shell.atomic_io import append_json
from grpo_fn.shell.logging.metrics_writer import rewind
from grpo_fn.shell.model.blocks import torch_compile
from grpo_fn.shell.model.logprob_model import PlainKernels
from grpo_fn.shell.sampler.local.cuda_steps import build_engine
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler, SharedDecoder
from grpo_fn.trainer import recording
from grpo_fn.trainer.build import TrainingRun
from grpo_fn.trainer.recording import (
    KERNELS,
    check_same_kernels,
    chosen_kernels,
    record_kernels,
    recorded_kernels,
    settle_kernels,
)

HERE = {"blocks": "torch_compile", "head": "TritonKernels", "decoding attention": "split-KV kernel"}
PLAIN = HERE | {"decoding attention": "matrix products"}


def a_run(device: str, *others: dict[str, str]) -> TrainingRun:
    """With what is asked of a run: its device, and what the other ranks bring."""

    def exchange(mine: dict[str, str], *, what: str) -> list[dict[str, str]]:
        return [mine, *others]

    world = SimpleNamespace(device=torch.device(device), exchange=exchange)
    run = object.__new__(TrainingRun)
    vars(run).update(world=world, sampler=SimpleNamespace(sampler=None))
    return run


def test_on_a_cpu_nothing_is_chosen_or_exchanged() -> None:
    run = a_run("cpu", {"head": "another"})
    assert chosen_kernels(run) == {}
    check_same_kernels(run, "before step 1")
    assert settle_kernels(run, 1) == []


def test_on_a_card_blocks_head_and_decoding_are_named_once_there_is_an_engine(monkeypatch) -> None:
    monkeypatch.setattr(recording, "choose_head_kernels", lambda device: SimpleNamespace(kernels=PlainKernels()))
    run, model = a_run("cuda"), family("qwen2_tied")
    blocks = SimpleNamespace(compile=partial(torch_compile, mode="default"))
    monkeypatch.setattr(
        recording, "torch", SimpleNamespace(empty=lambda *_, dtype, device: torch.empty(0, dtype=dtype))
    )
    compute = SimpleNamespace(dtype="bfloat16", attention="sdpa")
    vars(run)["settings"] = SimpleNamespace(parallelism=blocks, compute=compute)
    run.sampler.sampler = object.__new__(LocalSampler)
    vars(run.sampler.sampler)["shared"] = SharedDecoder()
    rows = "bucketed_attention"  # of the CPU, where the query is here
    found = {"blocks": "torch_compile", "attention of packed rows": rows, "head": "PlainKernels"}
    assert chosen_kernels(run) == found
    run.sampler.sampler.shared.engine = build_engine(model)
    assert chosen_kernels(run) == found | {"decoding attention": "matrix products", "projections": "apart"}


def test_ranks_with_different_kernels_end_the_run_and_one_without_a_choice_does_not(monkeypatch) -> None:
    monkeypatch.setattr(recording, "chosen_kernels", lambda run: HERE)
    check_same_kernels(a_run("cuda", HERE, {"head": "TritonKernels"}), "after step 1")
    said = "decoding attention.*after step 3: got matrix products on rank 2, expected split-KV kernel as on rank 0"
    with pytest.raises(RuntimeError, match=said):
        check_same_kernels(a_run("cuda", HERE, PLAIN), "after step 3")


def a_run_that_decodes(monkeypatch, tmp_path: Path, others: list[dict[str, str]]) -> TrainingRun:
    """On a card by its device; the model is on the CPU, and has not been decoded."""
    run, sampler = a_run("cuda", *others), object.__new__(LocalSampler)
    vars(sampler).update(shared=SharedDecoder(), model=family("qwen2_tied"))
    vars(run).update(request=SimpleNamespace(run_dir=tmp_path))
    run.sampler.sampler = sampler
    run.world.main, run.world.together = True, lambda do, *, what: do()
    monkeypatch.setattr(recording, "chosen_kernels", lambda run: run.sampler.sampler.shared.engine.choices())
    return run


def test_how_rows_are_decoded_is_chosen_compared_and_on_record_before_the_first_step(monkeypatch, tmp_path) -> None:
    mine = {"decoding attention": "matrix products", "projections": "apart"}
    run = a_run_that_decodes(monkeypatch, tmp_path, [mine])
    assert settle_kernels(run, 4) == []
    assert recorded_kernels(tmp_path, 4) == mine
    assert recorded_kernels(tmp_path, 3) == {}
    held = run.sampler.sampler.shared
    engine = held.engine
    run.sampler.sampler.prepare()
    assert held.decoder(run.sampler.sampler.model, torch.device("cpu")) is engine  # that of the first call


def test_ranks_that_would_decode_differently_take_no_step(monkeypatch, tmp_path) -> None:
    others = [{"decoding attention": "matrix products", "projections": "joined"}]
    run = a_run_that_decodes(monkeypatch, tmp_path, others)
    with pytest.raises(RuntimeError, match="projections, by a trial on each rank, before step 1: got joined on rank 1"):
        settle_kernels(run, 1)
    assert not (tmp_path / KERNELS).exists()


def test_an_engine_says_how_its_steps_attend_and_what_they_join() -> None:
    engine = build_engine(family("qwen2_tied"))
    assert engine.choices() == {"decoding attention": "matrix products", "projections": "apart"}
    engine.code, engine.step_model = engine.code._replace(split_kv=lambda *given: given[0]), torch.nn.Identity()
    assert engine.choices() == {"decoding attention": "split-KV kernel", "projections": "joined"}


def test_a_run_that_goes_on_with_other_kernels_says_so_whatever_is_recorded_of_its_steps(tmp_path: Path) -> None:
    assert record_kernels(tmp_path, 1, {}) == []  # a CPU
    assert not (tmp_path / KERNELS).exists()
    assert record_kernels(tmp_path, 1, PLAIN) == []  # nothing before it
    (line,) = record_kernels(tmp_path, 3, HERE)
    said = "decoding attention matrix products recorded, split-KV kernel now"
    assert line == f"step 3 has other kernels than before: {said}"
    assert record_kernels(tmp_path, 5, HERE) == []
    assert [recorded_kernels(tmp_path, step) for step in (0, 1, 2, 3, 9)] == [{}, PLAIN, PLAIN, HERE, HERE]


def test_steps_that_are_taken_again_have_the_kernels_of_the_second_time(tmp_path: Path) -> None:
    for step, kernels in ((1, HERE), (4, PLAIN)):
        append_json(tmp_path / KERNELS, {"step": step, "kernels": kernels})
    rewind(tmp_path / KERNELS, 3)  # as resuming after step 2 does
    append_json(tmp_path / KERNELS, {"step": 3, "kernels": HERE})
    (tmp_path / KERNELS).write_bytes((tmp_path / KERNELS).read_bytes() + b'{"step": 5, "ker')  # it is going on
    assert [recorded_kernels(tmp_path, step) for step in (2, 3, 4, 5)] == [HERE] * 4


@pytest.mark.parametrize(
    ("now", "said"), [(HERE, []), (PLAIN, ["kernels, decoding attention"]), ({"head": "TritonKernels"}, []), ({}, [])]
)
def test_a_replay_names_kernels_that_are_not_the_recorded_ones(now, said) -> None:
    line = {"ranks": 1, "device": "cuda", "torch": "2.13.0"}
    again = ReplayedStep(None, {}, line, None, now)
    for known in (line, {}):  # with and without checksums of the step
        found = circumstances(RecordedStep(known, {}, None, HERE), again)
        assert [text.split(":")[0] for text in found] == said
    assert circumstances(RecordedStep(line, {}, None, {}), again) == []  # an older record
