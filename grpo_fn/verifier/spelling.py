r"""One spelling of an answer: of its numbers, signs and layout, without a unit behind it; and the unit, by itself.

Nothing here knows the gold or any algebra.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Set
from fractions import Fraction
from functools import lru_cache

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_THOUSANDS = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")

# Words behind a number that make another number of it, take it back, or are mathematics: no unit.
_NO_UNITS = r"pi|sqrt|sin|cos|tan|sec|csc|cot|log|exp|inf|infinity|theta|alpha|beta|gamma|abcd|mod|base|percent"
_NO_UNITS += r"|or|nor|not|no|isn|if|unless|and|minus|plus|wrong|false|half|halves|thirds?|quarters?|squared|cubed"
_NO_UNITS += r"|factorial|than|least|most|over|under|to|th|st|nd|rd"
_NO_UNIT = re.compile(rf"\b(?:{_NO_UNITS})\b", re.I)
_COUNTS = re.compile(r"\b(?:times|more|less|fewer|pairs?)\b", re.I)  # units only where the prompt counts in them
_ANY_WORD = {"unit", "squar", "sq", "cubic", "of", "in", "th", "a", "an", "per", "each", "total"}  # as stems
PRODUCT = r"[a-df-hj-np-tv-z]{2,3}"  # letters that are multiplied rather than a word: no, one and odd are words
_GAP = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
_POWER = r"(?:\s*\^\s*(?:-?[0-9]|\{\s*-?\s*[0-9]\s*\}))"
TEXT = r"\\(?:text[a-z]*|mbox|mathrm|mathit|operatorname)"
_TEXT_UNIT = rf"{TEXT}\s*\{{(?:[A-Za-z\s.,'’/*~-]|\\[,;:! ]|\\(?:cdot|times|mu|Omega)(?![A-Za-z])|{_POWER})+\}}"
_CIRCLE = r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"
_TEXT_TAIL = re.compile(
    rf"(?:(?:{_GAP}|/|\*|\\(?:cdot|times)(?![A-Za-z]))*"
    rf"(?:{_TEXT_UNIT}|\\(?:mu|Omega)(?![A-Za-z])|{_CIRCLE}{_GAP}*{TEXT}\s*\{{\s*[CF]\s*\}}){_POWER}?)+\s*\Z"
)
_BARE_TAIL = re.compile(rf"(.*?[0-9)}}])({_GAP}+[A-Za-z](?:[A-Za-z .,'’*!/-]|{_POWER})*)\Z", re.DOTALL)
_LITERAL = re.compile(rf"[+-]?{UNSIGNED}(?:/[0-9]+)?")
_QUANTITY = re.compile(r"[0-9]|\\pi|\\infty")
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALE = re.compile(rf"\b(?:{'|'.join(_SCALES)})\b", re.I)


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
    r"""A short answer without dollar signs, colours, comments, emphasis, a final full stop, and a unit behind it.

    Mathematical signs beyond ASCII become LaTeX, digits of every script 0 to 9; 2 1/2 is a mixed fraction, 1.5e3 a
    power of ten, 1 000 and 1'000 are 1000, 3{,}5 is 3.5, "3 million dollars" 3000000; semicolons separate as commas
    do, and what is between them may have decimal commas. A unit is one of the table below, or any words that make no
    other number.
    """
    return plain_among(answer, frozenset())


def plain_among(answer: str, known: Set[str]) -> str:
    """`plain_answer`; of the words behind a number, only units and those that are `known` go, unless none is known.

    Known are stems, as of `word_stems`.
    """
    answer = _respelt(answer)
    number, tail = _split_unit(answer)
    if not tail or _unit(tail):
        return number
    if _NO_UNIT.search(tail) or not _QUANTITY.search(number):
        return answer
    if scale := SCALE.search(tail):
        exact = re.fullmatch(rf"[+-]?{UNSIGNED}", number)
        return str(Fraction(number.replace(",", "")) * _SCALES[scale.group().lower()]) if exact else answer
    stems = word_stems(tail) - _ANY_WORD - known
    if known:
        return answer if stems else number
    return answer if _COUNTS.search(tail) or min(map(len, stems), default=2) < 2 else number


@lru_cache(maxsize=4096)
def word_stems(text: str) -> frozenset[str]:
    """The words of a text without what makes plurals of them."""
    return frozenset(re.sub(r"(?:y|ie|e)?s?\Z", "", word) or word for word in re.findall("[a-z]+", text.casefold()))


@lru_cache(maxsize=4096)
def _respelt(answer: str) -> str:
    answer = latin_digits(answer)
    for pattern, by in _REWRITES:
        answer = pattern.sub(by, answer)
    return answer


def _split_unit(answer: str) -> tuple[str, str]:
    """An answer in plain spelling without the words behind its number, and these without LaTeX."""
    if tail := _TEXT_TAIL.search(answer):
        number = answer[: tail.start()]
        return (number, _flat(tail.group())) if _QUANTITY.search(number) else (answer, "")
    if tail := _BARE_TAIL.fullmatch(answer):
        words = _flat(tail[2])
        if _unit(words):  # of letters alone, those are factors
            named = "/" in words or any(len(word) > 1 for word in re.findall("[A-Za-z]+", words))
        else:
            named = bool(_LITERAL.fullmatch(tail[1]) and re.match(rf"(?!{PRODUCT}\b)[A-Za-z]{{3,}}", words))
        if named:
            return tail[1], words
    return answer, ""


def _flat(tail: str) -> str:
    """Words without the commands around them: km / h^2."""
    for pattern, by in _FLATTENED:
        tail = re.sub(pattern, by, tail)
    return tail.strip()


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


def _last_line(aligned: re.Match[str]) -> str:
    r"""Of `x &= 40 + 2 \\\\ &= 42` what its last line says."""
    *_, last = [line for line in aligned[3].split(r"\\") if line.strip()] or [""]
    return last.replace("&", "")


def _without_braces(text: re.Match[str]) -> str:
    inner = text.group()
    while inner[:1] == "{" and _GROUP.fullmatch(inner):
        inner = inner[1:-1].strip()
    return inner


def _improper(mixed: re.Match[str]) -> str:
    """12 1/2 percent, of which the parser would make a product."""
    whole, top, bottom = int(mixed[1]), int(mixed[2] or mixed[4]), int(mixed[3] or mixed[5])
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _repeating(decimal: re.Match[str]) -> str:
    whole, start, cycle = decimal.groups()
    shift, nines = 10 ** len(start), 10 ** len(cycle) - 1
    exact = Fraction(int(whole + start or "0") * nines + int(cycle), shift * nines)
    return rf"\frac{{{exact.numerator}}}{{{exact.denominator}}}"


_SIGNS = {"−": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "…": "...", "\u200b": ""}
_SIGNS |= {"≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "√": r"\sqrt "}
_SIGNS |= {"²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
_SIGNS |= {"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ "}
_SYNONYMS = {"varnothing": r"\emptyset", "ne": r"\neq", "rightarrow": r"\to", "land": r"\wedge", "lor": r"\vee"}
_SYNONYMS |= {"lnot": r"\neg", "lg": r"\log_{10}", "implies": r"\to"}
_GROUP = re.compile(r"\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\}")  # braces that hold all there is
# A command that was escaped twice; behind the end of a row of a matrix there is a space.
DOUBLED_BACKSLASH = r"\\\\(?=(?:leq?|geq?|d?frac|sqrt|pi|text|left|right|cdot|infty|cup|times)(?![A-Za-z]))"
_SEMICOLON = re.compile(r"(?<!\\)\s*;\s*")
_COMMA = re.compile(r"(?<=[0-9]),([0-9]+)")
_SEPARATING_COMMA = re.compile(r"(?<!\\),")  # not a thin space
_BRACKET = re.compile(r"[()\[\]]")
_SIZES = "tiny|scriptsize|footnotesize|small|normalsize|large|huge|underline"
_LEADING_WORDS = r"about|approximately|approx|exactly|(?:the\s+)?(?:(?:final|correct)\s+)?answer(?:\s+is)?|rs|usd"
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
        (r"\\?\$|[€£¥¢]|\\pounds(?![A-Za-z])|(?<!\\)\\[()\[\]]", ""),
        (r"\\[bB]igg?[lrm]?(?![A-Za-z])", ""),
        (r"\\begin\s*\{(align(?:ed)?|gather(?:ed)?|split)(\*?)\}(.*)\\end\s*\{\1\2\}", _last_line),
        (r"\\(?:displaystyle|textstyle|boldsymbol|mathbf|mathsf|mathtt|bf|rm|phantom)(?![A-Za-z])", ""),
        (rf"\\(?:{_SIZES})(?![A-Za-z])", ""),
        *[(rf"\\{name}(?![A-Za-z])", by.replace("\\", r"\\")) for name, by in _SYNONYMS.items()],
        (r"\A(?!\\)([^{}]*)\\over(?![A-Za-z])([^{}]*)\Z", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"{\\frac{\1}{\2}}"),
        (r"\\langle(?![A-Za-z])([^()]*,[^()]*)\\rangle", r"(\1)"),
        (r"(?<=\S)\s*,?\s*\(?\s*[A-Za-z]\s*\\in\s*\\mathbb\s*\{?\s*[ZN]\s*\}?\s*\)?\s*\Z", ""),
        (r"\A\(([0-9A-F]+)\)\s*_", r"\1_"),
        (rf"{TEXT}\s*\{{\s*\\[dtc]?frac\s*\{{([a-z]+)\}}\s*\{{([a-z]+{_POWER}?)\}}\s*\}}", r"\\text{\1/\2}"),
        (
            r"([0-9]+)\s*\\[dtc]?frac\s*(?:\{([0-9]+)\}\s*\{([0-9]+)\}|([0-9])([0-9]))(?=\s*\\?%)",
            _improper,
        ),
        (r"\\(?:vec|bm)(?![A-Za-z])", ""),
        (r"\(?\s*\\[bp]?mod\s*(?:\{\s*([0-9A-Za-z]+)\s*\}|([0-9A-Za-z]+))\s*\)?", r"\\pmod{\1\2}"),
        (rf"\\[dtc]?frac\s*\{{\s*({_TEXT_UNIT})\s*\}}\s*\{{\s*({_TEXT_UNIT}{_POWER}?)\s*\}}", r"\1/\2"),
        (r"(?<![0-9.])[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9.])", lambda number: number.group().replace(".", "")),
        (
            r"([0-9]*\.[0-9]*)\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?",
            r"\1\\overline{\2\3\4}",
        ),
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
        (r"\A\\(?:text|mathrm|mbox)\s*\{([\s+.-]*[0-9][^{}\\]*)\}[\s.]*\Z", r"\1"),
        (rf"\A(?:\\approx|[=:~\s]|(?:\\text\s*\{{\s*)?(?:{_LEADING_WORDS})\b[.:\s]*\}}?)+", ""),
        (r"(?:\\\\|\\?[.,;:\s*])+\Z", ""),
        (r"\A\{.*\}\Z", _without_braces),
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


_FLATTENED = (
    (rf"{TEXT}(?![a-z])|\\[,;:! ]|\\q?quad|~", " "),
    (rf"{_CIRCLE}\s*\{{?\s*", "degree "),
    (r"\s*\\Omega", "Ω"),
    (r"\\mu\s*", "μ"),
    (r"\\(?:cdot|times)|\*", " "),
    (r"[{}.,]", ""),
)
_PREFIXES = {"n": "nano", "μ": "micro", "m": "milli", "c": "centi", "d": "deci", "h": "hecto", "k": "kilo"}
_PREFIXES |= {"M": "mega", "G": "giga", "T": "tera"}
# Symbols, in which case counts, with the names of each; both may have a prefix.
_SI = {
    **{"m": "meter metre", "g": "gram gramme gm", "s": "second sec", "A": "ampere amp", "K": "kelvin", "mol": "mole"},
    **{"N": "newton", "J": "joule", "W": "watt", "V": "volt", "Hz": "hertz", "Pa": "pascal", "eV": "electronvolt"},
    **{"L": "liter litre", "C": "coulomb", "F": "farad", "Ω": "ohm", "T": "tesla", "H": "henry", "cal": "calorie"},
    **{"Wh": "watthour", "B": "byte"},
}
_NAMES = {
    **{"inch": "in inches", "foot": "ft feet", "yard": "yd", "mile": "mi", "kilogram": "kilo", "pound": "lb"},
    **{
        "ounce": "oz",
        "ton": "tonne",
        "minute": "min",
        "hour": "hr",
        "day": "",
        "week": "wk",
        "month": "",
        "year": "yr",
    },
    **{"gallon": "gal", "quart": "qt", "pint": "pt", "acre": "", "hectare": "ha", "knot": "", "radian": "rad"},
    **{
        "cent": "¢",
        "dollar": "usd",
        "euro": "eur",
        "yen": "jpy",
        "rupee": "rs inr",
        "degree": "deg °",
        "am": "",
        "pm": "",
    },
    **{"celsius": "degreec", "fahrenheit": "degreef", "mile/hour": "mph", "kilometer/hour": "kmh kph kmph"},
}
_SI_SYMBOLS = {"l": "liter", **{symbol: names.split()[0] for symbol, names in _SI.items()}}
_SI_NAMES = {name: names.split()[0] for names in _SI.values() for name in names.split()}
_UNITS = {word: unit for unit, words in _NAMES.items() for word in (unit, *words.split())} | _SI_NAMES
_UNITS |= {prefix + name: prefix + unit for prefix in _PREFIXES.values() for name, unit in _SI_NAMES.items()}
_UNIT_SYMBOLS = {
    sign + symbol: prefix + unit for sign, prefix in _PREFIXES.items() for symbol, unit in _SI_SYMBOLS.items()
}
_UNIT_SYMBOLS |= {"h": "hour", **_SI_SYMBOLS}
_UNIT_SIGNS = {r"\$": "dollar", "$": "dollar", "€": "euro", "£": "pound", r"\pounds": "pound", "¥": "yen", "¢": "cent"}
_SIGN = re.compile(r"\A[\s$]*(\\\$|[€£¥]|\\pounds)|([€£¥¢])[\s$.]*\Z")
_DEGREE = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)[\s$.]*\Z")
_LONE_UNIT = re.compile(rf"(?<=[0-9)}}]){_GAP}*([A-Za-z](?:[A-Za-z ./]|{_POWER})*)\Z")  # even "5 m" and "5m"
_SCALE_OF_DEGREES = re.compile(r"\b(degree)s?\s*(c|f)(?:elsius|ahrenheit)?\b", re.I)
_SQUARED = re.compile(r"([A-Za-z]+)\s+(s|c)(?:quared|ubed)\b")
_SQUARE = re.compile(r"\b(s|c)(?:q|quared?|ubic|ubed)\s+([A-Za-z]+)")
_FACTOR = re.compile(r"([^\s^²³]+)\s*(?:\^\s*(-?\s*[0-9])|([²³]))?")
_RATIO = re.compile(r"/|\s+(?:per|an?)\s+")
_TEMPERATURES = {"degree^1", "celsius^1", "fahrenheit^1"}
_EXPONENTS = {"s": "2", "c": "3", "²": "2", "³": "3"}


@lru_cache(maxsize=4096)
def unit_of(answer: str) -> str:
    """The unit that an answer ends with, or begins with if it is a currency; "" without a known one."""
    if sign := _SIGN.search(answer):
        return _unit(_UNIT_SIGNS[sign[1] or sign[2]])
    if _DEGREE.search(answer):
        return _unit("degree")
    respelt = _respelt(answer)
    return _unit(_split_unit(respelt)[1] or _flat("".join(_LONE_UNIT.findall(respelt))))


def units_differ(gold: str, answer: str) -> bool:
    """Test whether both name a known unit, and not the same."""
    expected, given = unit_of(gold), unit_of(answer)
    scale_left_out = "degree^1" in (expected, given) and {expected, given} <= _TEMPERATURES
    return bool(expected and given and expected != given and not scale_left_out)


def _unit(words: str) -> str:
    """The product of powers of units that the words name, in one spelling; "" where one of them is unknown."""
    words = _SQUARED.sub(lambda unit: f"{unit[1]}^{_EXPONENTS[unit[2]]}", _SCALE_OF_DEGREES.sub(r"\1\2", words))
    words = _SQUARE.sub(lambda unit: f"{unit[2]}^{_EXPONENTS[unit[1]]}", words)
    powers: Counter[str] = Counter()
    for place, side in enumerate(_RATIO.split(words)):
        for word, exponent, sign in _FACTOR.findall(side):
            unit = _UNIT_SYMBOLS.get(word) or _known_name(word.casefold())
            if not unit:
                return ""
            power = int(exponent.replace(" ", "") or _EXPONENTS.get(sign, "1"))
            for step, part in enumerate(unit.split("/")):
                powers[part] += -power if (place > 0) != (step > 0) else power
    return " ".join(f"{unit}^{power}" for unit, power in sorted(powers.items()) if power)


def _known_name(name: str) -> str:
    return (
        _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or _UNIT_SYMBOLS.get(name if len(name) > 1 else "", "")
    )
