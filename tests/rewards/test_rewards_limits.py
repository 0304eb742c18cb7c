"""A reward with its own deadline: the same reward, under the same name, that says how long it may take."""

from functools import partial, reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.math import correct
from grpo_fn.rewards.wrappers import by_task, with_timeout
from grpo_fn.shell.reward_workers.reward_pool import seconds_of


def tenth(problem, completion, *, of):
    return of / 10 if completion.text else None


def halved(problem, completion, *, reward):
    """A wrapper that is none of the pool's business."""
    return reward(problem, completion) / 2


seconds = st.floats(1e-3, 1e6)


@given(seconds, st.floats(-9, 9), st.sampled_from(["", "a"]))
def test_a_deadline_changes_no_value(limit, of, text):
    row = Problem(0, "?", "42", {}), Completion(text, 1, False)
    reward = partial(tenth, of=of)
    assert partial(with_timeout, reward=reward, seconds=limit)(*row) == reward(*row)


@given(st.lists(seconds, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_the_least_of_several_deadlines_counts_whatever_is_between_them(limits, wrapped, knobs):
    def around(reward, limit):
        inside = partial(halved, reward=reward) if wrapped else reward
        whole = partial(with_timeout, reward=inside, seconds=limit)
        return partial(whole) if knobs else whole

    assert seconds_of(reduce(around, limits, partial(tenth, of=1)), 5.0) == min(limits)


@given(seconds, seconds, seconds)
def test_the_rewards_of_a_table_share_the_longest_of_their_deadlines(default, one, other):
    table = {"a": partial(with_timeout, reward=correct, seconds=one), "b": correct}
    fn = partial(by_task, rewards=table)
    assert seconds_of(fn, default) == max(one, default)
    both = partial(by_task, rewards={**table, "b": partial(with_timeout, reward=correct, seconds=other)})
    assert seconds_of(both, default) == max(one, other)
    assert seconds_of(partial(with_timeout, reward=both, seconds=default), 1e9) == min(default, max(one, other))


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_no_time_at_all_is_refused(limit):
    with pytest.raises(ValueError, match=f"seconds: got {limit}, expected more than 0"):
        seconds_of(partial(with_timeout, reward=correct, seconds=limit), 5.0)
