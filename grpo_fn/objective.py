"""What is minimised: token losses of one row, and the objective of a micro-batch that composes them.

A token loss takes one row, `logp [T]` and a Batch with `[T]` fields and a scalar advantage, and is vmapped by
`policy_objective`: `logp[B, T] * adv[B]`, which broadcasts silently when B == T, cannot be written. It returns the loss
of every token and the same three diagnostics: "ratio", and "clip_low" and "clip_high", 1 where the clip on that side
is active and the token therefore has no gradient.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from grpo_fn.kl import k3
from grpo_fn.ratio import ratio
from grpo_fn.types import Batch, Scores, Totals


def clipped_ratio(
    logp: Float[Tensor, "T"], row: Batch, *, clip_low: float, clip_high: float
) -> tuple[Float[Tensor, "T"], dict[str, Float[Tensor, "T"]]]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - logp_old), 0 where ~mask.

    PPO (arXiv:1707.06347, eq. 7), per token in GRPO (arXiv:2402.03300, eq. 3); clip_high > clip_low is DAPO's
    clip-higher (arXiv:2503.14476). At r = 1 the gradient is REINFORCE's, -A grad logp.
    """
    r = ratio(logp, row.logp_old, row.mask)
    low, high = 1 - clip_low, 1 + clip_high
    gain = torch.minimum(r * row.adv, r.clamp(low, high) * row.adv)
    return torch.where(row.mask, -gain, 0.0), {
        "ratio": r,
        "clip_low": (row.mask & (row.adv < 0) & (r < low)).to(r.dtype),
        "clip_high": (row.mask & (row.adv > 0) & (r > high)).to(r.dtype),
    }


def reinforce(logp: Float[Tensor, "T"], row: Batch) -> tuple[Float[Tensor, "T"], dict[str, Float[Tensor, "T"]]]:
    """-A logp, 0 where ~mask (Williams 1992). Nothing is clipped, nothing corrects for stale samples: on-policy only.

    The value is no measure of progress: only its gradient means something.
    """
    r = ratio(logp, row.logp_old, row.mask)
    never = torch.zeros_like(r)
    loss = torch.where(row.mask, -row.adv * torch.where(row.mask, logp, 0.0), 0.0)
    return loss, {"ratio": r, "clip_low": never, "clip_high": never}


def policy_objective(
    scores: Scores,
    *,
    batch: Batch,
    totals: Totals,
    token_loss: Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]],
    kl: Callable[[Tensor, Batch], Tensor],
    weigh: Callable[[Tensor, Totals], Tensor],
    beta: float,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """sum_bt w_bt (loss_bt + beta kl_bt): this micro-batch's share of the step's objective, to minimise.

    Differentiate it by `grad_and_value(partial(policy_objective, batch=..., ...), has_aux=True)(scores)`; the gradient
    is the learning signal, also a Scores. Entropy is read, not optimised: its gradient is exactly zero.

    Also returns, per token and detached, the loss's diagnostics, "kl" (the k3 value, whatever `kl` and `beta` are) and
    "entropy" in nats. Shapes `[B, T]`, B at least 1.
    """
    loss, seen = vmap(token_loss)(scores.logp, batch)
    if beta:  # not beta * kl alone: 0 * inf is nan, and without a reference logp_ref may hold anything
        loss = loss + beta * vmap(kl)(scores.logp, batch)
    objective = (weigh(batch.mask, totals) * loss).sum()
    seen = {**seen, "kl": vmap(k3)(scores.logp, batch), "entropy": scores.entropy}
    return objective, {name: value.detach() for name, value in seen.items()}
