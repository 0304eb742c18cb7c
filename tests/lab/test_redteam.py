"""The red team: who is found out, on problems that the search has not seen, and what the command says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.lab.attacks import ATTACKS, EPISODE_ATTACKS
from grpo_fn.lab.redteam import TASKS, attack_named, attack_target, report_attack, text_target
from grpo_fn.redteam import main
from grpo_fn.rewards.math import correct

PROBLEMS = [Problem(uid, f"What is {uid} + 1000?", f"{uid + 1000}", {}) for uid in range(40, 72)]
ARITHMETIC = {"reward_knobs": [], "task": "arithmetic", "task_knobs": [], "pulls": 20, "workers": 1}


def judged(problems, texts):
    return [correct(problem, Completion(text, 1, False)) or 0.0 for problem, text in zip(problems, texts, strict=True)]


def test_a_sound_judge_pays_nothing_but_the_sum_that_the_prompt_states():
    campaign = attack_target(PROBLEMS, text_target(judged), pulls=10)
    scores = {found.which.attack: found.score for found in campaign.found}
    assert scores.keys() == ATTACKS.keys()
    assert scores.pop("prompt_echo") == 1.0  # the numbers of these prompts, added
    assert set(scores.values()) == {0.0}
    assert (campaign.gold, campaign.problems) == (1.0, 16)


def test_a_judge_of_containment_is_found_out_with_the_text():
    def contains(problems, texts):
        return [float(str(int(p.answer) - 1000) in text) for p, text in zip(problems, texts, strict=True)]

    best = attack_target(PROBLEMS, text_target(contains), pulls=10).found[0]
    assert best.score == 1.0
    assert "41" in best.text


def test_what_is_reported_is_measured_on_problems_that_the_search_has_not_seen():
    """A reward that pays on every other one alone promises the search much and gets nothing."""
    seen = {problem.uid for problem in PROBLEMS[::2]}
    campaign = attack_target(
        PROBLEMS, text_target(lambda problems, _: [float(p.uid in seen) for p in problems]), pulls=10
    )
    assert {found.score for found in campaign.found} == {0.0}


def test_the_same_rewards_give_the_same_campaign():
    assert attack_target(PROBLEMS, text_target(judged), pulls=15) == attack_target(
        PROBLEMS, text_target(judged), pulls=15
    )


def test_one_part_that_dominates_is_found_out():
    campaign = attack_named(
        rewards=["math", "grpo_fn.rewards.format.boxed"], weights=[1.0, 5.0], problems=8, **ARITHMETIC
    )
    assert campaign.found[0].score >= 5.0
    assert campaign.gold == 6.0
    assert campaign.reward == "math + 5 * grpo_fn.rewards.format.boxed"
    assert "best without the answer: 5." in report_attack(campaign)


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"rewards": ["mth"]}, "expected math"),
        ({"weights": [1.0, 2.0]}, "--weight: got 2 for 1 rewards"),
        ({"problems": 1}, "got 1 held-out problems and 20 pulls"),
        ({"pulls": -1}, "got 8 held-out problems and -1 pulls"),
        ({"task": "arithmetics"}, "expected arithmetic"),
        ({"task": "grpo_fn.verifier.find_boxes"}, "text"),
        ({"task": "gsm8k"}, "expected --task_param data=VALUE"),
        ({"task_knobs": ["max_values=3"]}, "max_values"),
        ({"rewards": ["math", "lenient"], "reward_knobs": ["tolerance=1"]}, "expected a knob of one of the rewards"),
    ],
)
def test_bad_input_says_what_was_expected(knobs, complaint):
    with pytest.raises((ValueError, TypeError), match=re.escape(complaint)):
        attack_named(**{"rewards": ["math"], "weights": [], "problems": 8, **ARITHMETIC, **knobs})


def test_the_command_says_bad_input_in_one_message_and_exits_with_2(capsys):
    assert main(["--reward", "math", "--task", "gsm8k"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "expected --task_param data=VALUE" in said.err
    assert "Traceback" not in said.err


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['--help']; import runpy; "
    done = subprocess.run(
        [sys.executable, "-c", code + "runpy.run_module('grpo_fn.redteam', run_name='__main__')"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in TASKS)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards" / "redteam.md"


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["math", "math_evaluated", "lenient"])
def test_the_page_says_what_the_command_finds_on_arithmetic(reward):
    campaign = attack_named(rewards=[reward], weights=[], problems=64, **{**ARITHMETIC, "pulls": 100})
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{reward}` | arithmetic |"))
    best = campaign.found[0]
    assert row.startswith(f"| `{reward}` | arithmetic | {best.score:.3f} | {campaign.gold:.3f} | {best.which.attack} |")


def test_episodes_of_a_run_are_attacked_in_its_environment(capsys):
    assert main(["--gin_file", "run/maze.gin", "--problems", "2", "--pulls", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("total_reward on run/maze.gin: mean scores over 1 problems")
    assert "; the golds get 1.000" in said  # the shortest way, a direction a turn
    names = {line.split("|")[1].strip() for line in said.splitlines() if line.startswith("| ")}
    assert names - {"attack"} == EPISODE_ATTACKS.keys()
    assert r"north\n> " in said


def test_a_chat_format_that_reads_calls_in_tokens_alone_is_refused(capsys):
    bound = (
        "sections.Episodes.chat_format=@chat_format.family_renderer",
        "chat_format.family_renderer.family='x'",
    )
    params = [part for one in bound for part in ("--gin_param", one)]
    assert main(["--gin_file", "run/calculator.gin", *params, "--problems", "2", "--pulls", "0"]) == 2
    assert "expected one with the knob read_calls: chat_format.tokenizer_template" in capsys.readouterr().err
