"""Rewards around rewards: a timeout for one of them, one reward for each task of a mixture.

    problem      the problem of the row; of a mixture with its part's name in `meta["task"]`
    completion   the completion of the row
    returns      what the wrapped reward returns

What scores rows looks through both for the rewards within.
"""

from collections.abc import Awaitable, Mapping

from grpo_fn.core.problem import Completion, Problem, RewardFn


def with_timeout(
    problem: Problem, completion: Completion, *, reward: RewardFn, seconds: float
) -> float | Awaitable[float | None] | None:
    """`reward` of the row; a process that can be killed gives it `seconds` of wall clock.

    The function itself keeps no time: nothing can stop a Python function from inside the process it runs in. In a gin
    file, for a judge that is slower than the rest: `judge/wrappers.with_timeout.reward = @mine.judge`,
    `judge/wrappers.with_timeout.seconds = 60.0`, and `@judge/wrappers.with_timeout` among the parts.

    Args:
        reward: the wrapped reward.
        seconds: wall clock for one row, seconds; `RewardPool` reads it instead of its `timeout_per_completion`.
    """
    return reward(problem, completion)


def by_task(problem: Problem, completion: Completion, *, rewards: Mapping[str, RewardFn]) -> float | None:
    """The reward that `rewards` names for the problem's part of the mixture, `meta["task"]`.

    Args:
        rewards: the reward of each part, by the part's name.

    Raises:
        ValueError: for a problem of no part, or of one without a reward.
    """
    name = problem.meta.get("task")
    if name not in rewards:
        raise ValueError(f"problem {problem.uid}: got task {name!r}, expected one with a reward: {', '.join(rewards)}")
    return rewards[name](problem, completion)
