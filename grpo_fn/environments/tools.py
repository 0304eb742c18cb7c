"""Tools for the policy: a calculator, and Python in the sandbox."""

import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import NamedTuple

from grpo_fn.core.problem import Program
from grpo_fn.rewards.code import Runner

# -- A calculator: sums, differences, products and quotients of numbers, exact, without running anything.


_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(\*\*|[-+*/()×÷]))")
_PLACES = Context(prec=12)  # of a result that is no whole number
_LONGEST = 200  # characters of an expression: exact fractions may have as many digits


class _Operator(NamedTuple):
    binds: int
    operands: int
    compute: Callable[..., Fraction]


_BINARY = {
    "+": _Operator(1, 2, lambda a, b: a + b),
    "-": _Operator(1, 2, lambda a, b: a - b),
    "*": _Operator(2, 2, lambda a, b: a * b),
    "/": _Operator(2, 2, lambda a, b: a / b),
}
_SIGNS = {"+": _Operator(3, 1, lambda a: a), "-": _Operator(3, 1, lambda a: -a)}
_SPELLINGS = {"×": "*", "÷": "/"}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression of numbers with + - * / and brackets.

    Args:
        expression: for example 12*(7+5)

    Returns:
        The value: a whole number in full, any other to 12 significant digits.

    Raises:
        ValueError: for anything that is no expression, a division by zero and an expression that is too long.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"got an expression of {len(expression)} characters, expected at most {_LONGEST}")
    value = _value(_read_tokens(expression))
    if value.denominator == 1:
        return str(value.numerator)
    return str(_PLACES.divide(Decimal(value.numerator), Decimal(value.denominator)))


def _read_tokens(text: str) -> list[str]:
    """Numbers, operators and brackets."""
    tokens, place, text = [], 0, text.rstrip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or found[2] == "**":
            raise ValueError(f"got {text[place:].strip()[:20]!r}, expected a number, one of + - * / or a bracket")
        tokens.append(found[1] or _SPELLINGS.get(found[2], found[2]))
        place = found.end()
    return tokens


def _value(tokens: list[str]) -> Fraction:
    """Two stacks, operands and operators (Dijkstra's shunting yard), so that no depth of brackets is too deep."""
    values: list[Fraction] = []
    waiting: list[_Operator | None] = []  # None is an open bracket
    operand_next = True

    def apply() -> None:
        operator = waiting.pop()
        operands = values[-operator.operands :]
        del values[-operator.operands :]
        try:
            values.append(operator.compute(*operands))
        except ZeroDivisionError:
            raise ValueError("got a division by zero, expected a divisor that is not 0") from None

    for token in tokens:
        if operand_next and token in _SIGNS:
            waiting.append(_SIGNS[token])
        elif operand_next and token == "(":
            waiting.append(None)
        elif operand_next and token not in _BINARY and token != ")":
            values.append(Fraction(token))
            operand_next = False
        elif not operand_next and token in _BINARY:
            while waiting and waiting[-1] is not None and waiting[-1].binds >= _BINARY[token].binds:
                apply()
            waiting.append(_BINARY[token])
            operand_next = True
        elif not operand_next and token == ")":
            while waiting and waiting[-1] is not None:
                apply()
            if not waiting:
                raise ValueError("got ')' without '(', expected brackets in pairs")
            waiting.pop()
        else:
            expected = "a number or '('" if operand_next else "one of + - * / or ')'"
            raise ValueError(f"got {token[:20]!r}, expected {expected} there")
    if operand_next:
        raise ValueError("got the end of the expression, expected a number")
    while waiting:
        if waiting[-1] is None:
            raise ValueError("got '(' without ')', expected brackets in pairs")
        apply()
    return values[0]


# -- Python as a tool: a program that the policy wrote, run in the sandbox, answered with what it printed.


_SHOWN = 1000  # characters of what a program printed, the last ones


def python(code: str, *, run: Runner) -> str:
    """Run a Python program and read what it prints. Only the standard library is there; nothing is kept between runs.

    Args:
        code: the program
        run: runs a program: `sandbox.run_program` with its knobs.

    Returns:
        What it printed; why it failed, where it did.

    Raises:
        ValueError: for a program without anything in it.
    """
    if not code.strip():
        raise ValueError("got an empty program, expected one that prints its result")
    # One test that always holds: that it is proven says that the program ran to its end and is still there.
    ran = run(Program((code,), "", ("assert True",), ()))
    printed = tail(ran.printed, _SHOWN)
    if all(ran.verdicts) and ran.proven:
        return printed or "(the program printed nothing)"
    return f"error: {ran.reason}" + (f"\n{printed}" if printed else "")


def tail(printed: str, length: int) -> str:
    """The last so many characters of what a program printed, without white space at either end."""
    return printed.strip()[-length:]
