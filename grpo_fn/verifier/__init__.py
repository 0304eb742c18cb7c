r"""Is a math answer right? math-verify with three verdicts: 1 right, 0 wrong, None unscorable.

`extract` decides which text is the answer, `spelling` how it is spelt, `screen` what is not worth reading, and
`equivalence` what has the same value. What goes into math-verify's parser is always one short answer in one `\boxed{}`:
bare LaTeX parses wrongly there (`2\sqrt{6}` as 2), and its own search merges neighbouring boxes and takes a number in
passing for the answer. No parsed answer is turned into text: that can take for ever.

A model can still write what takes too long. math-verify's time-outs are signals and work in the main thread only, so
they are off: text from a model is scored in processes that can be killed. The row is then unscorable.

Leniencies that are kept, each with its test: a unit, degree, currency or base that only one side names is ignored; a
percent sign is a unit where the gold has none and is 1 or more, else a hundredth; a name before an equals sign is
ignored; letters have no case; point, open interval and bare list of the same numbers are equal; expressions with
letters or roots are equal if their values are, multiplied out or not; a decimal of 6 places or more may stand for the
rational that it rounds. docs/rewards/verifier.md says it class by class.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from math_verify import LatexExtractionConfig, grader, parse, parser
from sympy import Basic, Expr, FiniteSet, Float, Integer, MatrixBase

from grpo_fn.verifier import equivalence
from grpo_fn.verifier.equivalence import same_kind
from grpo_fn.verifier.extract import (
    LONGEST_ANSWER,
    as_list,
    find_boxes,
    marked_answer,
    without_thoughts,
)
from grpo_fn.verifier.screen import is_costly, is_evasive, is_worked_out
from grpo_fn.verifier.spelling import plain_answer, unit_of, units_differ

# math-verify warns once per process that its time-outs are off; they are meant to be.
parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True

# Units are taken away in `spelling`: the parser takes the t of "4t" for one.
_LATEX = LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)
_LATEX = replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False))
_LITERAL = re.compile(r"([+-]?)(?:([0-9]+)|([1-9][0-9]{0,2}(?:,[0-9]{3})+)|([0-9]*\.[0-9]+))")
_NAME = re.compile(r"\s*\\?[A-Za-z](?:[^=<>{}()]|\{[^{}]*\}|\([^()]*\))*=")
_CHAIN = re.compile(r"^[^=,;]*[^=,;\\<>!]=[^,;]*[^,;\\<>!]=[^,;]*$", re.DOTALL)
_WORD = re.compile(r"\\(?:text[a-z]*|mbox|mathrm)\s*\{([^{}\\]*)\}")
_OPTION = re.compile(
    r"[\s({]*(?:\\(?:text[a-z]*|mbox|mathrm|mathbf)\s*\{)?[\s({]*(?:(?:option|choice|answer)\s+)?\(?([A-Z])\)?[\s)}.]*",
    re.I,
)
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
_SHORT_UNIT = re.compile(r"(?<=[0-9])\s+[gmshlGMSHL]\s*\Z")
_BRACES = {r"\{", r"\lbrace"}
_BRACKETED = re.compile(
    r"[\s$]*(?:\(?[A-Za-z](?:\s*,\s*[A-Za-z])*\)?\s*(?:=|\\in)\s*)?(\\left\s*(?:\(|\[|\\\{)|\(|\[|\\\{|\\lbrace)"
    r"[^()\[\]]*,[^()\[\]]*(?:\)|\]|\\\}|\\rbrace)[\s$.]*"
)


class Verdict(NamedTuple):
    """1, 0 or None: `evaluated` wants no closed form left, `closed` a worked-out answer, `lenient` the value alone."""

    evaluated: float | None
    closed: float | None
    lenient: float | None


_UNSCORABLE, _WRONG, _RIGHT = Verdict(None, None, None), Verdict(0.0, 0.0, 0.0), Verdict(1.0, 1.0, 1.0)


def verify_answer(gold: str, text: str) -> float | None:
    r"""1 iff the marked answer of a text, in `\boxed{...}` or behind `####`, equals the gold and is worked out, else 0.

    None when the gold, LaTeX or plain text, cannot be parsed.
    """
    return judge(gold, text, marked_answer(text)).closed


def judge(gold: str, text: str, answer: str | None) -> Verdict:
    """The verdict on an answer, or where it is wrong, on as many boxes as the gold has parts."""
    verdict = _verdict(gold, answer if answer is not None and len(answer) <= LONGEST_ANSWER else "")
    parts = _parts(gold)
    if verdict is not _WRONG or parts < 2 or len(boxes := find_boxes(without_thoughts(text))) != parts:
        return verdict
    inside = [box.inside for box in boxes if box.inside is not None]
    every = as_list(inside) if len(set(inside)) == parts else ""
    return _verdict(gold, every) if 0 < len(every) <= LONGEST_ANSWER else verdict


@lru_cache(maxsize=2048)
def _parts(gold: str) -> int:
    """How many values a gold lists; 1 of anything else."""
    expected = _read(plain_answer(gold))
    return len(expected.args) if isinstance(expected, FiniteSet) else 1


@lru_cache(maxsize=8192)
def _verdict(gold: str, answer: str) -> Verdict:
    """The verdict on an answer, both as they are written."""
    expected = _read(plain_answer(gold))
    if expected is None:
        return _UNSCORABLE
    if not answer or units_differ(gold, answer) or _in_other_brackets(gold, answer):
        return _WRONG
    gold, answer = same_kind(gold, answer)
    shared = _SHORT_UNIT.search(answer)
    if shared and unit_of(gold) == unit_of(answer):
        answer = answer[: shared.start()]
    gold, answer = plain_answer(gold), plain_answer(answer)
    expected = _read(gold)
    option = _OPTION.fullmatch(gold), _OPTION.fullmatch(answer)
    if option[0] and option[1]:
        return _RIGHT if option[0][1].casefold() == option[1][1].casefold() else _WRONG
    if not answer or is_costly(gold, answer) or is_evasive(gold, answer):
        return _WRONG
    if (_WORD.fullmatch(gold) or ":" in gold) and _words(gold) == _words(answer):  # a time is no quotient
        return _RIGHT
    if isinstance(expected, Expr) and expected.is_number and "," not in gold and _DECIMAL_COMMA.fullmatch(answer):
        answer = answer.replace(",", ".")
    given = _read(answer)
    if given is None:
        return _WRONG
    try:
        expected = equivalence.stated_value(expected)
        complex_given = equivalence.with_imaginary_unit(given)
        evaluated = complex_given is given
        given = equivalence.comparable_part(expected, complex_given)
        right = given is not None and equivalence.equal(expected, given)
    except MemoryError:
        raise
    except Exception:  # two things that cannot be compared are not equal
        return _WRONG
    if not right:
        return _WRONG
    plain = equivalence.is_plain(expected)
    finished = is_worked_out(gold, answer) and (not plain or (evaluated and equivalence.is_written_out(given)))
    closed = finished or not plain or equivalence.is_closed_form(given)
    return Verdict(float(finished), float(closed), 1.0)


def _in_other_brackets(gold: str, answer: str) -> bool:
    """Is one of them a set in braces and the other one a point or an interval?"""
    marks = [found[1].removeprefix("\\left") for text in (gold, answer) if (found := _BRACKETED.fullmatch(text))]
    return len(marks) == 2 and (marks[0] in _BRACES) != (marks[1] in _BRACES)


@lru_cache(maxsize=2048)
def _read(text: str) -> Any:
    """The parsed text; None where nothing parses."""
    if literal := _LITERAL.fullmatch(text):  # what the parser makes of it, sooner (a test holds it to that)
        sign, _, _, decimal = literal.groups()
        size = Float(decimal) if decimal else Integer(text.lstrip("+-").replace(",", ""))
        return -size if sign == "-" else size
    parsed = _parsed(text)
    if parsed is None and (name := _NAME.match(text)):
        return _parsed(text[name.end() :])
    return parsed


def _parsed(text: str) -> Any:
    try:
        (first, *_) = parse(
            rf"\boxed{{{text}}}", [_LATEX], "no_fallback", "first_match", parsing_timeout=None, raise_on_error=True
        )
    except MemoryError:
        raise
    except Exception:
        return None
    # Where the whole does not parse, the parser makes do with what follows the last of two equals signs.
    whole = equivalence.equation_sides(first) or not _CHAIN.search(text)
    return first if whole and isinstance(first, Basic | MatrixBase) else None


def _words(text: str) -> str:
    bare = " ".join(_WORD.sub(r"\1", text).casefold().split())
    items = re.split(r"\s*,\s*", bare.lstrip("0").rstrip("."))
    return ",".join(sorted(items) if max(map(len, items)) == 1 else items)  # options have no order
