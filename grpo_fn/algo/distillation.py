"""On-policy distillation: what a teacher's log-probs of the sampled tokens change about their advantages.

`gap` is log pi_teacher - log pi_old of each sampled token, a constant to the gradient: above 0 the teacher likes the
token better than the policy that sampled it. On-policy, REINFORCE on the gap of each token alone (no sum over later
tokens) has the expected gradient of sum_t KL(pi(. | s_t) || pi_teacher(. | s_t)) with the prefixes s_t held fixed.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from grpo_fn.algo.credit import zero_outside_mask

EXAMPLES = {  # knobs as tests try them
    **{"coef": (1.0, 0.25), "gamma": (0.5, 0.0), "lam": (0.5, 1.0), "clip": (0.2, 0.5)},
    **{"warmup": (0, 3), "decay": (0, 5)},
}
TINY = 1e-8  # least sum of |gap| of a row that is divided by, nats; from TRL's code


def no_teacher(
    adv: Float[Tensor, "P G T"], gap: Float[Tensor, "P G T"], mask: Bool[Tensor, "P G T"]
) -> Float[Tensor, "P G T"]:
    """The advantages as they are: there is no teacher, or it is only measured.

    Use it when: there is no teacher.
    Peers: every GRPO.

    Args:
        adv: advantage of each token, [P, G, T].
        gap: log pi_teacher - log pi_old of each token, [P, G, T], in nats; not read.
        mask: which tokens were sampled, [P, G, T]; not read.

    Returns:
        The advantage of each token, [P, G, T].
    """
    return adv


def teacher_gap(
    adv: Float[Tensor, "P G T"], gap: Float[Tensor, "P G T"], mask: Bool[Tensor, "P G T"], *, coef: float
) -> Float[Tensor, "P G T"]:
    """A_t + coef gap_t: the sampled-token estimate of the reverse KL to the teacher, beside the rewards' advantages.

    With `credit.no_rewards` it is distillation alone (MOPD, arXiv:2601.02780, eq. 8; from NeMo-RL's code), with another
    credit distillation beside rewards. A token's own gap only, no sum over later ones.

    Use it when: a stronger model of the same tokenizer is there to learn from.
    Peers: slime, miles and Tinker OPD; NeMo-RL `OPDAdvantageEstimator`; verl `opd` with k1.

    Args:
        adv: advantage of each token, [P, G, T].
        gap: log pi_teacher - log pi_old of each token, [P, G, T], in nats.
        mask: which tokens were sampled, [P, G, T].
        coef: advantage of a token that is 1 nat likelier under the teacher, in units of the advantage.

    Returns:
        The advantage of each token, [P, G, T]; as it was where ~mask.
    """
    return adv + coef * zero_outside_mask(gap, mask)


def early_teacher_gap(
    adv: Float[Tensor, "P G T"], gap: Float[Tensor, "P G T"], mask: Bool[Tensor, "P G T"], *, coef: float, gamma: float
) -> Float[Tensor, "P G T"]:
    """A_t + coef w_t gap_t, w_t = 1 + gamma (1 - sum_{s<t} |gap_s| / sum_s |gap_s|): early tokens weigh more.

    IW-OPD (arXiv:2606.22600; from TRL's code): the first token has weight 1 + gamma; after all the disagreement of the
    row it is 1. gamma 0 is `teacher_gap`.

    Use it when: rows leave the teacher's path early, and what follows them says little.
    Peers: TRL `iw_opd`.

    Args:
        adv: advantage of each token, [P, G, T].
        gap: log pi_teacher - log pi_old of each token, [P, G, T], in nats.
        mask: which tokens were sampled, [P, G, T].
        coef: advantage of a token that is 1 nat likelier under the teacher, in units of the advantage.
        gamma: additional weight of the first token, dimensionless.

    Returns:
        The advantage of each token, [P, G, T]; as it was where ~mask.
    """
    kept = zero_outside_mask(gap, mask)
    size = kept.abs()
    before = size.cumsum(-1) - size
    weight = 1.0 + gamma * (1.0 - before / size.sum(-1, keepdim=True).clamp(min=TINY))
    return adv + coef * weight * kept


def teacher_reweighted(
    adv: Float[Tensor, "P G T"], gap: Float[Tensor, "P G T"], mask: Bool[Tensor, "P G T"], *, lam: float, clip: float
) -> Float[Tensor, "P G T"]:
    """A_t ((1 - lam) + lam clip(exp(sign(A_t) gap_t), 1 - clip, 1 + clip)): who in a row gets the row's advantage.

    RLSD (arXiv:2604.03128; from ms-swift's code): the reward says which way, the teacher how much; with lam and clip
    in [0, 1] no advantage changes its sign. Made for a teacher that is the policy with the answer before its eyes.
    ms-swift can warm lam up and let it decay: `linear_share`, of which lam is the height.

    Use it when: rewards can be trusted and say nothing about which token it was.
    Peers: ms-swift `advantage_reweight=rlsd`.

    Args:
        adv: advantage of each token, [P, G, T].
        gap: log pi_teacher - log pi_old of each token, [P, G, T], in nats.
        mask: which tokens were sampled, [P, G, T].
        lam: share of the advantage that is reweighted, in [0, 1].
        clip: how far a token's weight may be from 1, dimensionless.

    Returns:
        The advantage of each token, [P, G, T]; as it was where ~mask.
    """
    weight = (adv.sign() * zero_outside_mask(gap, mask)).exp().clamp(1.0 - clip, 1.0 + clip)
    return adv * ((1.0 - lam) + lam * weight)


# -- the share of what a teacher changes, as a function of the steps taken


def full_share(steps: int) -> float:
    """1: what the teacher changes about the advantages, in every step.

    Use it when: always, but for what the other is for.
    Peers: all.

    Args:
        steps: steps taken before.

    Returns:
        The share, 1.
    """
    return 1.0


def linear_share(steps: int, *, warmup: int, decay: int) -> float:
    """From 0 to 1 along a line over `warmup` steps, then to 0 along a line over `decay` steps; decay 0: it stays at 1.

    RLSD (arXiv:2604.03128; from ms-swift's code), whose lam it multiplies: of (1 - lam) + lam w the teacher's part is
    lam (w - 1). Of `teacher_gap` and `early_teacher_gap` it multiplies coef.

    Use it when: the teacher's part should begin small, or end before the run does.
    Peers: ms-swift `rlsd_lambda_warmup_steps`, `rlsd_lambda_decay_steps`, 0 by default, which count optimizer steps.

    Args:
        steps: steps taken before.
        warmup: steps of the line up; 0: there is none.
        decay: steps of the line down; 0: there is none.

    Returns:
        The share, in [0, 1].
    """
    if steps < warmup:
        return steps / warmup
    return max(0.0, 1.0 - (steps - warmup) / decay) if decay > 0 else 1.0
