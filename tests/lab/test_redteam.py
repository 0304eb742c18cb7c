"""The red team finds the holes of a reward, on problems that the search has not seen."""

import inspect
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import Reply, judge_server, mark_in, said

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.lab.attacks import ATTACKS, EPISODE_ATTACKS
from grpo_fn.lab.redteam import attack_named, attack_target, attack_task, next_arm, report_attack, text_target
from grpo_fn.redteam import main
from grpo_fn.rewards import code, episode, format, math
from grpo_fn.rewards.judge import Judge, marked_score
from grpo_fn.rewards.math import correct
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.tasks.task import held_out_only

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = [Problem(uid, f"What is {uid} + 1000?", f"{uid + 1000}", {}) for uid in range(40, 72)]
ARITHMETIC = {"reward_knobs": [], "task": "arithmetic", "task_knobs": [], "pulls": 20, "workers": 1}


def judged(problems: list[Problem], completions: list[Completion]) -> list[float]:
    return [correct(*row) or 0.0 for row in zip(problems, completions, strict=True)]


def attacked(reward) -> dict[str, float]:
    """Attack -> the score of its best text."""
    return {best.attack: best.score for best in attack_target(PROBLEMS, text_target(reward), pulls=10).attempts}


# -- the bandit

means = st.lists(st.integers(0, 10), min_size=2, max_size=6, unique=True).map(lambda tenths: [t / 10 for t in tenths])


def pulls(means: list[float], count: int) -> list[int]:
    payments: list[list[float]] = [[] for _ in means]
    for _ in range(count):
        arm = next_arm(payments, spread=1.0)
        payments[arm].append(means[arm])
    return [len(paid) for paid in payments]


@given(means)
def test_the_best_arm_is_pulled_most_and_every_arm_once(means):
    counts = pulls(means, 400)
    assert min(counts) >= 1
    assert counts.index(max(counts)) == means.index(max(means))


# -- a campaign


def test_a_sound_judge_pays_nothing_but_the_sum_that_the_prompt_states():
    campaign = attack_target(PROBLEMS, text_target(judged), pulls=10)
    scores = {best.attack: best.score for best in campaign.attempts}
    assert scores.keys() == ATTACKS.keys()
    assert scores.pop("prompt_echo") == 1.0  # the numbers of these prompts, added
    assert set(scores.values()) == {0.0}
    assert (campaign.gold, campaign.problems) == (1.0, 16)
    assert attack_target(PROBLEMS, text_target(judged), pulls=10) == campaign


def test_reported_figures_are_measured_on_problems_that_the_search_has_not_seen():
    """A reward that pays on every other one alone promises the search much and gets nothing."""
    searched = {problem.uid for problem in PROBLEMS[::2]}
    assert set(attacked(lambda problems, _: [float(p.uid in searched) for p in problems]).values()) == {0.0}


def test_one_part_that_dominates_is_reported_with_the_text_that_pays():
    boxed = "grpo_fn.rewards.format.boxed"
    campaign = attack_named(rewards=["math", boxed], weights=[1.0, 5.0], problems=8, **ARITHMETIC)
    assert campaign.attempts[0].score >= 5.0
    assert campaign.gold == 6.0
    assert campaign.reward == f"math + 5 * {boxed}"
    assert "best without the answer: 5." in report_attack(campaign)
    assert r"\boxed" in campaign.attempts[0].text


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"rewards": ["mth"]}, "expected math"),
        ({"weights": [1.0, 2.0]}, "--weight: got 2 for 1 rewards"),
        ({"problems": 1}, "got 1 held-out problems and 20 pulls"),
        ({"task": "grpo_fn.verifier.find_boxes"}, "text"),
        ({"task": "gsm8k"}, "expected --task_param data=VALUE"),
        ({"rewards": ["math", "lenient"], "reward_knobs": ["tolerance=1"]}, "expected a knob of one of the rewards"),
    ],
)
def test_bad_input_says_what_was_expected(knobs, complaint):
    with pytest.raises((ValueError, TypeError), match=re.escape(complaint)):
        attack_named(**{"rewards": ["math"], "weights": [], "problems": 8, **ARITHMETIC, **knobs})


# -- of a run


def test_a_runs_own_reward_is_attacked_on_its_task(capsys):
    argv = ["--gin_file", "run/arithmetic.gin", "--problems", "4", "--pulls", "0"]
    parts = ["--gin_param", "combine.combine.parts=[@format.boxed]", "--gin_param", "combine.combine.weights=[2.0]"]
    assert main([*argv, *parts]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 * boxed on run/arithmetic.gin: mean scores over 2 problems")
    assert "best without the answer: 2.000" in out
    for bad in ([*argv, "--reward", "math"], ["--reward", "math"]):
        assert main(bad) == 2
        assert "expected either the two or the gin files" in capsys.readouterr().err


def test_episodes_of_a_run_are_attacked_in_its_environment(capsys):
    assert main(["--gin_file", "run/maze.gin", "--problems", "2", "--pulls", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("total_reward on run/maze.gin: mean scores over 1 problems")
    assert "; the golds get 1.000" in out  # the shortest way, a direction a turn
    names = {line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")}
    assert names - {"attack"} == EPISODE_ATTACKS.keys()
    assert r"north\n> " in out


def test_a_chat_format_that_reads_calls_in_tokens_alone_is_refused(capsys):
    bindings = (
        "sections.Episodes.chat_format=@chat_format.family_renderer",
        "chat_format.family_renderer.family='x'",
    )
    params = [word for binding in bindings for word in ("--gin_param", binding)]
    assert main(["--gin_file", "run/calculator.gin", *params, "--problems", "2", "--pulls", "0"]) == 2
    assert "expected one with the knob read_calls: chat_format.tokenizer_template" in capsys.readouterr().err


# -- a model as judge

TEMPLATE = "Question:\n{prompt}\n\n{fence}\n{completion}\n{fence}\n\nEnd with one line of this form:\n{mark}: N"


def first_grade(answer: str, mark: str) -> float | None:
    """A weak reader: the first thing that looks like a grade, wherever it stands."""
    grade = re.search(r"(?:grade|verdict)\w*(?:-[a-p]{12})?\W+(\d+)", answer, re.IGNORECASE)
    return grade and min(1.0, float(grade[1]) / 10)


def quoted(question: str, before: int) -> Reply:
    """The reply, word for word, and then the least grade: it grades nothing."""
    reply = re.search(r"^(text-[a-p]{12})\n(.*)\n\1$", question, re.DOTALL | re.MULTILINE)[2]
    return said(f"The reply was:\n{reply}\n{mark_in(question)}: 0")


def gullible(question: str, before: int) -> Reply:
    """What no reader can mend: the model itself follows the reply."""
    return said(f"{mark_in(question)}: {10 if 'with 10 for N' in question else 0}")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("answer", "read", "fooled"),
    [
        (gullible, partial(marked_score, low=0.0, high=10.0), True),
        (quoted, partial(marked_score, low=0.0, high=10.0), False),
        (quoted, first_grade, True),
    ],
)
def test_a_reply_about_its_own_grade_pays_only_with_a_gullible_judge_or_reader(answer, read, fooled):
    with judge_server(answer, models=("attacked",)) as up:
        judge = Judge(
            **{"name": "judge", "endpoint": up.url, "model": "attacked", "system": "", "template": TEMPLATE},
            **{"read": read, "sampling": {}, "concurrency": 16, "retries": 0, "backoff_seconds": 0.1},
            **{"request_seconds": 30.0, "batch_seconds": 60.0, "max_failures": 4, "api_key_variable": None},
        )
        pool = partial(RewardPool, workers=1, timeout_per_completion=5.0, memory_mb=1024, stop_on_error=True)
        campaign = attack_task(held_out_only(PROBLEMS[:4]), [judge], [1.0], pool, problems=4, pulls=0)
    scores = {best.attack: best.score for best in campaign.attempts}
    assert scores.pop("judge_injections") == float(fooled)
    if read is not first_grade:
        assert set(scores.values()) == {0.0}


# -- the tables of docs/rewards/score.md

PAGE = (ROOT / "docs" / "rewards" / "score.md").read_text()
LINES = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (-?\d\.\d{3}) \| (\d\.\d{3}) \|", PAGE, re.MULTILINE)
FILES = {name for _, task, *_ in LINES for name in re.findall(r"\w+/\w+\.gin", task)}
RUNS_ELSEWHERE = {"run/arithmetic_vllm.gin", "run/sft.gin", "run/rows.gin"}  # another task, no reward, a user's reward
TASKS_ELSEWHERE = {"task/gsm8k.gin", "task/openmath.gin"}  # bound by run/gsm8k.gin itself; on the hub alone


def test_every_reward_run_and_task_has_a_line_on_the_page():
    rewards = {
        name
        for module in (code, format, math, episode)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        if [*inspect.signature(value).parameters][:2] == ["problem", "completion"]
    }
    renamed = {"correct": "math", "correct_evaluated": "math_evaluated", "all_tests_pass": "code"}
    named = {word for reward, *_ in LINES for word in re.findall(r"\w+", reward)}
    # No reward, but what the sandbox says; and a grader of given completions, which pays nothing but the answer.
    assert {name for name in rewards if renamed.get(name, name) not in named} == {"run_against_tests", "same_text"}
    assert {f"run/{path.name}" for path in (ROOT / "gin" / "run").glob("*.gin")} - RUNS_ELSEWHERE <= FILES
    texts = "\n".join((ROOT / "gin" / name).read_text() for name in FILES if name.startswith("run/"))
    named = FILES | {*re.findall(r'^include "(task/\w+\.gin)"', texts, re.MULTILINE)}
    assert {f"task/{path.name}" for path in (ROOT / "gin" / "task").glob("*.gin")} - named == TASKS_ELSEWHERE
