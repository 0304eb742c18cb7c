"""Are two numbers the same? Exactly, however large they are; what a decimal may leave out is said here.

Between exact numbers nothing is left out: 2^100 + 1 is not 2^100. A decimal is a fraction of a power of ten. It stands
for an exact rational if it is that number, or is that number rounded or cut off at `FEWEST_PLACES` places or more; for
an irrational one only where the gold is the decimal: 3.14159265 is no answer to a gold of pi.
"""

import math
from fractions import Fraction
from typing import Any

import sympy

FEWEST_PLACES = 6  # of a decimal that stands for a number that it is not
MOST_BITS = 20_000  # of a number that is worked out as a fraction
LARGEST_FACTORIAL = 500


def same_value(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Test whether two numbers are the same.

    Args:
        gold: the number that is asked for.
        answer: the number that is given.

    Returns:
        True iff they are, in the sense of this module.
    """
    if gold == answer:
        return gold not in (sympy.nan, sympy.zoo)
    wanted, given = _fraction(gold), _fraction(answer)
    if wanted is not None and given is not None:
        return wanted == given or _stands_for(gold, wanted, answer, given)
    if not _agree(without_decimals(gold), without_decimals(answer)):
        asked = gold if _is_decimal(gold) and not answer.has(sympy.Float) else None
        return asked is not None and wanted is not None and _is_rounded(wanted, _places(asked), answer)
    return True


def without_decimals(value: sympy.Basic) -> sympy.Basic:
    """The same with each decimal as the fraction that it says.

    Args:
        value: an expression.

    Returns:
        The expression without decimals.
    """
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


def _is_decimal(value: sympy.Expr) -> bool:
    return isinstance(value, sympy.Float)


def _places(decimal: sympy.Float) -> int:
    """Digits behind the point."""
    size = Fraction(str(decimal))
    places = 0
    while (size * 10**places).denominator != 1:
        places += 1
    return places


def _stands_for(gold: sympy.Expr, wanted: Fraction, answer: sympy.Expr, given: Fraction) -> bool:
    """Is one of them, a decimal, the other one rounded or cut off?"""
    decimals = sorted(
        [
            (_places(x), value, other)
            for x, value, other in [(gold, wanted, given), (answer, given, wanted)]
            if _is_decimal(x)
        ],
        key=lambda decimal: decimal[0],
    )
    if not decimals or (len(decimals) == 2 and decimals[0][0] == decimals[1][0]):
        return False
    places, value, other = decimals[0]
    near = abs(value - other) * 1000 <= abs(other)
    return near and places >= FEWEST_PLACES and _rounds_to(other, places, value)


def _is_rounded(decimal: Fraction, places: int, exact: sympy.Expr) -> bool:
    about = exact.evalf(places + 30)
    return bool(about.is_real) and places >= FEWEST_PLACES and _rounds_to(Fraction(str(about)), places, decimal)


def _rounds_to(exact: Fraction, places: int, decimal: Fraction) -> bool:
    unit = Fraction(1, 10**places)
    cut = unit * int(exact / unit)
    return abs(exact - decimal) * 2 <= unit or decimal == cut
