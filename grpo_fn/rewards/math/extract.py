r"""Which text is the answer. Nothing here knows the gold or any algebra.

What is between `<think>` and `</think>` is no answer. Of the rest, a marked answer is the last box with those that are
joined to it, or else what follows the last `####`, or else the last "the answer is" or "Answer:" at the start of a
line. The last mark decides: to write several answers does not help.
"""

import re

from grpo_fn.rewards.format import last_match
from grpo_fn.rewards.math.boxes import Box, find_boxes, joined_parts
from grpo_fn.rewards.math.spelling import latin_digits

LONGEST_ANSWER = 256  # characters; the longest gold of MATH has 159
TAIL = 2048  # characters at the end of a text in which formulas are looked for

_HASHES = re.compile(r"####[ \t]*(?=[^\sA-Za-z#])")  # not a heading of Markdown
_SAID = re.compile(
    r"\bthe\s+(?:final\s+|correct\s+)?answer\s+is\b\s*:?|^[ \t*#]*(?:final[ \t]+)?answer[ \t*]*:", re.I | re.M
)
_SENTENCE_END = re.compile(r"\n|\.(?=\s|$)|,?\s+(?:because|since|so|which|where|as)\b", re.I)
_THOUGHT = re.compile(r"<(/?)think(?:ing)?>", re.I)

_DIGITS = r"(?:[0-9]{1,3}(?:[, \u00a0\u202f\u2009][0-9]{3})+(?![0-9])|[0-9]+)"  # thousands in prose, 1 000 too
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_LAST_NUMBER = re.compile(rf"(?<![0-9.])(?<![0-9]/)(?:(?<![A-Za-z)\]}}])[+-])?{_UNSIGNED}(?:/[0-9]+)?")
_FORMULA = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|(?<!\\)\$(?P<inline>[^$\n]*)(?<!\\)\$|\\\((?P<round>[^\n]*?)\\\)|\\\[(?P<square>.*?)\\\]"
    r"|\\begin\{(?P<kind>align|aligned|gather|equation|eqnarray)(?P<star>\*?)\}(?P<lines>.*?)\\end\{(?P=kind)(?P=star)\}",
    re.DOTALL,
)
_LONE_NAME = re.compile(r"\s*[A-Za-z]{1,3}(?:_\{?\w\}?)?[\s.,]*")  # a formula that says nothing of a value
_LINES = re.compile(r"\\begin\{(?!align|gather|split)")


def without_thoughts(text: str) -> str:
    """The text outside `<think>` and `</think>`: one that never closes goes to the end, one never opened began before.

    Args:
        text: text of a completion.

    Returns:
        What is left.
    """
    kept, place, inside = [], 0, False
    for mark in _THOUGHT.finditer(text):
        if not mark[1] and not inside:
            kept.append(text[place : mark.start()])
        elif mark[1]:
            kept = kept if inside else []
            place = mark.end()
        inside = not mark[1]
    return "".join(kept if inside else [*kept, text[place:]])


def marked_answer(text: str) -> str | None:
    """The text that is marked as the answer, as written; None where nothing is. Time is linear in the text.

    Args:
        text: text of a completion.

    Returns:
        The marked answer; "" where the last box never closes.
    """
    text = without_thoughts(text)
    if boxes := find_boxes(text):
        return joined_parts(text, boxes) or ""
    for marker in (_HASHES, _SAID):
        if mark := last_match(marker, text):
            return _SENTENCE_END.split(text[mark.end() : mark.end() + 2 * LONGEST_ANSWER].lstrip(), maxsplit=1)[0]
    return None


def last_value(text: str) -> str | None:
    r"""The last formula, or the last number behind it; None without either.

    A formula is `$...$`, `$$...$$`, `\(...\)`, `\[...\]` or an `align`, of which the last line counts, with those that
    are joined to it as boxes are. A letter alone, as in "where $x$ is the length", is none. Time is linear in the
    text: formulas are looked for in its last `TAIL` characters.

    Args:
        text: text of a completion.

    Returns:
        The formula without its signs, or the number.
    """
    text = latin_digits(without_thoughts(text)[-TAIL:])
    formulas = [formula for formula in map(_formula, _FORMULA.finditer(text)) if not _LONE_NAME.fullmatch(formula[2])]
    number = last_match(_LAST_NUMBER, text)
    if number is None or (formulas and number.start() < formulas[-1].end):
        return joined_parts(text, formulas)
    return number.group()


def _formula(found: re.Match[str]) -> Box:
    inside = next(found[name] for name in ("display", "inline", "round", "square", "lines") if found[name] is not None)
    if not _LINES.search(inside):
        inside = re.sub(r"\\(?:begin|end)\{[a-z]+\*?\}", "", inside)
        *_, inside = [line for line in inside.split(r"\\") if line.strip()] or [""]
        inside = inside.replace("&", "")
    return Box(found.start(), found.end(), inside)
