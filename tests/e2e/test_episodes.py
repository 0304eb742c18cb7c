"""Runs of episodes: interrupted, replayed without their tool, and on two ranks, they are what they were."""

import gzip
import json
import signal
import sys
from pathlib import Path

import pytest
from e2e.faults import job
from e2e.running import TESTS, AtPhase, command, finish, metrics, outcome
from e2e.test_ranks import same_run

from grpo_fn.replay.__main__ import main as replay

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


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["generate", "train", "checkpoint"])
def test_a_killed_run_goes_on_bit_for_bit(cache: Path, episodes: Path, tmp_path: Path, phase: str) -> None:
    argv = command(cache, tmp_path / "run", *EPISODES)
    assert finish(argv, tmp_path / "out", AtPhase(phase, 2, signal.SIGKILL)) == -signal.SIGKILL
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert outcome(tmp_path / "run") == outcome(episodes)


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
def test_two_ranks_make_the_same_run(cache: Path, episodes: Path, tmp_path: Path) -> None:
    made = job(tmp_path, 2, command(cache, tmp_path / "run", *EPISODES))
    assert made.code == 0, made.everything()
    same_run(tmp_path / "run", episodes)


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
