"""The reward of `tools/bench`, the same function on both sides. No torch, nothing of the project in here."""

from typing import Any


def odd(text: str) -> float:
    """The share of characters with an odd code point: random texts differ in it, so every group has a signal."""
    return sum(ord(letter) % 2 for letter in text) / max(1, len(text))


def ours(problem: Any, completion: Any) -> float:
    """As grpo_fn takes a reward."""
    return odd(completion.text)


def trl(completions: list[str], **others: Any) -> list[float]:
    """As TRL takes a reward."""
    return [odd(text) for text in completions]
