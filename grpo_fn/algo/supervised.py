"""Supervised tokens, which are given and not sampled: their cross entropy, what each weighs, and their share of a step.

As the only component of a step they make a supervised stage; beside sampled ones a mixture (CHORD, arXiv:2508.11408).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from grpo_fn.algo import metrics
from grpo_fn.algo.aggregation import token_mean
from grpo_fn.algo.distillation import full_share
from grpo_fn.algo.importance import no_correction
from grpo_fn.algo.metrics import UpdateResult
from grpo_fn.algo.objective import Component, update_policy
from grpo_fn.algo.step import Experience, Span, StepAlgorithm, Stream, without_demonstrations
from grpo_fn.core.batch import check_rollout, count, given_batch
from grpo_fn.core.batch import minibatches as split_minibatches
from grpo_fn.core.groups import by_group, outcome_reward
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch, Carry, Gains, Groups, Policy, Rollout, Sampler, Scores, Totals

EXAMPLES = {
    "mu": (0.1,),
    "peak": (0.9,),
    "valley": (0.05,),
    "warmup": (0, 3),
    "decay": (0, 5),
}  # knobs as tests try them


def cross_entropy(
    scores: Scores,
    *,
    batch: Batch,
    totals: Totals,
    gains: Gains,
    token_weight: Callable[[Tensor, Batch], Tensor],
    loss_aggregation: Callable[[Batch, Totals], Tensor],
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """sum_bt w_bt phi_bt (-logp_bt): this micro-batch's share of the cross entropy of given tokens.

    The denominators in w are those of the given tokens of the whole optimizer step. phi is a constant to the gradient.

    Args:
        scores: log-probs and entropies under the policy, [B, T] each, in nats; B at least 1.
        batch: the micro-batch, each field [B, T]; its mask says which tokens learn.
        totals: given tokens and rows of the whole optimizer step, the denominators in w.
        gains: not read.
        token_weight: (logp [T], row) -> phi [T], what each token of a row weighs.
        loss_aggregation: (batch, totals) -> w [B, T].

    Returns:
        The objective, a scalar; and per token, [B, T] and detached, "nll" (-logp, nats) and "token_weight" (phi).
    """
    nll = -torch.where(batch.mask, scores.logp, 0.0)
    phi = vmap(token_weight)(scores.logp, batch).detach()
    objective = (loss_aggregation(batch, totals) * phi * nll).sum()
    return objective, {"nll": nll.detach(), "token_weight": phi}


# -- what a given token weighs


def every_token_alike(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """phi = 1: plain supervised fine-tuning.

    Use it when: there is no reason to trust some given tokens more than others.
    Peers: TRL `SFTTrainer`, verl's SFT trainer.

    Args:
        logp: log-probs of the given tokens, in nats.
        row: one row, whose fields are [T].

    Returns:
        The weight of each token, [T]; 0 where ~mask.
    """
    return row.mask.to(logp.dtype)


def uncertain_tokens(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """phi = p (1 - p): tokens that the policy is sure of, or finds impossible, weigh little; at most 1/4.

    CHORD (arXiv:2508.11408), from the authors' code, where phi is a constant to the gradient.

    Use it when: demonstrations of another policy must not tear down what this one can.
    Peers: Trinity-RFT `sft_phi`; ms-swift `chord_enable_phi_function`, which differentiates phi too.

    Args:
        logp: log-probs of the given tokens, in nats.
        row: one row, whose fields are [T].

    Returns:
        The weight of each token, [T]; 0 where ~mask.
    """
    logp = torch.where(row.mask, logp, 0.0)
    return torch.where(row.mask, logp.exp() * -torch.expm1(logp), 0.0)


# -- their share mu of a step, as a function of the steps taken


def sampled_alone(steps: int) -> float:
    """mu = 0: given tokens have no share; where there are some, they are measured.

    Use it when: there are no demonstrations.
    Peers: none.

    Args:
        steps: steps taken before.

    Returns:
        mu, in [0, 1].
    """
    return 0.0


def constant_share(steps: int, *, mu: float) -> float:
    """The same mu in every step: with mu / (1 - mu) times the weight of the sampled tokens' objective.

    CHORD-phi (arXiv:2508.11408) holds it constant, as the token weights do the rest; from the authors' code.

    Use it when: token weights say which given tokens to learn, or a little of the demonstrations is to stay.
    Peers: Trinity-RFT, ms-swift with `chord_mu_peak` = `chord_mu_valley`.

    Args:
        steps: steps taken before.
        mu: the share, in [0, 1].

    Returns:
        mu.
    """
    return mu


def decaying_share(steps: int, *, peak: float, valley: float, warmup: int, decay: int) -> float:
    """mu from 0 to `peak` along a line over `warmup` steps, then to `valley` along a cosine over `decay` steps.

    CHORD-mu (arXiv:2508.11408), from the authors' code: imitation first, exploration later.

    Use it when: a policy that seldom is right begins with the demonstrations and leaves them behind.
    Peers: Trinity-RFT, ms-swift `chord_mu_*`.

    Args:
        steps: steps taken before.
        peak: largest mu, in [0, 1].
        valley: mu from the end of the decay on, in [0, 1].
        warmup: steps of the line.
        decay: steps of the cosine.

    Returns:
        mu, in [0, 1].
    """
    if steps < warmup:
        return peak * steps / warmup
    if steps >= warmup + decay:
        return valley
    return valley + (peak - valley) * (1 + math.cos(math.pi * (steps - warmup) / decay)) / 2


def nothing_given(problems: Sequence[Problem]) -> Rollout:
    """No demonstrations: the problems of a run that samples have none.

    Args:
        problems: those that were asked about.

    Returns:
        Nothing ever.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"got {len(problems)} problems to read demonstrations of, wanted none in a run that samples")


# Fields of a StepAlgorithm that learns from sampled tokens alone, each counted once.
SAMPLED_ONLY = {
    "supervised": partial(cross_entropy, token_weight=every_token_alike, loss_aggregation=token_mean),
    "supervised_share": sampled_alone,
    "observation_coef": 0.0,
    "given": nothing_given,
    "demonstrations": without_demonstrations,
    "energy_weight": no_correction,
    "distillation_share": full_share,
}


# -- a step that has no others


def supervised_step(
    policy: Policy, sampler: Sampler, stream: Stream, carried: Carry, *, key: Tensor, algo: StepAlgorithm, span: Span
) -> tuple[Experience, Carry, dict[str, float]]:
    """One supervised step: read the next demonstrations of the stream, and update on their tokens.

    In the place of `grpo_step`. Nothing is sampled and nothing scored; the sampler keeps its weights until an
    evaluation loads others.

    Args:
        policy: pi_theta, updated in place.
        sampler: not asked.
        stream: (first, count) -> problems first, ..., first + count - 1, each with its demonstration.
        carried: what the step before left; AT_THE_START for the first.
        key: random key of the step, [2]; not used.
        algo: the functions and numbers of the step; of its functions `given`, `objective` and what splits rows.
        span: name -> context manager that times a phase.

    Returns:
        What the step learned from, what it leaves for the next one, and its metrics by name.
    """
    sampler.rest()  # the device is the trainer's
    with span("train"):
        groups, _, carried, _ = algo.group_sampling(partial(next_demonstrations, stream, algo=algo), carried)
        batch = given_batch(groups.rollout)
        how = {"objective": algo.objective, "epochs": algo.epochs, "minibatches": algo.minibatches}
        learned = learn_given(policy, batch, carried.gains, **how, split=algo.split, anchor=algo.anchor)
        batch = learned[0].batch if len(learned) == 1 else batch
    figures = {**metrics.summarise_updates(batch, learned, reference=False), "train/skipped_step": 0.0}
    adv = by_group(batch.adv, len(groups.problems))
    return Experience(groups, adv, batch), carried._replace(steps=carried.steps + 1), figures


def learn_given(
    policy: Policy,
    batch: Batch,
    gains: Gains,
    *,
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    epochs: int,
    minibatches: int,
    split: Callable[[Batch], list[Tensor]],
    anchor: Callable[[Batch, Tensor], Batch],
) -> list[UpdateResult]:
    """The updates of a supervised step: of a run's stage, and of the warm start of a tiny model.

    Args:
        policy: pi_theta, updated in place.
        batch: rows of given tokens, each field [B, T].
        gains: what the coefficients of the objective are multiplied with.
        objective: as `cross_entropy`; scores, batch=, totals=, gains= -> loss and diagnostics.
        epochs: passes over the rows.
        minibatches: optimizer steps in a pass.
        split: the rows of a batch's micro-batches, that fit the devices.
        anchor: a micro-batch and its log-probs now -> what it is compared with.

    Returns:
        What each update did.
    """
    return [
        update_policy(policy, [Component(mini, count(mini), objective, 1.0)], gains, split=split, anchor=anchor)
        for _ in range(epochs)
        for mini in split_minibatches(batch, minibatches)
    ]


def next_demonstrations(stream: Stream, first: int, problems: int, *, algo: StepAlgorithm) -> Groups:
    """The next problems of the stream with their demonstrations, one row each; their rewards are 0 and not looked at.

    Args:
        stream: (first, count) -> problems first, ..., first + count - 1.
        first: number of the first problem.
        problems: number of problems, P.
        algo: its `given` makes the rows.

    Returns:
        The P problems with one row each.

    Raises:
        ValueError: fields of the rows do not fit together.
    """
    asked = tuple(stream(first, problems))
    rollout = algo.given(asked)
    check_rollout(rollout)
    nothing = torch.zeros_like(rollout.logp_sampled[:, :1])
    return Groups(asked, rollout, outcome_reward(nothing, torch.ones_like(nothing, dtype=torch.bool), {}))
