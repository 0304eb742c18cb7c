"""What is minimised: the objective of a micro-batch, composed of a corrected token loss, a KL, weights and a bonus."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from grpo_fn.algo.kl import k3
from grpo_fn.core.types import Batch, Gains, Scores, Totals


def policy_objective(
    scores: Scores,
    *,
    batch: Batch,
    totals: Totals,
    gains: Gains,
    token_loss: Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]],
    importance_correction: Callable[[Tensor, Batch], Tensor],
    kl: Callable[[Tensor, Batch], Tensor],
    loss_aggregation: Callable[[Tensor, Totals], Tensor],
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
        loss_aggregation: (mask [B, T], totals) -> w [B, T].
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
    objective = (loss_aggregation(batch.mask, totals) * loss).sum()
    seen = {**seen, "correction": correction, "kl": vmap(k3)(scores.logp, batch), "entropy": scores.entropy}
    return objective, {name: value.detach() for name, value in seen.items()}
