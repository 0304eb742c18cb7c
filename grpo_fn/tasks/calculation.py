"""Products and sums of large numbers, made on the spot: too much for a small model, nothing for a calculator.

`a*b+c` or `a*b-c`, never below zero.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count as count_from

from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import Task, block_uniforms, drawn_task, frozen_key

_STYLE = 1 << 32  # of the key's children: blocks of problems are numbered from 0 and never get this far
_LEAST = 2  # of the numbers: a product with 1 is none


def task(*, max_value: int, test_size: int) -> Task:
    """Problems with two factors and a third number, each 2..max_value, `test_size` of them held out.

    Args:
        max_value: largest of the numbers.
        test_size: held-out problems.

    Returns:
        The task; problems bring their `expression` in `meta`, "34*57+88".

    Raises:
        ValueError: for a max_value below 3, or a test_size that leaves less than half to train on.
    """
    if max_value < _LEAST + 1:
        raise ValueError(f"max_value: got {max_value}, wanted at least {_LEAST + 1}")
    contents = 2 * (max_value - _LEAST + 1) ** 3
    make = partial(_problem, max_value)
    return drawn_task(make, _expression, width=4, contents=contents, test_size=test_size)


def tool_demonstrations(task: Task, key: Tensor, *, tool_share: float) -> Iterator[tuple[Problem, bool]]:
    """Endless training problems for a supervised warm start, each with whether it is to be solved with the tool."""
    style = frozen_key(prng.fold_in(key, _STYLE))
    for index in count_from():
        yield task.train(key, index), block_uniforms(style, 1, index)[0] < tool_share


def _expression(problem: Problem) -> str:
    return problem.meta["expression"]


def _problem(max_value: int, draw: Sequence[float]) -> Problem:
    a, b, c = (_LEAST + int(u * (max_value - _LEAST + 1)) for u in draw[:3])
    sign = "+" if draw[3] < 0.5 or a * b < c else "-"
    expression, answer = f"{a}*{b}{sign}{c}", a * b + c if sign == "+" else a * b - c
    return Problem(0, f"What is {expression}?", str(answer), {"expression": expression})
