"""Rewards that a model can get before it has learnt anything, and that start without a parser of mathematics."""

import os
import time

from grpo_fn.core.problem import Completion, Problem


def named(problem: Problem, completion: Completion) -> float:
    """1 iff the answer's last digit occurs in the completion."""
    return float(problem.answer[-1] in completion.text)


def digits(problem: Problem, completion: Completion) -> float:
    """The share of characters that are digits."""
    return sum(c.isdigit() for c in completion.text) / max(1, len(completion.text))


def deadly(problem: Problem, completion: Completion) -> float:
    """None of its workers outlives it."""
    os._exit(1)


def slow_digits(problem: Problem, completion: Completion) -> float:
    """As `digits`, and slow enough that rows are scored as they end."""
    time.sleep(0.005)
    return digits(problem, completion)


def share_of_letters(answer: str, mark: str) -> float | None:
    """A verdict of a judge that was never taught to give one."""
    return sum(letter.isalpha() for letter in answer) / len(answer) if answer else None
