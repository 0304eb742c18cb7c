"""A step taken again is the same bit for bit, or what differs first is named; the run folder stays as it is."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import dealt
from e2e.running import TESTS, command, finish, metrics
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn import replay as tool
from grpo_fn.core import checksums
from grpo_fn.core.batch import by_reading, by_width, minibatches, trim_rows
from grpo_fn.core.json_lines import digests_by_step
from grpo_fn.core.types import Batch, Scores
from grpo_fn.lab import replay as again
from grpo_fn.lab.replay import signal_by_row
from grpo_fn.lab.replay_diff import relative_difference
from grpo_fn.shell.atomic_io import append_json
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler
from grpo_fn.trainer.recording import KERNELS

LORA = ("--gin_file", "scale/lora.gin")
QUANTITIES = [name for name in checksums.QUANTITIES if name != "curriculum"]  # of a run without one
ALL = ", ".join(QUANTITIES)
Replayed = Callable[..., tuple[int, str]]

# Several updates a step in several micro-batches, a reference in the loss, groups that wait for the next step.
BUSY = {
    "step__Algorithm__epochs": 2,
    "step__Algorithm__minibatches": 2,
    "sections__PolicyUpdate__micro_tokens": 100,
    "step__Algorithm__old_logp": "@step.from_trainer",
    "step__Algorithm__group_sampling": "@group_sampling.dynamic",
    "group_sampling__dynamic__max_gen_batches": 8,
    "combine__combine__parts": "[@rewards.named]",
    "combine__combine__weights": "[1.0]",
    "objective__policy_objective__beta": 0.04,
    "losses__clipped_ratio__clip_low": 1e-3,
    "losses__clipped_ratio__clip_high": 1e-3,
    "sections__Checkpoints__every": 3,
}


@pytest.fixture(scope="module")
def busy(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("busy")
    assert finish(command(cache, folder / "run", **BUSY), folder / "out") == 0, (folder / "out").read_text()
    return folder / "run"


@pytest.fixture
def replayed(capsys: pytest.CaptureFixture[str]) -> Replayed:
    """(exit code, what was said) of a replay, which leaves the run folder as it is."""

    def run(folder: Path, step: int, *flags: str) -> tuple[int, str]:
        before = contents(folder)
        capsys.readouterr()
        code = tool.main([str(folder), "--step", str(step), *flags])
        out, err = capsys.readouterr()
        assert contents(folder) == before
        return code, out + (err if code == 2 else "")

    return run


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and the time of its last change."""
    files = {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
    return files | {str(p): (b"", p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_dir()}


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def change_line(run: Path, step: int, **changes: Any) -> None:
    lines = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
    lines[step - 1] |= changes
    (run / "digests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_row(run: Path, step: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = run / "rollouts" / f"step_{step:06d}.jsonl.gz"
    rows = rollout_store.load_rows(path)
    change(rows)
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def other(digest: str) -> str:
    return f"{int(digest, 16) ^ 1:016x}"


# -- the same


@pytest.mark.parametrize(("step", "begun"), [(3, "model that the run began with"), (6, "step_4")])
def test_any_step_is_what_it_was(whole: Path, replayed: Replayed, step: int, begun: str) -> None:
    code, said = replayed(whole, step)
    assert code == 0, said
    assert begun in said
    lines = digests_by_step(whole)
    assert list(lines) == [1, 2, 3, 4, 5, 6]
    for name in QUANTITIES:
        assert len({line[name] for line in lines.values()}) == 6, f"{name} of two steps are the same"
    first = 5 if step == 6 else 1
    assert [line for line in said.splitlines() if line.startswith("step ")] == [
        *(f"step {n}: {ALL} as recorded" for n in range(first, step + 1)),
        f"step {step} of {whole} is what it was",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "flags"), [(2, []), (6, ["--use_stored_rollout"])])
def test_steps_of_many_updates_and_waiting_groups(busy: Path, replayed: Replayed, step: int, flags: list[str]) -> None:
    assert any(row["generation/carried_over_groups"] for row in metrics(busy)[1:])
    code, said = replayed(busy, step, *flags)
    assert code == 0, said


@pytest.mark.slow
def test_adapters_and_their_dropout(cache: Path, tmp_path: Path, replayed: Replayed) -> None:
    run = tmp_path / "run"
    argv = command(
        cache, run, *LORA, lora__LoRA__dropout=0.2, sections__Checkpoints__every=3, step__Algorithm__epochs=2
    )
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    code, said = replayed(run, 5)
    assert code == 0, said
    assert "step_3" in said


def must_not_sample(*args: object, **knobs: object) -> None:
    raise AssertionError("tokens were sampled again")


def test_the_learning_signal_is_shown_as_a_page(whole: Path, tmp_path: Path, replayed: Replayed) -> None:
    code, said, *_ = replayed(whole, 3, "--token_report", str(tmp_path / "step.html"))
    assert code == 0
    assert f"the learning signal of step 3 is in {tmp_path / 'step.html'}" in said
    page = (tmp_path / "step.html").read_text()
    assert "Step 3 of" in page
    assert page.count('class="row') >= 1


@pytest.mark.parametrize("flags", [[], ["--use_stored_rollout"]])
def test_an_engine_that_cannot_repeat_its_tokens_is_not_asked(
    whole: Path, replayed: Replayed, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(LocalSampler, "sample", must_not_sample)
    monkeypatch.setattr(LocalSampler, "repeatable", bool(flags), raising=False)
    code, said = replayed(whole, 6, *flags)
    assert code == 0, said
    assert bool(flags) != ("LocalSampler cannot repeat its tokens: the stored ones are learned from" in said)


def test_a_step_that_is_not_recorded_says_that_its_kernels_are_others(
    copied: Path, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run on a card has them, of whose steps some are not recorded."""
    lines = (copied / "digests.jsonl").read_text().splitlines(keepends=True)
    (copied / "digests.jsonl").write_text(lines[1])
    kernels = {"head": "TritonKernels", "decoding attention": "split-KV kernel"}
    append_json(copied / KERNELS, {"step": 1, "kernels": kernels})
    now = {"head": "TritonKernels", "decoding attention": "matrix products"}
    monkeypatch.setattr(again, "chosen_kernels", lambda run: now)
    code, said = replayed(copied, 2)
    assert code == 0, said
    other_kernels = "kernels, decoding attention: split-KV kernel recorded, matrix products now"
    assert f"step 1: not recorded; {other_kernels}\n" in said
    assert f"step 2: {ALL} as recorded\n" in said


# -- different


def test_the_first_quantity_that_differs_is_named(copied: Path, replayed: Replayed) -> None:
    name = "tokens"
    line = digests_by_step(copied)[5]
    change_line(copied, 5, **{name: other(line[name])})
    change_line(copied, 6, weights="0" * 16)
    code, said = replayed(copied, 6)
    assert code == 1
    assert f"step 5: {name} differ\n" in said
    assert "step 6: weights differ\n" in said
    assert f"first difference: step 5, {name}: {other(line[name])} recorded, {line[name]} now" in said
    assert "rounding" not in said


def test_other_tokens_are_named_with_both(copied: Path, whole: Path, replayed: Replayed) -> None:
    """The model of the run, its sampling key and what it learned: all but one token of the recorded step."""
    stored = rollout_store.load_rows(copied / "rollouts" / "step_000005.jsonl.gz")[6]
    place = stored["mask"].index(1) + 1
    was = stored["tokens"][place]

    def change(rows: list[dict[str, Any]]) -> None:
        rows[6]["tokens"][place] = 300

    change_row(copied, 5, change)
    code, said = replayed(copied, 5)
    assert code == 1, "the rollout that lies there is not the recorded one"
    assert f"step 5: {ALL} as recorded" in said
    assert "first difference: step 5, tokens: the rollout in" in said
    assert re.search(
        rf"row 6 \(problem 17, sample 2\), tokens\[{place}\] in rollouts/: 300 '.*' recorded, {was} '.*' now", said
    ), said
    code, said = replayed(copied, 5, "--use_stored_rollout")
    assert code == 1
    assert "step 5: tokens, logp_old, signal" not in said.partition("logp_old")[0], "the old log-probs are stored too"
    assert "step 5: tokens, " in said


def test_an_edited_prompt_is_named(copied: Path, replayed: Replayed) -> None:
    change_row(copied, 5, lambda rows: [row.update(prompt="1 + 1 =") for row in rows[4:8]])
    code, said = replayed(copied, 5)
    assert code == 1
    assert "first difference: step 5, row 4 (problem 17, sample 0), prompt in rollouts/: '1 + 1 =' recorded, " in said
    code, said = replayed(copied, 5, "--use_stored_rollout")
    assert code == 2
    assert "expected the stored one, '1 + 1 ='" in said


def test_an_edited_figure_and_a_missing_quantity_are_differences(copied: Path, replayed: Replayed) -> None:
    rows = metrics(copied)
    rows[5]["loss/grad_norm"] += 1.0
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = replayed(copied, 5)
    assert code == 1
    assert "first difference: step 5, loss/grad_norm in metrics.jsonl: " in said
    path = copied / "digests.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: x for k, x in line.items() if k != "signal"}) + "\n" for line in lines))
    code, said = replayed(copied, 5)
    assert code == 1
    assert "first difference: step 5, its line in digests.jsonl: got no signal, expected tokens, " in said
    assert "step 5: tokens, rewards, advantages, logp_old, gradients, weights as recorded" in said


def test_rounding_is_called_by_its_name(copied: Path, replayed: Replayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are off by an ulp or so, as those of another number of ranks are."""
    from grpo_fn.shell.policy.fsdp import FSDPPolicy

    restore = FSDPPolicy.restore

    def nudged(self: FSDPPolicy, *args: Any) -> None:
        restore(self, *args)
        with torch.no_grad():
            for p in self.logprob_model.parameters():
                p.mul_(1 + 2e-7)

    monkeypatch.setattr(FSDPPolicy, "restore", nudged)
    for step in (5, 6):
        change_line(copied, step, ranks=8)
    change_line(copied, 4, weights=None)
    code, said = replayed(copied, 5)
    assert code == 1
    assert "ranks: 8 recorded, 1 now" in said
    assert "differs by rounding: max relative difference " in said
    assert re.search(
        r"row \d+ \(problem \d+, sample \d\), logp_sampled\[\d+\] in rollouts/: -\d.* recorded, -\d.* now", said
    ), said


# -- under other knobs


def both(said: str) -> dict[str, tuple[str, str]]:
    """The table's figures."""
    rows = (line.split() for line in said.splitlines())
    return {row[0]: (row[1], row[2]) for row in rows if len(row) in (3, 4) and "/" in row[0]}


def test_another_algorithm_by_its_file(whole: Path, replayed: Replayed) -> None:
    code, said = replayed(whole, 6, "--override", "algo/grpo.gin", "--override", "optimizer.adamw.lr=0.5")
    assert code == 0, said
    assert f"step 6: {ALL} as recorded" in said
    assert float(both(said)["loss/grad_norm"][0]) == pytest.approx(metrics(whole)[6]["loss/grad_norm"], rel=1e-5)
    assert "step 6 with algo/grpo.gin, optimizer.adamw.lr=0.5:" in said
    assert "the same bits: tokens, rewards, logp_old; others: advantages, signal, gradients, weights" in said
    assert 0 < float(re.search(r"cosine (\S+),", said)[1]) < 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.adamw.rate=1.0", "optimizer.adamw: got a binding for rate, expected one of"),
        ("optimizer.adamw.lr", "--set 'optimizer.adamw.lr': got"),
        ("step.Algorithm.minibatches=3", "minibatches"),
    ],
)
def test_an_override_that_is_none_is_refused_before_any_work(
    whole: Path, replayed: Replayed, override: str, expected: str
) -> None:
    code, said = replayed(whole, 1, "--override", override)
    assert code == 2, said
    assert expected in said
    assert "as recorded" not in said


def test_an_override_of_what_is_trained_is_refused(whole: Path, replayed: Replayed) -> None:
    code, said = replayed(whole, 5, "--override", "scale/lora.gin")
    assert code == 2, said
    assert "--override: got knobs that change what is trained" in said


# -- bad input


def test_bad_input_is_one_line(whole: Path, copied: Path, tmp_path: Path, replayed: Replayed) -> None:
    assert replayed(tmp_path, 1) == (2, f"error: got {tmp_path}, expected the folder of a run, with run.json in it\n")
    for step in (0, 7):
        code, said = replayed(whole, step)
        assert code == 2
        assert f"--step: got {step}" in said
    (copied / "rollouts" / "step_000005.jsonl.gz").unlink()
    code, said = replayed(copied, 6, "--use_stored_rollout")
    assert code == 2
    assert "got no rollout of step 5" in said
    assert replayed(copied, 6)[0] == 0
    path = copied / "rollouts" / "step_000006.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-100])
    code, said = replayed(copied, 6)
    assert code == 2
    assert "step_000006.jsonl.gz, which is broken" in said


# -- the parts


@given(
    *(st.integers(1, 3), st.sampled_from([1, 2, 3, 6]), st.integers(1, 40), st.integers(1, 4)),
    *(st.integers(0, 2**32), st.booleans()),
)
def test_signals_go_back_to_their_rows(
    epochs: int, parts: int, micro_tokens: int, devices: int, seed: int, packing: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(0, 7, (6, 1), generator=generator)
    mask = (torch.arange(8) >= 1) & (torch.arange(8) < 1 + length)
    value = torch.randn(6, 8, generator=generator)
    batch = Batch(torch.zeros(6, 8).long(), mask, *([value] * 5), mask, mask.long())

    split = partial(dealt, parts=by_reading if packing else by_width, micro_tokens=micro_tokens, devices=devices)
    minis = [mini for _ in range(epochs) for mini in minibatches(batch, parts)]
    cuts = [trim_rows(mini, rows) for mini in minis for rows in split(mini)]
    sent = [(micro, Scores(micro.logp_old, torch.where(micro.mask, 1.0, torch.nan))) for micro in cuts]
    rows = again.micro_batch_rows(batch, split, epochs=epochs, parts=parts)
    logp, count = signal_by_row(batch, rows, sent)
    assert torch.equal(count, epochs * mask.float())
    torch.testing.assert_close(logp, torch.where(mask, epochs * value, 0.0))
    assert not signal_by_row(batch, rows, []).logp.any()


@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=5), st.floats(1e-6, 1.0))
def test_relative_differences_are_of_the_largest(values: list[float], by: float) -> None:
    x = torch.tensor(values)
    assert relative_difference(x, x) == 0
    if x.any():
        assert relative_difference(x, x.double() * (1 + by)) == pytest.approx(by, rel=1e-6)
    elif len(x):
        assert relative_difference(x, x + 1) == float("inf")


# -- many ranks


def torchrun(module: str, *flags: str) -> subprocess.CompletedProcess:
    argv = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module, *flags]
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.slow
def test_two_ranks_repeat_what_two_ranks_did_and_one_rank_says_what_differs(
    cache: Path, tmp_path: Path, replayed: Replayed
) -> None:
    run = tmp_path / "run"
    made = torchrun("grpo_fn.run", *command(cache, run))
    assert made.returncode == 0, made.stderr
    before = contents(run)
    again = torchrun("grpo_fn.replay", str(run), "--step", "6", "--override", "optimizer.adamw.lr=0.0")
    assert again.returncode == 0, again.stdout + again.stderr
    assert contents(run) == before
    assert again.stdout.count(f"step 6: {ALL} as recorded") == 1, "the main rank alone speaks"
    assert "others: weights" in again.stdout
    stored = torchrun("grpo_fn.replay", str(run), "--step", "6", "--use_stored_rollout")
    assert stored.returncode == 0, stored.stdout + stored.stderr
    code, said = replayed(run, 5)
    if code == 0:  # the sums came out alike
        assert f"step 5: {ALL} as recorded" in said
    else:
        assert "ranks: 2 recorded, 1 now" in said
