"""Rewards of episodes: sums over turns, and what was done in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.problem import Completion, Problem, Turn
from grpo_fn.rewards.episode import last_reward, right_with_tool, total_reward, used_tool

ASKED = Problem(0, "?", "42", {})
rewards = st.one_of(st.none(), st.integers(-8, 8).map(float))


def episode(gains, calls=()):
    turns = (
        Turn("said", 1, "seen", reward, "state", n) for reward, n in zip(gains, calls or [0] * len(gains), strict=True)
    )
    return Completion("said", 1, False, tuple(turns))


@given(st.lists(rewards, max_size=5), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_total_is_the_discounted_sum(gains, gamma):
    got = total_reward(ASKED, episode(gains), gamma=gamma)
    expected = None if None in gains else sum(gamma**k * gain for k, gain in enumerate(gains))
    assert got == pytest.approx(expected)


@given(st.lists(rewards, max_size=5))
def test_the_last_reward_is_the_verdict(gains):
    assert last_reward(ASKED, episode(gains)) == (gains[-1] if gains else 0.0)


@given(st.lists(st.integers(0, 2), max_size=4))
def test_a_tool_was_used_in_any_turn(calls):
    assert used_tool(ASKED, episode([0.0] * len(calls), calls)) == float(any(calls))


@pytest.mark.parametrize("gamma", [-0.1, 1.1])
def test_a_discount_outside_its_range_is_refused(gamma):
    with pytest.raises(ValueError, match=rf"gamma: got {gamma}, expected 0 to 1"):
        total_reward(ASKED, episode([1.0]), gamma=gamma)


@pytest.mark.parametrize(
    ("rewards", "calls", "expected"),
    [
        ([0.0, 1.0], [1, 0], 1.0),
        ([1.0], [0], 0.0),
        ([0.0, 0.0], [1, 0], None),
        ([0.0, None], [1, 0], None),
        ([], [], None),
    ],
)
def test_a_tool_counts_where_the_answer_is_right(rewards, calls, expected):
    assert right_with_tool(ASKED, episode(rewards, calls)) == expected
