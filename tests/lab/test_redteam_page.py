"""The tables of docs/rewards/redteam.md: every reward, run and task has its line, which is what the command says."""

import inspect
import re
from pathlib import Path

import pytest

from grpo_fn.redteam import main
from grpo_fn.rewards import code, episode, format, math

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "rewards" / "redteam.md").read_text()
LINES = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (-?\d\.\d{3}) \| (\d\.\d{3}) \|", PAGE, re.MULTILINE)
FILES = {name for _, task, *_ in LINES for name in re.findall(r"\w+/\w+\.gin", task)}
RUNS_ELSEWHERE = {"run/arithmetic_vllm.gin", "run/sft.gin"}  # that draw from another's task, or reward nothing
TASKS_ELSEWHERE = {"task/gsm8k.gin", "task/openmath.gin"}  # bound by run/gsm8k.gin itself; on the hub alone


def rewards_of(module: object) -> set[str]:
    """The public rewards of a module."""
    return {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and [*inspect.signature(value).parameters][:2] == ["problem", "completion"]
        and not name.startswith("_")
    }


def test_every_reward_has_a_line() -> None:
    rewards = set().union(*map(rewards_of, (code, format, math, episode)))
    by_another_name = {"correct": "math", "correct_evaluated": "math_evaluated", "all_tests_pass": "code"}
    named = {word for reward, *_ in LINES for word in re.findall(r"\w+", reward)}
    absent = {name for name in rewards if by_another_name.get(name, name) not in named}
    # No reward, but what the sandbox says; and a grader of given completions, which pays nothing but the answer.
    assert absent == {"run_against_tests", "same_text"}


def test_every_run_and_task_file_has_a_line() -> None:
    assert {f"run/{path.name}" for path in (ROOT / "gin" / "run").glob("*.gin")} - RUNS_ELSEWHERE <= FILES
    texts = "\n".join((ROOT / "gin" / name).read_text() for name in FILES if name.startswith("run/"))
    named = FILES | {*re.findall(r'^include "(task/\w+\.gin)"', texts, re.MULTILINE)}
    assert {f"task/{path.name}" for path in (ROOT / "gin" / "task").glob("*.gin")} - named == TASKS_ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (["--gin_file", "run/arithmetic.gin"], "run/arithmetic.gin"),
        (["--reward", "math", "--task", "arithmetic"], "arithmetic"),
    ],
)
def test_a_line_is_what_the_command_says(flags: list[str], place: str, capsys: pytest.CaptureFixture) -> None:
    assert main(flags) == 0
    said = capsys.readouterr().out
    reward, _, best, gold = next(line for line in LINES if line[1] == place)
    assert said.startswith(f"{reward} on ")
    assert f"best without the answer: {best} (" in said
    assert said.rstrip().endswith(f"the golds get {gold}")


def test_a_runs_own_reward_is_attacked_on_its_task(capsys: pytest.CaptureFixture) -> None:
    argv = ["--gin_file", "run/arithmetic.gin", "--problems", "4", "--pulls", "0"]
    parts = ["--gin_param", "combine.combine.parts=[@format.boxed]", "--gin_param", "combine.combine.weights=[2.0]"]
    assert main([*argv, *parts]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 * boxed on run/arithmetic.gin: mean scores over 2 problems")
    assert "best without the answer: 2.000" in said
    assert main([*argv, "--reward", "math"]) == 2
    assert main(["--reward", "math"]) == 2
    assert "expected either the two or the gin files" in capsys.readouterr().err
