"""The rewards and graders of a configuration, called in a worker on two toy completions before anything expensive.

Those of the package have tests of their own; only functions from elsewhere are called.
"""

from collections.abc import Callable, Sequence

import torch

from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.shell.reward_workers.reward_pool import Loss, RewardError, RewardPool
from grpo_fn.trainer.checks.try_out import own_functions


def reward_parts(reward: Callable[..., Reward], problem: Problem) -> tuple[list[str], list[RewardFn]]:
    """The parts of a reward, found by calling it on two empty completions whose scores are all 0.

    Args:
        reward: (problems, rollout, *, score) -> Reward.
        problem: any problem of the task.

    Returns:
        The names of the parts, and the functions that it asks to be scored.

    Raises:
        ValueError: when it returns no Reward.
    """
    mask = torch.tensor([[False, True], [False, True]])
    rollout = Rollout(mask.long(), mask, torch.zeros(2, 2), ~mask[:, 1], ("", ""))
    asked: list[RewardFn] = []

    def score(fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        asked.append(fn)
        return [0.0] * len(completions)

    found = reward((problem,), rollout, score=score)
    if not isinstance(found, Reward):
        raise ValueError(f"reward: got {type(found).__name__} from sections.Rewards.reward, wanted a core.types.Reward")
    return [*found.parts], asked


def try_rewards(knob: str, fns: Sequence[RewardFn], problem: Problem, make_pool: Callable[[], RewardPool]) -> None:
    """Raise ValueError unless each function gives a number or None for the answer of a problem and for an empty text.

    A row that is late or whose worker dies is no error here: the run loses such rows and goes on.

    Args:
        knob: what the functions are bound to, for the message.
        fns: rewards or graders, (problem, completion) -> float, or None for what cannot be scored.
        problem: any problem of the task.
        make_pool: makes the pool of worker processes that the run scores with.

    Raises:
        ValueError: for a function that no worker can load, that returns something else, or that raises: on either text
            where the pool stops on errors, on both where it does not.
    """
    texts = (Completion(problem.answer, 1, False), Completion("", 1, True))
    for fn in fns:
        names = [name for name in own_functions(fn) if not name.startswith("grpo_fn.")]
        if not names:
            continue
        lost: list[Loss] = []
        with make_pool() as pool:
            try:
                pool.judge(fn, [problem] * len(texts), texts, report=lost.append)
            except RewardError as error:  # no worker could load it
                raise ValueError(f"{knob}: {error}") from error
        raised = [loss for loss in lost if loss.cause == "exceptions"]
        if raised and (pool.stop_on_error or len(raised) == len(texts)):
            reason = raised[0].reason
            raise ValueError(
                f"{knob}: {', '.join(names)}, called with problem {problem.uid} and a toy completion: {reason}"
                + ("" if "wanted" in reason else "; wanted a finite number or None")
            )
