"""Have two parsed answers the same value? math-verify says so in the end, for what is not settled sooner.

Numbers, and tuples, lists, intervals and matrices of them, are settled here. Two expressions whose values at a point
differ are not equal, nor is an equation that fails where the gold's holds. math-verify would find that out by
simplifying or solving, which can take for ever, and its way with numbers is 6 decimals: 1e-7 equals 2e-7. What numbers
are the same `same_value` says.

Everything here takes what the parser made of a text, and may raise whatever sympy raises.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
from math_verify import verify
from sympy.core.function import AppliedUndef

from grpo_fn.verifier.spelling import DOUBLED_BACKSLASH

HUNDREDTH = sympy.UnevaluatedExpr(sympy.Rational(1, 100))  # how the parser reads a percent sign
_POINTS = (sympy.Rational(7391, 10007), sympy.Rational(-13627, 10009))  # nowhere in particular


def equation_sides(relation: Any) -> list[Any]:
    """a, b and c of "a = b = c"; nothing for what is no equation."""
    links = relation._unsorted_args if isinstance(relation, sympy.And) else [relation]
    if not all(isinstance(link, sympy.Eq) for link in links):
        return []
    return [links[0].lhs, *(link.rhs for link in links)]


def stated_value(gold: Any) -> Any:
    """The gold, of "0.56 = 56%" its last side."""
    each = equation_sides(gold)
    return each[-1] if each and all(map(_is_number, each)) else gold


def comparable_part(gold: Any, answer: Any) -> Any:
    """What of the answer is put against the gold: of an equation one side. None where its sides contradict each other.

    The first side is a name and the others have to agree: "x = 6 * 7 = 42" is 42, as is "42 = x", but "y = 41 = 42" is
    no answer at all. An equation that ends in "= 0" is no answer to a gold of 0, unless what it says is 0 has a name.
    """
    each = equation_sides(answer)
    if isinstance(gold, sympy.Expr):
        answer, each = _single(answer), [_single(side) for side in each]
    numbers = [side for side in each if _is_number(side)]
    if any(not _same_number(numbers[-1], number) for number in numbers):
        return None
    if not each:
        return answer
    if isinstance(gold, sympy.Rel | sympy.And):
        between = all(equal(each[-1], side) for side in each[1:-1])
        return sympy.Eq(each[0], each[-1], evaluate=False) if between else None
    if _is_number(gold):
        ends = [each[0], each[-1]] if gold == 0 else []
        sound = all(map(_is_name, ends)) and not any(_is_circular(each[0], side) for side in each[1:-1])
        return numbers[-1] if numbers and sound else None
    others = each[1:-1] if _is_name(each[0]) else each[:-1]
    return each[-1] if all(equal(each[-1], side) for side in others) else None


def equal(gold: Any, answer: Any) -> bool:
    """Has the answer the value of the gold? Not symmetric: the gold says what kind of answer is asked for."""
    gold, answer = with_imaginary_unit(gold), with_imaginary_unit(answer)
    answer = comparable_part(gold, answer)
    if _is_number(gold) or answer is None:
        return _is_number(answer) and _same_number(gold, answer)
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return gold.shape == answer.shape and all(map(equal, gold.flat(), answer.flat()))
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        same_ends = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return same_ends and equal(gold.start, answer.start) and equal(gold.end, answer.end)
    items, given = _items(gold), _items(answer)
    if isinstance(gold, sympy.FiniteSet) and len(set(items)) == len(items):
        given = list(dict.fromkeys(given))  # the same once more is no other answer, unless the gold counts
    if items and given:
        return len(items) == len(given) and _paired(items, given, anyhow=isinstance(gold, sympy.FiniteSet))
    if gold == answer:
        return True
    if answer.has(sympy.binomial):
        answer = sympy.expand_func(answer)
    if not gold.has(sympy.Float):  # a decimal is the fraction that it says
        answer = without_decimals(answer)
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr) and _differ(gold, answer):
        return False
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq) and _misses(gold, answer):
        return False
    return verify([gold], [answer], timeout_seconds=None, raise_on_error=True)


def is_plain(value: Any) -> bool:
    """An integer, a fraction or a decimal, perhaps with a percent sign."""
    return isinstance(value, sympy.Number) or (_is_number(value) and isinstance(_percent(value), sympy.Number))


def is_written_out(value: Any) -> bool:
    """A number, a power of one, or a product with a power as in 3 * 10^8: no sum or product is left to be done."""
    if isinstance(value, sympy.Mul):
        others = [factor for factor in value.args if not isinstance(factor, sympy.Number)]
        return bool(others) and all(factor == HUNDREDTH or _is_power(factor) for factor in others)
    return isinstance(value, sympy.Number) or _is_power(value)


def is_closed_form(value: Any) -> bool:
    """A number, a power, root or function of one, or a product of these: 5!, i^4, 7!/7, but not 3 * 14 or 40 + 2."""
    if isinstance(value, sympy.Mul):
        plain = [factor for factor in value.args if isinstance(factor, sympy.Number)]
        return len(plain) < min(2, len(value.args)) and all(map(is_closed_form, value.args))
    if isinstance(value, sympy.Pow | sympy.Function):
        return all(map(is_closed_form, value.args))
    return _is_number(value) and not isinstance(value, sympy.Add)


def _is_power(value: Any) -> bool:
    if not (isinstance(value, sympy.Pow) and isinstance(value.exp, sympy.Integer)):
        return False
    return value.base.is_Number or _is_power(value.base)


def with_imaginary_unit(value: Any) -> Any:
    """The value with the number i where i is its only letter; the parser has a symbol for it."""
    letters = value.free_symbols if isinstance(value, sympy.Basic) else set()
    alone = isinstance(value, sympy.Expr) and {letter.name for letter in letters} == {"i"}
    return value.xreplace(dict.fromkeys(letters, sympy.I)) if alone else value


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number)


def _single(value: Any) -> Any:
    """What a list of one holds: braces around a number make one."""
    return value.args[0] if isinstance(value, sympy.FiniteSet) and len(value) == 1 else value


def _is_name(side: Any) -> bool:
    """A number, f(3), or letters alone."""
    return _is_number(side) or isinstance(side, AppliedUndef) or side.atoms(sympy.Number) <= {sympy.Integer(-1)}


def _is_circular(name: Any, side: Any) -> bool:
    """x = 41 x, whose meaning is unclear; the area of "A = 1/2 b h = 42" is fine."""
    return not _is_name(side) and bool(name.free_symbols & side.free_symbols)


def _items(value: Any) -> Sequence[Any]:
    """What a list, a point or an open interval holds, in the order it was written in."""
    if isinstance(value, sympy.Interval) and value.left_open and value.right_open:
        return [value.start, value.end]
    return getattr(value, "_unsorted_args", value.args) if isinstance(value, sympy.FiniteSet | sympy.Tuple) else []


def _paired(gold: Sequence[Any], answer: Sequence[Any], *, anyhow: bool) -> bool:
    """Is each item equal to its partner, in order or `anyhow`?"""
    if not anyhow:
        return all(map(equal, gold, answer))
    left = list(answer)
    for item in gold:
        partner = next((place for place, given in enumerate(left) if equal(item, given)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def _same_number(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """A sign that only one side has is a unit where the gold's number is 1 or more: 50 for 50 %, as is 0.5."""
    share, given = _percent(gold), _percent(answer)
    if given is None:
        is_unit = share is None or (abs(share.evalf()) >= 1 and same_value(share, answer))
        return is_unit if share is not None and is_unit else same_value(gold if share is None else share / 100, answer)
    if share is None:
        return same_value(gold, given if abs(gold.evalf()) >= 1 else given / 100)
    return same_value(share, given)


def _percent(number: sympy.Expr) -> sympy.Expr | None:
    """x of "x percent"; None without a percent sign."""
    if not (isinstance(number, sympy.Mul) and HUNDREDTH in number.args):
        return None
    return sympy.Mul(*(factor for factor in number.args if factor != HUNDREDTH))


def _differ(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Have the two different values at one of the points? Words, which are symbols, have none."""
    if isinstance(gold, sympy.Symbol) or isinstance(answer, sympy.Symbol):
        return False
    points = (_spread(gold.free_symbols | answer.free_symbols, start) for start in _POINTS)
    return any(_apart(_value(gold, at), _value(answer, at)) for at in points)


def _misses(gold: sympy.Eq, answer: sympy.Eq) -> bool:
    """Does the answer fail at a point where the gold holds?"""
    if not all(isinstance(side, sympy.Expr) for side in [*gold.args, *answer.args]):
        return False
    found = _solution(gold)
    at = {**_spread(answer.free_symbols, _POINTS[0]), **found}
    return bool(found) and _apart(sympy.Integer(0), _value(answer.lhs - answer.rhs, at))


@lru_cache(maxsize=256)
def _solution(gold: sympy.Eq) -> Mapping[str, sympy.Expr]:
    """A point where the gold holds, by name; empty where none is found."""
    first, *rest = sorted(gold.free_symbols, key=lambda symbol: symbol.name)
    at = _spread(gold.free_symbols, _POINTS[0])
    try:
        roots = sympy.solve(gold.subs({symbol: at[symbol.name] for symbol in rest}), first)
    except NotImplementedError:
        roots = []
    return {**at, first.name: roots[0]} if roots else {}


def _spread(symbols: Iterable[sympy.Basic], start: sympy.Rational) -> dict[str, sympy.Expr]:
    """A value for each name: symbols of one name may differ in what the parser assumes of them."""
    names = sorted({symbol.name for symbol in symbols})
    return {name: start * (place + 2) / (place + 1) for place, name in enumerate(names)}


def _value(side: sympy.Expr, at: Mapping[str, sympy.Expr]) -> sympy.Expr:
    return side.evalf(20, subs={symbol: at[symbol.name] for symbol in side.free_symbols})


def _apart(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Not the same number; an unknown function is none, and decides nothing in a gold."""
    if not (gold.is_number and answer.is_number):
        return bool(gold.is_number)
    return bool(abs(gold - answer) > 1e-9 * max(abs(gold), abs(answer)) + 1e-12)


# -- numbers, exactly, however large they are; a decimal may leave digits out


FEWEST_PLACES = 6  # of a decimal that stands for a number that it is not
MOST_BITS = 20_000  # of a number that is worked out as a fraction
LARGEST_FACTORIAL = 500


def same_value(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Test whether two numbers are the same."""
    if gold == answer:
        return gold not in (sympy.nan, sympy.zoo)
    expected, given = _fraction(gold), _fraction(answer)
    if expected is not None and given is not None:
        return expected == given or _stands_for(gold, expected, answer, given)
    if _agree(without_decimals(gold), without_decimals(answer)):
        return True
    if not isinstance(gold, sympy.Float) or expected is None or answer.has(sympy.Float):
        return False
    places = _places(gold)
    about = answer.evalf(places + 30)
    return bool(about.is_real) and places >= FEWEST_PLACES and _rounds_to(Fraction(str(about)), places, expected)


def without_decimals(value: sympy.Basic) -> sympy.Basic:
    """The same with each decimal as the fraction that it says."""
    return value.xreplace({decimal: sympy.Rational(str(decimal)) for decimal in value.atoms(sympy.Float)})


def _fraction(value: Any) -> Fraction | None:
    """The value, of what is made of rational numbers, sums, products, powers and factorials; None of anything else."""
    match value:
        case sympy.Rational():
            return Fraction(int(value.p), int(value.q))
        case sympy.Float():
            return Fraction(str(value)) if value.is_finite else None
        case sympy.UnevaluatedExpr() | sympy.Abs():
            inside = _fraction(value.args[0])
            return inside if inside is None or not isinstance(value, sympy.Abs) else abs(inside)
        case sympy.factorial():
            size = _fraction(value.args[0])
            whole = size is not None and size.denominator == 1 and 0 <= size <= LARGEST_FACTORIAL
            return Fraction(math.factorial(int(size))) if size is not None and whole else None
        case sympy.Pow():
            return _power(_fraction(value.base), _fraction(value.exp))
        case sympy.Add() | sympy.Mul():
            return _combined([_fraction(part) for part in value.args], isinstance(value, sympy.Add))
        case _:
            return None


def _combined(parts: list[Fraction | None], is_sum: bool) -> Fraction | None:
    total = Fraction(0 if is_sum else 1)
    for part in parts:
        if part is None or _bits(part) + _bits(total) > MOST_BITS:
            return None
        total = total + part if is_sum else total * part
    return total


def _power(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    if base is None or exponent is None or exponent.denominator != 1 or (base == 0 and exponent <= 0):
        return None
    return base ** int(exponent) if _bits(base) * abs(exponent) <= MOST_BITS else None


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _agree(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """The same to more digits than two different numbers of this size that people write down share."""
    size = max(abs(gold.evalf(15)), abs(answer.evalf(15)))
    if not size.is_finite or not size:
        return size == 0
    if 0 in (gold, answer):  # of what is 0 no digit can be known
        return bool(gold.doit() == answer.doit())
    digits = 60 + min(1000, max(0, int(sympy.log(size, 10).evalf(5))))
    x, y = gold.evalf(digits), answer.evalf(digits)
    return bool(x.is_finite and y.is_finite and abs(x - y) <= size * sympy.Float(10, digits) ** (10 - digits))


def _places(decimal: sympy.Float) -> int:
    """Digits behind the point."""
    size = Fraction(str(decimal))
    places = 0
    while (size * 10**places).denominator != 1:
        places += 1
    return places


def _stands_for(gold: sympy.Expr, expected: Fraction, answer: sympy.Expr, given: Fraction) -> bool:
    """Is one of them, a decimal, the other one rounded or cut off?"""
    decimals = sorted(
        [
            (_places(x), value, other)
            for x, value, other in [(gold, expected, given), (answer, given, expected)]
            if isinstance(x, sympy.Float)
        ],
        key=lambda decimal: decimal[0],
    )
    if not decimals or (len(decimals) == 2 and decimals[0][0] == decimals[1][0]):
        return False
    places, value, other = decimals[0]
    near = abs(value - other) * 1000 <= abs(other)
    return near and places >= FEWEST_PLACES and _rounds_to(other, places, value)


def _rounds_to(exact: Fraction, places: int, decimal: Fraction) -> bool:
    unit = Fraction(1, 10**places)
    cut = unit * int(exact / unit)
    return abs(exact - decimal) * 2 <= unit or decimal == cut


# -- names and their values: "y = -1, x = 3" is (3, -1)


_NAMED = re.compile(r"\s*([A-Za-z]|\\(?:alpha|beta|theta|lambda|mu|phi))\s*=([^=<>]+)")
_NAMED_TUPLE = re.compile(
    r"\s*\(\s*([A-Za-z](?:\s*,\s*[A-Za-z])+)\s*\)\s*=\s*(?:\\left)?\((.*?)(?:\\right)?\)[\s.$]*", re.DOTALL
)
_POINT = re.compile(r"[\s$]*(?:\\left)?\(([^()]*(?:\([^()]*\)[^()]*)*)\)[\s.$]*")
_BETWEEN = re.compile(r",(?![^(\[{]*[)\]}])|\\(?:text|mbox|mathrm)\s*\{[\s,]*and[\s,]*\}|\band\b")


def without_names(gold: str, answer: str) -> tuple[str, str]:
    """Gold and answer, of which names with their values are a point in the order of the names."""
    expected, given = _point_of_names(gold), _point_of_names(answer)
    if expected and given:
        return (expected[1], given[1]) if expected[0] == given[0] else (gold, answer)
    if given and _POINT.fullmatch(gold):
        return gold, given[1]
    if expected and _POINT.fullmatch(answer):
        return expected[1], answer
    return gold, answer


def _point_of_names(text: str) -> tuple[list[str], str] | None:
    """The names in order and their values as a point, of "x = 3, y = -1" and "(x, y) = (3, -1)"."""
    if named := _NAMED_TUPLE.fullmatch(text):
        pairs = list(zip(re.split(r"\s*,\s*", named[1]), _BETWEEN.split(named[2]), strict=False))
    else:
        found = [_NAMED.fullmatch(part) for part in _BETWEEN.split(re.sub(r"\\[,;:! ]|~|\$|\\quad", " ", text))]
        pairs = [(pair[1], pair[2].rstrip(" .")) for pair in found if pair] if all(found) else []
    values = dict(pairs)
    if len(pairs) < 2 or len(values) < len(pairs):
        return None
    return sorted(values), f"({', '.join(values[name] for name in sorted(values))})"


# -- inequalities in one letter, as intervals: "1 < x \le 3" is (1, 3]


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
    """The letter of an inequality and the set that it says; None for what is no such inequality."""
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
    """Gold and answer, of which an inequality is an interval where the other one is one or says the same letter."""
    expected, given = as_interval(gold), as_interval(answer)
    if expected and given and expected[0] == given[0]:
        return expected[1], given[1]
    if expected and not given and _INTERVAL.match(answer):
        return expected[1], answer
    if given and not expected and _INTERVAL.match(gold):
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
    bounded = all(
        _BOUND.fullmatch(bound) and not _LETTER.fullmatch(bound) and letter not in re.findall(_LETTER, bound)
        for bound in (low, high)
        if bound
    )
    if not _LETTER.fullmatch(letter) or not bounded:
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


def _goes_up(relation: str) -> bool:
    return relation[0] in "<≤" or relation.startswith((r"\le", r"\lt"))
