r"""Is the completion well formed? Nothing here knows the answer.

A box is `\boxed{...}` with braces balanced as TeX balances them: an escaped brace `\{` is a character, not a brace.
"""

import re

from grpo_fn.problem import Completion, Problem

_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MENTION = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def boxed(problem: Problem, completion: Completion) -> float:
    r"""1 iff the completion ended by itself and holds exactly one `\boxed{...}`, closed and not empty; else 0."""
    text = completion.text
    if completion.truncated or len(_MENTION.findall(text)) != 1:
        return 0.0
    return 1.0 if (last_box(text) or "").strip() else 0.0


def has_box(text: str) -> bool:
    r"""Does the text open a `\boxed{`, closed or not?"""
    return _OPENING.search(text) is not None


def last_box(text: str) -> str | None:
    r"""What is inside the last `\boxed{`; None when there is none or the last one never closes.

    The last opening decides: an answer retracted by a second box does not count, and of nested boxes the inner one
    does. Time is linear in the text.
    """
    start = None
    for opening in _OPENING.finditer(text):
        start = opening.end()
    return None if start is None else _balanced(text, start)


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()]
    return None
