"""The kernels that a rank has chosen on its card: the same on all ranks, on record, and compared by what goes on."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import family

from grpo_fn.replay.diff import RecordedStep, ReplayedStep, circumstances
from grpo_fn.shell.model.blocks import torch_compile
from grpo_fn.shell.model.head_chunk.plain_kernels import PlainKernels
from grpo_fn.shell.policy.checksums import FILE
from grpo_fn.shell.sampler.local.decode_step import build_engine
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler, SharedDecoder
from grpo_fn.trainer import recording
from grpo_fn.trainer.recording import changed_kernels, check_same_kernels, chosen_kernels
from grpo_fn.trainer.run import TrainingRun

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
    check_same_kernels(run, 1)


def test_on_a_card_blocks_head_and_decoding_are_named_once_there_is_an_engine(monkeypatch) -> None:
    monkeypatch.setattr(recording, "choose_head_kernels", lambda device: SimpleNamespace(kernels=PlainKernels()))
    run, model = a_run("cuda"), family("qwen2_tied")
    blocks = SimpleNamespace(compile=partial(torch_compile, mode="default"))
    vars(run)["settings"] = SimpleNamespace(parallelism=blocks)
    run.sampler.sampler = object.__new__(LocalSampler)
    vars(run.sampler.sampler)["held"] = SharedDecoder()
    found = {"blocks": "torch_compile", "head": "PlainKernels"}
    assert chosen_kernels(run) == found
    run.sampler.sampler.held.engine = build_engine(model)
    assert chosen_kernels(run) == found | {"decoding attention": "matrix products", "projections": "apart"}


def test_ranks_with_different_kernels_end_the_run_and_one_without_a_choice_does_not(monkeypatch) -> None:
    monkeypatch.setattr(recording, "chosen_kernels", lambda run: HERE)
    check_same_kernels(a_run("cuda", HERE, {"head": "TritonKernels"}), 1)
    said = "decoding attention.*after step 3: got matrix products on rank 2, wanted split-KV kernel as on rank 0"
    with pytest.raises(RuntimeError, match=said):
        check_same_kernels(a_run("cuda", HERE, PLAIN), 3)


def test_an_engine_says_how_its_steps_attend_and_what_they_join() -> None:
    engine = build_engine(family("qwen2_tied"))
    assert engine.choices() == {"decoding attention": "matrix products", "projections": "apart"}
    engine.code, engine.stepped = engine.code._replace(split_kv=lambda *given: given[0]), torch.nn.Identity()
    assert engine.choices() == {"decoding attention": "split-KV kernel", "projections": "joined"}


def test_a_run_that_goes_on_with_other_kernels_says_so(tmp_path: Path) -> None:
    lines = [{"step": 1, "kernels": PLAIN}, {"step": 2, "kernels": HERE}, {"step": 3}]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert changed_kernels(tmp_path, 4, HERE) == []
    assert changed_kernels(tmp_path, 1, HERE) == []  # nothing before it
    assert changed_kernels(tmp_path, 4, {}) == []
    (line,) = changed_kernels(tmp_path, 4, PLAIN)
    said = "decoding attention split-KV kernel recorded, matrix products now"
    assert line == f"step 4 has other kernels than before: {said}"


@pytest.mark.parametrize(
    ("now", "said"), [(HERE, []), (PLAIN, ["kernels, decoding attention"]), ({"head": "TritonKernels"}, []), (None, [])]
)
def test_a_replay_names_kernels_that_are_not_the_recorded_ones(now, said) -> None:
    known = {"ranks": 1, "device": "cuda", "torch": "2.13.0"}
    line = known if now is None else known | {"kernels": now}
    was = RecordedStep(known | {"kernels": HERE}, {}, None)
    found = circumstances(was, ReplayedStep(None, {}, line, None))
    assert [text.split(":")[0] for text in found] == said
    assert circumstances(RecordedStep(known, {}, None), ReplayedStep(None, {}, line, None)) == []  # an older record
