"""Token losses of one row: `(logp [T], row) -> ([T], diagnostics)`. `objective.policy_objective` vmaps and weighs them.

    logp        log-probs of the row's tokens under the policy, [T], in nats
    row         the row, a Batch whose fields are [T]
    clip_low    the ratio is clipped to at least 1 - clip_low, dimensionless
    clip_high   the ratio is clipped to at most 1 + clip_high, dimensionless
    returns     the loss of every token, [T], 0 where ~mask, and its diagnostics, [T] each: "ratio", and "clip_low" and
                "clip_high", 1 where the clip on that side takes the advantage's gradient away

One row at a time: no row can touch another, whatever the shapes (`logp[B, T] * adv[B]` broadcasts when B == T).

Below r = exp(logp - logp_old), A = adv, means run over the sampled tokens of the row, and sg[.] is a constant to the
gradient. On-policy every loss has the gradient of `reinforce`, -A grad logp; `sequence_ratio` and `gmpo` have it where
A is the same for all tokens of the row.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_fn.core import masked
from grpo_fn.core.types import Batch

TOKEN_LIMIT = 20.0  # nats: bounds of a token's log-ratio and, above, of a row's, in `vespo`
ROW_FLOOR = math.log(1e-8)  # nats: least log-ratio of a row there
CHUNK = 128  # columns of one piece of `discounted_to_go`

Loss = tuple[Float[Tensor, "T"], dict[str, Float[Tensor, "T"]]]


def reinforce(logp: Float[Tensor, "T"], row: Batch) -> Loss:
    """-A logp: nothing is clipped, nothing corrects for stale samples, so on-policy only.

    REINFORCE (Williams 1992). The value is no measure of progress: only its gradient means something.

    Use it when: exactly one step on fresh samples.
    Peers: RLOO and REINFORCE losses.
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
    """
    return _clipped(ratio(logp, row.logp_old, row.mask), row, clip_low, clip_high)


def dual_clip(logp: Float[Tensor, "T"], row: Batch, *, clip_low: float, clip_high: float, cap: float) -> Loss:
    """`clipped_ratio`, at most -cap A where A < 0: a bad token that became very likely gives no unbounded loss.

    Dual-clip PPO (arXiv:1912.09729), cap = 3 there.

    Use it when: a bad token may have become very likely: stale samples.
    Peers: verl always does (`clip_ratio_c=3`), TRL `delta`.

    Args:
        cap: largest ratio that counts where A < 0, dimensionless.

    Raises:
        ValueError: cap is not above 1.
    """
    if cap <= 1:
        raise ValueError(f"cap: got {cap}, expected more than 1, or bad tokens teach nothing on-policy")
    r = ratio(logp, row.logp_old, row.mask)
    adv = _adv(row)
    loss, diagnostics = _clipped(r, row, clip_low, clip_high)
    beyond = (adv < 0) & (r > cap)
    diagnostics["clip_high"] = diagnostics["clip_high"] + beyond.to(r.dtype)
    return torch.where(beyond, -cap * adv, loss), diagnostics


def sequence_ratio(logp: Float[Tensor, "T"], row: Batch, *, clip_low: float, clip_high: float) -> Loss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean_t log r_t), one ratio for all tokens of the row.

    GSPO (arXiv:2507.18071, eq. 5 and 7), which averages it over a row: take objective.sequence_mean. A token is
    clipped or not by its own A; where they differ within a row, the others' losses still move its logp.

    Use it when: mixtures of experts, long rows; with `sequence_mean`.
    Peers: TRL `importance_sampling_level="sequence"`; TRL's sampler correction of the same name is exp(sum), not of
    the mean.
    """
    log_r = log_ratio(logp, row.logp_old, row.mask)
    return _clipped(capped_exp(_row_mean(log_r, row)).exp(), row, clip_low, clip_high)


def sequence_ratio_token(logp: Float[Tensor, "T"], row: Batch, *, clip_low: float, clip_high: float) -> Loss:
    """As `sequence_ratio` with s_t = sg[s] exp(logp_t - sg[logp_t]): the same value, a gradient to its own logp alone.

    GSPO-token (arXiv:2507.18071, eq. 13 and 14), made for an A of each token. With one A for the row its gradient is
    that of `sequence_ratio`; it is the paper's under objective.sequence_mean.

    Use it when: GSPO with an A of each token.
    Peers: verl `gspo` is this form; ms-swift `sequence_token`.
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
        clip_high: the weight is at most 1 + clip_high, dimensionless.
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
        tau_positive: steepness of the sigmoid where A > 0.
        tau_negative: steepness of the sigmoid elsewhere.

    Raises:
        ValueError: one of the two is not above 0.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError(f"tau: got {tau_positive} and {tau_negative}, expected more than 0")
    r, adv = ratio(logp, row.logp_old, row.mask), _adv(row)
    good, bad = ((4 / tau) * torch.sigmoid(tau * (r - 1)) for tau in (tau_positive, tau_negative))
    return -torch.where(adv > 0, good, bad) * adv, loss_diagnostics(r, False, False)


def gmpo(logp: Float[Tensor, "T"], row: Batch, *, log_low: float, log_high: float) -> Loss:
    """-g A, g = exp(mean_t c_t), c = min(log r, log_high) where A > 0, max(log r, -log_low) where A < 0; in nats.

    GMPO (arXiv:2507.20673, eq. 4): the geometric mean of a row's clipped ratios in the place of their arithmetic mean;
    averaged over rows: take objective.sequence_mean. "ratio" is each token's own.

    Use it when: outliers among ratios; with `sequence_mean`.
    Peers: verl `geo_mean`, TRL `GMPOTrainer`.

    Args:
        log_low: log r counts as at least -log_low where A < 0, in nats.
        log_high: log r counts as at most log_high where A > 0, in nats.
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
        delta: how far p may move in the direction of A before the gradient ends, 0 to 1.
        kappa: coefficient of the penalty (log r)^2, per nat squared.
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
        coef: coefficient of |log r|, per nat.
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
    """
    r = ratio(logp, row.logp_sampled, row.mask)
    return torch.where(row.selected, 0.0, -r * _adv(row)), loss_diagnostics(r, False, False)


masked_ratio.NEEDS = frozenset({"logp_sampled"})


# Losses -sg[w] A logp: what weighs the gradient is a constant to it, and each paper has its own w. `vespo`, `dppo_kl`
# and `masked_reinforce` compare the policy with the *sampler*, r = exp(logp - logp_sampled): logp_old has no say there,
# and no correction is needed.


def vespo(
    logp: Float[Tensor, "T"],
    row: Batch,
    *,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> Loss:
    """-sg[phi] A logp, phi = exp(lambda + k log W - lambda W), W = prod_t r_t of the row, 1e-8 to e^20.

    VESPO (arXiv:2602.10693; from the authors' code): the weight of a row is 1 on-policy, highest at W = k / lambda and
    falls on both sides; k and lambda are `k_positive` and `lambda_positive` where A >= 0, else the
    others. Each log r_t counts as -20 to 20 nats. No gradient is cut off, so both clip diagnostics are 0.

    Use it when: stale samples, asynchronous sampling: a whole row's weight, without its variance.
    Peers: TRL `vespo`: W of logp_old, times the sampler's truncated weights.

    Args:
        k_positive: power of W where A >= 0, dimensionless.
        lambda_positive: decay in W where A >= 0, dimensionless.
        k_negative: power of W where A < 0, dimensionless.
        lambda_negative: decay in W where A < 0, dimensionless.

    Raises:
        ValueError: a lambda is not above 0.
    """
    if min(lambda_positive, lambda_negative) <= 0:
        raise ValueError(f"lambda: got {lambda_positive} and {lambda_negative}, expected more than 0")
    adv, log_r = sampled_values(row.adv, row), log_ratio(logp, row.logp_sampled, row.mask)
    log_w = log_r.detach().clamp(-TOKEN_LIMIT, TOKEN_LIMIT).sum(-1, keepdim=True).clamp(ROW_FLOOR, TOKEN_LIMIT)
    good, bad = (
        (decay + power * log_w - decay * log_w.exp()).exp()
        for power, decay in ((k_positive, lambda_positive), (k_negative, lambda_negative))
    )
    weight = torch.where(adv >= 0, good, bad)
    return -weight * adv * sampled_values(logp, row), loss_diagnostics(capped_exp(log_r).exp(), False, False)


vespo.NEEDS = frozenset({"logp_sampled"})


def dppo_kl(logp: Float[Tensor, "T"], row: Batch, *, delta: float, cap: float) -> Loss:
    """-sg[keep min(r, cap)] A logp; a token is kept until the binary KL of its probability has reached delta.

    The KL is q log(q / p) + (1 - q) log((1 - q) / (1 - p)), q the sampler's probability of the token, p the policy's:
    that of "this token or another". Above delta, keep = 0 where A > 0 and p > q, or A < 0 and p < q. DPPO with the
    binary KL (arXiv:2602.04879; from verl's code, which adds 1e-8 to 1 - q and 1 - p).

    Use it when: as `dppo_tv`, whose distance is in probability: a KL also sees a rare token that becomes much rarer.
    Peers: verl `dppo_kl`, around logp_old; the cap is `clip_ratio_c`, which actor.yaml has as 3 and their example of
        DPPO as 10000; the 20 of the function itself is read only where no actor config is.

    Args:
        delta: KL at which the gradient in the direction of A ends, in nats.
        cap: largest ratio that counts, dimensionless.
    """
    adv, r = sampled_values(row.adv, row), ratio(logp, row.logp_sampled, row.mask)
    log_p, log_q = (sampled_values(x, row).detach().clamp(max=0.0) for x in (logp, row.logp_sampled))
    p, q = log_p.exp(), log_q.exp()
    divergence = q * (log_q - log_p) + (1 - q) * ((1 - q + 1e-8).log() - (1 - p + 1e-8).log())
    far = divergence > delta
    high, low = far & (adv > 0) & (p > q), far & (adv < 0) & (p < q)
    weight = torch.where(high | low, 0.0, r.detach().clamp(max=cap))
    return -weight * adv * sampled_values(logp, row), loss_diagnostics(r, low, high)


dppo_kl.NEEDS = frozenset({"logp_sampled"})


def masked_reinforce(logp: Float[Tensor, "T"], row: Batch, *, low: float, high: float) -> Loss:
    """-sg[r] A logp where 1 - low < r < 1 + high, else 0, whatever the sign of A.

    GLM-5 (arXiv:2602.15763, section 4.1.2; from SkyRL's code): the sampler's log-probs are the old policy's, so no
    pass is spent on them, and a token on which policy and sampler disagree in either direction teaches nothing.

    Use it when: asynchronous sampling, agents: one forward pass fewer; with `step.from_sampler`.
    Peers: slime; SkyRL `rollout_is`; `clipped_ratio` lets a bad token that became more likely teach, this does not.

    Args:
        low: how far r may be below 1, dimensionless.
        high: how far r may be above 1, dimensionless.
    """
    adv, r = sampled_values(row.adv, row), ratio(logp, row.logp_sampled, row.mask)
    below, above = (adv != 0) & (r <= 1 - low), (adv != 0) & (r >= 1 + high)
    weight = torch.where(below | above, 0.0, r.detach())
    return -weight * adv * sampled_values(logp, row), loss_diagnostics(r, below, above)


masked_reinforce.NEEDS = frozenset({"logp_sampled"})


def dro(logp: Float[Tensor, "T"], row: Batch, *, beta: float) -> Loss:
    """-A logp + beta / 2 (logp - logp_old)^2: REINFORCE held near the old policy by a square in the place of a clip.

    Direct reward optimisation (arXiv:2405.19107) with a group's baseline for its value function; from verl's and
    tinker's code. Its gradient, -(A - beta log r) grad logp, ends where log r = A / beta.

    Use it when: several updates a rollout, and no gradient should be cut off.
    Peers: tinker and verl `dro`.

    Args:
        beta: coefficient of the square, per nat squared.

    Raises:
        ValueError: beta is not above 0.
    """
    if beta <= 0:
        raise ValueError(f"beta: got {beta}, expected more than 0: without it this is losses.reinforce")
    log_r = log_ratio(logp, row.logp_old, row.mask)
    loss = -sampled_values(row.adv, row) * sampled_values(logp, row) + beta / 2 * log_r**2
    return loss, loss_diagnostics(capped_exp(log_r).exp(), False, False)


def future_weighted(
    logp: Float[Tensor, "T"],
    row: Batch,
    *,
    clip_low: float,
    clip_high: float,
    cap: float | None,
    half_life: float,
    weight_low: float,
    weight_high: float,
    safety: float,
) -> Loss:
    """sg[f_t] times `clipped_ratio` or, with a cap, `dual_clip`; f_t = clip(exp(F_t), weight_low, weight_high).

    F_t = sum_{s >= t} g^(s - t) log r_s, r = exp(logp - logp_old), g = 2^(-1 / half_life), tokens with r > cap left
    out: a token after which the update makes the row likelier counts more, so the first update of a rollout is
    DAPO's. Where A < 0 and r > safety, f is 0.8 to 1. FIPO (arXiv:2603.19835; from ms-swift's code).

    Use it when: long chains of thought and several updates a rollout.
    Peers: ms-swift `fipo`: half_life `fipo_decay_rate`, weights 1 to 1.2 by default, cap `delta`, safety 4.

    Args:
        cap: largest ratio that counts where A < 0, and in F; None for neither.
        half_life: tokens after which a later log-ratio counts half.
        weight_low: least weight of a token.
        weight_high: largest weight of a token.
        safety: ratio above which a token with A < 0 is not weighed more than 1.

    Raises:
        ValueError: half_life is not above 0, not weight_low <= 1 <= weight_high, or cap is not above 1.
    """
    if half_life <= 0:
        raise ValueError(f"half_life: got {half_life}, expected more than 0 tokens")
    if not 0 <= weight_low <= 1 <= weight_high:
        raise ValueError(f"weight_low, weight_high: got {weight_low} and {weight_high}, expected 0 <= low <= 1 <= high")
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    loss, diagnostics = clipped_ratio(logp, row, **clips) if cap is None else dual_clip(logp, row, **clips, cap=cap)
    log_r, r = log_ratio(logp, row.logp_old, row.mask).detach(), diagnostics["ratio"].detach()
    counted = log_r if cap is None else torch.where(r > cap, 0.0, log_r)
    weight = capped_exp(discounted_to_go(counted, decay=2 ** (-1 / half_life))).exp().clamp(weight_low, weight_high)
    risky = (sampled_values(row.adv, row) < 0) & (r > safety)
    return torch.where(risky, weight.clamp(0.8, 1.0), weight) * loss, diagnostics


def discounted_to_go(x: Float[Tensor, "T"], *, decay: float) -> Float[Tensor, "T"]:
    """sum_{s >= t} decay^(s - t) x_s for each t, in pieces of 128 columns: two small products instead of [T, T]."""
    length = x.shape[-1]
    pieces = rearrange(F.pad(x, (0, -length % CHUNK)), "(n c) -> n c", c=CHUNK)
    within = pieces @ _powers(CHUNK, decay, like=x).T  # to the end of the piece
    beyond = _powers(pieces.shape[-2], decay**CHUNK, like=x) @ within[..., 0]  # from each piece's start to the end
    after = F.pad(beyond[1:], (0, 1))
    left = CHUNK - torch.arange(CHUNK, device=x.device, dtype=x.dtype)
    return rearrange(within + decay**left * after[:, None], "n c -> (n c)")[:length]


def _powers(size: int, decay: float, *, like: Tensor) -> Float[Tensor, "N N"]:
    """decay^(j - i) at row i, column j >= i; 0 below."""
    place = torch.arange(size, device=like.device)
    apart = place[None, :] - place[:, None]
    return torch.where(apart >= 0, decay ** apart.clamp(min=0).to(like.dtype), 0.0)


# What losses are made of.


def sampled_values(x: Float[Tensor, "*T"], row: Batch) -> Float[Tensor, "T"]:
    """The value where the row's mask is set, 0 elsewhere. Raises ValueError for a batch in the place of a row."""
    if row.mask.ndim != 1:
        raise ValueError(
            f"loss: got a mask of shape {tuple(row.mask.shape)}, expected that of one row, [T]: torch.func.vmap takes "
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
