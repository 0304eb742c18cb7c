"""A reward with a deadline of its own, said where the reward is named."""

from collections.abc import Awaitable
from functools import partial
from typing import Any

from grpo_fn.core.problem import Completion, Problem, RewardFn


def within(
    problem: Problem, completion: Completion, *, reward: RewardFn, seconds: float
) -> float | Awaitable[float | None] | None:
    """`reward` of the row; whoever scores it in a process that can be killed gives it `seconds` of wall clock.

    The function itself keeps no time: nothing can stop a Python function from inside the process it runs in. In a gin
    file, for a judge that is slower than the rest: `judge/wrappers.within.reward = @mine.judge`,
    `judge/wrappers.within.seconds = 60.0`, and `@judge/wrappers.within` among the parts.
    """
    return reward(problem, completion)


def seconds_of(fn: Any) -> float | None:
    """The seconds that `within` gives this reward, the least where it is put around twice; None where it is not.

    Looks through knobs and through every wrapper that calls what it wraps `reward`. Raises ValueError for seconds
    that are not more than 0.
    """
    found = []
    while isinstance(fn, partial):
        if fn.func is within:
            found.append(fn.keywords["seconds"])
        fn = fn.keywords.get("reward")
    for seconds in found:
        if not seconds > 0:
            raise ValueError(f"wrappers.within seconds: got {seconds}, wanted more than 0")
    return min(found, default=None)
