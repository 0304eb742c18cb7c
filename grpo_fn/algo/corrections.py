"""Corrections for samples of another policy: `(logp [T], row) -> weight [T]`, one row, vmapped.

    logp      log-probs of the row's tokens under the policy, [T], in nats; `off_policy_sequence_mask` alone reads them
    row       the row, a Batch whose fields are [T]
    ratio     row -> w [T]: `token_ratio`, or `row_ratio`
    returns   the weight of each token, [T]: finite, constant to the gradient, 1 where ~mask and between equal policies

The sampler is never quite the trainer: other kernels, another precision, or weights that are some updates old. With
w = exp(logp_old - logp_sampled), an expectation over the sampler's tokens of w f is one over pi_old of f, the prefixes
o_<t held fixed. The token loss goes on from pi_old to the policy with its own ratio. Where logp_old is logp_sampled
itself (step.from_sampler), w is 1 everywhere: take step.from_trainer.

A ratio is `(row) -> w [T]`; a divergence is `(log_w [T]) -> [T]`, 0 where the two agree; a reduction is
`(x [T], mask [T]) -> scalar`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_fn.algo.losses import capped_exp, log_ratio
from grpo_fn.core import masked as over
from grpo_fn.core.types import Batch

Ratio = Callable[[Batch], Tensor]
Correction = Callable[[Tensor, Batch], Tensor]
Divergence = Callable[[Tensor], Tensor]
Reduction = Callable[[Tensor, Tensor], Tensor]


def truncated_weight(logp: Float[Tensor, "T"], row: Batch, *, ratio: Ratio, cap: float) -> Float[Tensor, "T"]:
    """min(w, cap): unbiased where no w exceeds cap, a bias in the place of a large variance where some do.

    Truncated importance sampling (TIS; Ionides 2008) between sampler and trainer is Yao et al. 2025, "Your efficient
    RL framework secretly brings you off-policy RL training" (https://fengyao.notion.site/off-policy-rl); peers use 2.

    Use it when: another engine samples; stale samples. Start here, cap 2; `row_ratio` where the loss has a sequence's.
    Peers: TRL `token_truncate`, verl `rollout_is="token"`; TRL `sequence_truncate` is exp of the sum.

    Args:
        cap: largest weight.

    Raises:
        ValueError: cap is less than 1.
    """
    if not cap >= 1:
        raise ValueError(f"cap: got {cap}, expected at least 1, or samples of the policy itself lose weight")
    return ratio(row).clamp(max=cap)


truncated_weight.NEEDS = frozenset({"trainer_logp"})


def masked_weight(logp: Float[Tensor, "T"], row: Batch, *, ratio: Ratio, low: float, high: float) -> Float[Tensor, "T"]:
    """w where low <= w <= high, else 0: a token on which the two disagree too much, either way, teaches nothing.

    IcePop (Ring-1T, arXiv:2510.18855): a token that is kept keeps its weight w; 0.5 to 5 there. Of `row_ratio` it is
    geometric sequence masking (Liu, Li et al. 2025, "When speed kills stability", part 3,
    https://richardli.xyz/rl-collapse), which leaves out whole rows; w lies near 1, so it wants a narrow range.

    Use it when: a few tokens are far off (mixtures of experts): they should not teach at all; 0.5 to 5.
    Peers: TRL `token_mask`; verl's geometric rejection; TRL `sequence_mask` is exp of the sum.

    Args:
        low: smallest weight that is kept.
        high: largest weight that is kept.

    Raises:
        ValueError: not 0 <= low <= 1 <= high.
    """
    _check_range(low, high)
    w = ratio(row)
    return torch.where((w >= low) & (w <= high), w, 0.0)


masked_weight.NEEDS = frozenset({"trainer_logp"})


def off_policy_sequence_mask(logp: Float[Tensor, "T"], row: Batch, *, delta: float) -> Float[Tensor, "T"]:
    """0 where A < 0 and mean_t (logp_sampled - logp) > delta, else 1: no lessons from mistakes already unlearnt.

    DeepSeek-V3.2 (arXiv:2512.02556, section 3.1, eq. 8 and 9). It looks at the policy as it is at
    this very update, so it holds back stale samples and late epochs as well, whatever logp_old is. The paper does not
    say its delta; 0.5 is where TRL's documentation starts.

    Use it when: stale samples, many updates a rollout.
    Peers: TRL `off_policy_mask_threshold`.

    Args:
        delta: largest row mean of logp_sampled - logp at which tokens with A < 0 are kept, in nats a token.

    Raises:
        ValueError: delta is less than 0.
    """
    if not delta >= 0:
        raise ValueError(f"delta: got {delta}, expected at least 0, or samples of the policy itself are masked")
    behind = over.mean(log_ratio(row.logp_sampled, logp, row.mask), row.mask, dim=-1)
    return torch.where(row.mask & (row.adv < 0) & (behind > delta), 0.0, torch.ones_like(logp)).detach()


off_policy_sequence_mask.NEEDS = frozenset({"logp_sampled"})


def weight_and_mask(
    logp: Float[Tensor, "T"], row: Batch, *, weight: Correction, mask: Correction
) -> Float[Tensor, "T"]:
    """`weight` where `mask` is not 0, else 0.

    Not their product: a mask that keeps w would square it. Truncated weights of DeepSeek's rows are
    weight_and_mask(weight=truncated_weight, mask=off_policy_sequence_mask).

    Use it when: a truncation and a mask at once; not their product, which would square a w that is kept.

    Args:
        weight: (logp, row) -> [T], the weight of a token that is kept.
        mask: (logp, row) -> [T], 0 for a token that is left out.
    """
    return torch.where(mask(logp, row) == 0, 0.0, weight(logp, row))


def rejected_row(
    logp: Float[Tensor, "T"],
    row: Batch,
    *,
    divergence: Divergence,
    reduction: Reduction,
    low: float,
    high: float,
) -> Float[Tensor, "T"]:
    """1 where low <= reduction(divergence(log w)) <= high of the row, else 0 at all of its tokens.

    Rejection sampling of rows (Liu, Li et al. 2025, "When speed kills stability", https://richardli.xyz/rl-collapse):
    k1 says which way the trainer went, k2 and k3 how far, whatever the direction; the sum grows with the length, the
    mean does not, the largest finds one token. k3's mean is the steadiest of small divergences (verl).

    Use it when: another engine samples, or samples are stale, and rows that are off should not teach at all.
    Peers: verl `rollout_rs` `seq_sum_k1` to `seq_max_k3`; SkyRL's geometric mask is the mean of k1.

    Args:
        divergence: (log w [T]) -> [T], 0 where sampler and trainer agree.
        reduction: (x [T], mask [T]) -> one number of the row.
        low: least number at which a row is kept, in nats.
        high: largest number at which a row is kept, in nats.

    Raises:
        ValueError: not low <= 0 <= high.
    """
    if not low <= 0 <= high:
        raise ValueError(
            f"low, high: got {low} and {high}, expected low <= 0 <= high, or samples of the policy itself are left out"
        )
    apart = reduction(divergence(_log_w(row)), row.mask)
    return torch.where(row.mask & ((apart < low) | (apart > high)), 0.0, torch.ones_like(logp))


rejected_row.NEEDS = frozenset({"trainer_logp"})


def outlier_row(logp: Float[Tensor, "T"], row: Batch, *, low: float, high: float) -> Float[Tensor, "T"]:
    """1 where low <= w <= high at every token of the row, else 0 at all of its tokens.

    SkyRL's outlier mask, 1e-4 to 100: one token that the sampler all but never draws is a sign of a fault.

    Use it when: beside any weight, as a guard with a wide range: `weight_and_mask`.
    Peers: SkyRL `outlier_token_is_threshold_low`, `_high`; verl `rollout_token_veto_threshold`, the lower bound alone.

    Args:
        low: smallest w of a token at which a row is kept.
        high: largest w of a token at which a row is kept.

    Raises:
        ValueError: not 0 <= low <= 1 <= high.
    """
    _check_range(low, high)
    w = token_ratio(row)  # 1 where nothing was sampled
    return torch.where(row.mask & ((w < low) | (w > high)).any(), 0.0, torch.ones_like(logp))


outlier_row.NEEDS = frozenset({"trainer_logp"})


def token_ratio(row: Batch) -> Float[Tensor, "T"]:
    """w of each token; 1 where nothing was sampled."""
    return capped_exp(_log_w(row)).exp()


def row_ratio(row: Batch) -> Float[Tensor, "T"]:
    """exp(mean_t log w_t) at each of the row's tokens, 1 elsewhere: the geometric mean of its w.

    The row's importance ratio is the product of all w_t, which grows or vanishes with its length; its |o|-th root is
    biased and comparable between short rows and long ones, as GSPO (arXiv:2507.18071, section 4.1) argues for the loss.
    """
    mean = over.mean(_log_w(row), row.mask, dim=-1)
    return capped_exp(torch.where(row.mask, mean, 0.0)).exp()


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
    return over.mean(x, mask, dim=-1)


def row_max(x: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Float[Tensor, ""]:
    """The value furthest from 0 among the sampled tokens of a row, with its sign; 0 of none."""
    kept = torch.where(mask, x, 0.0)
    least, most = kept.amin(), kept.amax()
    return torch.where(-least > most, least, most)


def _log_w(row: Batch) -> Float[Tensor, "T"]:
    return log_ratio(row.logp_old, row.logp_sampled, row.mask).detach()


def _check_range(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"low, high: got {low} and {high}, expected 0 <= low <= 1 <= high, or samples of the policy itself are "
            "masked"
        )
