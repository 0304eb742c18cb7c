"""Properties of a reward that a run expects, checked in worker processes under a deadline."""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import hypothesis.strategies as st
from hypothesis.strategies import SearchStrategy

from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.shell.reward_workers.worker_pool import RETURNED_NONE
from grpo_fn.testing import texts
from grpo_fn.testing.harness import UNSHRUNK, check_claim, for_all, simplest_example
from grpo_fn.testing.texts import TextRow

Score = Callable[[Sequence[TextRow]], list[float | None]]
Bounds = tuple[float | int, float | int]


def check_reward(
    reward: RewardFn,
    *,
    problems: SearchStrategy[Problem] | None = None,
    completions: texts.Completions = texts.completions,
    hostile: Sequence[str] = texts.HOSTILE + texts.BOMBS,
    bounds: Bounds = (-math.inf, math.inf),
    deadline: float | int = 5.0,
    memory_mb: int = 1024,
) -> None:
    """Check that a reward is fit for a run, whatever a model writes.

    It is found by its name in another process; never raises; returns a finite number within `bounds`, or None; takes
    at most `deadline` and `memory_mb` a row; and says the same of equal rows, in any order, again and in every process.

    Args:
        reward: (problem, completion) -> a number or None, its knobs bound.
        problems: draws what it is asked about; None: `text_problems()`.
        completions: problem -> strategy that draws what a model wrote to it.
        hostile: texts tried besides, which break parsers and blow up what computes or runs them; HOSTILE alone for a
            reward that has to run them and lets a run's deadline save it.
        bounds: lowest and highest value of the reward.
        deadline: seconds a row; by default that of gin/base.gin.
        memory_mb: address space of each worker in MB; by default that of gin/base.gin.

    Raises:
        AssertionError: the reward is not fit; the message shows the row.
    """
    asked = texts.text_problems() if problems is None else problems
    rows, problem = texts.text_rows(asked, completions), simplest_example(asked)
    found_by_name(reward)
    with scoring(reward, deadline, memory_mb) as one, scoring(reward, deadline, memory_mb) as other:
        for text in hostile:
            check_value_and_time(one, TextRow(problem, Completion(text, 1, False)), bounds)
        for_all(rows, partial(check_value_and_time, one, bounds=bounds), phases=UNSHRUNK)
        a_function_of_the_row(one, other, rows)


def found_by_name(reward: RewardFn) -> None:
    """Workers are sent the reward's name and its knobs, no code."""
    try:
        pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"got {reward!r}, expected a function that a module defines: {error}") from error


def check_value_and_time(score: Score, row: TextRow, bounds: Bounds) -> None:
    """Check that a row gets a number within bounds or None. That the number is finite is the worker's own demand."""
    (value,) = score([row])
    fits = value is None or bounds[0] <= value <= bounds[1]
    check_claim(fits, f"got {value} on {row}, expected within {bounds}, or None")


def a_function_of_the_row(one: Score, other: Score, rows: SearchStrategy[TextRow]) -> None:
    """No memory of other rows, no clock, no unkeyed randomness, no hash that every process salts anew."""
    shuffled = st.lists(rows, min_size=1, max_size=4).flatmap(
        lambda drawn: st.tuples(st.just(drawn), st.permutations(range(len(drawn))))
    )

    def holds(example: tuple[list[TextRow], list[int]]) -> None:
        drawn, order = example
        first, again = one(drawn), one(drawn)
        check_claim(again == first, f"got {again} after {first} for the same rows, expected the same")
        elsewhere = other([drawn[place] for place in order])
        expected = [first[place] for place in order]
        check_claim(elsewhere == expected, f"got {elsewhere} in another process and order, expected {expected}")

    for_all(shuffled, holds, phases=UNSHRUNK)


@contextmanager
def scoring(reward: RewardFn, deadline: float, memory_mb: int) -> Iterator[Score]:
    """A worker of its own for `reward`; raises AssertionError when a row costs it the worker."""
    with RewardPool(workers=1, timeout_per_completion=deadline, memory_mb=memory_mb, stop_on_error=True) as pool:

        def score(rows: Sequence[TextRow]) -> list[float | None]:
            outcomes = pool.judge(reward, [row.problem for row in rows], [row.completion for row in rows])
            for row, outcome in zip(rows, outcomes, strict=True):
                known = outcome.value is not None or outcome.reason == RETURNED_NONE
                check_claim(known, f"got {outcome.reason} on {row}, expected a number or None")
            return [outcome.value for outcome in outcomes]

        yield score
