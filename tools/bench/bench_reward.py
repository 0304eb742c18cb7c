"""Reward and tool of `tools/bench`, the same functions on both sides. No torch, nothing of the project in here."""

import re
from typing import Any

EXPRESSION = re.compile(r"(\d{1,9})\*(\d{1,9})([-+])(\d{1,9})")


def odd(text: str) -> float:
    """The share of characters with an odd code point: random texts differ in it, so every group has a signal."""
    return sum(ord(letter) % 2 for letter in text) / max(1, len(text))


def ours(problem: Any, completion: Any) -> float:
    """As grpo_fn takes a reward."""
    return odd(completion.text)


def trl(completions: list[str], **others: Any) -> list[float]:
    """As TRL takes a reward."""
    return [odd(text) for text in completions]


def trl_episodes(completions: list[list[dict[str, Any]]], **others: Any) -> list[float]:
    """As TRL takes a reward of conversations: of what was said last."""
    return [odd(messages[-1]["content"]) for messages in completions]


def calculator(expression: str) -> str:
    """Compute an expression.

    Args:
        expression: two factors and a third number, as in 12*34+56

    Returns:
        The value; "?" for anything else, so that an error reads the same on both sides.
    """
    found = EXPRESSION.fullmatch(expression.strip())
    if found is None:
        return "?"
    a, b, sign, c = found.groups()
    return str(int(a) * int(b) + int(sign + c))
