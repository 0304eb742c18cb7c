"""A scored step of given numbers, to try a credit with: no policy, no sampler, no reward function."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_fn.algo.credit import PASSES, ScoredStep
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Gains, Groups, Reward, Rollout


def scored_step(
    reward: Reward,
    mask: Bool[Tensor, "P G T"],
    *,
    drift: Float[Tensor, "P G T"] | None = None,
    teacher_gap: Float[Tensor, "P G T"] | None = None,
    energy: Float[Tensor, "P G T"] | None = None,
    steps: int = 0,
) -> ScoredStep:
    """A step whose rows have these rewards and differences of log-probs; logp_old is 0 everywhere.

    Args:
        reward: of P prompts with G samples each.
        mask: which tokens were sampled.
        drift: logp_old - logp_ref, in nats; None: 0.
        teacher_gap: logp_teacher - logp_old, in nats; None: 0.
        energy: |d logp / d logits|^2 of each token; None: 0.
        steps: steps taken before.

    Returns:
        The step, which needs nothing to be declared.
    """
    rows = mask.flatten(0, 1)
    zeros = torch.zeros(rows.shape, dtype=reward.value.dtype, device=rows.device)
    passes = {"logp_old": zeros}
    for name, value, sign in (("logp_ref", drift, -1), ("logp_teacher", teacher_gap, 1), ("energy", energy, 1)):
        passes[name] = zeros if value is None else sign * value.flatten(0, 1)
    rollout = Rollout(rows.long(), rows, zeros, torch.zeros_like(rows[:, 0]), ("",) * len(rows))
    problems = tuple(Problem(uid, "", "", {}) for uid in range(len(mask)))
    reads = {name: (lambda rows=x: rows) for name, x in passes.items()}
    return ScoredStep(Groups(problems, rollout, reward), reads, frozenset(PASSES), Gains(1.0, 1.0), steps)
