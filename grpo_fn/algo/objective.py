"""What is minimised: the objective of a micro-batch, composed of a corrected token loss, a KL, weights and a bonus."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from grpo_fn.algo.needs import needs
from grpo_fn.core.batch import check_tensor
from grpo_fn.core.types import Batch, Gains, Scores, Totals

Objective = Callable[[Scores, Batch, Totals, Gains], Tensor | tuple[Tensor, dict[str, Tensor]]]
TokenLoss = Callable[[Tensor, Batch], Tensor | tuple[Tensor, dict[str, Tensor]]]


def policy_objective(
    scores: Scores,
    batch: Batch,
    totals: Totals,
    gains: Gains,
    *,
    token_loss: TokenLoss,
    importance_correction: Callable[[Tensor, Batch], Tensor] | None,
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
        token_loss: (logp [T], row) -> loss [T] of one row, or that and diagnostics, [T] each.
        importance_correction: (logp [T], row) -> c [T], a token's weight where the sampler was not pi_old; None: the
            sampler is taken for pi_old, c = 1.
        kl: (logp [T], row) -> KL estimate [T], of one row.
        loss_aggregation: (batch, totals) -> w [B, T].
        beta: coefficient of the KL, per nat; 0: none.
        entropy_bonus: coefficient of the entropy, per nat; 0: none.

    Returns:
        The objective, a scalar; and the loss's diagnostics of each token, [B, T] and detached, "correction" (c) among
        them where there is one.
    """
    result = vmap(token_loss)(scores.logp, batch)
    loss, diagnostics = result if isinstance(result, tuple) else (result, {})
    check_tensor("objective.policy_objective.token_loss", loss, tuple(scores.logp.shape), torch.float32)
    if importance_correction is not None:
        correction = vmap(importance_correction)(scores.logp, batch).detach()
        loss, diagnostics = correction * loss, {**diagnostics, "correction": correction}
    if beta:  # not beta * kl alone: 0 * inf is nan, and without a reference logp_ref may hold anything
        loss = loss + gains.kl * beta * vmap(kl)(scores.logp, batch)
    if entropy_bonus:
        loss = loss - gains.entropy * entropy_bonus * torch.where(batch.mask, scores.entropy, 0.0)
    value = (loss_aggregation(batch, totals) * loss).sum()
    return value, {name: x.detach() for name, x in diagnostics.items()}


policy_objective.NEEDS = lambda knobs: needs([knob for name, knob in knobs.items() if name != "kl" or knobs["beta"]])


def objective_value(
    objective: Objective, scores: Scores, batch: Batch, totals: Totals, gains: Gains
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """The value of an objective, and its diagnostics of each token; one of a user's own may have none."""
    result = objective(scores, batch, totals, gains)
    value, diagnostics = result if isinstance(result, tuple) else (result, {})
    check_tensor("step.Algorithm.objective", value, (), torch.float32)
    return value, diagnostics


def with_teacher_divergence(
    scores: Scores,
    batch: Batch,
    totals: Totals,
    gains: Gains,
    *,
    objective: Objective,
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
        objective: (scores, batch, totals, gains) -> loss and diagnostics.
        divergence: (logp [T], row) -> KL estimate [T] of one row, its logp_ref being the teacher's.
        loss_aggregation: (batch, totals) -> v [B, T].
        coef: coefficient of the divergence, per nat.

    Returns:
        The sum, a scalar, and the objective's diagnostics of each token, [B, T].
    """
    value, diagnostics = objective_value(objective, scores, batch, totals, gains)
    apart = vmap(divergence)(scores.logp, batch._replace(logp_ref=batch.logp_teacher))
    return value + coef * (loss_aggregation(batch, totals) * apart).sum(), diagnostics


# The divergence reads the teacher's log-probs in the place of the reference's.
with_teacher_divergence.NEEDS = lambda knobs: needs(knobs["objective"]) | {"logp_teacher"}
