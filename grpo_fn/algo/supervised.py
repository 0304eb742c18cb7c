"""Supervised tokens, which are given and not sampled: their cross entropy, what each weighs, and their share of a step.

    logp         log-probs of the given tokens of a row, [T], in nats
    row          the row, a Batch whose fields are [T]
    scores       log-probs and entropies under the policy, [B, T] each, in nats; B at least 1
    batch        a micro-batch of given rows, each field [B, T]; its mask says which tokens learn
    totals       given tokens and rows of the whole optimizer step, the denominators in w
    gains        not read
    steps        steps taken before
    scored       the step; its demonstrations are those of `train.train.demonstrations`
    objective    of given tokens: `cross_entropy`
    returns      the weight of each token, [T], 0 where ~mask; the objective and its diagnostics; the share mu, in [0,
                 1]; the term, None when there is none

As the only term of a step they make a supervised stage; beside sampled ones (`step.Algorithm.beside`) a mixture (CHORD,
arXiv:2508.11408; ECHO, arXiv:2605.24517).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from grpo_fn.algo import metrics
from grpo_fn.algo.credit import ScoredStep
from grpo_fn.algo.metrics import UpdateResult
from grpo_fn.algo.objective import Objective, objective_value
from grpo_fn.algo.step import Experience, Span, Stream, Term, update
from grpo_fn.core.batch import by_group, check_rollout, given_batch, observed_tokens, outcome_reward
from grpo_fn.core.batch import minibatches as split_minibatches
from grpo_fn.core.partials import check_divides, check_positive
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch, Carry, Gains, Groups, Policy, Rollout, Sampler, Scores, Totals, TrainablePolicy


def cross_entropy(
    scores: Scores,
    batch: Batch,
    totals: Totals,
    gains: Gains,
    *,
    token_weight: Callable[[Tensor, Batch], Tensor] | None,
    loss_aggregation: Callable[[Batch, Totals], Tensor],
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """sum_bt w_bt phi_bt (-logp_bt): this micro-batch's share of the cross entropy of given tokens.

    The denominators in w are those of the given tokens of the whole optimizer step. phi is a constant to the gradient.

    Args:
        token_weight: (logp [T], row) -> phi [T], what each token of a row weighs; None: phi = 1, plain fine-tuning as
            in TRL's `SFTTrainer`.
        loss_aggregation: (batch, totals) -> w [B, T].
    """
    nll = -torch.where(batch.mask, scores.logp, 0.0)
    phi = batch.mask.to(nll.dtype) if token_weight is None else vmap(token_weight)(scores.logp, batch).detach()
    objective = (loss_aggregation(batch, totals) * phi * nll).sum()
    return objective, {"nll": nll.detach(), "token_weight": phi}


# -- what a given token weighs


def uncertain_tokens(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """phi = p (1 - p): tokens that the policy is sure of, or finds impossible, weigh little; at most 1/4.

    CHORD (arXiv:2508.11408), from the authors' code, where phi is a constant to the gradient.

    Use it when: demonstrations of another policy must not tear down what this one can.
    Peers: Trinity-RFT `sft_phi`; ms-swift `chord_enable_phi_function`, which differentiates phi too.
    """
    logp = torch.where(row.mask, logp, 0.0)
    return torch.where(row.mask, logp.exp() * -torch.expm1(logp), 0.0)


# -- their share mu of a step, as a function of the steps taken


def constant_share(steps: int, *, mu: float) -> float:
    """The same mu in every step: with mu / (1 - mu) times the weight of the sampled tokens' objective.

    CHORD-phi (arXiv:2508.11408) holds it constant, as the token weights do the rest; from the authors' code.

    Use it when: token weights say which given tokens to learn, or a little of the demonstrations is to stay.
    Peers: Trinity-RFT, ms-swift with `chord_mu_peak` = `chord_mu_valley`.

    Args:
        mu: the share, in [0, 1].
    """
    return mu


def decaying_share(steps: int, *, peak: float, valley: float, warmup: int, decay: int) -> float:
    """mu from 0 to `peak` along a line over `warmup` steps, then to `valley` along a cosine over `decay` steps.

    CHORD-mu (arXiv:2508.11408), from the authors' code: imitation first, exploration later.

    Use it when: a policy that seldom is right begins with the demonstrations and leaves them behind.
    Peers: Trinity-RFT, ms-swift `chord_mu_*`.

    Args:
        peak: largest mu, in [0, 1].
        valley: mu from the end of the decay on, in [0, 1].
        warmup: steps of the line.
        decay: steps of the cosine.
    """
    if steps < warmup:
        return peak * steps / warmup
    if steps >= warmup + decay:
        return valley
    return valley + (peak - valley) * (1 + math.cos(math.pi * (steps - warmup) / decay)) / 2


# -- terms beside the sampled tokens


def demonstrations(scored: ScoredStep, *, objective: Objective, share: Callable[[int], float]) -> Term:
    """mu times an objective of the step's demonstrations; the sampled tokens keep 1 - mu of the step.

    CHORD (arXiv:2508.11408). Each objective is a mean over its own tokens.

    Use it when: there are completions better than the policy's own.
    Peers: Trinity-RFT `mix_chord`; ms-swift `chord_sft_dataset`.

    Args:
        share: (steps taken before) -> mu, in [0, 1].

    Raises:
        ValueError: mu is no share.
    """
    mu = share(scored.steps)
    if not 0 <= mu <= 1:
        raise ValueError(f"supervised.demonstrations.share: got {mu} after {scored.steps} steps, expected 0 to 1")
    return Term(given_batch(scored.demonstrations(scored.steps)), objective, mu, mu)


demonstrations.NEEDS = frozenset({"demonstrations"})


def observations(scored: ScoredStep, *, objective: Objective, coef: float) -> Term | None:
    """coef times an objective of what environments wrote between turns, added to that of the sampled tokens.

    ECHO (arXiv:2605.24517). Samples without a valid reward teach nothing. Each objective is a mean over its own tokens,
    as in prime-rl's code.

    Use it when: the policy should learn what its tools answer.
    Peers: prime-rl.

    Args:
        coef: weight of the objective, at least 0.
    """
    rollout, valid = scored.groups.rollout, rearrange(scored.reward.valid, "p g -> (p g) 1")
    rows = given_batch(rollout._replace(mask=observed_tokens(rollout.mask) & valid.to(rollout.mask.device)))

    def named(scores: Scores, batch: Batch, totals: Totals, gains: Gains) -> tuple[Tensor, dict[str, Tensor]]:
        value, diagnostics = objective_value(objective, scores, batch, totals, gains)
        return value, {"observation_nll": diagnostics["nll"]} if "nll" in diagnostics else {}

    return Term(rows, named, coef) if rows.mask.any() else None


observations.NEEDS = frozenset({"episodes"})


# -- a step that has no others


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A supervised stage, in the place of `step.Algorithm`: it learns from given completions and samples nothing.

    Raises:
        ValueError: a number is below 1, or prompts do not split into whole minibatches.
    """

    objective: Objective  # of given tokens: cross_entropy
    prompts: int  # a step, each with one completion
    epochs: int = 1  # passes over the rows of a step
    minibatches: int = 1  # optimizer steps in a pass
    group_size, credit = 1, None  # of every stage, so that a loop need not ask which kind of algorithm it has

    def __post_init__(self) -> None:
        check_positive(epochs=self.epochs, minibatches=self.minibatches, prompts=self.prompts)
        check_divides(self.prompts, self.minibatches)


def supervised_step(
    policy: Policy,
    sampler: Sampler,
    stream: Stream,
    carried: Carry,
    *,
    algo: Stage,
    given: Callable[[Sequence[Problem]], Rollout],
    span: Span,
) -> tuple[Experience, Carry, dict[str, float]]:
    """One supervised step: read the next demonstrations of the stream, and update on their tokens.

    Nothing is sampled and nothing scored; the sampler keeps its weights until an evaluation loads others.

    Raises:
        ValueError: fields of the rows do not fit together.
    """

    sampler.rest()  # the device is the trainer's
    with span("train"):
        problems = tuple(stream(carried.drawn, algo.prompts))
        rollout = given(problems)
        check_rollout(rollout)
        zeros = torch.zeros_like(rollout.logp_sampled[:, :1])
        groups = Groups(problems, rollout, outcome_reward(zeros, torch.ones_like(zeros, dtype=torch.bool), {}))
        batch = given_batch(groups.rollout)
        updates = {"epochs": algo.epochs, "minibatches": algo.minibatches}
        own_pass = algo.epochs * algo.minibatches == 1 and not policy.dropout  # logp_old, for the record alone
        learned = learn_given(policy, batch, algo.objective, carried.gains, **updates, own_pass=own_pass)
        batch = learned[0].batch if len(learned) == 1 else batch
    figures = {**metrics.summarise_updates(batch, learned, reference=False), "train/skipped_step": 0.0}
    adv = by_group(batch.adv, len(groups.problems))
    carried = carried._replace(drawn=carried.drawn + algo.prompts, steps=carried.steps + 1)
    return Experience(groups, adv, batch), carried, figures


def learn_given(
    policy: TrainablePolicy,
    batch: Batch,
    objective: Objective,
    gains: Gains,
    *,
    epochs: int,
    minibatches: int,
    own_pass: bool,
) -> list[UpdateResult]:
    """The updates of a supervised step: of a run's stage, and of the warm start of a tiny model."""
    return [
        update(policy, [Term(mini, objective, 1.0)], gains, own_pass=own_pass)
        for _ in range(epochs)
        for mini in split_minibatches(batch, minibatches)
    ]
