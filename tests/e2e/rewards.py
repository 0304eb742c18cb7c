"""Rewards that a model can get before it has learnt anything, and that start without a parser of mathematics."""

import os

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
