"""Runs of episodes: killed anywhere, replayed without their tool, and on two ranks, they are what they were."""

import gzip
import json
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import resume_check
from e2e.faults import job
from e2e.running import SMALL, TESTS, AtPhase, Forked, command, finish, metrics, outcome
from e2e.test_ahead_run import run_ahead
from e2e.test_ranks import same_run

from grpo_fn.replay import main as replay

EPISODES = ("--gin_file", str(TESTS / "e2e" / "episodes.gin"))


def run_of(cache: Path, run_dir: Path, **changes: object) -> Path:
    out = run_dir.with_suffix(".out")
    assert finish(command(cache, run_dir, *EPISODES, **changes), out) == 0, out.read_text()
    return run_dir


def tool_bindings(tool: Path) -> dict[str, object]:
    """Changes: what the file `tool` says is observed as well."""
    tool.write_text("?")
    step = {"environment__Environment__step": "@environment_fakes.with_tool", "environment__Environment__pure": False}
    return {**step, "environment_fakes__with_tool__tool": repr(str(tool))}


def rows(run_dir: Path, step: int) -> list[dict]:
    with gzip.open(run_dir / "rollouts" / f"step_{step:06d}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def episodes(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(cache, tmp_path_factory.mktemp("episodes") / "run")


def test_episodes_of_several_turns_train(episodes: Path) -> None:
    turns = [row["turns"] for row in rows(episodes, 1)]
    assert max(map(len, turns)) > 1
    assert {turn["limit"] for row in turns for turn in row} > {""}
    for row in rows(episodes, 1):
        assert sum(row["mask"]) == sum(turn["length"] for turn in row["turns"])
    assert metrics(episodes)[1]["episode/turns_max"] > 1


@pytest.mark.slow
def test_a_step_is_replayed_without_its_tool(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = run_of(cache, tmp_path / "run", **tool_bindings(tmp_path / "tool"))
    (tmp_path / "tool").unlink()
    assert replay([str(run), "--step", "3"]) == 0, capsys.readouterr().out
    assert "is what it was" in capsys.readouterr().out


ECHO = (*EPISODES, "--gin_file", "algo/echo.gin")


@pytest.mark.slow
def test_two_ranks_learn_alike_from_observations(cache: Path, tmp_path: Path) -> None:
    """By a model that is spread over them: losses, gradients and weights, and of other ones than without it."""
    whole, plain = tmp_path / "whole", tmp_path / "plain"
    for run, more in ((whole, {}), (plain, {"step__Algorithm__beside": []})):
        assert finish(command(cache, run, *ECHO, **more), run.with_suffix(".out")) == 0
    made = job(tmp_path, 2, command(cache, tmp_path / "run", *ECHO, "--gin_file", "scale/full_shard.gin"))
    assert made.code == 0, made.everything()
    same_run(tmp_path / "run", whole)
    seen = metrics(whole)[1]
    assert seen["observation/tokens"] > 0
    assert seen["observation/loss"] > 0
    assert metrics(plain)[1].keys().isdisjoint({"observation/tokens", "observation/loss"})
    assert metrics(plain)[2]["loss/objective"] != metrics(whole)[2]["loss/objective"]


@pytest.mark.slow
def test_a_step_that_is_taken_again_is_answered_from_the_tape(cache: Path, tmp_path: Path) -> None:
    """The run is killed in step 4, when its checkpoint is that of step 2; then its tool answers otherwise."""
    tool = tmp_path / "tool"
    argv = command(cache, tmp_path / "run", *EPISODES, **tool_bindings(tool))
    assert finish(argv, tmp_path / "out", AtPhase("train", 4, signal.SIGKILL)) == -signal.SIGKILL
    before = rows(tmp_path / "run", 3)
    tool.write_text("other")
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert "environments answer as recorded in 1 steps after step 2" in (tmp_path / "out").read_text()
    assert rows(tmp_path / "run", 3) == before
    shown = [turn["observation"] for row in rows(tmp_path / "run", 4) for turn in row["turns"]]
    assert any(text.endswith("other") for text in shown)


@pytest.mark.slow
def test_a_batch_of_episodes_that_is_sampled_ahead_goes_through_a_checkpoint(cache: Path, tmp_path: Path) -> None:
    whole = run_ahead(cache, tmp_path / "whole", *EPISODES)
    assert [row["generation/staleness"] for row in metrics(whole)[1:]] == [0, 1, 2, 2, 2, 2]
    assert max(len(row["turns"]) for row in rows(whole, 4)) > 1
    broken = run_ahead(cache, tmp_path / "broken", *EPISODES, doom=AtPhase("train", 4, signal.SIGKILL))
    assert outcome(broken) == outcome(whole)


# -- killed


@pytest.mark.slow
def test_a_rank_killed_inside_a_tool_changes_nothing(cache: Path, episodes: Path, tmp_path: Path) -> None:
    """The process that asks for an environment's step, in the midst of the call."""
    (folder := tmp_path / "calls").mkdir()
    changes = {"environment__Environment__step": "@environment_fakes.kills_the_run_once"}
    changes |= {"environment_fakes__kills_the_run_once__folder": repr(str(folder))}
    changes |= {"environment_fakes__kills_the_run_once__after": 20}
    over = job(tmp_path, 2, command(cache, tmp_path / "run", *EPISODES, **changes), restarts=1)
    assert over.code == 0, over.everything()
    assert -signal.SIGKILL in over.codes(0).values()
    same_run(tmp_path / "run", episodes)


@pytest.mark.slow
def test_a_run_of_episodes_killed_at_eight_random_moments_ends_as_undisturbed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Of one run: each start goes on from where the last was killed, and the moments are later and later in it."""
    monkeypatch.setattr(resume_check, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))
    argv = ["--gin_file", "run/arithmetic.gin", "--gin_file", str(SMALL), *EPISODES, "--out", str(tmp_path / "out")]
    argv += ["--gin_param", f"models.TinyModel.cache={str(cache)!r}", "--gin_param", "STEPS=12"]
    assert resume_check.main([*argv, "--kills", "8", "--seed", "6", "--timeout", "240"]) == 0, capsys.readouterr()
    assert "identical after 8 kills" in capsys.readouterr().out
