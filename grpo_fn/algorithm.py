"""The box: one GRPO step (Shao et al. 2024, arXiv:2402.03300, Algorithm 1, lines 5 to 11) on one page."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.func import grad_and_value, vmap

from grpo_fn import metrics
from grpo_fn.batch import check_reward, check_rollout, count, make_batch, minibatches, split
from grpo_fn.problem import Problem
from grpo_fn.types import Batch, Policy, Reward, Rollout, Sampler, Scores, Totals


@dataclass(frozen=True)
class Algo:
    """What makes a GRPO relative: four functions and four numbers."""

    reward: Callable[[Sequence[Problem], Rollout], Reward]
    advantage: Callable[[Tensor, Tensor], Tensor]  # one group: reward [G], valid [G] -> [G]
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]]  # scores; batch=, totals= -> loss, per-token diagnostics
    old_logp: Callable[[Policy, Rollout], Tensor]  # the denominator of the ratio: from_sampler or recomputed
    group_size: int
    epochs: int  # passes over one rollout
    minibatches: int  # optimizer steps in a pass
    micro_tokens: int  # padded tokens per forward and backward


class Experience(NamedTuple):
    """What one step saw and how it judged it."""

    rollout: Rollout
    reward: Reward
    adv: Float[Tensor, "P G"]


def from_sampler(policy: Policy, rollout: Rollout) -> Float[Tensor, "B T"]:
    """logp_old = logp_sampled: exact when sampler and trainer compute alike, as the local sampler does."""
    return rollout.logp_sampled


def recomputed(policy: Policy, rollout: Rollout) -> Float[Tensor, "B T"]:
    """logp_old from the trainer's own forward pass: one more pass, and no sampler mismatch in the ratio."""
    return policy.logp(rollout)


def grpo_step(
    policy: Policy,
    sampler: Sampler,
    problems: Sequence[Problem],
    *,
    key: Tensor,
    algo: Algo,
    all_reduce: Callable[[Totals], Totals],
    span: Callable[[str], AbstractContextManager[object]],
) -> tuple[Experience, dict[str, float]]:
    """Sample, score, compare within groups, and climb. `span` names the phases for whoever keeps time."""
    with span("generate"):
        rollout = sampler.sample(problems, algo.group_size, key=key)  # o ~ pi_old(. | q)
        check_rollout(rollout)
    with span("score"):
        reward = algo.reward(problems, rollout)  # r
        check_reward(reward, len(problems), algo.group_size)
        adv = vmap(algo.advantage)(reward.value, reward.valid)  # A, one group at a time
    with span("train"):
        logp_old = algo.old_logp(policy, rollout)
        logp_ref = policy.reference(rollout)
        batch = make_batch(rollout, reward, adv, logp_old, logp_old if logp_ref is None else logp_ref)
        learned = [
            climb(policy, mini, all_reduce(count(mini)), algo)
            for _ in range(algo.epochs)
            for mini in minibatches(batch, algo.minibatches)
        ]
    with span("sync"):
        sampler.load(policy)  # pi_old <- pi_theta
    return Experience(rollout, reward, adv), {
        **metrics.of_rollout(rollout),
        **metrics.of_reward(reward),
        **metrics.of_advantage(adv, reward.valid),
        **summary(learned),
    }


class Learned(NamedTuple):
    """One optimizer step: the objective's value, per-token statistics, what the optimizer did."""

    objective: float
    stats: dict[str, metrics.Stat]
    update: dict[str, float]


def climb(policy: Policy, batch: Batch, totals: Totals, algo: Algo) -> Learned:
    """Accumulate the batch's gradient in micro-batches, then take one optimizer step."""
    objective, stats = 0.0, []
    for micro in split(batch, algo.micro_tokens):
        scores, pullback = policy.vjp(micro)  # log pi_theta
        signal, (value, tokens) = grad_and_value(partial(algo.objective, batch=micro, totals=totals), has_aux=True)(
            scores
        )
        pullback(signal)  # theta.grad += J^T dlogp
        objective += float(value)
        stats.append(diagnose(scores, micro, tokens))
    return Learned(objective, metrics.merge_all(stats), policy.update())


def diagnose(scores: Scores, micro: Batch, tokens: dict[str, Tensor]) -> dict[str, metrics.Stat]:
    """Statistics of the objective's per-token diagnostics over the sampled tokens."""
    gap = {"logp_gap": (scores.logp - micro.logp_sampled).abs()}
    return {name: metrics.stat(x, micro.mask) for name, x in {**tokens, **gap}.items()}


def summary(learned: list[Learned]) -> dict[str, float]:
    """Metrics of a step's updates: statistics merged, the optimizer's own figures from the last."""
    stats = metrics.merge_all([step.stats for step in learned])
    if not stats:  # every sample was unscorable: there was nothing to learn from
        return {"loss/objective": 0.0, **learned[-1].update}
    return {
        "loss/objective": sum(step.objective for step in learned) / len(learned),
        **metrics.of_learning(stats),
        **learned[-1].update,
    }


def alone(totals: Totals) -> Totals:
    """The all-reduce of a single process."""
    return totals
