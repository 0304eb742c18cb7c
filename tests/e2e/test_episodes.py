"""Runs of episodes: interrupted, replayed without their tool, and on more ranks, they are what they were."""

import gzip
import json
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from e2e.faults import job
from e2e.running import TESTS, AtPhase, command, finish, metrics, outcome
from e2e.test_ahead_run import AHEAD, IMPORTS
from e2e.test_ranks import same_run

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.replay import main as replay
from grpo_fn.shell.reward_workers.reward_pool import EarlyRewards

EPISODES = ("--gin_file", str(TESTS / "e2e" / "episodes.gin"))


def run_of(cache: Path, run_dir: Path, **changes: object) -> Path:
    out = run_dir.with_suffix(".out")
    assert finish(command(cache, run_dir, *EPISODES, **changes), out) == 0, out.read_text()
    return run_dir


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


def test_an_opening_that_leaves_no_turn_is_refused_before_a_model_is_loaded(cache: Path, tmp_path: Path) -> None:
    argv = command(cache, tmp_path / "run", *EPISODES, environment__Environment__start="@environment_fakes.long_start")
    assert finish(argv, tmp_path / "out") == 2
    said = (tmp_path / "out").read_text()
    assert re.search(
        r"Episodes.environment: environment_fakes.count_digits: got an opening of \d{3} tokens for problem \d+, "
        r"expected at most 119 \(sections.Sampling.max_total_tokens less one for a turn\): '",
        said,
    ), said
    assert "loading the model" not in said


@pytest.mark.slow
def test_a_step_is_replayed_without_its_tool(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tool = tmp_path / "tool"
    tool.write_text("?")
    run = run_of(
        cache,
        tmp_path / "run",
        environment__Environment__step="@environment_fakes.with_tool",
        environment__Environment__pure=False,
        environment_fakes__with_tool__tool=repr(str(tool)),
    )
    tool.unlink()
    assert replay([str(run), "--step", "3"]) == 0, capsys.readouterr().out
    assert "is what it was" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_is_replayed_after_the_program_of_its_mcp_server_is_deleted(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("mcp", reason="NOT TESTED without the mcp library: replay of an MCP server's tools")
    program = tmp_path / "server.py"
    program.write_text((TESTS / "helpers" / "mcp_server_program.py").read_text())
    argv = command(
        cache,
        tmp_path / "run",
        *("--gin_file", str(TESTS / "e2e" / "mcp_tools.gin")),
        mcp_tools__environment__command=repr((sys.executable, str(program))),
    )
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    turns = [turn for row in rows(tmp_path / "run", 3) for turn in row["turns"]]
    observed = [turn["observation"] for turn in turns if turn["observation"]]
    assert observed
    assert not any("error" in text for text in observed)
    assert metrics(tmp_path / "run")[3]["episode/environment_failures"] == 0
    program.unlink()
    assert replay([str(tmp_path / "run"), "--step", "3"]) == 0, capsys.readouterr().out
    assert "is what it was" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_more_ranks_make_the_same_run(ranks: int, cache: Path, episodes: Path, tmp_path: Path) -> None:
    made = job(tmp_path, ranks, command(cache, tmp_path / "run", *EPISODES))
    assert made.code == 0, made.everything()
    same_run(tmp_path / "run", episodes)


ECHO = (*EPISODES, "--gin_file", "algo/echo.gin")


@pytest.mark.slow
def test_what_environments_wrote_is_learned_alike_by_two_ranks(cache: Path, tmp_path: Path) -> None:
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
    tool.write_text("?")
    changes = {
        "environment__Environment__step": "@environment_fakes.with_tool",
        "environment__Environment__pure": False,
        "environment_fakes__with_tool__tool": repr(str(tool)),
    }
    argv = command(cache, tmp_path / "run", *EPISODES, **changes)
    assert finish(argv, tmp_path / "out", AtPhase("train", 4, signal.SIGKILL)) == -signal.SIGKILL
    before = rows(tmp_path / "run", 3)
    tool.write_text("other")
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert "environments answer as recorded in 1 steps after step 2" in (tmp_path / "out").read_text()
    assert rows(tmp_path / "run", 3) == before
    shown = [turn["observation"] for row in rows(tmp_path / "run", 4) for turn in row["turns"]]
    assert any(text.endswith("other") for text in shown)


def ahead_of(cache: Path, folder: Path) -> list[str]:
    """The arguments of a run of episodes that samples ahead."""
    folder.mkdir()
    (folder / "engines.gin").write_text(IMPORTS)
    return [*command(cache, folder / "run", *EPISODES, **AHEAD), "--gin_file", str(folder / "engines.gin")]


@pytest.mark.slow
def test_a_batch_of_episodes_that_is_sampled_ahead_goes_through_a_checkpoint(cache: Path, tmp_path: Path) -> None:
    argv = ahead_of(cache, tmp_path / "whole")
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    whole = tmp_path / "whole" / "run"
    assert [row["generation/staleness"] for row in metrics(whole)[1:]] == [0, 1, 2, 2, 2, 2]
    assert max(len(row["turns"]) for row in rows(whole, 4)) > 1
    argv = ahead_of(cache, tmp_path / "broken")
    assert finish(argv, tmp_path / "out", AtPhase("train", 4, signal.SIGKILL)) == -signal.SIGKILL
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert outcome(tmp_path / "broken" / "run") == outcome(whole)


def notes_early_rows(note: Path) -> None:
    """Doom that harms nothing: a dot in the file for each row that is begun before its step asks for rewards."""
    begin = EarlyRewards.on_completions

    def watched(early: EarlyRewards, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        with note.open("a") as file:
            file.write("." * len(problems))
        begin(early, problems, completions)

    EarlyRewards.on_completions = watched


def without_early_rewards() -> None:
    """Doom that harms nothing: no row is scored before its step asks for rewards."""
    EarlyRewards.on_completions = lambda early, problems, completions: None


@pytest.mark.slow
def test_rewards_that_come_early_are_those_that_come_late(cache: Path, tmp_path: Path) -> None:
    changes = {"combine__combine__parts": "[@rewards.named, @rewards.slow_digits]"}
    dooms = {"early": partial(notes_early_rows, tmp_path / "rows"), "late": without_early_rewards}
    for name, doom in dooms.items():
        argv = command(cache, tmp_path / name, *EPISODES, **changes)
        assert finish(argv, tmp_path / "out", doom) == 0, (tmp_path / "out").read_text()
    assert (tmp_path / "rows").stat().st_size > 4 * 16 / 2  # of four steps
    assert outcome(tmp_path / "early") == outcome(tmp_path / "late")
