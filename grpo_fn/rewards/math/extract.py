r"""Which text is the answer, and how it reads without what surrounds it. Nothing here knows the gold or any algebra.

A marked answer is the last `\boxed{...}`, or else what follows the last `####`, or else the last "the answer is" or
"Answer:" at the start of a line. The last mark decides: to write several answers does not help.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from grpo_fn.rewards.format import has_box, last_box, last_match

LONGEST_ANSWER = 256  # characters; the longest gold of MATH has 159

_HASHES = re.compile(r"####[ \t]*(?=[^\sA-Za-z#])")  # not a heading of Markdown
_SAID = re.compile(
    r"\bthe\s+(?:final\s+|correct\s+)?answer\s+is\b\s*:?|^[ \t*#]*(?:final[ \t]+)?answer[ \t*]*:", re.I | re.M
)
_SENTENCE_END = re.compile(r"\n|\.(?=\s|$)|,?\s+(?:because|since|so|which|where|as)\b", re.I)

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_THOUSANDS = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")
_LAST_NUMBER = re.compile(rf"(?<![0-9.])(?<![0-9]/)(?:(?<![A-Za-z)\]}}])[+-])?{_UNSIGNED}(?:/[0-9]+)?")
_FORMULA = re.compile(r"(?<!\\)\$([^$\n]*)(?<!\\)\$|\\\(([^\n]*?)\\\)|\\\[(.*?)\\\]", re.DOTALL)

# A unit in words behind a number. Words that are mathematics are none, nor are those that take the number back.
_NO_UNITS = r"pi|sqrt|sin|cos|tan|sec|csc|cot|log|exp|inf|infinity|theta|alpha|beta|gamma|xyz|abc|abcd|mod|base|percent"
_NO_UNITS += r"|or|nor|not|no|isn|if|unless|and|minus|plus|wrong|false|half|halves|thirds?|quarters?"
_NO_UNIT = re.compile(rf"\b(?:{_NO_UNITS})\b", re.I)
_POWER = r"(?:\s*\^\s*(?:[23]|\{[23]\}))?\Z"
_LAST_TEXT = re.compile(rf"\\(?:text[a-z]*|mbox|mathrm|mathit)\s*\{{([A-Za-z\s.,'’/-]+)\}}{_POWER}")
_COUNTED = re.compile(
    rf"([+-]?{_UNSIGNED}(?:/[0-9]+)?)(?:\\[ ,;:]|~|\s)+"
    rf"((?:[A-Za-z]{{3,}}|cm|mm|km|kg|mg|ml|ft|in|lb|oz|hr|am|pm|mi|yd|kw|ms)\b[A-Za-z .,'’*!/-]*){_POWER}",
    re.IGNORECASE,
)
_QUANTITY = re.compile(r"[0-9]|\\pi|\\infty")
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"\b(?:{'|'.join(_SCALES)})\b", re.I)


def marked_answer(text: str) -> str | None:
    """The text that is marked as the answer, as written; None where nothing is. Time is linear in the text."""
    if has_box(text):
        return last_box(text)
    for marker in (_HASHES, _SAID):
        if mark := last_match(marker, text):
            return _SENTENCE_END.split(text[mark.end() : mark.end() + 2 * LONGEST_ANSWER].lstrip(), maxsplit=1)[0]
    return None


def last_value(text: str) -> str | None:
    r"""The formula (`$...$`, `\(...\)` or `\[...\]`) around the last number, or else that number; None without one.

    Time is linear in the text.
    """
    number = last_match(_LAST_NUMBER, text)
    if number is None:
        return None
    first = max(0, number.start() - LONGEST_ANSWER)
    for formula in _FORMULA.finditer(text[first : number.start() + 2 * LONGEST_ANSWER]):
        if formula.start() <= number.start() - first < formula.end():
            return next(group for group in formula.groups() if group is not None)
    return number.group()


def plain_answer(answer: str) -> str:
    """A short answer without dollar signs, emphasis, a final full stop, thin spaces in numbers and a unit in words.

    Mathematical signs beyond ASCII become LaTeX, 2 1/2 a mixed fraction, and "3 million dollars" 3000000.
    """
    for pattern, by in _REWRITES:
        answer = pattern.sub(by, answer)
    number, words = answer, ""
    if unit := _LAST_TEXT.search(answer):
        number, words = answer[: unit.start()], unit[1]
    elif unit := _COUNTED.match(answer):
        number, words = unit[1], unit[2]
    number = re.sub(r"(?:\\[ ,;:]|~|\s)+\Z", "", number)
    if _NO_UNIT.search(words) or not _QUANTITY.search(number):
        return answer
    if not (scale := _SCALE.search(words)):
        return number
    exact = re.fullmatch(rf"[+-]?{_UNSIGNED}", number)
    return str(Fraction(number.replace(",", "")) * _SCALES[scale.group().lower()]) if exact else answer


def _without_commas(text: re.Match[str]) -> str:
    """Without those in numbers, as long as there are no others: "1,600 apples", but not "1,600, 2"."""
    joined = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text.group())
    return text.group() if "," in joined else joined


def _repeating(decimal: re.Match[str]) -> str:
    whole, start, cycle = decimal.groups()
    shift, nines = 10 ** len(start), 10 ** len(cycle) - 1
    exact = Fraction(int(whole + start or "0") * nines + int(cycle), shift * nines)
    return rf"\frac{{{exact.numerator}}}{{{exact.denominator}}}"


_SIGNS = {"−": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "…": "...", "\u200b": ""}
_SIGNS |= {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "√": r"\sqrt "}
_SIGNS |= {"²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
_SIGNS |= {"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ "}
_LEADING_WORDS = "about|approximately|approx|exactly|answer|rs|usd"
# One after the other: what surrounds an answer goes, and spellings that the parser misreads change.
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.ASCII), by)
    for pattern, by in [
        (r"√\s*([0-9]+)", r"\\sqrt{\1}"),
        ("|".join(_SIGNS), lambda sign: _SIGNS[sign.group()]),
        (r"[\u00a0\u202f\u2009]", " "),
        (r"\\?\$|[€£¥]|(?<!\\)\\[()\[\]]", ""),
        (r"\\(?:displaystyle|textstyle|boldsymbol|mathbf|textbf|bf|rm|phantom)(?![A-Za-z])", ""),
        (r"\A[\s*]+|[\s*]+\Z", ""),
        (r"\\(?:text|mathrm|mbox)\s*\{\s*percent\s*\}|(?<=[0-9])\s+percent\b", r"\\%"),
        (r"\A\\(?:text|mathrm|mbox)\s*\{([\s+.-]*[0-9][^{}\\:]*)\}\Z", r"\1"),
        (rf"\A(?:\\approx|[=:~\s]|(?:\\text\s*\{{\s*)?(?:{_LEADING_WORDS})\b[.:\s]*\}}?)+", ""),
        (r"(?:\\?[.,;:\s*])+\Z", ""),
        (r",?\s*\\(?:text|mbox)\s*\{[\s,]*(?:and|or)[\s,]*\}", ","),
        (r"(?<=[0-9])(?:,?\\[,;:! ]|\{,\}|~)(?=[0-9]{3}(?![0-9]))", ""),  # thin spaces within a number
        (r"\\!\s*", ""),
        (r"(?<![0-9.,\\}])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])", lambda number: number.group().replace(" ", "")),
        (r"\A(?:(?!\\\{)[^(\[])*\Z", _without_commas),
        (r"([0-9]) +([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}"),
        (r"\\[dtc]?frac\s*(\\[A-Za-z]+)\s*([0-9A-Za-z]|(?=\{))", r"\\frac{\1}{\2}"),
        (r"(?<=[0-9])i(?![A-Za-z])", " i"),  # the parser has one i for "3 i" and another one for "3i"
        (r"([0-9]*)\.([0-9]*)\\overline\s*\{([0-9]+)\}", _repeating),
    ]
)
