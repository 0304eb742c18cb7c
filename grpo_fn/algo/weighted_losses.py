"""Token losses -sg[w] A logp of one row: what weighs the gradient is a constant to it, and each paper has its own w.

As in losses.py, `(logp [T], row) -> ([T], diagnostics)`, one row, vmapped by `objective.policy_objective`. Below r =
exp(logp - logp_sampled): these compare the policy with the *sampler*, so logp_old has no say and no correction is
needed; only `dro` and `future_weighted` look at logp_old. On-policy each has the gradient of `reinforce`.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from grpo_fn.algo.losses import (
    Loss,
    capped_exp,
    clipped_ratio,
    dual_clip,
    log_ratio,
    loss_diagnostics,
    ratio,
    sampled_values,
)
from grpo_fn.core.types import Batch

EXAMPLES = {  # knobs as tests try them
    **{"k_positive": (2.0,), "lambda_positive": (3.0,), "k_negative": (3.0,), "lambda_negative": (2.0,)},
    **{"delta": (0.05,), "cap": (20.0,), "low": (0.2,), "high": (0.28,), "beta": (0.1,), "half_life": (2.0,)},
    **{"clip_low": (0.2,), "clip_high": (0.28,), "weight_low": (0.8, 1.0), "weight_high": (1.2,), "safety": (1.5,)},
}
TOKEN_LIMIT = 20.0  # nats: bounds of a token's log-ratio and, above, of a row's, in `vespo`
ROW_FLOOR = math.log(1e-8)  # nats: least log-ratio of a row there
CHUNK = 128  # columns of one piece of `discounted_to_go`


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
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        k_positive: power of W where A >= 0, dimensionless.
        lambda_positive: decay in W where A >= 0, dimensionless.
        k_negative: power of W where A < 0, dimensionless.
        lambda_negative: decay in W where A < 0, dimensionless.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each; "ratio" is each token's own.

    Raises:
        ValueError: a lambda is not above 0.
    """
    if min(lambda_positive, lambda_negative) <= 0:
        raise ValueError(f"lambda: got {lambda_positive} and {lambda_negative}, wanted more than 0")
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
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        delta: KL at which the gradient in the direction of A ends, in nats.
        cap: largest ratio that counts, dimensionless.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
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
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        low: how far r may be below 1, dimensionless.
        high: how far r may be above 1, dimensionless.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.
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
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        beta: coefficient of the square, per nat squared.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.

    Raises:
        ValueError: beta is not above 0.
    """
    if beta <= 0:
        raise ValueError(f"beta: got {beta}, wanted more than 0: without it this is losses.reinforce")
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
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].
        clip_low: the ratio is clipped to at least 1 - clip_low, dimensionless.
        clip_high: the ratio is clipped to at most 1 + clip_high, dimensionless.
        cap: largest ratio that counts where A < 0, and in F; None for neither.
        half_life: tokens after which a later log-ratio counts half.
        weight_low: least weight of a token.
        weight_high: largest weight of a token.
        safety: ratio above which a token with A < 0 is not weighed more than 1.

    Returns:
        The loss of each token, [T], 0 where ~mask, and its diagnostics, [T] each.

    Raises:
        ValueError: half_life is not above 0, not weight_low <= 1 <= weight_high, or cap is not above 1.
    """
    if half_life <= 0:
        raise ValueError(f"half_life: got {half_life}, wanted more than 0 tokens")
    if not 0 <= weight_low <= 1 <= weight_high:
        raise ValueError(f"weight_low, weight_high: got {weight_low} and {weight_high}, wanted 0 <= low <= 1 <= high")
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    loss, seen = clipped_ratio(logp, row, **clips) if cap is None else dual_clip(logp, row, **clips, cap=cap)
    log_r, r = log_ratio(logp, row.logp_old, row.mask).detach(), seen["ratio"].detach()
    counted = log_r if cap is None else torch.where(r > cap, 0.0, log_r)
    weight = capped_exp(discounted_to_go(counted, decay=2 ** (-1 / half_life))).exp().clamp(weight_low, weight_high)
    risky = (sampled_values(row.adv, row) < 0) & (r > safety)
    return torch.where(risky, weight.clamp(0.8, 1.0), weight) * loss, seen


def discounted_to_go(x: Float[Tensor, "T"], *, decay: float) -> Float[Tensor, "T"]:
    """sum_{s >= t} decay^(s - t) x_s for each t, in pieces of 128 columns: two small products instead of [T, T]."""
    length = x.shape[-1]
    pieces = F.pad(x, (0, -length % CHUNK)).unflatten(-1, (-1, CHUNK))
    within = pieces @ _powers(CHUNK, decay, like=x).T  # to the end of the piece
    beyond = _powers(pieces.shape[-2], decay**CHUNK, like=x) @ within[..., 0]  # from each piece's start to the end
    after = F.pad(beyond[1:], (0, 1))
    left = CHUNK - torch.arange(CHUNK, device=x.device, dtype=x.dtype)
    return (within + decay**left * after[:, None]).flatten()[:length]


def _powers(size: int, decay: float, *, like: Tensor) -> Float[Tensor, "N N"]:
    """decay^(j - i) at row i, column j >= i; 0 below."""
    place = torch.arange(size, device=like.device)
    apart = place[None, :] - place[:, None]
    return torch.where(apart >= 0, decay ** apart.clamp(min=0).to(like.dtype), 0.0)
