"""Corrections that leave whole rows out: `(logp [T], row) -> weight [T]`, one row, vmapped, as in importance.py.

A row on which sampler and trainer disagree too much has weight 0 at each of its tokens, and `weight` decides what the
others have. w = exp(logp_old - logp_sampled), so with `step.from_sampler` no row is ever left out.

A divergence is `(log_w [T]) -> [T]`, 0 where the two agree; a reduction is `(x [T], mask [T]) -> scalar`.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_fn.algo.importance import Correction, truncated_weight
from grpo_fn.algo.losses import capped_exp, log_ratio
from grpo_fn.core import masked
from grpo_fn.core.types import Batch

Divergence = Callable[[Tensor], Tensor]
Reduction = Callable[[Tensor, Tensor], Tensor]


def rejected_row(
    logp: Float[Tensor, "T"],
    row: Batch,
    *,
    weight: Correction | None,
    divergence: Divergence,
    reduction: Reduction,
    low: float,
    high: float,
) -> Float[Tensor, "T"]:
    """`weight` where low <= reduction(divergence(log w)) <= high of the row, else 0 at all of its tokens.

    Rejection sampling of rows (Liu, Li et al. 2025, "When speed kills stability", https://richardli.xyz/rl-collapse):
    k1 says which way the trainer went, k2 and k3 how far, whatever the direction; the sum grows with the length, the
    mean does not, the largest finds one token. k3's mean is the steadiest of small divergences (verl).

    Use it when: another engine samples, or samples are stale, and rows that are off should not teach at all.
    Peers: verl `rollout_rs` `seq_sum_k1` to `seq_max_k3`; SkyRL's geometric mask is the mean of k1.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        weight: (logp, row) -> [T], the weight of the tokens of a row that is kept; None: 1.
        divergence: (log w [T]) -> [T], 0 where sampler and trainer agree.
        reduction: (x [T], mask [T]) -> one number of the row.
        low: least number at which a row is kept, in nats.
        high: largest number at which a row is kept, in nats.

    Returns:
        The weight of each token, [T]; 1 where ~mask.

    Raises:
        ValueError: not low <= 0 <= high.
    """
    if not low <= 0 <= high:
        raise ValueError(
            f"low, high: got {low} and {high}, wanted low <= 0 <= high, or samples of the policy itself are left out"
        )
    found = reduction(divergence(_log_w(row)), row.mask)
    return torch.where(row.mask & ((found < low) | (found > high)), 0.0, _kept_weight(logp, row, weight))


rejected_row.NEEDS = frozenset({"trainer_logp"})


def outlier_row(
    logp: Float[Tensor, "T"], row: Batch, *, weight: Correction | None, low: float, high: float
) -> Float[Tensor, "T"]:
    """`weight` where low <= w <= high at every token of the row, else 0 at all of its tokens.

    SkyRL's outlier mask, 1e-4 to 100: one token that the sampler all but never draws is a sign of a fault.

    Use it when: beside any weight, as a guard with a wide range.
    Peers: SkyRL `outlier_token_is_threshold_low`, `_high`; verl `rollout_token_veto_threshold`, the lower bound alone.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        weight: (logp, row) -> [T], the weight of the tokens of a row that is kept; None: 1.
        low: smallest w of a token at which a row is kept.
        high: largest w of a token at which a row is kept.

    Returns:
        The weight of each token, [T]; 1 where ~mask.

    Raises:
        ValueError: not 0 <= low <= 1 <= high.
    """
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"low, high: got {low} and {high}, wanted 0 <= low <= 1 <= high, or samples of the policy itself are out"
        )
    w = capped_exp(_log_w(row)).exp()  # 1 where nothing was sampled
    found = ((w < low) | (w > high)).any()
    return torch.where(row.mask & found, 0.0, _kept_weight(logp, row, weight))


outlier_row.NEEDS = frozenset({"trainer_logp"})


def k1_divergence(log_w: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """-log w, which is above 0 where the trainer finds a token less likely than the sampler did."""
    return -log_w


def k2_divergence(log_w: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """(log w)^2 / 2."""
    return log_w**2 / 2


def k3_divergence(log_w: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """w - 1 - log w, at least 0."""
    return torch.expm1(capped_exp(log_w)) - log_w


def row_sum(x: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Float[Tensor, ""]:
    """The sum over the sampled tokens of a row."""
    return torch.where(mask, x, 0.0).sum()


def row_mean(x: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Float[Tensor, ""]:
    """The mean over the sampled tokens of a row; 0 of none."""
    return masked.mean(x, mask, dim=-1)


def row_max(x: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Float[Tensor, ""]:
    """The value furthest from 0 among the sampled tokens of a row, with its sign; 0 of none."""
    kept = torch.where(mask, x, 0.0)
    least, most = kept.amin(), kept.amax()
    return torch.where(-least > most, least, most)


def _log_w(row: Batch) -> Float[Tensor, "T"]:
    return log_ratio(row.logp_old, row.logp_sampled, row.mask).detach()


EXAMPLES: dict[str, tuple[object, ...]] = {  # knobs as tests try them
    **{"weight": (partial(truncated_weight, cap=3.0),), "low": (0.0,), "high": (1.0,)},
    "divergence": (k1_divergence, k2_divergence, k3_divergence),
    "reduction": (row_sum, row_mean, row_max),
}


def _kept_weight(logp: Float[Tensor, "T"], row: Batch, weight: Correction | None) -> Float[Tensor, "T"]:
    return torch.ones_like(logp) if weight is None else weight(logp, row)
