r"""Is the completion well formed? Nothing here knows the answer. A completion that ran into the limit never is.

A box is `\boxed{...}` with braces balanced as TeX balances them: an escaped brace `\{` is a character, not a brace.
"""

import re
from collections import deque
from collections.abc import Sequence

from grpo_fn.core.problem import Completion, Problem

_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MENTION = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAG_NAME = re.compile(r"[A-Za-z][\w-]*")


def boxed(problem: Problem, completion: Completion) -> float:
    r"""1 iff the completion ended by itself and holds exactly one `\boxed{...}`, closed and not empty; else 0.

    Args:
        problem: not read.
        completion: the completion that is judged.

    Returns:
        1.0 or 0.0.
    """
    text = completion.text
    if completion.truncated or len(_MENTION.findall(text)) != 1:
        return 0.0
    return 1.0 if (last_box(text) or "").strip() else 0.0


def answer_tags(problem: Problem, completion: Completion, *, tags: Sequence[str]) -> float:
    """1 iff the completion is `<a>...</a><b>...</b>` for the tags a, b, in this order, and ended by itself; else 0.

    Every tag opens once and closes once, no block is empty, and nothing but white space stands outside of the blocks.
    `("think", "answer")` is the format of DeepSeek-R1 (arXiv:2501.12948, table 1). Time is linear in the text.

    Args:
        problem: not read.
        completion: the completion that is judged.
        tags: names of the tags, in order, without brackets.

    Returns:
        1.0 or 0.0.

    Raises:
        ValueError: for tags that are no names, or not all different.
    """
    return _well_tagged(completion.text, completion.truncated, tags)


def answer_tags_by_prompt(problem: Problem, completion: Completion, *, tags: Sequence[str]) -> float:
    """`answer_tags`, for a prompt or chat template that has opened the first tag already: the completion is inside.

    Args:
        problem: not read.
        completion: the completion that is judged, without the first opening tag.
        tags: names of the tags, in order, without brackets; the prompt opens the first.

    Returns:
        1.0 or 0.0.

    Raises:
        ValueError: as `answer_tags`.
    """
    return _well_tagged(f"<{tags[0]}>{completion.text}" if tags else "", completion.truncated, tags)


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{`; None when there is none or the last one never closes.

    The last opening decides: an answer retracted by a second box does not count, and of nested boxes the inner one
    does. Time is linear in the text.

    Args:
        text: text of a completion or of a solution.

    Returns:
        The text between the braces, as it is; None without a closed last box.
    """
    opening = next(iter(deque(_OPENING.finditer(text), maxlen=1)), None)
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[opening.end() : brace.start()]
    return None


def _well_tagged(text: str, truncated: bool, tags: Sequence[str]) -> float:
    if isinstance(tags, str) or not tags or len(set(tags)) < len(tags) or not all(map(_TAG_NAME.fullmatch, tags)):
        raise ValueError(f'tags: got {tags!r}, wanted different names such as ("think", "answer")')
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    pieces = re.split(f"({'|'.join(marks)})", text, maxsplit=len(marks))  # text, mark, text, mark, ..., text
    if truncated or pieces[1::2] != marks:
        return 0.0
    # Outside, inside the first block, between, inside the second, ..., outside; one mark too many is in the last.
    return float(all((place % 2 == 1) == bool(piece.strip()) for place, piece in enumerate(pieces[::2])))
