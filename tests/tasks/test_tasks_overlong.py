"""Overlong prompts: refused, or left out and counted; what stays fits, and a benchmark is not cut by the way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.problem import Problem
from grpo_fn.tasks.overlong import drop, drop_both, refuse
from grpo_fn.tasks.task import TEST_UID, from_rows

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def prompt_length(problem):
    return len(problem.prompt)


def made(train, test):
    """A task whose prompts have these lengths; the first character keeps training and held-out prompts apart."""
    rows = [Problem(0, "t" * length, "", {}) for length in train]
    return from_rows(rows, [Problem(0, "h" * length, "", {}) for length in test])


@given(lengths, lengths, st.integers(1, 9))
def test_refuse_returns_the_task_when_all_fits_and_names_the_longest_prompt_otherwise(train, test, limit):
    task = made(train, test)
    if max(*train, *test) <= limit:
        assert refuse(task, prompt_length, limit) == (task, 0)
        return
    over, sign = (train, "t") if max(train) > limit else (test, "h")
    with pytest.raises(
        ValueError, match=rf"over the {limit} tokens .* the longest has at least {max(over)}: '{sign * max(over)}'"
    ):
        refuse(task, prompt_length, limit)


@given(lengths, lengths, st.integers(1, 9))
def test_drop_leaves_the_rows_that_fit_and_counts_the_others(train, test, limit):
    task = made(train, test)
    if max(test) > limit or min(train) > limit:
        with pytest.raises(ValueError, match=r"held-out ones over|none may stay"):
            drop(task, prompt_length, limit)
        return
    left, count = drop(task, prompt_length, limit)
    assert [len(row.prompt) for row in left.rows] == [length for length in train if length <= limit]
    assert count == sum(length > limit for length in train) == len(train) - left.size
    assert left.test == task.test
    assert len(left.notes) == (count > 0)
    if count:
        long = [str(i) for i, length in enumerate(train) if length > limit]
        assert left.notes[0].endswith(f"of more than {limit} tokens: {', '.join(long)}")


@given(lengths, lengths, st.integers(1, 9))
def test_drop_both_leaves_held_out_problems_out_too_and_each_keeps_its_uid(train, test, limit):
    task = made(train, test)
    if min(test) > limit or min(train) > limit:
        with pytest.raises(ValueError, match=r"held-out ones over|none may stay"):
            drop_both(task, prompt_length, limit)
        return
    left, count = drop_both(task, prompt_length, limit)
    assert count == sum(length > limit for length in (*train, *test))
    assert [(p.uid - TEST_UID, len(p.prompt)) for p in left.test] == [(i, n) for i, n in enumerate(test) if n <= limit]
    assert len(left.notes) == (max(train) > limit) + (max(test) > limit)
