r"""The boxes of a text: where they are, what is in them, and which of them are one answer together.

A box is `\boxed{...}`, `\fbox{...}` or `\framebox{...}` with braces balanced as TeX balances them, or one of these
before a bare number or formula, `\boxed 42`. Of nested boxes the innermost counts.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MOST_BOXES = 64

_TOKEN = re.compile(r"\\{1,2}(?:boxed|fbox|framebox)(?![A-Za-z])\s*(\{)?|\\.|[{}]", re.DOTALL)
_MENTION = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
# What stands after `\boxed` without a brace: a number, or one command with its arguments.
_BARE = re.compile(
    r"[+−-]?\s?[0-9][0-9.,/]*|\\(?!boxed|fbox)[A-Za-z]{2,12}(?:\{(?:[^{}]|\{[^{}]{0,64}\}){0,64}\}){0,2}"
)
_DOUBLED = re.compile(r"\s*(\{(?:[^{}]|\{[^{}]{0,64}\}){1,256}\})[\s$.]{0,16}\Z")

_NAME = r"[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?\s*="
JOINT = re.compile(
    rf"[\s$.\\)(]*(?:[,;&]|\\(?:text|mbox|mathrm)\s*\{{[\s,]*(?:and|or)[\s,]*\}}|\b(?:and|or)\b)"
    rf"(?:[\s$,\\)(]|\b(?:and|or)\b)*(?:{_NAME})?[\s$]*"
)
LONGEST_JOINT = 40  # characters
_LEADING_NAME = re.compile(rf"\s*{_NAME}")


class Box(NamedTuple):
    """A box: where it begins and ends in its text, and what is in it; None where it never closes."""

    start: int
    end: int
    inside: str | None


def find_boxes(text: str) -> list[Box]:
    r"""The innermost boxes among the last `MOST_BOXES`, in order; one that never closes is last. Time is linear.

    `\boxed{{42}`, whose inner braces close and are all there is, holds 42.

    Args:
        text: any text.

    Returns:
        The boxes.
    """
    mentions = deque(_MENTION.finditer(text), maxlen=MOST_BOXES)
    if not mentions:
        return []
    found: list[Box] = []
    opened: list[tuple[int, int] | None] = []  # of each open brace: of a box, where it and its inside begin
    newest = -1  # where the last box to be opened begins
    for token in _TOKEN.finditer(text, max(0, mentions[0].start() - 1)):
        mark = token.group()
        if mark == "{":
            opened.append(None)
        elif mark == "}":
            box = opened.pop() if opened else None
            if box is not None and box[0] == newest:
                found.append(Box(newest, token.end(), text[box[1] : token.start()]))
        elif token[1]:
            newest = token.start()
            opened.append((newest, token.end()))
        elif len(mark) > 2 and (bare := _BARE.match(text, token.end())):
            newest = token.start()
            found.append(Box(newest, bare.end(), bare.group()))
    unclosed = next((box for box in opened if box is not None and box[0] == newest), None)
    if unclosed is not None:
        doubled = _DOUBLED.match(text, unclosed[1])
        found.append(Box(newest, len(text), doubled[1] if doubled else None))
    return found


def joined_parts(text: str, parts: Sequence[Box]) -> str | None:
    """The last part with those before it that a comma, a semicolon, "and" or "or" joins to it, as one list.

    The same part twice is one. A name before an equals sign is not part of the list.

    Args:
        text: the text that the parts are in.
        parts: boxes or formulas, in order.

    Returns:
        The list, or the part that is alone; None without a part, and where the last one never closes.
    """
    if not parts or parts[-1].inside is None:
        return None
    chain = [parts[-1].inside]
    for before, after in zip(parts[-2::-1], parts[:0:-1], strict=True):
        between = text[before.end : after.start]
        if before.inside is None or len(between) > LONGEST_JOINT or not JOINT.fullmatch(between):
            break
        chain.append(before.inside)
    return as_list(chain[::-1])


def as_list(parts: Sequence[str]) -> str:
    """Several answers as one list, each once and without its name.

    Args:
        parts: at least one answer, as written.

    Returns:
        The only one as it is, or several with commas between them.
    """
    different = list(dict.fromkeys(part.strip() for part in parts))
    if len(different) == 1:
        return parts[-1]
    return ", ".join(_LEADING_NAME.sub("", part) for part in different)
