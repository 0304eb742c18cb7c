"""A reward of your own: how much of the working is written out, and right."""

import re

from grpo_fn.core.problem import Completion, Problem

STEP = re.compile(r"(?<![0-9])([0-9]{1,6}) ?([+-]) ?([0-9]{1,6}) ?= ?([0-9]{1,6})")


def right_steps(problem: Problem, completion: Completion) -> float:
    """The share of a word problem's steps that the completion works out in order, of all the steps that it writes.

    1 for `5+1=6 6+5=11 11+3=14`, 0 for the bare answer; a completion that writes every equation there is gets little.
    """
    values, changes = problem.meta["values"], problem.meta["changes"]
    expected = [f"{x}{op}{b}={y}" for x, (op, b), y in zip(values[:-1], changes, values[1:], strict=True)]
    said = ["{}{}{}={}".format(*step) for step in STEP.findall(completion.text)]
    right = 0
    while right < min(len(said), len(expected)) and said[right] == expected[right]:
        right += 1
    return right / max(len(said), len(expected))
