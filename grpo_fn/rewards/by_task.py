"""A reward for each part of a mixture of tasks."""

from collections.abc import Mapping

from grpo_fn.core.problem import Completion, Problem, RewardFn


def by_task(problem: Problem, completion: Completion, *, rewards: Mapping[str, RewardFn]) -> float | None:
    """The reward that `rewards` names for the problem's part of the mixture, `meta["task"]`.

    Raises ValueError for a problem of no part, or of one without a reward.
    """
    name = problem.meta.get("task")
    if name not in rewards:
        raise ValueError(f"problem {problem.uid}: got task {name!r}, wanted one with a reward: {', '.join(rewards)}")
    return rewards[name](problem, completion)
