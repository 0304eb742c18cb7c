"""The tables of docs/rewards/redteam.md: every reward, run and accepted kind is attacked, and has its line."""

import inspect
import re
from pathlib import Path

import pytest
import redteam_table

from grpo_fn.redteam.__main__ import main
from grpo_fn.rewards import code, episode, format, length, math, procedural
from grpo_fn.score.scoring import known_reward
from grpo_fn.tasks import procedural as procedural_task

ENTRIES = [*redteam_table.entries(Path("/data"))]
RUNS = Path(redteam_table.ROOT / "gin" / "run")
TASKS = redteam_table.ROOT / "gin" / "task"
ELSEWHERE = {"run/arithmetic_vllm.gin", "run/sft.gin"}  # that draw from another's task, or reward nothing


def rewards_of(module: object) -> set[str]:
    """The public rewards of a module."""
    return {
        f"{module.__name__}.{name}"
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and [*inspect.signature(value).parameters][:2] == ["problem", "completion"]
        and not name.startswith("_")
    }


def test_every_reward_run_and_accepted_kind_is_attacked() -> None:
    named = {known_reward(name).function for entry in ENTRIES for name in entry.rewards}
    found = set().union(*map(rewards_of, (code, format, length, math, procedural)))
    assert found - {"grpo_fn.rewards.code.run_against_tests"} <= named  # which is no reward: what the sandbox says
    files = {name for entry in ENTRIES for name in entry.gin_files}
    assert {f"run/{path.name}" for path in RUNS.glob("*.gin")} - ELSEWHERE <= files
    kinds = {entry.label for entry in ENTRIES if entry.group == "kinds"}
    assert kinds == {*procedural_task.kinds()} - {*procedural_task.AUDIT_FAILURES}


def test_every_task_file_reward_of_episodes_and_the_judge_are_attacked() -> None:
    files = {name for entry in ENTRIES for name in entry.gin_files}
    texts = [(redteam_table.ROOT / "gin" / name).read_text() for name in files if name.startswith("run/")]
    named = files | set(re.findall(r'^include "(task/\w+\.gin)"', "\n".join(texts), re.MULTILINE))
    tasks = {f"task/{path.name}" for path in TASKS.glob("*.gin")}
    assert tasks - named == {"task/gsm8k.gin"}  # whose task run/gsm8k.gin binds itself
    bound = "\n".join([*texts, *(param for entry in ENTRIES for param in entry.gin_params)])
    used = {f"grpo_fn.rewards.episode.{name}" for name in re.findall(r"@episode\.(\w+)", bound)}
    assert rewards_of(episode) - {"grpo_fn.rewards.episode.total_reward"} <= used
    assert "@judge.Judge()" in bound


def test_a_campaign_without_its_data_has_a_line_that_says_so(tmp_path: Path) -> None:
    absent = [entry for entry in redteam_table.entries(tmp_path) if redteam_table.not_run(entry)]
    assert len(absent) == len([entry for entry in ENTRIES if entry.data is not None or entry.absent]) > 10
    line = redteam_table.skipped_line(absent[0], redteam_table.not_run(absent[0]))
    assert line == f"| - | run/gsm8k.gin | not run: {tmp_path / 'gsm8k'} is not there | | | |"


def test_the_page_has_a_line_for_each() -> None:
    page = redteam_table.PAGE.read_text()
    lines = [line for found in redteam_table.TABLE.finditer(page) for line in found[0].splitlines()[3:-1]]
    assert len(lines) == len(ENTRIES)
    for entry in ENTRIES:
        assert any(f" {entry.label or entry.task or ' + '.join(entry.gin_files)} |" in line for line in lines), (
            entry.name()
        )


def test_tables_are_rewritten_in_their_places() -> None:
    page = "a\n<!-- campaigns of runs -->\nold\n<!-- end -->\nb\n"
    wanted = "\n".join(["a", "<!-- campaigns of runs -->", *redteam_table.HEAD, "| x |", "<!-- end -->", "b", ""])
    assert redteam_table.with_tables(page, {"runs": ["| x |"]}) == wanted
    assert redteam_table.with_tables(wanted, {"runs": ["| x |"]}) == wanted
    with pytest.raises(ValueError, match="got places for runs, wanted them for kinds"):
        redteam_table.with_tables(page, {"kinds": []})


@pytest.mark.slow
@pytest.mark.parametrize("word", ["runs: as configured on run/arithmetic.gin", "on aiw"])
def test_the_page_says_what_the_tool_finds(word: str, capsys: pytest.CaptureFixture) -> None:
    assert redteam_table.main(["--data", "/data", "--only", word]) == 0
    assert capsys.readouterr().out in redteam_table.PAGE.read_text()


def test_a_runs_own_reward_is_attacked_on_its_task(capsys: pytest.CaptureFixture) -> None:
    argv = ["--gin_file", "run/arithmetic.gin", "--problems", "4", "--pulls", "0"]
    parts = ["--gin_param", "combine.combine.parts=[@format.boxed]", "--gin_param", "combine.combine.weights=[2.0]"]
    assert main([*argv, *parts]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 * boxed on run/arithmetic.gin: mean scores over 2 problems")
    assert "best without the answer: 2.000" in said
    assert main([*argv, "--reward", "math"]) == 2
    assert main(["--reward", "math"]) == 2
    assert "wanted either the two or the gin files" in capsys.readouterr().err
