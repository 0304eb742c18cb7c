"""Rewards around rewards: a timeout for one of them, one reward for each task of a mixture."""

import math
from collections.abc import Awaitable, Mapping
from typing import Any

from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Completion, Problem, RewardFn


def with_timeout(
    problem: Problem, completion: Completion, *, reward: RewardFn, seconds: float
) -> float | Awaitable[float | None] | None:
    """`reward` of the row; a process that can be killed gives it `seconds` of wall clock.

    The function itself keeps no time: nothing can stop a Python function from inside the process it runs in. In a gin
    file, for a judge that is slower than the rest: `judge/wrappers.with_timeout.reward = @mine.judge`,
    `judge/wrappers.with_timeout.seconds = 60.0`, and `@judge/wrappers.with_timeout` among the parts.

    Args:
        problem: the problem of the row.
        completion: the completion of the row.
        reward: the wrapped reward.
        seconds: wall clock for one row, seconds; `RewardPool` reads it instead of its `timeout_per_completion`.

    Returns:
        What `reward` returns: its value, None, or an awaitable of it.
    """
    return reward(problem, completion)


def seconds_of(fn: Any, default: float) -> float:
    """The seconds that a row of this reward may take: those of `with_timeout`, the least where it is put around twice.

    Looks through knobs and through every wrapper that calls what it wraps `reward`. The rewards of a `by_task` table
    share one deadline, the longest of theirs.

    Args:
        fn: a reward, plain or with knobs and wrappers around it.
        default: seconds where there is no `with_timeout`.

    Returns:
        Seconds of wall clock for one row.

    Raises:
        ValueError: for seconds that are not more than 0.
    """
    function, knobs = function_and_knobs(fn)
    if function is by_task:
        return max(seconds_of(reward, default) for reward in knobs["rewards"].values())
    if function is with_timeout:
        if not knobs["seconds"] > 0:
            raise ValueError(f"wrappers.with_timeout seconds: got {knobs['seconds']}, wanted more than 0")
        within = seconds_of(knobs["reward"], math.inf)
        return min(knobs["seconds"], within)
    return seconds_of(knobs["reward"], default) if "reward" in knobs else default


def by_task(problem: Problem, completion: Completion, *, rewards: Mapping[str, RewardFn]) -> float | None:
    """The reward that `rewards` names for the problem's part of the mixture, `meta["task"]`.

    Args:
        problem: a problem of a mixture, with its part's name in `meta["task"]`.
        completion: its completion.
        rewards: the reward of each part, by the part's name.

    Returns:
        The value of that reward; None for what cannot be scored.

    Raises:
        ValueError: for a problem of no part, or of one without a reward.
    """
    name = problem.meta.get("task")
    if name not in rewards:
        raise ValueError(f"problem {problem.uid}: got task {name!r}, wanted one with a reward: {', '.join(rewards)}")
    return rewards[name](problem, completion)
