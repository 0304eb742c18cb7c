"""The objective: a corrected token loss, a KL, an entropy bonus, and the weights of tokens.

A KL estimator is `(logp [T], row) -> [T]`, one row, vmapped: the estimate at each token, 0 where ~mask.

A weight is `(batch, totals) -> [B, T]`, 0 where ~mask: the loss is sum(weight * token loss). The denominators `totals`
are those of the whole optimizer step, so micro-batches and ranks add up to the same loss and gradient however the rows
are dealt out. Nothing to learn from weighs nothing: an empty batch gives zeros, never nan.

A controller is `(gain, measured) -> gain`, called once a step with what the step measured.

    logp               log-probs of the row's tokens under the policy, [T], in nats
    row                the row, a Batch whose fields are [T]
    batch              rows of the step, each field [B, T]; which tokens were sampled, and how many their group has, is
                       read
    totals             sampled tokens, rows, samples and groups of the whole optimizer step
    gain               the factor of this step, dimensionless, 1 in the first step: it multiplies a coefficient,
                       entropy_bonus or beta, in the loss and in the credit
    measured           `loss/kl` (k3, the mean over tokens) or `loss/entropy` (its mean over tokens) of this step, in
                       nats
    scores             log-probs and entropies under the policy, [B, T] each, in nats; B at least 1
    gains              what the coefficients of the objective are multiplied with in this step, dimensionless
    max_length         L, in tokens: the longest completion allowed, or 1
    loss_aggregation   (batch, totals) -> w [B, T]
    coef               coefficient of the divergence, per nat
    figures            metrics of this step, by name
    returns            the estimate [T]; the weight of each token [B, T]; the gain of the next step
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from grpo_fn.algo.losses import capped_exp, log_ratio, ratio
from grpo_fn.core.batch import check_tensor
from grpo_fn.core.partials import needs
from grpo_fn.core.types import Batch, Gains, Scores, Totals

Objective = Callable[[Scores, Batch, Totals, Gains], Tensor | tuple[Tensor, dict[str, Tensor]]]
TokenLoss = Callable[[Tensor, Batch], Tensor | tuple[Tensor, dict[str, Tensor]]]


def policy_objective(
    scores: Scores,
    batch: Batch,
    totals: Totals,
    gains: Gains,
    *,
    token_loss: TokenLoss,
    importance_correction: Callable[[Tensor, Batch], Tensor] | None,
    kl: Callable[[Tensor, Batch], Tensor],
    loss_aggregation: Callable[[Batch, Totals], Tensor],
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
        token_loss: (logp [T], row) -> loss [T] of one row, or that and diagnostics, [T] each.
        importance_correction: (logp [T], row) -> c [T], a token's weight where the sampler was not pi_old; None: the
            sampler is taken for pi_old, c = 1.
        kl: (logp [T], row) -> KL estimate [T], of one row.
        beta: coefficient of the KL, per nat; 0: none.
        entropy_bonus: coefficient of the entropy, per nat; 0: none.
    """
    result = vmap(token_loss)(scores.logp, batch)
    loss, diagnostics = result if isinstance(result, tuple) else (result, {})
    check_tensor("objective.policy_objective.token_loss", loss, tuple(scores.logp.shape), torch.float32)
    if importance_correction is not None:
        correction = vmap(importance_correction)(scores.logp, batch).detach()
        loss, diagnostics = correction * loss, {**diagnostics, "correction": correction}
    if beta:  # not beta * kl alone: 0 * inf is nan, and without a reference logp_ref may hold anything
        loss = loss + gains.kl * beta * vmap(kl)(scores.logp, batch)
    if entropy_bonus:
        loss = loss - gains.entropy * entropy_bonus * torch.where(batch.mask, scores.entropy, 0.0)
    value = (loss_aggregation(batch, totals) * loss).sum()
    return value, {name: x.detach() for name, x in diagnostics.items()}


policy_objective.NEEDS = lambda knobs: needs([knob for name, knob in knobs.items() if name != "kl" or knobs["beta"]])


def objective_value(
    objective: Objective, scores: Scores, batch: Batch, totals: Totals, gains: Gains
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """The value of an objective, and its diagnostics of each token; one of a user's own may have none."""
    result = objective(scores, batch, totals, gains)
    value, diagnostics = result if isinstance(result, tuple) else (result, {})
    check_tensor("step.Algorithm.objective", value, (), torch.float32)
    return value, diagnostics


def with_teacher_divergence(
    scores: Scores,
    batch: Batch,
    totals: Totals,
    gains: Gains,
    *,
    objective: Objective,
    divergence: Callable[[Tensor, Batch], Tensor],
    loss_aggregation: Callable[[Batch, Totals], Tensor],
    coef: float,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """objective + coef sum_bt v_bt d_bt: a divergence to the teacher beside an objective, with its own weights v.

    In the place of `distillation.teacher_gap`, whose gap shares the weights of the advantages: there a mean over rows
    divides both by a row's length, here the divergence may be a mean over tokens while the objective is one over rows.

    Args:
        objective: (scores, batch, totals, gains) -> loss and diagnostics.
        divergence: (logp [T], row) -> KL estimate [T] of one row, its logp_ref being the teacher's.
    """
    value, diagnostics = objective_value(objective, scores, batch, totals, gains)
    apart = vmap(divergence)(scores.logp, batch._replace(logp_ref=batch.logp_teacher))
    return value + coef * (loss_aggregation(batch, totals) * apart).sum(), diagnostics


# The divergence reads the teacher's log-probs in the place of the reference's.
with_teacher_divergence.NEEDS = lambda knobs: needs(knobs["objective"]) | {"logp_teacher"}


# Estimates of KL(pi_theta || pi_ref). With x = logp_ref - logp, r = exp(logp - logp_old) and tokens drawn from pi_old,
# "unbiased" means: summed over a row's tokens, the expected gradient is that of sum_t KL(pi_theta(. | o_<t) ||
# pi_ref(. | o_<t)) with the prefixes o_<t held fixed. tests/algo/test_unbiased.py proves every such word by enumerating
# all outcomes. The plain k1 = -x is missing on purpose: its expected gradient on-policy is E[grad log pi] = 0, so in a
# loss it only adds noise. As a *reward* it is exact. https://joschu.net/blog/kl-approx.html names k1, k2 and k3.


def k3(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """k3 = exp(x) - x - 1, in nats: never negative, zero only where the two policies agree.

    The GRPO paper's penalty (arXiv:2402.03300, eq. 4). Its value is unbiased on-policy; its gradient is not: in
    expectation it is the gradient of the *other* divergence, KL(pi_ref || pi_theta), and its single-sample factor e^x
    grows without bound where pi_theta << pi_ref. Right to first order near pi_ref; some 40 % off between unrelated
    policies.

    Peers: verl `low_var_kl`, OpenRLHF `k3`, TRL without `use_bias_correction_kl`.
    """
    # expm1(x) >= x holds in floating point too, whereas exp(x) - x - 1 cancels to small negative numbers.
    x = capped_exp(log_ratio(row.logp_ref, logp, row.mask))
    return torch.expm1(x) - x


k3.NEEDS = frozenset({"logp_ref"})


def k2(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """k2 = x^2 / 2, in nats squared: a biased value whose gradient is unbiased on-policy (r = 1), and cheap.

    In the loss of REINFORCE++ with baseline (arXiv:2501.03262v9, eq. 8).

    Peers: verl `mse`, and `k3+` in its gradient; OpenRLHF `k2`.
    """
    return log_ratio(row.logp_ref, logp, row.mask) ** 2 / 2


k2.NEEDS = frozenset({"logp_ref"})


def k1_ratio(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """r * k1 = -r x, in nats, differentiated through r: unbiased in value and gradient, on- and off-policy."""
    return ratio(logp, row.logp_old, row.mask) * log_ratio(logp, row.logp_ref, row.mask)


k1_ratio.NEEDS = frozenset({"logp_ref"})


def k3_ratio(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """r * k3, in nats, differentiated through r: unbiased in value and gradient, on- and off-policy, never negative.

    DeepSeek-V3.2's "unbiased KL estimate" (arXiv:2512.02556, eq. 7). On-policy its gradient per token is
    (logp - logp_ref) grad log pi, that of k2 exactly; the difference from k3 is there although r is 1.

    Peers: TRL `use_bias_correction_kl`.
    """
    return ratio(logp, row.logp_old, row.mask) * k3(logp, row)


k3_ratio.NEEDS = frozenset({"logp_ref"})


# How much each token counts.


def token_mean(batch: Batch, totals: Totals) -> Float[Tensor, "B T"]:
    """w = mask / N, N sampled tokens in the step: every token counts the same, long rows count more.

    DAPO's token-level loss (arXiv:2503.14476, eq. 12).

    Use it when: every token should count alike; long rows then count more.
    Peers: verl `token-mean`, TRL `dapo`.
    """
    return batch.mask / totals.tokens.clamp(min=1)


def sequence_mean(batch: Batch, totals: Totals) -> Float[Tensor, "B T"]:
    """w = mask / (R |o_i|), R rows in the step, |o_i| sampled tokens of the row: every row counts the same.

    GRPO as published (arXiv:2402.03300, eq. 3). A token of a long row weighs less, so long wrong answers are punished
    less than short ones: the length bias that arXiv:2503.20783 describes.

    Use it when: every row should count alike; long wrong rows are then punished less per token.
    Peers: verl `seq-mean-token-mean`, TRL `grpo`.
    """
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    return batch.mask / (totals.rows.clamp(min=1) * length)


def sequence_mean_over_samples(batch: Batch, totals: Totals) -> Float[Tensor, "B T"]:
    """w = mask / (S |o_i|), S samples of the step, with those of which nothing is left to learn from.

    As `sequence_mean`, but a step of which filters leave half is half as large, not made of louder rows.

    Use it when: filters or missing scores should make a step smaller.
    Peers: TRL `grpo` and `sapo`, with `mask_truncated_completions` or rewards of None.
    """
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    return batch.mask / (totals.samples.clamp(min=1) * length)


def constant_length_over_samples(batch: Batch, totals: Totals, *, max_length: int) -> Float[Tensor, "B T"]:
    """w = mask / (S L), S samples of the step, with those of which nothing is left to learn from; L = `max_length`.

    As `constant_length`, in the way of `sequence_mean_over_samples`.

    Use it when: filters or missing scores should make a step smaller.
    Peers: TRL `dr_grpo` and `luspo`, with `mask_truncated_completions` or rewards of None.
    """
    return batch.mask / (totals.samples.clamp(min=1) * max_length)


def constant_length(batch: Batch, totals: Totals, *, max_length: int) -> Float[Tensor, "B T"]:
    """w = mask / (R L), L = `max_length` the same for every row: the policy gradient up to the constant L.

    Dr. GRPO (arXiv:2503.20783) takes the longest completion allowed; 1 gives the plain sum over a row's tokens, the
    sequence-level REINFORCE of RLOO (arXiv:2402.14740).

    Use it when: you want the policy gradient without a length bias.
    Peers: verl `seq-mean-token-sum-norm`, TRL `dr_grpo`.
    """
    return batch.mask / (totals.rows.clamp(min=1) * max_length)


def prompt_mean(batch: Batch, totals: Totals) -> Float[Tensor, "B T"]:
    """w = mask / (P N_p), P prompts in the step, N_p sampled tokens of all samples of the prompt.

    A mean over the tokens of a prompt's group, then over prompts (from SkyRL's code). Within a group tokens count the
    same, as in `token_mean`, but a prompt whose answers are long does not count more than another. P counts prompts of
    which a token is left to learn from; SkyRL counts all.

    Use it when: lengths differ from prompt to prompt more than within one: mixtures, long tasks beside short ones.
    Peers: SkyRL `prompt_mean`, which scales advantages and so leaves the KL out.
    """
    return batch.mask / (totals.groups.clamp(min=1) * batch.group_tokens.clamp(min=1))


# Coefficients that follow a measurement.


def adaptive_kl(gain: float, measured: float, *, target: float, rate: float, limit: float) -> float:
    """gain (1 + rate e), e = measured / target - 1 clipped to [-limit, limit]: a KL above the target raises its price.

    The proportional controller of Ziegler et al. (arXiv:1909.08593, section 2.2), with rate 0.1 and limit 0.2 there.
    Their KL is a whole sequence's, ours a token's. The gain stays positive.

    Use it when: runs should be compared at one KL.
    Peers: verl `AdaptiveKLController`, OpenRLHF: rate = rows / horizon, KL of a sequence.

    Args:
        target: KL expected, in nats a token.
        rate: relative change of the gain per unit of e.
        limit: largest |e|.

    Raises:
        ValueError: target is not above 0, or rate * limit not in [0, 1).
    """
    if target <= 0 or not 0 <= rate * limit < 1:
        raise ValueError(
            f"target, rate, limit: got {target}, {rate}, {limit}, expected target > 0, 0 <= rate limit < 1"
        )
    return gain * (1 + rate * min(limit, max(-limit, measured / target - 1)))


def adaptive_entropy(gain: float, measured: float, *, target: float, step: float, highest: float) -> float:
    """gain + step below the target entropy, gain - step above it, within [0, highest]: a bonus as large as it must be.

    After Skywork-OR1 (arXiv:2505.22312, section 3.2.5), which begins at 0 and switches the bonus off while entropy is
    above the target; here it only comes down by steps.

    Use it when: entropy falls too far, and no bonus fits the whole run.
    Peers: there the bonus is off while entropy is above the target.

    Args:
        target: entropy expected, in nats a token.
        step: change of the gain at each step.
        highest: largest gain.

    Raises:
        ValueError: step is not above 0, or highest is below 0.
    """
    if step <= 0 or highest < 0:
        raise ValueError(f"step, highest: got {step}, {highest}, expected step > 0 and highest >= 0")
    return min(highest, max(0.0, gain + (step if measured < target else -step)))


def next_gains(
    gains: Gains,
    figures: Mapping[str, float],
    *,
    kl_control: Callable[[float, float], float] | None,
    entropy_control: Callable[[float, float], float] | None,
) -> Gains:
    """The gains of the next step, for `step.Algorithm.control`; those of a step that learned nothing stay.

    Args:
        kl_control: (gain, measured KL) -> gain of the KL in the next step; None: it stays.
        entropy_control: (gain, measured entropy) -> gain of the entropy bonus in the next step; None: it stays.
    """
    kl = figures.get("loss/kl", figures.get("loss/approx_kl"))
    if kl is None:
        return gains
    return Gains(
        gains.kl if kl_control is None else kl_control(gains.kl, kl),
        gains.entropy if entropy_control is None else entropy_control(gains.entropy, figures["loss/entropy"]),
    )
