r"""Which text is the answer. Nothing here knows the gold or any algebra.

What is between `<think>` and `</think>` is no answer. Of the rest, a marked answer is the last box with those that are
joined to it, or else what follows the last `####`, or else the last "the answer is" or "Answer:" at the start of a
line. The last mark decides: to write several answers does not help.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from grpo_fn.verifier.spelling import SCALE, latin_digits

# -- the boxes of a text


MOST_BOXES = 64

_TOKEN = re.compile(r"\\{1,2}(?:boxed|fbox|framebox)(?![A-Za-z])\s*(\{)?|\\.|[{}]", re.DOTALL)
_MENTION = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
# What stands after `\boxed` without a brace: a number, or one command with its arguments.
_BARE = re.compile(
    r"[+−-]?\s?[0-9][0-9.,/]*|\\(?!boxed|fbox)[A-Za-z]{2,12}(?:\{(?:[^{}]|\{[^{}]{0,64}\}){0,64}\}){0,2}"
)
# What makes another number of a box: a minus or a digit before it; a digit, a power, a factor or a divisor behind it.
_MINUS_BEFORE = re.compile(r"(?:(?<![-−–])[-−]|[$=({\[][ \t]*[-−][ \t]*)\Z")
_FACTOR_BEFORE = re.compile(r"[0-9][.,]?\Z")
_FACTOR_BEHIND = re.compile(
    r"[.,]?[0-9]|\s?\^\s?\{?\s?[0-9A-Za-z(+-]|\s?(?:\\(?:pi|sqrt|[dtc]?frac|cdot|times)(?![A-Za-z])|[*/+]\s?[0-9(\\])|-[0-9(\\]"
)
_SIMPLE = re.compile(r"\s*[0-9.,/]+\s*|\s*\\[A-Za-z]+[^+-]*")
_DOUBLED = re.compile(r"\s*(\{(?:[^{}]|\{[^{}]{0,64}\}){1,256}\})[\s$.]{0,16}\Z")

_NAME = r"[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?\s*="
JOINT = re.compile(
    rf"[\s$.\\)(]*(?:[,;&]|\\(?:text|mbox|mathrm)\s*\{{[\s,]*(?:and|or)[\s,]*\}}|\b(?:and|or)\b)"
    rf"(?:[\s$,\\)(]|\b(?:and|or)\b)*(?:{_NAME})?[\s$]*"
)
LONGEST_JOINT = 40  # characters
_LEADING_NAME = re.compile(rf"\s*{_NAME}")


class Box(NamedTuple):
    """A box: where it begins and ends in its text, and what is in it; None where it is not a whole answer."""

    start: int
    end: int
    inside: str | None


def find_boxes(text: str) -> list[Box]:
    r"""The innermost boxes among the last `MOST_BOXES`, in order; one that never closes is last. Time is linear.

    `\boxed{{42}`, whose inner braces close and are all there is, holds 42.
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
                found.append(_whole_box(text, newest, token.end(), text[box[1] : token.start()]))
        elif token[1]:
            newest = token.start()
            opened.append((newest, token.end()))
        elif len(mark) > 2 and (bare := _BARE.match(text, token.end())):
            newest = token.start()
            found.append(_whole_box(text, newest, bare.end(), bare.group()))
    unclosed = next((box for box in opened if box is not None and box[0] == newest), None)
    if unclosed is not None:
        doubled = _DOUBLED.match(text, unclosed[1])
        found.append(Box(newest, len(text), doubled[1] if doubled else None))
    return found


def _whole_box(text: str, start: int, end: int, inside: str) -> Box:
    r"""A box with the minus before it; `\boxed{7}0` and `\boxed{7}^2` are no whole answers."""
    before = text[max(0, start - 16) : start]
    if _FACTOR_BEFORE.search(before) or _FACTOR_BEHIND.match(text, end):
        return Box(start, end, None)
    if minus := _MINUS_BEFORE.search(before):
        negative = f"-{inside.strip()}" if _SIMPLE.fullmatch(inside) else f"-({inside})"
        return Box(start - len(minus.group().lstrip("$=({[")), end, negative)
    return Box(start, end, inside)


def as_list(parts: Sequence[str]) -> str:
    """Several answers as one list, each once and without its name."""
    different = list(dict.fromkeys(part.strip() for part in parts))
    if len(different) == 1:
        return parts[-1]
    return ", ".join(_LEADING_NAME.sub("", part) for part in different)


LONGEST_ANSWER = 256  # characters; the longest gold of MATH has 159
TAIL = 2048  # characters at the end of a text in which formulas are looked for

_HASHES = re.compile(r"####[ \t]*(?=[^\sA-Za-z#])")  # not a heading of Markdown
_SAID = re.compile(
    r"\bthe\s+(?:final\s+|correct\s+)?answer\s+is\b\s*:?|^[ \t*#]*(?:final[ \t]+)?answer[ \t*]*:", re.I | re.M
)
_SENTENCE_END = re.compile(r"\n|\.(?=\s|$)|,?\s+(?:because|since|so|which|where|as)\b", re.I)
_THOUGHT = re.compile(r"<(/?)think(?:ing)?>", re.I)

# Thousands in prose, 1 000 too, or else a decimal comma.
_DIGITS = r"(?:[0-9]{1,3}(?:[, \u00a0\u202f\u2009][0-9]{3})+(?![0-9])|[0-9]+,[0-9]{1,2}(?![0-9,])|[0-9]+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_PERCENT = r"\s{0,8}(?:\\?%|\\text\s*\{\s*percent\s*\}|(?:percent|percentage|pct)\b)"
_LAST_NUMBER = re.compile(
    rf"(?<![0-9.])(?<![0-9]/)(?:(?<![A-Za-z])|(?<=Rs)|(?<=RM)|(?<=USD))(?:(?<![A-Za-z)\]}}])[+-])?{_UNSIGNED}"
    rf"(?:/[0-9]+)?(?:{_PERCENT})?"
)
_PERCENT_BEHIND = re.compile(rf"\s{{0,8}}\$?{_PERCENT}")
_SCALE_BEHIND = re.compile(rf"\s{{0,8}}\$?\s{{0,8}}(?:\\text\s?\{{\s?)?({SCALE.pattern})", re.I)
_FORMULA = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|(?<!\\)\$(?P<inline>[^$\n]*)(?<!\\)\$|\\\((?P<round>[^\n]*?)\\\)|\\\[(?P<square>.*?)\\\]"
    r"|(?P<bare>-?[0-9]*\s*\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\})|\\begin\{(?P<kind>align|aligned|gather|equation|eqnarray)(?P<star>\*?)\}(?P<lines>.*?)\\end\{(?P=kind)(?P=star)\}",
    re.DOTALL,
)
_LONE_NAME = re.compile(r"\s*[A-Za-z]{1,3}(?:_\{?\w\}?)?[\s.,]*")  # a formula that says nothing of a value
# "The area is": of a marked sentence, what it says. One that denies or offers a choice says nothing.
_STATED = re.compile(r"(?:the|so|thus|hence|there)\b.*\b(?:is|are|equals)\s+", re.I)
_DENIED = re.compile(r"\b(?:not|n?or|n?either|isn|aren|if|unless)\b", re.I)
_LINES = re.compile(r"\\begin\{(?!align|gather|split)")


def without_thoughts(text: str) -> str:
    """The text outside `<think>` and `</think>`: one that never closes goes to the end."""
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
    """The text that is marked as the answer, as written; None where nothing is. Time is linear in the text."""
    text = without_thoughts(text)
    if boxes := find_boxes(text):
        return _joined(text, boxes)
    for marker in (_HASHES, _SAID):
        if mark := last_match(marker, text):
            said = _SENTENCE_END.split(text[mark.end() : mark.end() + 2 * LONGEST_ANSWER].lstrip(), maxsplit=1)[0]
            return said if _DENIED.search(said) else _STATED.sub("", said)
    return None


def _joined(text: str, parts: Sequence[Box]) -> str:
    r"""The last part with those that a comma, a semicolon, "and" or "or" joins to it, as one list, or "".

    The same part twice is one. What is right behind it belongs to it: `\boxed{28}\%`, `\boxed{3}` million.
    """
    if not parts or parts[-1].inside is None:
        return ""
    last = parts[-1]
    chain = [last.inside]
    for before, after in zip(parts[-2::-1], parts[:0:-1], strict=True):
        between = text[before.end : after.start]
        if before.inside is None or len(between) > LONGEST_JOINT or not JOINT.fullmatch(between):
            break
        chain.append(before.inside)
    joined = as_list(chain[::-1])
    if scale := _SCALE_BEHIND.match(text, last.end):
        return f"{joined} {scale[1]}"
    percent = joined and "%" not in joined and _PERCENT_BEHIND.match(text, last.end)
    return rf"{joined}\%" if percent else joined


def last_value(text: str) -> str | None:
    r"""The last formula, or the last number behind it; None without either.

    A formula is `$...$`, `$$...$$`, `\(...\)`, `\[...\]` or an `align`, of which the last line counts, with those that
    are joined to it as boxes are. A letter alone, as in "where $x$ is the length", is none. Time is linear in the
    text: formulas are looked for in its last `TAIL` characters.
    """
    text = latin_digits(without_thoughts(text)[-TAIL:])
    every = [_formula(found) for found in _FORMULA.finditer(text)]
    formulas = [formula for formula in every if not _LONE_NAME.fullmatch(formula.inside or "")]
    number = last_match(_LAST_NUMBER, text)
    if number is not None and not (formulas and number.start() < formulas[-1].end):
        return number.group()
    return _joined(text, formulas or every) or None


def _formula(found: re.Match[str]) -> Box:
    inside = next(
        found[name] for name in ("display", "inline", "round", "square", "bare", "lines") if found[name] is not None
    )
    if found["inline"] is None and not _LINES.search(inside):
        inside = re.sub(r"\\(?:begin|end)\{[a-z]+\*?\}", "", inside)
        *_, inside = [line for line in inside.split(r"\\") if line.strip()] or [""]
        inside = inside.replace("&", "")
    return Box(found.start(), found.end(), inside)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last of all matches in the text that do not overlap; None where there is none."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)
