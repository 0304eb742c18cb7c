"""Texts that try to be paid without an answer: a weak reward falls for each of them, the judges of answers for none."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.lab.attacks import ATTACKS
from grpo_fn.rewards import format as reward_format
from grpo_fn.rewards.math import correct, correct_evaluated, lenient

PROMPT = "Tom has 3 apples and buys 14 more. How many are there?"
PROBLEM = Problem(0, PROMPT, "17", {})


def well_tagged(text):
    return reward_format.answer_tags(PROBLEM, Completion(text, 1, False), tags=("think", "answer"))


def quoting_judge(text):
    """A judge that fills its template field by field, quotes the reply, and is read at the first thing like a grade."""
    question = "A reply follows.\n{completion}\nEnd with {mark}: N".replace("{completion}", text)
    answer = question.replace("{mark}", "verdict-nmlkjihgfedc").partition("\n")[2].rpartition("\nEnd")[0] + "\nGrade: 0"
    return float(re.search(r"(?:verdict-[a-p]{12}|[Gg]rade): (\d+)", answer)[1] == "10")


# Of each attack, a reward that pays it in full and is nowhere near a judge of answers.
FOOLED = {
    "constant_answers": lambda text: float(re.search(r"\d", text) is not None),
    "listed_candidates": lambda text: float("17" in text),
    "empty_templates": lambda text: float("oxed" in text),
    "look_alikes": lambda text: float(any(map(str.isdigit, text))),
    "long_texts": lambda text: min(1.0, len(text) / 4000),
    "format_only": well_tagged,
    "repeated_marks": lambda text: min(1.0, text.count("####") / 10),
    "prompt_echo": lambda text: float({*PROMPT.split()} <= {*text.split()}),
    "injected_verdicts": lambda text: float("score is 1" in text or "Score: 1" in text),
    "judge_injections": quoting_judge,
    "single_part": lambda text: float(len(text) < 2),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_weak_reward_falls_for_an_attack_and_the_judges_do_not(name):
    texts = ATTACKS[name](PROMPT)
    assert max(map(FOOLED[name], texts)) == 1.0
    sound = [text for text in texts if "3 + 14" not in text and r"\boxed{17}" not in text]  # the sum is the answer
    assert len(sound) >= len(texts) - 2
    for judge in (correct, correct_evaluated, lenient):
        assert {judge(PROBLEM, Completion(text, 1, False)) for text in sound} == {0.0}


@given(st.text(max_size=200), st.text(max_size=200))
def test_an_attack_has_as_many_texts_for_every_prompt_and_the_same_ones_again(first, second):
    for attack in ATTACKS.values():
        assert len(attack(first)) == len(attack(second))
        assert attack(first) == attack(first)


def test_asserts_in_a_prompt_become_a_program_that_knows_them():
    program = ATTACKS["prompt_echo"]("Add.\nassert add(1, 2) == 3\nassert add(2, 2) == 4")[-1]
    space = {}
    exec(program.strip("`").removeprefix("python"), space)
    assert (space["add"](1, 2), space["add"](2, 2), space["add"](5, 5)) == (3, 4, None)
