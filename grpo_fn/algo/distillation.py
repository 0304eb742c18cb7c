"""On-policy distillation: what a teacher's log-probs of the sampled tokens change about their advantages.

    scored    the step, P prompts with G samples each: their rewards, and the teacher's log-probs of every token
    steps     steps taken before
    credit    (scored) -> [P, G, T], the rewards' advantages; None: rewards teach nothing
    share     (steps taken before) -> the share of the teacher's part in this step, 0 to 1; None: all of it
    coef      advantage of a token that is 1 nat likelier under the teacher, in units of the advantage
    returns   the advantage of each token, [P, G, T], as it was where ~mask; of a share, a number in [0, 1]

`gap` is log pi_teacher - log pi_old of each sampled token, a constant to the gradient: above 0 the teacher likes the
token better than the policy that sampled it. On-policy, REINFORCE on the gap of each token alone (no sum over later
tokens) has the expected gradient of sum_t KL(pi(. | s_t) || pi_teacher(. | s_t)) with the prefixes s_t held fixed.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from grpo_fn.algo.credit import Credit, ScoredStep, token_advantages, zero_outside_mask

Share = Callable[[int], float]
TINY = 1e-8  # least sum of |gap| of a row that is divided by, nats; from TRL's code


def teacher_gap(
    scored: ScoredStep, *, credit: Credit | None, share: Share | None, coef: float
) -> Float[Tensor, "P G T"]:
    """A_t + coef gap_t: the sampled-token estimate of the reverse KL to the teacher, beside the rewards' advantages.

    Without a credit it is distillation alone (MOPD, arXiv:2601.02780, eq. 8; from NeMo-RL's code), with one
    distillation beside rewards. A token's own gap only, no sum over later ones.

    Use it when: a stronger model of the same tokenizer is there to learn from.
    Peers: slime, miles and Tinker OPD; NeMo-RL `OPDAdvantageEstimator`; verl `opd` with k1.
    """
    adv = token_advantages(scored, credit)
    return in_part(scored, adv, adv + coef * zero_outside_mask(scored.teacher_gap, scored.mask), share)


teacher_gap.NEEDS = frozenset({"logp_teacher"})


def early_teacher_gap(
    scored: ScoredStep, *, credit: Credit | None, share: Share | None, coef: float, gamma: float
) -> Float[Tensor, "P G T"]:
    """A_t + coef w_t gap_t, w_t = 1 + gamma (1 - sum_{s<t} |gap_s| / sum_s |gap_s|): early tokens weigh more.

    IW-OPD (arXiv:2606.22600; from TRL's code): the first token has weight 1 + gamma; after all the disagreement of the
    row it is 1. gamma 0 is `teacher_gap`.

    Use it when: rows leave the teacher's path early, and what follows them says little.
    Peers: TRL `iw_opd`.

    Args:
        gamma: additional weight of the first token, dimensionless.
    """
    adv, kept = token_advantages(scored, credit), zero_outside_mask(scored.teacher_gap, scored.mask)
    size = kept.abs()
    before = size.cumsum(-1) - size
    weight = 1.0 + gamma * (1.0 - before / size.sum(-1, keepdim=True).clamp(min=TINY))
    return in_part(scored, adv, adv + coef * weight * kept, share)


early_teacher_gap.NEEDS = frozenset({"logp_teacher"})


def teacher_reweighted(
    scored: ScoredStep, *, credit: Credit | None, share: Share | None, lam: float, clip: float
) -> Float[Tensor, "P G T"]:
    """A_t ((1 - lam) + lam clip(exp(sign(A_t) gap_t), 1 - clip, 1 + clip)): who in a row gets the row's advantage.

    RLSD (arXiv:2604.03128; from ms-swift's code): the reward says which way, the teacher how much; with lam and clip
    in [0, 1] no advantage changes its sign. Made for a teacher that is the policy with the answer before its eyes.
    ms-swift can warm lam up and let it decay: `linear_share`, of which lam is the height.

    Use it when: rewards can be trusted and say nothing about which token it was.
    Peers: ms-swift `advantage_reweight=rlsd`.

    Args:
        lam: share of the advantage that is reweighted, in [0, 1].
        clip: how far a token's weight may be from 1, dimensionless.
    """
    adv = token_advantages(scored, credit)
    weight = (adv.sign() * zero_outside_mask(scored.teacher_gap, scored.mask)).exp().clamp(1.0 - clip, 1.0 + clip)
    return in_part(scored, adv, adv * ((1.0 - lam) + lam * weight), share)


teacher_reweighted.NEEDS = frozenset({"logp_teacher"})


def in_part(
    scored: ScoredStep, adv: Float[Tensor, "P G T"], changed: Float[Tensor, "P G T"], share: Share | None
) -> Float[Tensor, "P G T"]:
    """The advantages with this step's share of what the teacher changes about them; the metric `teacher/share`."""
    part = 1.0 if share is None else share(scored.steps)
    if not 0 <= part <= 1:
        raise ValueError(f"share: got {part} after {scored.steps} steps, expected a share, 0 to 1")
    scored.figures["teacher/share"] = part
    return changed if part == 1 else adv + part * (changed - adv)


# -- the share of what a teacher changes, as a function of the steps taken


def linear_share(steps: int, *, warmup: int, decay: int) -> float:
    """From 0 to 1 along a line over `warmup` steps, then to 0 along a line over `decay` steps; decay 0: it stays at 1.

    RLSD (arXiv:2604.03128; from ms-swift's code), whose lam it multiplies: of (1 - lam) + lam w the teacher's part is
    lam (w - 1). Of `teacher_gap` and `early_teacher_gap` it multiplies coef.

    Use it when: the teacher's part should begin small, or end before the run does.
    Peers: ms-swift `rlsd_lambda_warmup_steps`, `rlsd_lambda_decay_steps`, 0 by default, which count optimizer steps.

    Args:
        warmup: steps of the line up; 0: there is none.
        decay: steps of the line down; 0: there is none.
    """
    if steps < warmup:
        return steps / warmup
    return max(0.0, 1.0 - (steps - warmup) / decay) if decay > 0 else 1.0
