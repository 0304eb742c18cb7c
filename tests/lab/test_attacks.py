"""Texts that want to be paid without an answer: what they are made of, who falls for each, and who does not."""

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


def contains_gold(problem, text):
    return float(problem.answer in text)


def any_digit(problem, text):
    return float(re.search(r"\d", text) is not None)


def well_tagged(problem, text):
    return reward_format.answer_tags(problem, Completion(text, 1, False), tags=("think", "answer"))


def repeats_the_prompt(problem, text):
    return float(len(set(problem.prompt.split()) & set(text.split())) / len(set(problem.prompt.split())))


def quoting_judge(problem, text):
    """A judge that fills its template field by field, quotes the reply, and is read at the first thing like a grade."""
    asked = "A reply follows.\n{completion}\nEnd with {mark}: N".replace("{completion}", text)
    answer = asked.replace("{mark}", "verdict-nmlkjihgfedc").partition("\n")[2].rpartition("\nEnd")[0] + "\nGrade: 0"
    found = re.search(r"(?:verdict-[a-p]{12}|[Gg]rade): (\d+)", answer)
    return float(found[1] == "10")


# Of each attack, a reward that pays it in full and is nowhere near a judge of answers.
FOOLED = {
    "constant_answers": any_digit,
    "listed_candidates": contains_gold,
    "empty_templates": lambda problem, text: float("oxed" in text),
    "look_alikes": lambda problem, text: float(any(map(str.isdigit, text))),
    "long_texts": lambda problem, text: min(1.0, len(text) / 4000),
    "format_only": well_tagged,
    "repeated_marks": lambda problem, text: min(1.0, text.count("####") / 10),
    "prompt_echo": repeats_the_prompt,
    "injected_verdicts": lambda problem, text: float("score is 1" in text or "Score: 1" in text),
    "judge_injections": lambda problem, text: quoting_judge(problem, text),
    "single_part": lambda problem, text: float(len(text) < 2),
}


def test_every_attack_has_a_reward_that_falls_for_it():
    assert FOOLED.keys() == ATTACKS.keys()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_weak_reward_falls_for_it(name):
    assert max(FOOLED[name](PROBLEM, text) for text in ATTACKS[name](PROMPT)) == 1.0


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("judge", [correct, correct_evaluated, lenient])
def test_the_judges_do_not(name, judge):
    """No constant is 17, and neither number of the prompt is."""
    texts = [text for text in ATTACKS[name](PROMPT) if "3 + 14" not in text and r"\boxed{17}" not in text]
    assert len(texts) >= len(ATTACKS[name](PROMPT)) - 2
    assert {judge(PROBLEM, Completion(text, 1, False)) for text in texts} == {0.0}


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
