"""The calculator computes what exact fractions give, and refuses the rest in words."""

from contextlib import suppress
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo_fn.environments.tools import calculator as calculate
from grpo_fn.testing import texts

numbers = st.one_of(
    st.integers(0, 999).map(lambda n: (str(n), Fraction(n))),
    st.integers(0, 999).map(lambda n: (f"{n / 8}", Fraction(n, 8))),
)


def combined(inner):
    """An expression and its value; brackets where the order of operations asks for them, spaces anywhere."""

    def join(left, operator, right, spaces):
        (a, x), (b, y) = left, right
        value = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "/": lambda: x / y if y else None}[
            operator
        ]()
        return (f"({a}){' ' * spaces}{operator}({b})", value) if None not in (x, y) else (f"({a}){operator}({b})", None)

    def signed(one):
        return f"-({one[0]})", None if one[1] is None else -one[1]

    return st.one_of(st.builds(join, inner, st.sampled_from("+-*/"), inner, st.integers(0, 2)), inner.map(signed))


expressions = st.recursive(numbers, combined, max_leaves=8)


@given(expressions)
def test_a_value_is_that_of_exact_fractions(example):
    text, value = example
    if value is None:
        with pytest.raises(ValueError, match="division by zero"):
            calculate(text)
    else:
        got = calculate(text)
        assert (
            Fraction(got) == value if value.denominator == 1 else float(got) == pytest.approx(float(value), rel=1e-11)
        )
        assert not (value.denominator == 1 and "." in got)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2-3*4+10/4*2", "-5"),
        ("1/3", "0.333333333333"),
        ("8-3-2*8/4/2", "3"),
        ("-2*-3", "6"),
        ("+5", "5"),
        ("3×4÷2", "6"),
        (".5+1.25", "1.75"),
        ("9" * 40 + "*10", "9" * 40 + "0"),
        ("(" * 99 + "1" + ")" * 99, "1"),
    ],
)
def test_known_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "got the end of the expression, expected a number"),
        ("2**9", r"got '\*\*9', expected a number"),
        ("2 3", r"got '3', expected one of \+ - \* / or '\)' there"),
        ("()", r"got '\)', expected a number or '\(' there"),
        ("(2", r"got '\(' without '\)'"),
        ("2)", r"got '\)' without '\('"),
        ("1/(2-2)", "got a division by zero"),
        ("__import__('os')", 'got "__import__'),
        ("٤+٢", "got '٤"),
        ("1+" * 100 + "1", "got an expression of 201 characters, expected at most 200"),
    ],
)
def test_text_that_is_no_expression_is_refused_in_words(expression, said):
    with pytest.raises(ValueError, match=said):
        calculate(expression)


@given(st.one_of(texts.PROSE, st.text("0123456789+-*/(). ", max_size=30)))
def test_any_text_has_a_value_or_is_refused(text):
    with suppress(ValueError):
        assert isinstance(calculate(text), str)
