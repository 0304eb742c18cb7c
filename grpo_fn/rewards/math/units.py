"""The unit that an answer names, in one spelling. Two answers with two known units have to name the same one.

Values are not converted: 42 cm is not 0.42 m here. A word that is no unit of measure ("apples") says nothing.
"""

import re

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
_SIGNS = {r"\$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}

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
    """The unit that an answer ends with, or begins with if it is a currency; "" without a known one.

    Args:
        answer: a short answer, as written.

    Returns:
        The unit in one spelling: "cm", "cm 2" for an area, "mile / hour".
    """
    if sign := _SIGN.search(answer):
        return _SIGNS[sign[1] or sign[2]]
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
    """Test whether both name a known unit, and not the same.

    Args:
        gold: the gold, as written.
        answer: a short answer, as written.

    Returns:
        True iff the answer has another unit than the gold.
    """
    wanted, given = unit_of(gold), unit_of(answer)
    return bool(wanted and given and wanted != given)


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
