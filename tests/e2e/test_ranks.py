"""How many ranks there are, and how the model is spread over them, matters to the shell alone."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e import faults
from e2e.faults import ASK, KILL, Doom, Job, job, undisturbed
from e2e.running import after_step, command, outcome, timeless

from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.process import EXIT_STOPPED

pytestmark = pytest.mark.xdist_group("torchrun")  # with test_faults: undisturbed runs are made once
CLOSE = 1e-6
ROUNDED = ("loss/ratio_", "loss/logprob_diff_")  # of single tokens: two log-probs of float32, each rounded by itself
APART = 5e-6


def rollouts(run: Path) -> dict[int, list[dict[str, Any]]]:
    """The rows of every step."""
    folder = run / "rollouts"
    return {n: rollout_store.load_rows(folder / f"step_{n:06d}.jsonl.gz") for n in rollout_store.rollout_steps(folder)}


def weights(run: Path) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint holds: weights and moments."""
    return store.read_tensors(run / "checkpoints" / f"step_{store.steps(run / 'checkpoints')[-1]}", "")


def same_run(ours: Path, theirs: Path) -> None:
    """The same tokens, texts and rewards; log-probs, figures and weights to 1e-6."""
    assert rollouts(ours).keys() == rollouts(theirs).keys()
    for step, rows in rollouts(theirs).items():
        for mine, row in zip(rollouts(ours)[step], rows, strict=True):
            assert mine.keys() == row.keys()
            same = mine.keys() - {"logp_sampled", "advantage"}
            assert {k: mine[k] for k in same} == {k: row[k] for k in same}, f"step {step}"
            for name in mine.keys() - same:
                assert mine[name] == pytest.approx(row[name], abs=CLOSE), f"{name} of step {step}"
    for mine, row in zip(timeless(ours), timeless(theirs), strict=True):
        assert mine.keys() == row.keys()
        for name, value in row.items():
            close = APART if name.startswith(ROUNDED) else CLOSE
            assert mine[name] == pytest.approx(value, abs=close, rel=close), f"{name} of step {row['step']}"
    found, expected = weights(ours), weights(theirs)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_world_size_does_not_change_a_run(cache: Path, whole: Path, ranks: int) -> None:
    same_run(undisturbed(cache, ranks), whole)


@pytest.mark.slow
def test_one_rank_under_torchrun_is_a_run_without_torchrun(cache: Path, whole: Path) -> None:
    assert outcome(undisturbed(cache, 1)) == outcome(whole)


# -- going on


@pytest.mark.slow
def test_five_and_five_steps_are_ten(cache: Path, tmp_path: Path) -> None:
    """And however many ranks there are, a mirror is opened once a start."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    (file := tmp_path / "noting.gin").write_text(NOTING)
    more = ("--gin_file", str(file))
    assert job(whole, 2, command(cache, whole / "run", *more, STEPS=10)).code == 0
    argv = command(cache, halves / "run", *more, STEPS=10)
    first = job(halves, 2, argv, doom=Doom(1, partial(after_step, 5), ASK))
    assert set(first.codes(0).values()) == {EXIT_STOPPED}, first.everything()
    assert "stopped by a signal to another rank after step 5" in first.said(0, 0)
    assert store.steps(halves / "run" / "checkpoints")[-1] == 5
    second = job(tmp_path / "second", 2, argv)
    assert second.code == 0, second.everything()
    assert "resumed after step 5" in (halves / "run" / "log.txt").read_text()
    # Step 5 is saved because it was asked to stop, and kept if its accuracy was the best.
    assert {**outcome(halves / "run"), "kept": None} == {**outcome(whole / "run"), "kept": None}
    assert (halves / "run" / "openings").read_text() == "rank 0\n" * 2


NOTING = """
from __gin__ import dynamic_registration
from e2e import engines
from grpo_fn.trainer import sections

sections.Logging.mirror = @engines.noting
"""


def gone_on(cache: Path, before: int, folder: Path, ranks: int, *flags: str) -> None:
    """Take a run of `before` ranks back to step 4 and let others finish it: it ends as it had ended."""
    run = Path(shutil.copytree(undisturbed(cache, before), folder / "run"))
    shutil.rmtree(run / "checkpoints" / "step_6")
    shutil.rmtree(run / "model")
    over = job(folder, ranks, [*command(cache, run), *flags])
    assert over.code == 0, over.everything()
    assert "resumed after step 4" in (run / "log.txt").read_text()
    same_run(run, undisturbed(cache, before))


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_tokens(cache: Path, tmp_path: Path) -> None:
    gone_on(cache, 4, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["no_shard", "hybrid_shard"])
def test_another_strategy_goes_on_with_the_same_tokens(cache: Path, tmp_path: Path, scale: str) -> None:
    gone_on(cache, 2, tmp_path, 2, "--gin_file", f"scale/{scale}.gin")


# -- bad input


def refused(over: Job, ranks: int, *said: str) -> None:
    """Every rank ends with 2 and at most one line of errors, with its name; one a host says it, whichever was first."""
    codes = over.codes(0)
    assert 2 in codes.values(), over.everything()
    assert set(codes.values()) <= {2, -15}, over.everything()  # the first to go may take the others with it
    lines = {rank: over.said(0, rank, "stderr").strip() for rank in range(ranks)}
    reporting = [rank for rank, text in lines.items() if text]
    assert reporting
    for rank in reporting:
        assert lines[rank].startswith(f"rank {rank}: error: "), lines[rank]
        assert lines[rank].count("error:") == 1, lines[rank]
        for text in said:
            assert text in lines[rank], lines[rank]


def test_a_mesh_that_does_not_fit_is_refused_and_nothing_starts(cache: Path, tmp_path: Path) -> None:
    over = job(tmp_path, 2, command(cache, tmp_path / "run", mesh__Parallelism__dp_shard=3))
    refused(over, 2, "parallelism: got dp_replicate 1 x dp_shard 3 x tp 1 for 2 ranks")
    assert not (tmp_path / "run").exists()


def test_an_error_of_the_main_rank_alone_is_printed_once(cache: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(undisturbed(cache, 2), tmp_path / "run"))
    over = job(tmp_path, 2, command(cache, run, optimizer__adamw__lr=1.0))
    refused(over, 2, "of another configuration")
    assert [over.said(0, rank).count("error:") for rank in (0, 1)] == [1, 0]
    assert outcome(run) == outcome(undisturbed(cache, 2))


# -- adapters, another optimizer, and an average beside the weights

LORA = ["--gin_file", "scale/lora.gin", "--gin_param", "lora.LoRA.rank=4"]
MUON = ["--gin_file", "scale/full_shard.gin", "--gin_file", "scale/muon.gin", "--gin_param", "optimizer.muon.lr=1e-3"]
SELF = ["--gin_file", "scale/full_shard.gin", "--gin_file", "algo/sdft.gin", "--gin_file", "scale/self_teacher.gin"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [LORA, MUON, SELF], ids=["adapters", "muon", "moving_average"])
def test_two_ranks_go_on_bit_for_bit(cache: Path, tmp_path: Path, more: list[str]) -> None:
    """Killed in the backward pass of the third step, begun again by torchrun."""
    flags = [*more, "--gin_param", "STEPS=4"]
    calm = job(tmp_path / "calm", 2, [*command(cache, tmp_path / "calm" / "run"), *flags])
    assert calm.code == 0, calm.everything()
    folder = tmp_path / "doomed"
    doom = Doom(1, partial(faults.backward, 3), KILL)
    over = job(folder, 2, [*command(cache, folder / "run"), *flags], doom=doom, restarts=1)
    assert over.code == 0, over.everything()
    assert over.codes(1) == {0: 0, 1: 0}
    run = folder / "run"
    assert "resumed after step 2" in (run / "log.txt").read_text()
    assert outcome(run) == outcome(tmp_path / "calm" / "run")
    if more is LORA:
        assert all("lora_" in name for name in weights(run))
