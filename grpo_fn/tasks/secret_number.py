"""Numbers to be guessed, made on the spot: one in a range that the prompt names."""

from collections.abc import Sequence
from functools import partial

from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import Task, drawn_task


def task(*, max_value: int, numbers: int, test_size: int) -> Task:
    """Ranges of `numbers` whole numbers between 1 and max_value, one of them the number to be guessed.

    A range and its number are a content; `test_size` of them are held out.

    Args:
        max_value: largest number of any range.
        numbers: how many a range holds.
        test_size: held-out problems.

    Returns:
        The task; the answer is the number, `meta` has the `low` and `high` of the range.

    Raises:
        ValueError: for ranges of fewer than two numbers or more than max_value, or a test_size that leaves less than
            half to train on.
    """
    if not 2 <= numbers <= max_value:
        raise ValueError(
            f"got numbers {numbers} and max_value {max_value}, wanted numbers of at least 2 and at most it"
        )
    starts = max_value - numbers + 1
    make = partial(_problem, starts, numbers)
    return drawn_task(make, _content, width=2, contents=starts * numbers, test_size=test_size)


def _content(problem: Problem) -> tuple[int, int, str]:
    return problem.meta["low"], problem.meta["high"], problem.answer


def _problem(starts: int, numbers: int, draw: Sequence[float]) -> Problem:
    low = 1 + int(draw[0] * starts)
    high = low + numbers - 1
    prompt = f"I think of a number from {low} to {high}. Guess it."
    return Problem(0, prompt, str(low + int(draw[1] * numbers)), {"low": low, "high": high})
