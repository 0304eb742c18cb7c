"""Token losses of one row: `(logp [T], row) -> ([T], diagnostics)`. `objective.policy_objective` vmaps and weighs them.

A token loss takes one row, `logp [T]` and a Batch of `[T]` fields: no row can touch another, whatever the shapes
(`logp[B, T] * adv[B]` broadcasts silently when B == T). It returns the loss of every token, 0 where ~mask, and the same
three diagnostics: "ratio", and "clip_low" and "clip_high", 1 where the clip on that side takes the advantage's
gradient away.

Below r = exp(logp - logp_old), A = adv, means run over the sampled tokens of the row, and sg[.] is a constant to the
gradient. On-policy every loss has the gradient of `reinforce`, -A grad logp; `sequence_ratio` and `gmpo` have it where
A is the same for all tokens of the row.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_fn.core import masked
from grpo_fn.core.types import Batch

EXAMPLES = {  # knobs as tests try them
    **{"clip_low": (0.2,), "clip_high": (0.28,), "cap": (3.0,), "tau_positive": (1.0,), "tau_negative": (1.05,)},
    **{"log_low": (0.4,), "log_high": (0.4,), "delta": (0.2,), "kappa": (0.0, 1e-3), "coef": (1.0,)},
}

Loss = tuple[Float[Tensor, "T"], dict[str, Float[Tensor, "T"]]]


def reinforce(logp: Float[Tensor, "T"], row: Batch) -> Loss:
    """-A logp: nothing is clipped, nothing corrects for stale samples, so on-policy only.

    REINFORCE (Williams 1992). The value is no measure of progress: only its gradient means something.

    Use it when: exactly one step on fresh samples.
    Peers: RLOO and REINFORCE losses.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    r = ratio(logp, row.logp_old, row.mask)
    return -_adv(row) * sampled_values(logp, row), loss_diagnostics(r, False, False)


reinforce.NEEDS = frozenset({"fresh_samples"})


def clipped_ratio(logp: Float[Tensor, "T"], row: Batch, *, clip_low: float, clip_high: float) -> Loss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO (arXiv:1707.06347, eq. 7), per token in GRPO (arXiv:2402.03300, eq. 3); clip_high > clip_low is DAPO's
    clip-higher (arXiv:2503.14476, eq. 10).

    Use it when: more than one optimizer step a rollout, or a sampler that lags.
    Peers: TRL `epsilon`, `epsilon_high`; verl `clip_ratio_low`, `clip_ratio_high`.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        clip_low: the ratio is clipped to at least 1 - clip_low, dimensionless.
        clip_high: the ratio is clipped to at most 1 + clip_high, dimensionless.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    return _clipped(ratio(logp, row.logp_old, row.mask), row, clip_low, clip_high)


def dual_clip(logp: Float[Tensor, "T"], row: Batch, *, clip_low: float, clip_high: float, cap: float) -> Loss:
    """`clipped_ratio`, at most -cap A where A < 0: a bad token that became very likely gives no unbounded loss.

    Dual-clip PPO (arXiv:1912.09729), cap = 3 there.

    Use it when: a bad token may have become very likely: stale samples.
    Peers: verl always does (`clip_ratio_c=3`), TRL `delta`.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        clip_low: the ratio is clipped to at least 1 - clip_low, dimensionless.
        clip_high: the ratio is clipped to at most 1 + clip_high, dimensionless.
        cap: largest ratio that counts where A < 0, dimensionless.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.

    Raises:
        ValueError: cap is not above 1.
    """
    if cap <= 1:
        raise ValueError(f"cap: got {cap}, wanted more than 1, or bad tokens teach nothing on-policy")
    r = ratio(logp, row.logp_old, row.mask)
    adv = _adv(row)
    loss, seen = _clipped(r, row, clip_low, clip_high)
    beyond = (adv < 0) & (r > cap)
    return torch.where(beyond, -cap * adv, loss), {**seen, "clip_high": seen["clip_high"] + beyond.to(r.dtype)}


def sequence_ratio(logp: Float[Tensor, "T"], row: Batch, *, clip_low: float, clip_high: float) -> Loss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean_t log r_t), one ratio for all tokens of the row.

    GSPO (arXiv:2507.18071, eq. 5 and 7), which averages it over a row: take aggregation.sequence_mean. A token is
    clipped or not by its own A; where they differ within a row, the others' losses still move its logp.

    Use it when: mixtures of experts, long rows; with `sequence_mean`.
    Peers: TRL `importance_sampling_level="sequence"`; TRL's sampler correction of the same name is exp(sum), not of
    the mean.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        clip_low: the ratio is clipped to at least 1 - clip_low, dimensionless.
        clip_high: the ratio is clipped to at most 1 + clip_high, dimensionless.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    log_r = log_ratio(logp, row.logp_old, row.mask)
    return _clipped(capped_exp(_row_mean(log_r, row)).exp(), row, clip_low, clip_high)


def sequence_ratio_token(logp: Float[Tensor, "T"], row: Batch, *, clip_low: float, clip_high: float) -> Loss:
    """As `sequence_ratio` with s_t = sg[s] exp(logp_t - sg[logp_t]): the same value, a gradient to its own logp alone.

    GSPO-token (arXiv:2507.18071, eq. 13 and 14), made for an A of each token. With one A for the row its gradient is
    that of `sequence_ratio`; it is the paper's under aggregation.sequence_mean.

    Use it when: GSPO with an A of each token.
    Peers: verl `gspo` is this form; ms-swift `sequence_token`.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        clip_low: the ratio is clipped to at least 1 - clip_low, dimensionless.
        clip_high: the ratio is clipped to at most 1 + clip_high, dimensionless.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    log_r = log_ratio(logp, row.logp_old, row.mask).detach()
    own = log_ratio(logp, logp.detach(), row.mask)
    return _clipped(capped_exp(_row_mean(log_r, row) + own).exp(), row, clip_low, clip_high)


def cispo(logp: Float[Tensor, "T"], row: Batch, *, clip_high: float) -> Loss:
    """-sg[min(r, 1 + clip_high)] A logp: REINFORCE with a truncated importance weight; every token keeps a gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5), whose lower bound is set out of reach there and is none here.
    No gradient is ever taken away, so both clip diagnostics are 0.

    Use it when: no token should lose its gradient, many steps a rollout.
    Peers: TRL and ms-swift take `epsilon_high` itself as the cap (5.0); verl clips both sides.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        clip_high: the weight is at most 1 + clip_high, dimensionless.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    r = ratio(logp, row.logp_old, row.mask)
    weight = r.detach().clamp(max=1 + clip_high)
    return -weight * _adv(row) * sampled_values(logp, row), loss_diagnostics(r, False, False)


def sapo(logp: Float[Tensor, "T"], row: Batch, *, tau_positive: float, tau_negative: float) -> Loss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_positive where A > 0, else tau_negative: a clip with soft edges.

    SAPO (arXiv:2511.20347). The gradient fades as r leaves 1 on either side and is never cut off, so both
    clip diagnostics are 0.

    Use it when: a clip with soft edges.
    Peers: TRL, verl, AReaL `sapo`.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        tau_positive: steepness of the sigmoid where A > 0.
        tau_negative: steepness of the sigmoid elsewhere.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.

    Raises:
        ValueError: one of the two is not above 0.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError(f"tau: got {tau_positive} and {tau_negative}, wanted more than 0")
    r, adv = ratio(logp, row.logp_old, row.mask), _adv(row)
    good, bad = ((4 / tau) * torch.sigmoid(tau * (r - 1)) for tau in (tau_positive, tau_negative))
    return -torch.where(adv > 0, good, bad) * adv, loss_diagnostics(r, False, False)


def gmpo(logp: Float[Tensor, "T"], row: Batch, *, log_low: float, log_high: float) -> Loss:
    """-g A, g = exp(mean_t c_t), c = min(log r, log_high) where A > 0, max(log r, -log_low) where A < 0; in nats.

    GMPO (arXiv:2507.20673, eq. 4): the geometric mean of a row's clipped ratios in the place of their arithmetic mean;
    averaged over rows: take aggregation.sequence_mean. "ratio" is each token's own.

    Use it when: outliers among ratios; with `sequence_mean`.
    Peers: verl `geo_mean`, TRL `GMPOTrainer`.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        log_low: log r counts as at least -log_low where A < 0, in nats.
        log_high: log r counts as at most log_high where A > 0, in nats.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    log_r, adv = log_ratio(logp, row.logp_old, row.mask), _adv(row)
    high, low = (adv > 0) & (log_r > log_high), (adv < 0) & (log_r < -log_low)
    kept = torch.where(high, log_high, torch.where(low, -log_low, log_r))
    return -capped_exp(_row_mean(kept, row)).exp() * adv, loss_diagnostics(capped_exp(log_r).exp(), low, high)


def dppo_tv(logp: Float[Tensor, "T"], row: Batch, *, delta: float, kappa: float) -> Loss:
    """-keep A r + kappa (log r)^2, r = exp(logp - logp_sampled), by how far the token's *probability* p has moved.

    keep = 0 where A > 0 and p - p_sampled > delta, or A < 0 and p_sampled - p > delta. DPPO with the binary total
    variation (arXiv:2602.04879, eq. 12 and 13): a rare token may change its ratio much, a frequent one may not. Its
    trust region is around the sampler, so logp_old has no say. The penalty, on every sampled token, is prime-rl's.

    Use it when: rare tokens should be free to grow; sampler and trainer disagree.
    Peers: verl `dppo_tv`: around logp_old, sg[min(r, cap)] logp in the place of r; `clip_ratio_c` is the cap, 3.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        delta: how far p may move in the direction of A before the gradient ends, 0 to 1.
        kappa: coefficient of the penalty (log r)^2, per nat squared.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    r, log_r = ratio(logp, row.logp_sampled, row.mask), log_ratio(logp, row.logp_sampled, row.mask)
    adv = _adv(row)
    moved = capped_exp(sampled_values(logp, row)).exp() - capped_exp(sampled_values(row.logp_sampled, row)).exp()
    high, low = (adv > 0) & (moved > delta), (adv < 0) & (moved < -delta)
    return -torch.where(high | low, 0.0, adv) * r + kappa * log_r**2, loss_diagnostics(r, low, high)


dppo_tv.NEEDS = frozenset({"logp_sampled"})


def clip_cov(logp: Float[Tensor, "T"], row: Batch, *, clip_low: float, clip_high: float) -> Loss:
    """`clipped_ratio`, 0 where the token is selected; masking.clip_cov_tokens chooses.

    Clip-Cov (arXiv:2505.22617, eq. 12). A selected token is not counted by the clip diagnostics.

    Use it when: entropy collapses; with `masking.clip_cov_tokens`.
    Peers: verl `clip_cov`: an unkeyed permutation of each rank's minibatch.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        clip_low: the ratio is clipped to at least 1 - clip_low, dimensionless.
        clip_high: the ratio is clipped to at most 1 + clip_high, dimensionless.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    r = ratio(logp, row.logp_old, row.mask)
    return _clipped(r, row._replace(adv=torch.where(row.selected, 0.0, row.adv)), clip_low, clip_high)


def kl_cov(logp: Float[Tensor, "T"], row: Batch, *, coef: float) -> Loss:
    """-r A, plus coef |log r| where the token is selected; masking.kl_cov_tokens chooses.

    KL-Cov (arXiv:2505.22617, eq. 14). Nothing is clipped: the penalty alone holds back the tokens that cost the most
    entropy.

    Use it when: entropy collapses; with `masking.kl_cov_tokens`.
    Peers: verl `kl_cov`.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        coef: coefficient of |log r|, per nat.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    log_r = log_ratio(logp, row.logp_old, row.mask)
    r = capped_exp(log_r).exp()
    return -r * _adv(row) + torch.where(row.selected, coef * log_r.abs(), 0.0), loss_diagnostics(r, False, False)


def masked_ratio(logp: Float[Tensor, "T"], row: Batch) -> Loss:
    """-r A, r = exp(logp - logp_sampled), 0 where the token is selected; masking.second_moment_tokens chooses.

    M2PO (arXiv:2510.01161; from AReaL's documentation): no clip; the tokens on which policy and sampler were furthest
    apart are left out instead, as few as make the rest's mean (log r)^2 small. A selected token is not counted by the
    clip diagnostics.

    Use it when: samples are many updates old; with `masking.second_moment_tokens` and `step.from_trainer`.
    Peers: AReaL `m2_threshold`, in its clipped loss.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
    """
    r = ratio(logp, row.logp_sampled, row.mask)
    return torch.where(row.selected, 0.0, -r * _adv(row)), loss_diagnostics(r, False, False)


masked_ratio.NEEDS = frozenset({"logp_sampled"})


def sampled_values(x: Float[Tensor, "*T"], row: Batch) -> Float[Tensor, "T"]:
    """The value where the row's mask is set, 0 elsewhere. Raises ValueError for a batch in the place of a row."""
    if row.mask.ndim != 1:
        raise ValueError(
            f"loss: got a mask of shape {tuple(row.mask.shape)}, wanted that of one row, [T]: torch.func.vmap takes "
            "the function over all rows"
        )
    return torch.where(row.mask, x, 0.0)


def loss_diagnostics(r: Tensor, low: Tensor | bool, high: Tensor | bool) -> dict[str, Float[Tensor, "T"]]:
    """The diagnostics that every token loss returns: "ratio", "clip_low" and "clip_high"."""
    low, high = (torch.zeros_like(r).masked_fill(torch.as_tensor(x, device=r.device), 1.0) for x in (low, high))
    return {"ratio": r, "clip_low": low, "clip_high": high}


def _clipped(r: Float[Tensor, "T"], row: Batch, clip_low: float, clip_high: float) -> Loss:
    low, high, adv = 1 - clip_low, 1 + clip_high, _adv(row)
    loss = -torch.minimum(r * adv, r.clamp(low, high) * adv)
    return loss, loss_diagnostics(r, (adv < 0) & (r < low), (adv > 0) & (r > high))


def _adv(row: Batch) -> Float[Tensor, "T"]:
    return sampled_values(row.adv, row)


def _row_mean(x: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """The mean over the sampled tokens, at each of them."""
    return sampled_values(masked.mean(x, row.mask, dim=-1), row)


def log_ratio(
    logp: Float[Tensor, "*B T"], base: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """logp - base where `mask`, 0 elsewhere.

    Whatever stands behind the mask, infinities and nan included, changes neither the value nor a gradient: the choice
    is made before anything multiplies, so no 0 * inf arises on the way back.
    """
    return torch.where(mask, logp - base, 0.0)


def capped_exp(log_r: Float[Tensor, "*B T"]) -> Float[Tensor, "*B T"]:
    """Log-ratios of at most half the largest exponent of their dtype (44 in float32, 354 in float64).

    Beyond, `exp` overflows, and inf * 0 in a product with a zero advantage would be nan. Half of the range leaves space
    for a product of two ratios. The gradient there is zero: one such token would outweigh all others together.
    """
    return log_r.clamp(max=math.log(torch.finfo(log_r.dtype).max) / 2 - 1)


def ratio(
    logp: Float[Tensor, "*B T"], base: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """r = exp(logp - base) where `mask`, 1 elsewhere; always finite for finite inputs."""
    return capped_exp(log_ratio(logp, base, mask)).exp()
