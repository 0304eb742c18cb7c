"""The kernels that a rank has chosen on its card: the same on all ranks, on record, and compared by what goes on."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from warnings import catch_warnings, simplefilter

import pytest
import torch
from fakes import VOCABULARY
from families import family, published

from grpo_fn.lab.replay_diff import RecordedStep, ReplayedStep, circumstances
from grpo_fn.shell.atomic_io import append_json
from grpo_fn.shell.logging.metrics_writer import rewind
from grpo_fn.shell.model.blocks import torch_compile
from grpo_fn.shell.model.logprob_model import LogprobModel, PlainKernels
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
    settle_model,
)

HERE = {"blocks": "torch_compile", "head": "TritonKernels", "decoding attention": "split-KV kernel"}
PLAIN = HERE | {"decoding attention": "matrix products"}


def a_run(device: str, *others: dict[str, str], run_dir: Path = Path()) -> TrainingRun:
    """Of this device, with a model that has not been decoded; `others` are the kernels of the other ranks."""

    def exchange(own: dict[str, str], *, what: str) -> list[dict[str, str]]:
        return [own, *others]

    sampler, run = object.__new__(LocalSampler), object.__new__(TrainingRun)
    vars(sampler).update(shared=SharedDecoder(), model=family("qwen2_tied"))
    world = SimpleNamespace(
        device=torch.device(device), exchange=exchange, main=True, together=lambda do, *, what: do()
    )
    vars(run).update(world=world, sampler=SimpleNamespace(sampler=sampler), request=SimpleNamespace(run_dir=run_dir))
    return run


def test_on_a_card_blocks_head_and_decoding_are_named_once_there_is_an_engine(monkeypatch) -> None:
    monkeypatch.setattr(recording, "choose_head_kernels", lambda device: SimpleNamespace(kernels=PlainKernels()))
    on_cpu = SimpleNamespace(empty=lambda *_, dtype, device: torch.empty(0, dtype=dtype))
    monkeypatch.setattr(recording, "torch", on_cpu)
    run, compute = a_run("cuda"), SimpleNamespace(dtype="bfloat16", attention="sdpa")
    parallelism = SimpleNamespace(compile=partial(torch_compile, mode="default"))
    vars(run)["settings"] = SimpleNamespace(parallelism=parallelism, compute=compute)
    rows = "bucketed_attention"  # of the CPU, where the query is
    kernels = {"blocks": "torch_compile", "attention of packed rows": rows, "head": "PlainKernels"}
    assert chosen_kernels(run) == kernels
    engine = run.sampler.sampler.shared.engine = build_engine(run.sampler.sampler.model)
    assert chosen_kernels(run) == kernels | {"decoding attention": "matrix products", "projections": "apart"}
    engine.code, engine.step_model = engine.code._replace(split_kv=lambda *given: given[0]), torch.nn.Identity()
    assert engine.choices() == {"decoding attention": "split-KV kernel", "projections": "joined"}


def test_ranks_with_different_kernels_end_the_run_and_one_without_a_choice_does_not(monkeypatch) -> None:
    monkeypatch.setattr(recording, "chosen_kernels", lambda run: HERE)
    check_same_kernels(a_run("cuda", HERE, {"head": "TritonKernels"}), "after step 1")
    said = "decoding attention.*after step 3: got matrix products on rank 2, expected split-KV kernel as on rank 0"
    with pytest.raises(RuntimeError, match=said):
        check_same_kernels(a_run("cuda", HERE, PLAIN), "after step 3")


def test_how_rows_are_decoded_is_chosen_compared_and_on_record_before_the_first_step(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(recording, "chosen_kernels", lambda run: run.sampler.sampler.shared.engine.choices())
    own = {"decoding attention": "matrix products", "projections": "apart"}
    other = a_run("cuda", own | {"projections": "joined"}, run_dir=tmp_path)
    other.sampler.sampler.prepare()
    with pytest.raises(RuntimeError, match="projections, by a trial on each rank, before step 1: got joined on rank 1"):
        settle_kernels(other, 1)
    assert not (tmp_path / KERNELS).exists()
    run = a_run("cuda", own, run_dir=tmp_path)
    run.sampler.sampler.prepare()
    assert settle_kernels(run, 4) == []
    assert [recorded_kernels(tmp_path, step) for step in (3, 4)] == [{}, own]
    sampler = run.sampler.sampler
    engine = sampler.shared.engine
    sampler.prepare()
    assert sampler.shared.decoder(sampler.model, torch.device("cpu")) is engine  # that of the first call


def test_a_run_that_resumes_with_other_kernels_says_so_whatever_is_recorded_of_its_steps(tmp_path: Path) -> None:
    assert record_kernels(tmp_path, 1, {}) == []  # a CPU
    assert not (tmp_path / KERNELS).exists()
    assert record_kernels(tmp_path, 1, PLAIN) == []  # nothing before it
    (line,) = record_kernels(tmp_path, 3, HERE)
    said = "decoding attention matrix products recorded, split-KV kernel now"
    assert line == f"step 3 has other kernels than before: {said}"
    assert record_kernels(tmp_path, 5, HERE) == []
    assert [recorded_kernels(tmp_path, step) for step in (0, 1, 2, 3, 9)] == [{}, PLAIN, PLAIN, HERE, HERE]
    rewind(tmp_path / KERNELS, 3)  # as resuming after step 2 does
    append_json(tmp_path / KERNELS, {"step": 3, "kernels": PLAIN})
    (tmp_path / KERNELS).write_bytes((tmp_path / KERNELS).read_bytes() + b'{"step": 5, "ker')  # being written
    assert [recorded_kernels(tmp_path, step) for step in (2, 3, 5)] == [PLAIN] * 3


@pytest.mark.parametrize(
    ("now", "said"), [(HERE, []), (PLAIN, ["kernels, decoding attention"]), ({"head": "TritonKernels"}, []), ({}, [])]
)
def test_a_replay_names_kernels_that_are_not_the_recorded_ones(now, said) -> None:
    line = {"ranks": 1, "device": "cuda", "torch": "2.13.0"}
    again = ReplayedStep(None, {}, line, None, now)
    for known in (line, {}):  # with and without checksums of the step
        differences = circumstances(RecordedStep(known, {}, None, HERE), again)
        assert [text.split(":")[0] for text in differences] == said
    assert circumstances(RecordedStep(line, {}, None, {}), again) == []  # an older record


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "qwen3_moe",
            "Qwen3MoeForCausalLM: sampled in slots, trained on packed rows, attention sdpa, without its balancing loss",
        ),
        ("lfm2", "Lfm2ForCausalLM: sampled with a cache that grows, trained on padded rows, attention sdpa"),
    ],
)
def test_the_start_of_a_run_says_how_its_model_is_sampled_from_and_trained(name: str, line: str) -> None:
    run = a_run("cpu")
    model = published(name, VOCABULARY)
    vars(run.sampler.sampler)["model"] = model
    vars(run.world)["talking"] = lambda what: nullcontext()
    trained = LogprobModel(model, temperature=1.0, logits_chunk_elements=10**5)
    vars(run).update(policy=SimpleNamespace(logprob_model=trained), engine=run.sampler.sampler)
    with catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # why not in slots and not packed
        (text,) = settle_model(run)
    assert text.startswith(line)
