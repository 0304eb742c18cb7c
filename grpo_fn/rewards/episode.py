"""Rewards of whole episodes: what the environment gave at their turns, and what the policy did in them.

    problem      the problem; not read
    completion   the episode
    returns      the reward; None where a turn that it reads could not be scored

An episode without turns earns 0.
"""

from grpo_fn.core.problem import Completion, Problem


def total_reward(problem: Problem, completion: Completion, *, gamma: float) -> float | None:
    """sum_k gamma^k r_k over the turns, k from 0: what the environment gave, a later turn for less where gamma < 1.

    Args:
        gamma: discount a turn, in [0, 1]; 1 for the plain sum.

    Raises:
        ValueError: for a gamma outside [0, 1].
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma: got {gamma}, expected 0 to 1")
    total = 0.0
    for turn in reversed(completion.turns):
        if turn.reward is None:
            return None
        total = turn.reward + gamma * total
    return total


def last_reward(problem: Problem, completion: Completion) -> float | None:
    """The last turn's reward, 0 without turns: the verdict, in environments that grade the end."""
    return completion.turns[-1].reward if completion.turns else 0.0


def used_tool(problem: Problem, completion: Completion) -> float:
    """1 if a tool was called in any turn, else 0; give it the weight 0 to see it in the metrics alone."""
    return float(any(turn.calls for turn in completion.turns))


def right_with_tool(problem: Problem, completion: Completion) -> float | None:
    """`used_tool` of episodes whose last turn was rewarded: as a grader, the share of right answers that used a tool.

    None, which no mean counts, where the last turn was not rewarded.
    """
    return used_tool(problem, completion) if last_reward(problem, completion) else None
