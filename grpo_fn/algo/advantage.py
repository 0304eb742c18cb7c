"""Advantages: how much better a sample is than its group. Functions see one group; the caller vmaps over P groups.

    reward      rewards of one group, [G]
    valid       which of them could be scored, [G]
    value       G of each token of a group, its reward to go, [G, T]
    energy      |d log pi / d logits|^2 of each token under pi_old, [G, T], dimensionless
    mask        which tokens were sampled in valid rows, [G, T]
    logp        log-probs under the policy at an update, [G, T], in nats
    group       the rows of one group, each field [G, T]: `mask`, `logp_old`, and the signs of `adv`
    eps         added to the std, in units of the reward
    tau         temperature of the labels, in nats a token
    threshold   smallest reward that counts as solved, or right, in units of the reward
    returns     the advantages, [G]; in units of the reward, or dimensionless when they are divided by a std or a mean

Rules that hold for every function of this kind: an invalid sample gets exactly 0 and changes no other, whatever its
reward; a group whose valid rewards are all equal gets exactly 0, in every dtype and at every size; so does a group with
one valid sample, or none: there is nothing to compare with. A valid reward that is not finite comes out as nan or inf,
which batches refuse. Other kinds are baselines of tokens, `(value, energy, mask) -> [G, T]`, and what becomes of
advantages at an update, `(logp, group) -> [G, T]`.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_fn.core import masked
from grpo_fn.core.types import Batch


def group_normalized(
    reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"], *, eps: float, ddof: int
) -> Float[Tensor, "G"]:
    """A = (R - mean R) / (std R + eps), std with n - `ddof` in its denominator over the n valid samples.

    GRPO's outcome supervision (arXiv:2402.03300, section 4.1.2). Unchanged by shifting the rewards, and by scaling
    them as long as eps is small against std.

    Use it when: you want GRPO as published, or rewards of unknown scale.
    Peers: TRL `scale_rewards="group"`, verl `grpo`, OpenRLHF `group_norm`; eps 1e-4, 1e-6, 1e-9, all with ddof 1.

    Args:
        ddof: subtracted from n in the denominator of the variance: 0 population, 1 sample.
    """
    dev = mean_centered(reward, valid)
    # Measured in units of the largest deviation, squares neither overflow nor vanish, whatever the reward's unit. An
    # eps of 0 is not divided: torch takes 0 * (1 / unit), and 1 / unit is infinite for a subnormal one.
    unit = dev.abs().amax()
    safe = torch.where(unit == 0, 1.0, unit)
    relative = dev / safe
    count = valid.sum().to(reward.dtype)
    std = ((relative**2).sum() / (count - ddof).clamp(min=1)).sqrt()
    return torch.where(unit == 0, 0.0, relative / (std + (eps / safe if eps else 0.0)))


def mean_centered(reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"]) -> Float[Tensor, "G"]:
    """A = R - mean R over the valid samples.

    Dr. GRPO (arXiv:2503.20783). In expectation the policy gradient times (n - 1) / n, since a sample is part of its own
    baseline.

    Use it when: nearly-solved and nearly-hopeless prompts should not be amplified.
    Peers: TRL `scale_rewards="none"`, OpenRLHF `dr_grpo`.
    """
    _check_group(reward)
    # sum(R) / n differs from R by an ulp even if all R are equal. Measured from one of them, equal rewards are exact
    # zeros, and so is their mean. The smallest is the one that does not depend on the order of the group.
    least = torch.where(valid, reward, torch.inf).amin()
    above = torch.where(valid, reward - least, 0.0)
    return torch.where(valid, above - above.sum() / valid.sum().clamp(min=1), 0.0)


def leave_one_out(reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"]) -> Float[Tensor, "G"]:
    """A_i = R_i - mean of the others' R = n / (n - 1) (R_i - mean R), n valid samples: the unbiased baseline.

    RLOO (arXiv:2402.14740; Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free").

    Use it when: you want the unbiased policy gradient, small groups most of all.
    Peers: verl, OpenRLHF `rloo`.
    """
    count = valid.sum().to(reward.dtype)
    return mean_centered(reward, valid) * (count / (count - 1).clamp(min=1))


def leave_one_out_normalized(
    reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"], *, eps: float, ddof: int
) -> Float[Tensor, "G"]:
    """A_i = (R_i - mean of the others) / (spread_i + eps), spread_i the larger of the others' std and the group's.

    Leave-one-out in mean *and* std, as NeMo-RL has it. The others' std alone is 0 for the one sample that differs from
    equal others, and A without bound; with the group's in reserve |A| <= n / sqrt(n - 1) for any rewards and any eps.

    Use it when: you want NeMo-RL's idea for rewards of any scale; `leave_one_out_others_std` is its formula.
    Peers: none; NeMo-RL divides by the others' std alone, rounding noise for the one sample that differs from equal
    others: A = 18,040 for [2.0, 0.3 x 7].

    Args:
        ddof: subtracted from the count in the denominator of the variance: n - 1 - ddof for the others, n - ddof for
            the group.
    """
    dev = mean_centered(reward, valid)
    unit = dev.abs().amax()
    safe = torch.where(unit == 0, 1.0, unit)
    relative = dev / safe
    count = valid.sum().to(reward.dtype)
    others = valid & ~torch.eye(len(reward), dtype=torch.bool, device=reward.device)  # [G, G]: row i is without i
    loo = masked.std(relative.expand_as(others), others, dim=-1, ddof=ddof)
    whole = masked.std(relative, valid, dim=-1, ddof=ddof)
    ahead = relative * count / (count - 1).clamp(min=1)
    return torch.where(unit == 0, 0.0, ahead / (torch.maximum(loo, whole) + (eps / safe if eps else 0.0)))


def leave_one_out_others_std(reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"], *, eps: float) -> Float[Tensor, "G"]:
    """A_i = (R_i - mean of the others) / (std of the others + eps); not divided where the others' std is 0.

    NeMo-RL's `use_leave_one_out_baseline` with `normalize_rewards`: the std of m others has m - 1 in its denominator
    and is 0 for one. One right of 16 gets +1, since its others are alike; one of two right gets 3.615. Not bounded:
    others that are almost alike make A as large as the range of the rewards over `eps`. NeMo-RL takes the variance as
    mean R^2 - (mean R)^2, whose rounding makes equal others differ for rewards such as 0.3.

    Use it when: you reproduce a NeMo-RL run, with rewards of 0 and 1.
    Peers: NeMo-RL `adv_estimator.name: grpo`, eps 1e-6.
    """
    ahead = leave_one_out(reward, valid)
    others = valid & ~torch.eye(len(reward), dtype=torch.bool, device=reward.device)  # [G, G]: row i is without i
    # Above the others' smallest and in units of their range, so that close rewards keep their digits.
    above = torch.where(others, reward - masked.min(reward.expand_as(others), others, dim=-1).unsqueeze(-1), 0.0)
    unit = above.amax(-1)
    safe = torch.where(unit == 0, 1.0, unit)
    std = unit * masked.std(above / safe.unsqueeze(-1), others, dim=-1, ddof=1)
    return torch.where(unit == 0, ahead, ahead / (std + eps))


def pass_at_k(reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"], *, k: int, threshold: float) -> Float[Tensor, "G"]:
    """A of a solved sample = sqrt(f / (1 - f)), of another -(solved / unsolved) times that; R >= threshold is solved.

    f = C(unsolved, k) / C(n, k) is the chance that k of the group's n samples are all unsolved. Closed forms of the
    group-relative advantage of "one of k solves it" (arXiv:2508.10751, eq. 14 and 15), which draws all groups of k that
    there are: little signal where most samples solve the problem already. With k = 1 they are (R - mean) / std of 0/1
    rewards. A group in which any k samples hold a solved one gets 0, and so does one of fewer than k samples. Bounded
    by sqrt(n / k - 1).

    Use it when: one right answer in k tries is what counts, or entropy collapses.
    Peers: verl `grpo_passk` is another formula: only the best sample learns (arXiv:2503.19595).

    Args:
        k: number of tries of which one has to solve the problem.

    Raises:
        ValueError: k is less than 1.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    _check_group(reward)
    solved = valid & (reward >= threshold)
    count, won = valid.sum().to(reward.dtype), solved.sum().to(reward.dtype)
    lost = count - won
    drawn = torch.arange(k, device=reward.device, dtype=reward.dtype)
    fail = ((lost - drawn).clamp(min=0) / (count - drawn).clamp(min=1)).prod()
    signal = (won > 0) & (count >= k)
    size = (fail / torch.where(signal, 1 - fail, 1.0)).sqrt()
    adv = size * torch.where(solved, 1.0, -won / lost.clamp(min=1))
    odd = valid & ~reward.isfinite()  # a comparison would hide them
    return torch.where(odd, torch.nan, torch.where(valid & signal, adv, 0.0))


def max_rl(reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"]) -> Float[Tensor, "G"]:
    """A = (R - mean R) / mean R: the rarer a success within the group, the more it counts.

    Maximum likelihood RL (arXiv:2602.02710). For rewards 0 and 1, p = P(success): on-policy its mean policy gradient is
    exactly sum_{k < n} (1 - p)^(k - 1) grad p, which are the first n - 1 terms of grad log p; R - mean R has the first
    one alone, times (n - 1) / n. Bounded by n - 1. If a reward is negative, the mean in the denominator is taken above
    the group's smallest reward, which keeps the bound.

    Use it when: hard problems, rarely solved, should count most; rewards are not negative.
    """
    least = torch.where(valid, reward, torch.inf).amin().clamp(max=0.0)
    above = torch.where(valid, reward - least, 0.0)
    unit = above.amax()
    relative = above / torch.where(unit == 0, 1.0, unit)  # in units of the largest nothing overflows or vanishes
    mean = relative.sum() / valid.sum().clamp(min=1)  # at least 1 / n, or all are 0
    return mean_centered(relative, valid) / torch.where(unit == 0, 1.0, mean)


def rewards_as_labels(
    reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"], *, tau: float, threshold: float
) -> Float[Tensor, "G"]:
    """A of a right sample = 1 / (tau (1 + right)), of a wrong one -1 / (tau (1 + wrong)); R >= threshold is right.

    REAL (arXiv:2602.05630; from ms-swift's code) before the policy has moved: minus the slope of the group's loss in
    a sample's mean log-ratio; `label_weights` is what it is at any update. A group all right or all wrong gets 0.

    Use it when: with `label_weights`, see there.
    """
    _check_group(reward)
    right, wrong = valid & (reward >= threshold), valid & (reward < threshold)
    both = right.any() & wrong.any()
    share = [rows.to(reward.dtype) / (1 + rows.sum()).to(reward.dtype) for rows in (right, wrong)]
    adv = (share[0] - share[1]) / tau
    odd = valid & ~reward.isfinite()  # a comparison would hide them
    return torch.where(odd, torch.nan, torch.where(both, adv, 0.0))


def optimal_token_baseline(
    value: Float[Tensor, "G T"], energy: Float[Tensor, "G T"], mask: Bool[Tensor, "G T"]
) -> Float[Tensor, "G T"]:
    """A_it = G_it - sum_j W_jt G_jt / sum_j W_jt, W_it = sum_{s <= t} energy_is, over rows j that have a token t.

    OTB (arXiv:2602.07078; from verl's code): the energy of a token, 1 - 2 pi + sum_v pi_v^2, is the squared norm of its
    score in the logits, so W stands for that of the row up to t, and a row whose gradient is noisier has more say in
    the baseline. A row that is alone at t, the end of the longest, has none: A = G there, and in a group of one. Around
    `credit.reward_to_go`, which gives G.

    Use it when: one update a rollout, rows long or confident by turns; costs one more forward pass.
    Peers: verl `optimal_token_baseline`, with `handle_zero_tail`; it adds 1e-8 to the denominator. Where it has
        importance weights, it multiplies the energies by their squares: `credit.token_baseline.energy_weight`.
    """
    # Above the smallest of the column, as in mean_centered: of equal values nothing is left over.
    least = torch.where(mask, value, torch.inf).amin(0)
    above = torch.where(mask, value - least, 0.0)
    weight = torch.where(mask, torch.where(mask, energy, 0.0).cumsum(-1), 0.0)
    total = weight.sum(0)
    compared = above - (weight * above).sum(0) / torch.where(total > 0, total, 1.0)
    return torch.where(mask, torch.where(mask.sum(0) > 1, compared, value), 0.0)


def label_weights(logp: Float[Tensor, "G T"], group: Batch, *, tau: float) -> Float[Tensor, "G T"]:
    """A_i = +-e^x_i / (tau (1 + sum_j e^x_j)), x = -+s / tau, over rows j of i's sign; s a row's mean log-ratio.

    REAL (arXiv:2602.05630; from ms-swift's code): the group's loss is log(1 + sum_right e^(-s / tau)) +
    log(1 + sum_wrong e^(s / tau)), a classifier of its rows. A is minus its slope in s, found before the update in a
    pass over all rows, so that `losses.reinforce` with `objective.sequence_mean_over_samples` has the gradient of the
    groups' losses, divided by all samples, however the rows are dealt out. Right is A > 0, wrong A < 0; a row that is
    neither, and a group without both, get 0.

    Use it when: rewards are right or wrong, and no wrong row should weigh more the less likely it becomes.
    Peers: ms-swift `loss_type="real"`, tau 0.5, whose labels are the signs of GRPO's advantages.
    """
    score = masked.mean(logp - group.logp_old, group.mask, dim=-1)
    side = masked.sum(group.adv, group.mask, dim=-1).sign()
    x = -side * score / tau
    ahead = [torch.where(side == sign, x, -torch.inf) for sign in (1, -1)]
    log_total = [torch.logsumexp(torch.cat([y, y.new_zeros(1)]), 0) for y in ahead]  # the 1 is e^0
    share = sum((y - total).exp() for y, total in zip(ahead, log_total, strict=True))
    both = (side > 0).any() & (side < 0).any()
    adv = torch.where(both, side * share, 0.0) / tau
    return torch.where(group.mask, adv[:, None], 0.0)


def _check_group(reward: Tensor) -> None:
    if reward.ndim != 1:
        raise ValueError(
            f"advantage: got rewards of shape {tuple(reward.shape)}, expected those of one group, [G]: torch.func.vmap "
            "takes the function over all groups"
        )
