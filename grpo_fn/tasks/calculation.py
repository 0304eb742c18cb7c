"""Word problems with products of large numbers, made on the spot: too much for a small model, nothing for a calculator.

`{a} boxes of {b} things`, and a number more or less; the answer is `a * b + c` or `a * b - c`, never below zero.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count as count_from

from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.arithmetic import GAINS, LOSSES, NAMES, QUESTIONS, THINGS
from grpo_fn.tasks.draws import block_uniforms, drawn_task
from grpo_fn.tasks.task import Task, frozen_key

STARTS = ("{n} has {a} boxes of {b} {s}.", "{n} buys {a} bags of {b} {s}.", "{n} sees {a} rows of {b} {s}.")
_STYLE = 1 << 32  # of the key's children: blocks of problems are numbered from 0 and never get this far
_WIDTH = 10  # uniforms per problem: three numbers, an operator, and six for words
_LEAST = 2  # of the numbers: a box of one thing would be worded otherwise


def task(*, max_value: int, test_size: int) -> Task:
    """Problems with two factors and a third number, each 2..max_value, `test_size` of the contents held out.

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
    return drawn_task(make, _expression, width=_WIDTH, contents=contents, test_size=test_size)


def tool_demonstrations(task: Task, key: Tensor, *, tool_share: float) -> Iterator[tuple[Problem, bool]]:
    """Endless training problems for a supervised warm start, each with whether it is to be solved with the tool.

    Args:
        task: a task of this module.
        key: key of the draws.
        tool_share: probability that the tool is used, in [0, 1].

    Returns:
        The pairs, without end.
    """
    style = frozen_key(prng.fold_in(key, _STYLE))
    for index in count_from():
        yield task.train(key, index), block_uniforms(style, 1, index)[0] < tool_share


def _expression(problem: Problem) -> str:
    return problem.meta["expression"]


def _problem(max_value: int, draw: Sequence[float]) -> Problem:
    """Numbers and words of ten uniforms."""
    spread = max_value - _LEAST + 1
    a, b, c = (_LEAST + int(u * spread) for u in draw[:3])
    sign = "+" if draw[3] < 0.5 or a * b < c else "-"
    start, verb, question, thing, name, other = draw[4:]
    subject = int(name * len(NAMES))
    friend = (subject + 1 + int(other * (len(NAMES) - 1))) % len(NAMES)  # never the same again
    words = {"n": NAMES[subject][0], "p": NAMES[subject][1], "m": NAMES[friend][0], "s": _pick(THINGS, thing) + "s"}
    sentences = [
        _pick(STARTS, start).format(a=a, b=b, **words),
        _pick(GAINS if sign == "+" else LOSSES, verb).format(v=c, **words),
        _pick(QUESTIONS, question).format(**words),
    ]
    answer = a * b + c if sign == "+" else a * b - c
    return Problem(0, " ".join(sentences), str(answer), {"expression": f"{a}*{b}{sign}{c}"})


def _pick(choices: Sequence[str], u: float) -> str:
    return choices[int(u * len(choices))]
