r"""Is a math answer right? math-verify with three verdicts: 1 right, 0 wrong, None unscorable.

`extract` decides which text is the answer, `spelling` how it is spelt, `screen` what is not worth reading, and
`equivalence` what has the same value. The same text is right before anything is parsed, and words are compared as text.
What is parsed is always one short answer, by latex2sympy, math-verify's parser: math-verify's own search merges
neighbouring boxes and takes a number in passing for the answer. No parsed answer is turned into text: that can take
for ever.

A model can still write what takes too long. math-verify's time-outs are signals and work in the main thread only, so
they are off: text from a model is scored in processes that can be killed. The row is then unscorable.

Leniencies that are kept, each with its test: a unit, degree or currency that only one side names is ignored, as is the
gold's base; a percent sign that only one side has is a unit where the gold's number is 1 or more, else a hundredth; a
name before an equals sign is ignored; letters have no case unless a formula has one in both; point, open interval and
bare list of the same numbers are equal; expressions with letters or roots are equal if their values are, multiplied
out or not; a decimal of 6 places or more may stand for the rational that it rounds. docs/rewards/verifier.md says it
class by class.
"""

import re
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

from latex2sympy2_extended import latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import LatexExtractionConfig, grader
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
from grpo_fn.verifier.screen import is_costly, is_evasive, is_whole, is_worked_out
from grpo_fn.verifier.spelling import PRODUCT, TEXT, plain_among, plain_answer, unit_of, units_differ, word_stems

grader.TIMEOUT_WARNING_SHOWN = (
    True  # math-verify warns once per process that its time-outs are off; they are meant to be
)

# Units are taken away in `spelling`: the parser takes the t of "4t" for one.
_NORMALIZATION = replace(LatexExtractionConfig().normalization_config, units=False, boxed="none")
_LITERAL = re.compile(r"([+-]?)(?:([0-9]+)|([1-9][0-9]{0,2}(?:,[0-9]{3})+)|([0-9]*\.[0-9]+))")
_NAME = re.compile(r"\s*\\?[A-Za-z](?:[^=<>{}()]|\{[^{}]*\}|\([^()]*\))*=")
_IN_TEXT = re.compile(rf"{TEXT}\s*\{{([^{{}}\\]*)\}}")
_OPTION = re.compile(
    r"[\s({]*(?:\\(?:text[a-z]*|mbox|mathrm|mathbf)\s*\{)?[\s({]*(?:(?:option|choice|answer)\s+)?\(?([A-Z])\)?[\s)}.]*",
    re.I,
)
# "(B) 15", "B. 15", of which the first letter and the rest are the parts.
_CHOICE = re.compile(
    rf"\s*(?:{TEXT}\s*\{{)?\s*\(?([A-H])\s*(?:\)|[.:](?=[\s}}]))\s*\}}?(?:\s|~|:|\\[,;: ]|\\q?quad(?![A-Za-z]))*"
    r"(?!(?:n?or|and|not)\b|[,&])(?!.*\([A-H]\))([^\s}].*)",
    re.DOTALL,
)
_TIME = re.compile(r"0*([0-9]{1,2}):([0-5][0-9])")
_WORDS = re.compile(r"[^\W\d_][\w\s.,;:'’!?&-]*")
_WORD = re.compile(rf"(?!(?:and|or|pi|inf|infinity|sqrt|sin|cos|tan|log|ln|exp|{PRODUCT})\b)[A-Za-z]{{2,}}")
_LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_GAP = r"(?:\s|~|\\[,;:! ]|\\(?:left|right|q?quad)(?![A-Za-z]))+"
_LAYOUT = re.compile(rf"(?<![0-9]){_GAP}|{_GAP}(?![0-9])")  # a gap between two digits separates two numbers
_MISSING = re.compile(r"\{\s*\}|\\[dt]?(?:frac|binom)\s*(?:\{[^{}]*\}\s*)?\Z|\\sqrt\s*\Z|[\^_]\s*\Z")  # arguments
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
_SHORT_UNIT = re.compile(r"(?<=[0-9])\s+[A-Za-z]\s*\Z")
_BRACES = {r"\{", r"\lbrace"}
_BRACKETED = re.compile(
    r"[\s$]*(?:\(?[A-Za-z](?:\s*,\s*[A-Za-z])*\)?\s*(?:=|\\in)\s*)?(\\left\s*(?:\(|\[|\\\{)|\(|\[|\\\{|\\lbrace)"
    r"[^()\[\]]*,[^()\[\]]*(?:\)|\]|\\\}|\\rbrace)[\s$.]*"
)
_SET = re.compile(r"\\\{|\\lbrace")
_SET_OPERATION = re.compile(r"\\(?:cup|cap|setminus|mid)")
_VECTOR = r"\\(?:vec|mathbf|boldsymbol|bm|overrightarrow|hat)\s*(?:\{\s*\\?[A-Za-z]+\s*\}|[A-Za-z])"
_VECTOR_PRODUCT = re.compile(rf"{_VECTOR}\s*\\(times|cdot)\s*{_VECTOR}")


class Verdict(NamedTuple):
    """1, 0 or None: `evaluated` wants no closed form left, `closed` a worked-out answer, `lenient` the value alone."""

    evaluated: float | None
    closed: float | None
    lenient: float | None


_UNSCORABLE, _WRONG, _RIGHT = Verdict(None, None, None), Verdict(0.0, 0.0, 0.0), Verdict(1.0, 1.0, 1.0)


def verify_answer(gold: str, text: str) -> float | None:
    r"""1 iff the marked answer of a text, in `\boxed{...}` or behind `####`, equals the gold and is worked out, else 0.

    Args:
        gold: LaTeX or plain text
        text: the completion

    Returns:
        1.0, 0.0, or None when the gold is no answer: empty, or with brackets or arguments missing
    """
    return judge(gold, text, marked_answer(text), "").closed


def judge(gold: str, text: str, answer: str | None, prompt: str) -> Verdict:
    """The verdict on an answer, or where it is wrong, on as many boxes as the gold has parts.

    Words of the prompt may stand behind a number; without a prompt, any word that makes no other number of it.
    """
    verdict = _verdict(gold, answer if answer is not None and len(answer) <= LONGEST_ANSWER else "", prompt)
    parts = _parts(gold)
    if verdict is not _WRONG or parts < 2 or len(boxes := find_boxes(without_thoughts(text))) != parts:
        return verdict
    inside = [box.inside for box in boxes if box.inside is not None]
    every = as_list(inside) if len(set(inside)) == parts else ""
    return _verdict(gold, every, prompt) if 0 < len(every) <= LONGEST_ANSWER else verdict


@lru_cache(maxsize=2048)
def _parts(gold: str) -> int:
    """How many values a gold lists; 1 of anything else."""
    expected = _read(plain_answer(gold))
    return len(expected.args) if isinstance(expected, FiniteSet) else 1


@lru_cache(maxsize=8192)
def _verdict(gold: str, answer: str, prompt: str) -> Verdict:
    """The verdict on an answer, both as they are written."""
    if _read(plain := plain_answer(gold)) is None and not _is_text(plain):
        return _UNSCORABLE
    if not answer or units_differ(gold, answer):
        return _WRONG
    if (same := _same_text(gold, answer, prompt)) is not None:
        return _RIGHT if same else _WRONG
    (letter, expected_rest), (other, rest) = _choice(gold), _choice(answer)
    if letter and other and not (letter == other and expected_rest and rest):
        return _RIGHT if letter == other else _WRONG
    if expected_rest != gold or rest != answer:
        return _verdict(expected_rest, rest, prompt) if expected_rest else _WRONG
    return _verdict_by_value(gold, answer, prompt)


def _verdict_by_value(gold: str, answer: str, prompt: str) -> Verdict:
    if _in_other_brackets(gold, answer) or _products(gold) != _products(answer):
        return _WRONG
    gold, answer = equivalence.without_names(*same_kind(gold, answer))
    shared = _SHORT_UNIT.search(answer)
    if shared and unit_of(gold) and unit_of(gold) == unit_of(answer):
        answer = answer[: shared.start()]
    gold, answer = plain_answer(gold), plain_among(answer, _known(gold, prompt))
    if not answer or is_costly(gold, answer) or is_evasive(gold, answer, prompt):
        return _WRONG
    cased = _has_both_cases(gold) or _has_both_cases(answer)
    expected = _read(gold, cased)
    if isinstance(expected, Expr) and expected.is_number and "," not in gold and _DECIMAL_COMMA.fullmatch(answer):
        answer = answer.replace(",", ".")
    given = _read(answer, cased)
    if expected is None or given is None:
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


# -- what is compared as text


def _is_text(gold: str) -> bool:
    """Can a gold that does not parse be compared as text? Brackets close, and no argument is missing."""
    return any(map(str.isalnum, gold)) and is_whole(gold) and not _MISSING.search(gold)


def _same_text(gold: str, answer: str, prompt: str) -> bool | None:
    """Do the two read the same? None where that is not the question: numbers and formulas have their values."""
    gold, answer = plain_answer(gold), plain_among(answer, _known(gold, prompt))
    if _without_layout(gold) == _without_layout(answer) and gold:
        return True
    words = _words(gold)
    if words is not None and words == _words(answer):
        return True
    if ":" in gold and ":" in answer and gold.count(":") + answer.count(":") > 2:
        return False
    if time := _TIME.fullmatch(gold):  # no quotient, unless it may be a ratio in lowest terms
        other = _TIME.fullmatch(answer)
        if ":" in answer:
            return bool(other and time.groups() == other.groups())
        return None if gcd(int(time[1]), int(time[2])) == 1 and time[2][0] != "0" else False
    return False if words is not None and max(map(len, words.split(","))) > 1 else None


def _without_layout(text: str) -> str:
    text = _LAYOUT.sub("", text)
    return text if _has_both_cases(text) else text.casefold()


def _words(text: str) -> str | None:
    """An answer in words without its layout, options in order; None of anything else."""
    bare = " ".join(_IN_TEXT.sub(r" \1 ", text).split()).rstrip(".")
    if not _WORDS.fullmatch(bare):
        return None
    items = re.split(r"\s*(?:,|&|\band\b)\s*", bare)
    if max(map(len, items)) == 1:  # options have no order
        return ",".join(sorted(items)).casefold()
    return _LAYOUT.sub("", bare).casefold() if _WORD.search(bare) else None


def _has_both_cases(text: str) -> bool:
    """Does a letter stand in both cases in a formula, so that it is two letters?"""
    letters = set(_LETTER.findall(_IN_TEXT.sub("", text)))
    return any(letter.casefold() in letters for letter in letters if letter != letter.casefold())


def _choice(text: str) -> tuple[str, str]:
    """The letter of an option and what stands behind it; "" and the text for what is no option."""
    if option := _OPTION.fullmatch(text):
        return option[1].casefold(), ""
    if choice := _CHOICE.fullmatch(text):
        rest = choice[2].strip()
        return choice[1].casefold(), rest if is_whole(rest) else rest.removesuffix("}")
    return "", text


def _known(gold: str, prompt: str) -> frozenset[str]:
    """The words that may stand behind a number: those of the prompt and of the gold; none where the prompt has none."""
    words = word_stems(prompt)
    return words | word_stems(gold) if words else words


# -- what the parser does not see


def _in_other_brackets(gold: str, answer: str) -> bool:
    """Is one of them a set in braces and the other one a point, an interval, or several sets?"""
    marks = [found[1].removeprefix("\\left") for text in (gold, answer) if (found := _BRACKETED.fullmatch(text))]
    if len(marks) == 2 and (marks[0] in _BRACES) != (marks[1] in _BRACES):
        return True
    sets = [len(_SET.findall(text)) for text in (gold, answer)]
    return 0 < min(sets) < max(sets) and not _SET_OPERATION.search(gold + answer)


def _products(text: str) -> str:
    """The products of vectors, which are no products of numbers: a dot, or a cross with its factors in order."""
    found = list(_VECTOR_PRODUCT.finditer(text))
    crosses = [re.sub(r"\\[A-Za-z]+|[\s{}]", " ", product.group()) for product in found if product[1] == "times"]
    return " ".join([*crosses, "."] if len(found) > len(crosses) else crosses)


@lru_cache(maxsize=2048)
def _read(text: str, cased: bool = False) -> Any:
    """The parsed text; None where nothing parses."""
    if literal := _LITERAL.fullmatch(text):  # what the parser makes of it, sooner (a test holds it to that)
        sign, _, _, decimal = literal.groups()
        size = Float(decimal) if decimal else Integer(text.lstrip("+-").replace(",", ""))
        return -size if sign == "-" else size
    parsed = _parsed(text, cased)
    if parsed is None and (name := _NAME.match(text)):
        return _parsed(text[name.end() :], cased)
    if parsed is None and text.endswith(r"\%") and isinstance(share := _read(text[:-2], cased), Expr):
        return share * equivalence.HUNDREDTH  # the parser knows the sign behind a number only
    return parsed


def _parsed(text: str, cased: bool = False) -> Any:
    try:
        latex = normalize_latex(text, _NORMALIZATION)
        real = not grader.should_treat_as_complex(latex)
        config = ConversionConfig(lowercase_symbols=not cased)
        parsed = latex2sympy(latex, is_real=real, normalization_config=None, conversion_config=config)
    except MemoryError:
        raise
    except Exception:
        return None
    return parsed if isinstance(parsed, Basic | MatrixBase) else None
