r"""An inequality in one letter, as the interval or the union that it says: "1 < x \le 3" is (1, 3].

Text to text, without algebra: the letter has to be alone on its side.
"""

import re
from typing import NamedTuple

from grpo_fn.rewards.math.spelling import DOUBLED_BACKSLASH

_RELATION = re.compile(r"(\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt)(?![A-Za-z])|<=|>=|[<>≤≥])")
_OPENS = {r"\lt": "<", r"\gt": ">", "<": "<", ">": ">"}
_LETTER = re.compile(r"[A-Za-z]|\\(?:alpha|beta|theta|lambda|mu|phi)")
_BOUND = re.compile(r"[^=,;<>]+")
_WORD = r"\\(?:text|mbox|mathrm)\s*\{{[\s,]*{0}[\s,]*\}}|\b{0}\b"
_OR = re.compile(_WORD.format("or") + r"|\\(?:lor|vee|cup)(?![A-Za-z])|[∪∨]")
_AND = re.compile(_WORD.format("and") + r"|\\(?:land|wedge|cap)(?![A-Za-z])|[∩∧]")
_SURROUNDINGS = re.compile(r"\\?\$|\\(?:left|right|displaystyle|quad)(?![A-Za-z])|\\[,;:! ()\[\]]|~|[.\s]+\Z|\A\s+")
_ABSOLUTE = re.compile(
    rf"\A\s*\|\s*({_LETTER.pattern})\s*\|\s*(<=?|≤|\\(?:leq?|lt)(?![A-Za-z]))\s*([^\s=,;<>|+-]+)\s*\Z"
)
_INTERVAL = re.compile(r"\s*(?:[A-Za-z]\s*\\in\s*)?(?:\\left)?\s*[(\[]")


class _Range(NamedTuple):
    letter: str
    low: str = ""  # with its bracket, "(1" or "[1"
    high: str = ""


def as_interval(answer: str) -> tuple[str, str] | None:
    """The letter of an inequality and the set that it says; None for what is no such inequality.

    Args:
        answer: a short answer, as written.

    Returns:
        The letter, and the interval or union in LaTeX.
    """
    answer = re.sub(DOUBLED_BACKSLASH, r"\\", answer)
    if not _RELATION.search(answer):
        return None
    text = _ABSOLUTE.sub(r"-\3 \2 \1 \2 \3", _SURROUNDINGS.sub(" ", answer))
    ranges = [_intersection([_range(part) for part in _AND.split(side)]) for side in _OR.split(text)]
    known = [found for found in ranges if found is not None]
    if len(known) < len(ranges) or len({found.letter for found in known}) > 1:
        return None
    low, high = r"(-\infty", r"\infty)"
    return known[0].letter, r" \cup ".join(f"{found.low or low}, {found.high or high}" for found in known)


def same_kind(gold: str, answer: str) -> tuple[str, str]:
    """Gold and answer, of which an inequality is an interval where the other one is one or says the same letter.

    Args:
        gold: the gold, as written.
        answer: a short answer, as written.

    Returns:
        The two, as they can be compared.
    """
    wanted, given = as_interval(gold), as_interval(answer)
    if wanted and given and wanted[0] == given[0]:
        return wanted[1], given[1]
    if wanted and not given and _INTERVAL.match(answer):
        return wanted[1], answer
    if given and not wanted and _INTERVAL.match(gold):
        return gold, given[1]
    return gold, answer


def _range(text: str) -> _Range | None:
    pieces = [piece.strip() for piece in _RELATION.split(text)]
    sides, relations = pieces[::2], pieces[1::2]
    if len(relations) not in (1, 2) or len({_goes_up(relation) for relation in relations}) > 1:
        return None
    if not _goes_up(relations[0]):
        sides, relations = sides[::-1], relations[::-1]
    if len(sides) == 2:
        sides, relations = (
            (["", *sides], ["", *relations]) if _LETTER.fullmatch(sides[0]) else ([*sides, ""], relations)
        )
    low, letter, high = sides
    bounds = [bound for bound in (low, high) if bound]
    if not _LETTER.fullmatch(letter) or not all(_is_bound(bound, letter) for bound in bounds):
        return None
    below = ("(" if relations[0] in _OPENS else "[") + low if low else ""
    above = high + (")" if relations[-1] in _OPENS else "]") if high else ""
    return _Range(letter, below, above)


def _intersection(ranges: list[_Range | None]) -> _Range | None:
    """One range, or two of the same letter of which one bounds it below and the other one above."""
    match ranges:
        case [only]:
            return only
        case [_Range(letter, low, "") as first, _Range(other, "", high)] if letter == other and low and high:
            return first._replace(high=high)
        case [_Range(letter, "", high) as first, _Range(other, low, "")] if letter == other and low and high:
            return first._replace(low=low)
        case _:
            return None


def _is_bound(text: str, letter: str) -> bool:
    return (
        _BOUND.fullmatch(text) is not None and not _LETTER.fullmatch(text) and letter not in re.findall(_LETTER, text)
    )


def _goes_up(relation: str) -> bool:
    return relation[0] in "<≤" or relation.startswith((r"\le", r"\lt"))
