"""What is minimised: the objective of a micro-batch, composed of a corrected token loss, a KL, weights and a bonus; and
one optimizer step, which minimises a sum of components, each with rows and denominators of its own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad_and_value, vmap

from grpo_fn.algo import metrics
from grpo_fn.algo.kl import k3
from grpo_fn.core.batch import scatter_rows, trim_rows
from grpo_fn.core.types import Batch, Gains, Policy, Scores, Totals


class Component(NamedTuple):
    """One term of what an optimizer step minimises: weight * objective(scores of the batch, totals).

    Its denominators are its own, so rows that are added to one component dilute no other.
    """

    batch: Batch  # rows of the whole step; the tokens of its mask learn
    totals: Totals  # of that batch, whatever its micro-batches
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]]  # scores; batch=, totals=, gains= -> loss, diagnostics
    weight: float


def policy_objective(
    scores: Scores,
    *,
    batch: Batch,
    totals: Totals,
    gains: Gains,
    token_loss: Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]],
    importance_correction: Callable[[Tensor, Batch], Tensor],
    kl: Callable[[Tensor, Batch], Tensor],
    loss_aggregation: Callable[[Batch, Totals], Tensor],
    beta: float,
    entropy_bonus: float,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """sum_bt w_bt (c_bt loss_bt + beta kl_bt - entropy_bonus H_bt): this micro-batch's share of what a step minimises.

    Differentiate it by `grad_and_value(partial(policy_objective, batch=..., ...), has_aux=True)(scores)`; the gradient
    is the learning signal, also a Scores. Without a bonus the entropy is only read: its gradient is exactly zero.

    The correction c weighs the token loss alone, as in TRL and verl: KL and bonus hold the policy back, and a mask must
    not let go of it where sampler and trainer are furthest apart. The denominators in w stay the step's: what a mask
    takes away makes the step shorter, not the other tokens louder.

    Args:
        scores: log-probs and entropies under the policy, [B, T] each, in nats; B at least 1.
        batch: the micro-batch, each field [B, T].
        totals: sampled tokens, rows and samples of the whole optimizer step, the denominators in w.
        gains: what beta and entropy_bonus are multiplied with in this step, dimensionless.
        token_loss: (logp [T], row) -> loss [T] and diagnostics, of one row.
        importance_correction: (logp [T], row) -> c [T], a token's weight where the sampler was not pi_old.
        kl: (logp [T], row) -> KL estimate [T], of one row.
        loss_aggregation: (batch, totals) -> w [B, T].
        beta: coefficient of the KL, per nat; 0: none.
        entropy_bonus: coefficient of the entropy, per nat; 0: none.

    Returns:
        The objective, a scalar; and per token, [B, T] and detached, the loss's diagnostics, "correction" (c), "kl" (k3
        in nats, whatever `kl` and `beta` are) and "entropy" (nats).
    """
    loss, seen = vmap(token_loss)(scores.logp, batch)
    correction = vmap(importance_correction)(scores.logp, batch).detach()
    loss = correction * loss
    if beta:  # not beta * kl alone: 0 * inf is nan, and without a reference logp_ref may hold anything
        loss = loss + gains.kl * beta * vmap(kl)(scores.logp, batch)
    if entropy_bonus:
        loss = loss - gains.entropy * entropy_bonus * torch.where(batch.mask, scores.entropy, 0.0)
    objective = (loss_aggregation(batch, totals) * loss).sum()
    seen = {**seen, "correction": correction, "kl": vmap(k3)(scores.logp, batch), "entropy": scores.entropy}
    return objective, {name: value.detach() for name, value in seen.items()}


def with_teacher_divergence(
    scores: Scores,
    *,
    batch: Batch,
    totals: Totals,
    gains: Gains,
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    divergence: Callable[[Tensor, Batch], Tensor],
    loss_aggregation: Callable[[Batch, Totals], Tensor],
    coef: float,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """objective + coef sum_bt v_bt d_bt: a divergence to the teacher beside an objective, with weights v of its own.

    In the place of `distillation.teacher_gap`, whose gap shares the weights of the advantages: there a mean over rows
    divides both by a row's length, here the divergence may be a mean over tokens while the objective is one over rows.

    Args:
        scores: log-probs and entropies under the policy, [B, T] each, in nats; B at least 1.
        batch: the micro-batch, each field [B, T]; the log-probs of its teacher are read.
        totals: sampled tokens, rows and samples of the whole optimizer step.
        gains: what the coefficients of the objective are multiplied with.
        objective: scores; batch=, totals=, gains= -> loss and diagnostics.
        divergence: (logp [T], row) -> KL estimate [T] of one row, its logp_ref being the teacher's.
        loss_aggregation: (batch, totals) -> v [B, T].
        coef: coefficient of the divergence, per nat.

    Returns:
        The sum, a scalar, and the objective's diagnostics of each token, [B, T].
    """
    value, seen = objective(scores, batch=batch, totals=totals, gains=gains)
    apart = vmap(divergence)(scores.logp, batch._replace(logp_ref=batch.logp_teacher))
    return value + coef * (loss_aggregation(batch, totals) * apart).sum(), seen


with_teacher_divergence.SUPPLIED = {"objective": ("batch", "totals", "gains")}


def compare_as_given(micro: Batch, logp: Float[Tensor, "b T"]) -> Batch:
    """Compare with the log-probs that the batch came with.

    Args:
        micro: a micro-batch, each field [b, T].
        logp: its log-probs under the policy at this update, [b, T], in nats; not read.

    Returns:
        The micro-batch as it is.
    """
    return micro


def compare_to_own_pass(micro: Batch, logp: Float[Tensor, "b T"], *, reference: bool) -> Batch:
    """Compare with the policy as the update itself finds it: `from_trainer` without its pass, for steps of one update.

    Args:
        micro: a micro-batch, each field [b, T].
        logp: its log-probs under the policy at this update, [b, T], in nats.
        reference: whether the policy has a frozen reference; without one logp_ref is logp, too.

    Returns:
        The micro-batch with logp_old = logp, a constant to the gradient.
    """
    old = logp.detach()
    return micro._replace(logp_old=old, logp_ref=micro.logp_ref if reference else old)


def update_policy(
    policy: Policy,
    components: Sequence[Component],
    gains: Gains,
    *,
    split: Callable[[Batch], list[Tensor]],
    anchor: Callable[[Batch, Tensor], Batch],
) -> metrics.UpdateResult:
    """Accumulate the gradient of a sum of components in micro-batches, then take one optimizer step.

    Args:
        policy: pi_theta, updated in place.
        components: what the optimizer step minimises the sum of; the first one's batch is returned.
        gains: what the coefficients of the objectives are multiplied with.
        split: the rows of a batch's micro-batches, that fit the devices.
        anchor: a micro-batch and its log-probs now -> what it is compared with.

    Returns:
        The sum's value, per-token statistics, and the first batch with the log-probs that it was compared with.
    """
    objective, stats, apart = 0.0, [], []
    batch, first = components[0].batch, components[0]
    ratio = [batch.adv.new_zeros(0)]
    parts = [(one, rows) for one in components for rows in split(one.batch)]
    policy.set_accumulation_steps(len(parts))
    for one, rows in parts:
        micro = trim_rows(one.batch, rows)
        scores, pullback = policy.vjp(micro)  # log pi_theta
        micro = anchor(micro, scores.logp)
        loss = partial(weighted_objective, component=one, batch=micro, gains=gains)
        signal, (value, tokens) = grad_and_value(loss, has_aux=True)(scores)
        pullback(signal)  # theta.grad += J^T dlogp
        objective += float(value)
        stats.append(metrics.diagnose(micro, tokens))
        if "ratio" in tokens:  # tokens that were sampled
            apart.append(metrics.mismatch(scores.logp - micro.logp_sampled, micro.mask))
            ratio.append(tokens["ratio"].detach()[micro.mask].to(batch.adv.dtype))
        if one is not first:
            continue
        old, ref = (
            partial(scatter_rows, rows=rows, mask=micro.mask, values=x) for x in (micro.logp_old, micro.logp_ref)
        )
        batch = batch._replace(logp_old=old(batch.logp_old), logp_ref=ref(batch.logp_ref))
    merged = (metrics.merge_all(stats), metrics.merge_all(apart))
    return metrics.UpdateResult(objective, *merged, torch.cat(ratio), policy.update(), batch, len(parts))


def weighted_objective(
    scores: Scores, *, component: Component, batch: Batch, gains: Gains
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """A micro-batch's share of a component.

    Args:
        scores: log-probs and entropies under the policy, [B, T] each, in nats.
        component: the objective, its denominators and its weight.
        batch: the micro-batch, each field [B, T].
        gains: what the coefficients of the objective are multiplied with.

    Returns:
        weight * objective, a scalar, and the objective's diagnostics of each token, [B, T].
    """
    value, seen = component.objective(scores, batch=batch, totals=component.totals, gains=gains)
    return (value if component.weight == 1.0 else component.weight * value), seen
