r"""Right completions that show their working, for five easy kinds of `procedural.task`: what a small model is taught.

A working counts: `1:7 2:14 3:21 \boxed{21}` for 7 * 3, one step after the other, so it needs no table of products.
"""

import re
from collections.abc import Callable, Mapping

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.arithmetic import answer_only
from grpo_fn.tasks.draws import block_uniforms
from grpo_fn.tasks.task import frozen_key

_STYLE = prng.key(20_261_125, device="cpu")


def worked_or_answer(problem: Problem, *, worked_share: float) -> str:
    """The working and the answer in `worked_share` of the problems, the answer alone in the others; all are right.

    Args:
        problem: of `procedural.task`, of a kind in WORKINGS, at level 0.
        worked_share: probability that the working is shown, in [0, 1]; the uid decides.

    Returns:
        The text of a right completion.

    Raises:
        ValueError: for a problem of another kind, or one that is no longer a single step of it.
    """
    kind = problem.meta.get("task")
    if kind not in WORKINGS:
        raise ValueError(f"problem {problem.uid}: got kind {kind!r}, wanted one of {', '.join(WORKINGS)}")
    if block_uniforms(frozen_key(_STYLE), 1, problem.uid)[0] >= worked_share:
        return answer_only(problem)
    steps = WORKINGS[kind](problem)
    return f"{steps} {answer_only(problem)}" if steps else answer_only(problem)


def sum_steps(problem: Problem) -> str:
    """`chain_sum` of two terms, one up or down at a time."""
    first, sign, second = _match(r": (\d+) ([+-]) (\d+) =", problem)
    step = 1 if sign == "+" else -1
    return _counted(lambda i: int(first) + step * i, int(second))


def product_steps(problem: Problem) -> str:
    """`products` of two factors, as multiples of the first."""
    first, second = _match(r": (\d+) \* (\d+)\.", problem)
    return _counted(lambda i: int(first) * i, int(second))


def leg_steps(problem: Problem) -> str:
    """`leg_counting` of one kind of animal, one animal after the other."""
    (number,) = _match(r"if you have (\d+) [^,]*\?", problem)
    return _counted(lambda i: int(problem.answer) // int(number) * i, int(number))


def sister_steps(problem: Problem) -> str:
    """`aiw` of siblings: a brother has one sister more than his sister."""
    (sisters,) = _match(r"has (\d+) sisters", problem)
    return f"{sisters}+1={problem.answer}"


def family_steps(problem: Problem) -> str:
    """`family_relationships` in a family of three: the role of the one that is asked about, then the other's."""
    (child,) = _match(r"a child called (\w+)\.", problem)
    asked, other = (problem.meta["entry"]["metadata"][name] for name in ("person1", "person2"))
    return f"{asked} {'child' if asked == child else 'parent'} {other} {'child' if other == child else 'parent'}"


WORKINGS: Mapping[str, Callable[[Problem], str]] = {
    "aiw": sister_steps,
    "chain_sum": sum_steps,
    "family_relationships": family_steps,
    "leg_counting": leg_steps,
    "products": product_steps,
}


def _counted(value: Callable[[int], int], steps: int) -> str:
    return " ".join(f"{i}:{value(i)}" for i in range(1, steps + 1))


def _match(pattern: str, problem: Problem) -> tuple[str, ...]:
    found = re.search(pattern, problem.prompt)
    if found is None:
        raise ValueError(f"got the prompt {problem.prompt[:160]!r}, wanted one of level 0, with {pattern}")
    return found.groups()
