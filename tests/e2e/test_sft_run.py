"""Supervised runs: what they learn, record and refuse, that they go on to the last bit, and GRPO after them."""

import json
import signal
from pathlib import Path

import pytest
import torch
from e2e.faults import job
from e2e.running import SMALL, board, command, ended, finish, metrics, outcome, signal_after_step
from e2e.test_ranks import CLOSE, weights

from grpo_fn import replay as replaying
from grpo_fn.core import prng
from grpo_fn.tasks import arithmetic

SFT = ["--gin_file", "run/sft.gin", "--gin_param", "STEPS=6", "--gin_param", "ROWS=8", "--gin_param", "HELD_OUT=6"]
SOON = {"sections__Evaluation__every": 3, "sections__Checkpoints__every": 2}
SOON |= {"optimizer__adamw__lr": 1e-2, "optimizer__linear_decay__warmup": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right solutions of word problems, as a file of prompts and completions."""
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    task, key = arithmetic.task(max_value=5, operations=3, test_size=16), prng.key(5, device="cpu")
    problems = [task.train(key, index) for index in range(80)]
    rows = [
        json.dumps({"prompt": problem.prompt, "completion": arithmetic.answer_only(problem)}) for problem in problems
    ]
    path.write_text("\n".join(rows))
    return path


def supervised(cache: Path, run_dir: Path | None, data: Path, *flags: str, **changes: object) -> list[str]:
    params = ["--gin_param", f"DATA={str(data)!r}", "--gin_param", "MAX_NEW_TOKENS=8"]
    return command(cache, run_dir, *SFT, *params, *flags, **{**SOON, **changes})


@pytest.fixture(scope="module")
def calm(cache: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    assert finish(supervised(cache, folder / "run", data), folder / "out") == 0, (folder / "out").read_text()
    return folder / "run"


def test_the_held_out_loss_falls_and_nothing_is_sampled_or_scored(calm: Path) -> None:
    rows = metrics(calm)
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(losses) == 3
    assert losses[-1] < losses[1] < losses[0]
    steps = rows[1:]
    assert all(row["sft/loss"] == pytest.approx(row["loss/objective"], rel=1e-5) for row in steps)
    assert all(row["sft/tokens"] > 8 and row["sft/weight_mean"] == 1 and row["loss/grad_norm"] > 0 for row in steps)
    assert not any(name in row for row in steps for name in ("reward/mean", "generation/tokens", "loss/ratio_mean"))
    assert {"sft/loss", "sft/perplexity", "eval/loss"} <= {*board(calm).Tags()["scalars"]}
    assert (calm / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one(cache: Path, data: Path, calm: Path, tmp_path: Path) -> None:
    argv = supervised(cache, tmp_path / "run", data)
    assert ended(argv, tmp_path / "out", [signal_after_step(3, signal.SIGKILL)]) == [-9, 0]
    got, expected = outcome(tmp_path / "run"), outcome(calm)
    for one in (got, expected):
        for row in one["metrics"]:
            row.pop("sft/tokens_per_second", None)
    assert got == expected


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(cache: Path, data: Path, calm: Path, tmp_path: Path) -> None:
    over = job(tmp_path, 2, supervised(cache, tmp_path / "run", data))
    assert over.code == 0, over.everything()
    names = ("sft/loss", "sft/tokens", "loss/grad_norm", "eval/loss")
    for mine, row in zip(metrics(tmp_path / "run"), metrics(calm), strict=True):
        for name in row.keys() & set(names):
            assert mine[name] == pytest.approx(row[name], rel=1e-5), f"{name} of step {row['step']}"
    found, expected = weights(tmp_path / "run"), weights(calm)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_a_step_is_replayed(calm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replaying.main([str(calm), "--step", "3"]) == 0, capsys.readouterr().out
    assert "is what it was" in capsys.readouterr().out


@pytest.mark.slow
def test_grpo_begins_with_its_model_and_mixes_its_demonstrations_in(data: Path, calm: Path, tmp_path: Path) -> None:
    """And the mixture goes on to the last bit, too."""
    flags = ["--gin_file", "algo/chord.gin", "--gin_file", "task/demonstrations.gin"]
    params = [f"DEMONSTRATIONS={str(data)!r}", "DEMONSTRATION_ROWS=4", f"MODEL={str(calm / 'model')!r}"]
    more = [*flags, *(part for param in params for part in ("--gin_param", param))]
    for name, doom in (("calm", None), ("killed", signal_after_step(3, signal.SIGKILL))):
        argv = ["--gin_file", "run/arithmetic.gin", "--gin_file", str(SMALL), "--run_dir", str(tmp_path / name), *more]
        code = finish(argv, tmp_path / f"{name}.out", doom)
        assert code == (-9 if doom else 0), (tmp_path / f"{name}.out").read_text()
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "calm")
    rows = metrics(tmp_path / "calm")[1:]
    assert all(row["sft/tokens"] > 4 and row["loss/ratio_mean"] == pytest.approx(1, abs=1e-3) for row in rows)
