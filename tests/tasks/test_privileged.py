"""Privileged prompts: what is in them, whom they are for, and that templates are looked at."""

from functools import partial

import pytest
from fakes import problem
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.problem import Conversation
from grpo_fn.tasks import privileged
from grpo_fn.tasks.privileged import Sample

TEMPLATE = "{prompt} | {privileged}"
ASKED = problem(0, "2+3?")._replace(answer="5", meta={"solution": "2+3=5"})
rewards = st.none() | st.sampled_from([0.0, 0.5, 1.0, 1.1])


def samples(*rewards: float | None) -> list[Sample]:
    return [Sample(f"try {i}", reward, {}) for i, reward in enumerate(rewards)]


def test_a_prompt_shows_the_answer_or_the_named_field_and_none_without_it():
    assert privileged.with_answer(ASKED, (), 0, template=TEMPLATE) == "2+3? | 5"
    assert privileged.with_answer(ASKED._replace(answer=""), (), 0, template=TEMPLATE) is None
    named = partial(privileged.with_field, template=TEMPLATE)
    assert named(ASKED, (), 0, name="solution") == "2+3? | 2+3=5"
    assert named(ASKED, (), 0, name="hint") is None


@given(st.lists(rewards, min_size=1, max_size=5), st.data())
def test_a_right_sibling_teaches_and_never_the_sample_itself(given_rewards, data):
    place = data.draw(st.integers(0, len(given_rewards) - 1))
    got = privileged.with_right_sibling(ASKED, samples(*given_rewards), place, template=TEMPLATE, least_reward=1.0)
    right = [i for i, reward in enumerate(given_rewards) if i != place and reward is not None and reward >= 1.0]
    assert got == (f"2+3? | try {right[0]}" if right else None)


def test_feedback_is_the_sample_and_what_its_graders_said():
    judged = [Sample("I say 6", 0.1, {"correct": 0.0, "boxed": 1.0}), Sample("?", None, {})]
    how = partial(privileged.with_feedback, template=TEMPLATE)
    assert how(ASKED, judged, 0) == "2+3? | I say 6\n\ncorrect: 0\nboxed: 1"
    assert how(ASKED, judged, 1) is None
    assert how(ASKED, samples(0.5), 0) == "2+3? | try 0\n\nreward: 0.5"


def test_texts_may_have_braces_and_a_conversation_keeps_its_other_messages():
    boxed = ASKED._replace(prompt="box {it}", answer="\\boxed{5}")
    assert privileged.with_answer(boxed, (), 0, template=TEMPLATE) == "box {it} | \\boxed{5}"
    chat = Conversation('[{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+3?"}]')
    got = privileged.with_answer(ASKED._replace(prompt=chat), (), 0, template=TEMPLATE)
    assert isinstance(got, Conversation)
    assert [one["content"] for one in got.messages] == ["Be short.", "2+3? | 5"]


@pytest.mark.parametrize("template", ["{prompt} {answer}", "{prompt} {", "{prompt} {}", "{prompt}"])
def test_a_template_without_its_fields_is_refused(template):
    with pytest.raises(ValueError, match=r"template: got '.*, expected .*\{privileged\}"):
        privileged.with_answer(ASKED, (), 0, template=template)
