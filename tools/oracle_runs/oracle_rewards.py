"""Rewards of tools/oracle.py's runs, which depend on nothing but the text: the file serves every revision."""

from typing import Any


def named(problem: Any, completion: Any) -> float:
    """1 iff the answer's last digit occurs in the completion."""
    return float(problem.answer[-1] in completion.text)


def digits(problem: Any, completion: Any) -> float:
    """The share of characters that are digits."""
    return sum(c.isdigit() for c in completion.text) / max(1, len(completion.text))
