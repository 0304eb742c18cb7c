r"""One spelling of an answer: of its numbers, signs and layout, without a unit behind it; and the unit, by itself.

Nothing here knows the gold or any algebra.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_THOUSANDS = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")

# A unit in words behind a number. Words that are mathematics are none, nor are those that take the number back.
_NO_UNITS = r"pi|sqrt|sin|cos|tan|sec|csc|cot|log|exp|inf|infinity|theta|alpha|beta|gamma|xyz|abc|abcd|mod|base|percent"
_NO_UNITS += r"|or|nor|not|no|isn|if|unless|and|minus|plus|wrong|false|half|halves|thirds?|quarters?"
_NO_UNIT = re.compile(rf"\b(?:{_NO_UNITS})\b", re.I)
_POWER = r"(?:\s*\^\s*(?:[23]|\{[23]\}))?\Z"
_LAST_TEXT = re.compile(rf"\\(?:text[a-z]*|mbox|mathrm|mathit)\s*\{{([A-Za-z\s.,'’/-]+)\}}{_POWER}")
_COUNTED = re.compile(
    rf"([+-]?{UNSIGNED}(?:/[0-9]+)?)(?:\\[ ,;:]|~|\s)+"
    rf"((?:[A-Za-z]{{3,}}|cm|mm|km|kg|mg|ml|ft|in|lb|oz|hr|am|pm|mi|yd|kw|ms)\b[A-Za-z .,'’*!/-]*){_POWER}",
    re.IGNORECASE,
)
_QUANTITY = re.compile(r"[0-9]|\\pi|\\infty")
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"\b(?:{'|'.join(_SCALES)})\b", re.I)


def latin_digits(text: str) -> str:
    """The text with digits of every script as 0 to 9, and full-width signs and letters as those of ASCII.

    Superscript and circled digits are none. The length stays.
    """
    return text if text.isascii() else "".join(map(_latin, text))


def _latin(char: str) -> str:
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    return chr(ord(char) - 0xFEE0) if "\uff01" <= char <= "\uff5e" else char


def plain_answer(answer: str) -> str:
    r"""A short answer without dollar signs, colours, comments, emphasis, a final full stop, and a unit in words.

    Mathematical signs beyond ASCII become LaTeX, digits of every script 0 to 9; 2 1/2 is a mixed fraction, 1.5e3 a
    power of ten, 1 000 and 1'000 are 1000, 3{,}5 is 3.5, "3 million dollars" 3000000; semicolons separate as commas
    do, and what is between them may have decimal commas.
    """
    answer = latin_digits(answer)
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
    exact = re.fullmatch(rf"[+-]?{UNSIGNED}", number)
    return str(Fraction(number.replace(",", "")) * _SCALES[scale.group().lower()]) if exact else answer


def _without_commas(text: re.Match[str]) -> str:
    """Without those in numbers, as long as there are no others: "1,600 apples", but not "1,600, 2"."""
    joined = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text.group())
    return text.group() if _SEPARATING_COMMA.search(joined) else joined


def _with_commas(text: re.Match[str]) -> str:
    """Semicolons as commas. Beside them, a comma between two digits is a decimal one, or one of thousands."""
    answer = text.group()
    commas, between_digits = answer.count(","), _COMMA.findall(answer)
    if commas and len(between_digits) == commas and not _BRACKET.search(answer):
        thousands = all(len(digits) == 3 for digits in between_digits)
        answer = answer.replace(",", "" if thousands else ".")
    return _SEMICOLON.sub(", ", answer)


def _repeating(decimal: re.Match[str]) -> str:
    whole, start, cycle = decimal.groups()
    shift, nines = 10 ** len(start), 10 ** len(cycle) - 1
    exact = Fraction(int(whole + start or "0") * nines + int(cycle), shift * nines)
    return rf"\frac{{{exact.numerator}}}{{{exact.denominator}}}"


_SIGNS = {"−": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "…": "...", "\u200b": ""}
_SIGNS |= {"≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "√": r"\sqrt "}
_SIGNS |= {"²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
_SIGNS |= {"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ "}
# A command that was escaped twice; behind the end of a row of a matrix there is a space.
DOUBLED_BACKSLASH = r"\\\\(?=(?:leq?|geq?|d?frac|sqrt|pi|text|left|right|cdot|infty|cup|times)(?![A-Za-z]))"
_SEMICOLON = re.compile(r"(?<!\\)\s*;\s*")
_COMMA = re.compile(r"(?<=[0-9]),([0-9]+)")
_SEPARATING_COMMA = re.compile(r"(?<!\\),")  # not a thin space
_BRACKET = re.compile(r"[()\[\]]")
_SIZES = "tiny|scriptsize|footnotesize|small|normalsize|large|huge|underline"
_LEADING_WORDS = "about|approximately|approx|exactly|answer|rs|usd"
# One after the other: what surrounds an answer goes, and spellings that the parser misreads change.
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.ASCII), by)
    for pattern, by in [
        (DOUBLED_BACKSLASH, r"\\"),
        (r"(?<!\\)%[^\n%]*[A-Za-z0-9][^\n%]*\n", ""),  # a comment
        (r"\\textbf(?![A-Za-z])", r"\\text"),
        (r"(?<![0-9)!])\s*!=", r"\\neq "),
        (r"\\(?:text|page)?color\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}|\\colorbox\s*\{[^{}]*\}", ""),
        (r"\A([\s$]*)[–—](?=[0-9.])", r"\1-"),
        (r"√\s*([0-9]+)", r"\\sqrt{\1}"),
        ("|".join(_SIGNS), lambda sign: _SIGNS[sign.group()]),
        (r"[\u00a0\u202f\u2009]", " "),
        (r"\\?\$|[€£¥]|(?<!\\)\\[()\[\]]", ""),
        (r"\\(?:displaystyle|textstyle|boldsymbol|mathbf|mathsf|mathtt|bf|rm|phantom)(?![A-Za-z])", ""),
        (rf"\\(?:{_SIZES})(?![A-Za-z])", ""),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\ne(?![A-Za-z])", r"\\neq"),
        (r"\\(l|r)brace(?![A-Za-z])", lambda brace: r"\{" if brace[1] in "lL" else r"\}"),
        (r"\{\s*([0-9]+)\s*\\choose\s*([0-9]+)\s*\}", r"\\binom{\1}{\2}"),
        (
            r"(\\(?:sin|cos|tan|sec|csc|cot)\s*[({]?\s*)([0-9]+)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})",
            r"\1\\frac{\2\\pi}{180}",
        ),
        (r"\A[\s*]+|[\s*]+\Z", ""),
        (
            r"\\(?:text|mathrm|mbox)\s*\{\s*(?:percent|percentage|pct)\s*\}|(?<=[0-9])\s+(?:percent|percentage|pct)\b",
            r"\\%",
        ),
        (r"\A\\(?:text|mathrm|mbox)\s*\{([\s+.-]*[0-9][^{}\\:]*)\}[\s.]*\Z", r"\1"),
        (rf"\A(?:\\approx|[=:~\s]|(?:\\text\s*\{{\s*)?(?:{_LEADING_WORDS})\b[.:\s]*\}}?)+", ""),
        (r"(?:\\?[.,;:\s*])+\Z", ""),
        (r",?\s*\\(?:text|mbox)\s*\{[\s,]*(?:and|or)[\s,]*\}", ","),
        (r"(?<=[0-9])(?:,?\\!|\\[,;: ]|\{,\}|~|['’])(?=[0-9]{3}(?![0-9]))", ""),  # within a number; 50,\ 100 is a list
        (r"(?<=[0-9])\{,\}(?=[0-9])", "."),
        (r"(?<![0-9A-Za-z.])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)e([+-]?[0-9]{1,4})(?![0-9A-Za-z.])", r"\1\\times 10^{\2}"),
        (r"\A[^;]*(?<!\\);.*\Z", _with_commas),
        (r"\\!\s*", ""),
        (r"(?<![0-9.,\\}])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])", lambda number: number.group().replace(" ", "")),
        (r"\A(?:(?!\\\{)[^(\[])*\Z", _without_commas),
        (r"([0-9]) +([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}"),
        (r"\\[dtc]?frac\s*(\\[A-Za-z]+)\s*([0-9A-Za-z]|(?=\{))", r"\\frac{\1}{\2}"),
        (r"(?<=[0-9])i(?![A-Za-z])", " i"),  # the parser has one i for "3 i" and another one for "3i"
        (r"([0-9]*)\.([0-9]*)\\overline\s*\{([0-9]+)\}", _repeating),
    ]
)


# -- units: two answers with two known units have to name the same one


_NAMES = {
    **{"mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter decimetre", "m": "meter metre"},
    **{"km": "kilometer kilometre", "inch": "in inches", "foot": "ft feet", "yard": "yd", "mile": "mi"},
    **{"mg": "milligram", "g": "gram", "kg": "kilogram kilo", "pound": "lb", "ounce": "oz", "ton": "tonne"},
    **{"ms": "millisecond", "second": "s sec", "minute": "min", "hour": "h hr", "day": "", "week": "", "month": ""},
    **{"year": "yr", "ml": "milliliter millilitre", "liter": "l litre", "gallon": "gal", "quart": "qt", "pint": "pt"},
    **{"cent": "¢", "dollar": "usd", "euro": "eur", "yen": "jpy", "rupee": "rs inr", "degree": "deg", "radian": "rad"},
    **{"am": "", "pm": ""},
}
_UNITS = {word: unit for unit, words in _NAMES.items() for word in (unit, *words.split())}
_RATES = {"mph": "mile per hour", "kmh": "km per hour", "kph": "km per hour"}
_UNIT_SIGNS = {r"\$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}

_SIGN = re.compile(r"\A[\s$]*(\\\$|[€£¥])|([€£¥])[\s$.]*\Z")
_DEGREE = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)[\s$.]*\Z")
_TAIL = re.compile(
    r"(?:\\(?:text[a-z]*|mbox|mathrm|mathit)\s*\{(?:[0-9.,\s]*)([A-Za-z][^{}\\]*)\}"
    r"|(?<=[0-9}])[\s~]*(?:\\[,;: ])*\s*([A-Za-z][A-Za-z./ ]*))"
    r"\s*(?:\^\s*\{?\s*([0-9])\s*\}?|([²³]))?[\s$.}]*\Z"
)
_RATIO = re.compile(r"/|\s+(?:per|an?)\s+")
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3", "²": "2", "³": "3"}


def unit_of(answer: str) -> str:
    """The unit that an answer ends with, or begins with if it is a currency; "" without a known one."""
    if sign := _SIGN.search(answer):
        return _UNIT_SIGNS[sign[1] or sign[2]]
    if _DEGREE.search(answer):
        return "degree"
    tail = _TAIL.search(answer)
    if tail is None:
        return ""
    words = (tail[1] or tail[2]).casefold().replace(".", "").strip()
    each = [_unit(part) for part in _RATIO.split(_RATES.get(words.replace("/", ""), words))]
    power = tail[3] or _POWERS.get(tail[4] or "", "")
    return f"{' / '.join(each)} {power}".strip() if all(each) else ""


def units_differ(gold: str, answer: str) -> bool:
    """Test whether both name a known unit, and not the same."""
    expected, given = unit_of(gold), unit_of(answer)
    return bool(expected and given and expected != given)


def _unit(words: str) -> str:
    """One unit, perhaps squared or cubed; "" for a word that is none."""
    left, power = [], ""
    for word in words.split():
        power = _POWERS.get(word, power)
        if word not in _POWERS:
            left.append(word)
    if len(left) != 1:
        return ""
    unit = _UNITS.get(left[0]) or _UNITS.get(left[0].removesuffix("s"), "")
    return f"{unit} {power}".strip() if unit else ""
