"""Filters of samples and selections of tokens, both over the whole step.

    rollout   the step's samples, B = P * G rows
    adv       advantage of each token, [P, G, T]
    batch     all rows of the step, each field [B, T]
    key       one random key a row, [B, 2], on which alone a random choice depends
    returns   True for the samples that are kept, [P, G], or where the loss is to treat a token apart, [B, T]

A filter is `(rollout, adv) -> keep`. A sample left out was still part of its group's baseline; it has no
gradient and counts in no denominator. (One that could not be scored is left out of both, by `reward.valid`.)

A token selection is `(batch, key) -> selected`. A token loss sees one row; what is chosen among all tokens of a step
is chosen before the rows are dealt out to micro-batches, from the old policy's log-probs.
"""

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.types import Batch, Rollout


def clip_cov_tokens(
    batch: Batch, key: Int[Tensor, "B 2"], *, low: float, high: float, share: float
) -> Bool[Tensor, "B T"]:
    """`share` of the step's tokens, drawn at random from those with low < cov < high; for losses.clip_cov.

    Clip-Cov (Cui et al. 2025, arXiv:2505.22617, eq. 10 and 11): cov = (logp_old - its mean) (A - its mean); learning
    from tokens of high cov is what costs entropy. The authors' code draws anew for each minibatch, with the current
    logp and its own means; this draws once a step. A share above 0 marks at least one candidate, if there is any.

    Use it when: the loss is `losses.clip_cov`.

    Args:
        low: lower end of the range of cov, exclusive, in nats.
        high: upper end of the range of cov, exclusive, in nats.
        share: fraction of the step's sampled tokens, 0 to 1.

    Raises:
        ValueError: share is not between 0 and 1.
    """
    cov = _covariance(batch)
    draw = _draws(batch, key)
    return _lowest(draw, draw, batch.mask & (low < cov) & (cov < high), _count(batch, share))


def kl_cov_tokens(batch: Batch, key: Int[Tensor, "B 2"], *, share: float) -> Bool[Tensor, "B T"]:
    """`share` of the step's tokens, those with the highest cov; for losses.kl_cov.

    KL-Cov (Cui et al. 2025, arXiv:2505.22617, eq. 10 and 13), cov as in `clip_cov_tokens`.

    Use it when: the loss is `losses.kl_cov`.

    Args:
        share: fraction of the step's sampled tokens, 0 to 1.

    Raises:
        ValueError: share is not between 0 and 1.
    """
    highest_first = -_covariance(batch)
    return _lowest(highest_first, _draws(batch, key), batch.mask, _count(batch, share))


def second_moment_tokens(batch: Batch, key: Int[Tensor, "B 2"], *, limit: float) -> Bool[Tensor, "B T"]:
    """The tokens furthest from the sampler, as few as bring the others' mean (logp_old - logp_sampled)^2 below `limit`.

    M2PO (arXiv:2510.01161; from AReaL's documentation): the second moment does not cancel out as a KL does, and bounds
    the variance of the weights. Tokens as far as the nearest one that is selected are selected too. With
    `step.from_sampler` nothing is.

    Use it when: the loss is `losses.masked_ratio`.
    Peers: AReaL `m2_threshold`, within a micro-batch; here within the step.

    Args:
        limit: mean square that the tokens which are not selected stay below, in nats squared.

    Raises:
        ValueError: limit is not above 0.
    """
    if not limit > 0:
        raise ValueError(f"limit: got {limit}, expected more than 0, or samples of the policy itself are left out")
    square = torch.where(batch.mask, (batch.logp_old.double() - batch.logp_sampled.double()) ** 2, 0.0)
    nearest_first = square[batch.mask].sort().values
    number = torch.arange(1, len(nearest_first) + 1, device=square.device)
    far = nearest_first[nearest_first.cumsum(0) / number >= limit]
    return batch.mask & (square >= far[0]) if len(far) else torch.zeros_like(batch.mask)


second_moment_tokens.NEEDS = frozenset({"trainer_logp"})


def _covariance(batch: Batch) -> Float[Tensor, "B T"]:
    """(logp_old - mean) (adv - mean), both means over the sampled tokens of the step, in float64; 0 elsewhere."""
    logp, adv = (torch.where(batch.mask, x.double(), 0.0) for x in (batch.logp_old, batch.adv))
    apart = [x - x[batch.mask].mean() for x in (logp, adv)]
    return torch.where(batch.mask, apart[0] * apart[1], 0.0)


def _draws(batch: Batch, key: Int[Tensor, "B 2"]) -> Float[Tensor, "B T"]:
    """A uniform number for each token: that of column t is a function of the row's key and t alone."""
    width = batch.mask.shape[1]
    return prng.uniform(key, width, dtype=torch.float64, low=0.0, high=1.0)


def _count(batch: Batch, share: float) -> int:
    """floor(share N) of the step's N sampled tokens, at least 1 unless share is 0."""
    if not 0 <= share <= 1:
        raise ValueError(f"share: got {share}, expected 0 to 1")
    tokens = int(batch.mask.sum())
    return max(1, int(share * tokens)) if share and tokens else 0


def _lowest(
    score: Float[Tensor, "B T"], tie: Float[Tensor, "B T"], candidates: Bool[Tensor, "B T"], count: int
) -> Bool[Tensor, "B T"]:
    """The `count` candidates with the lowest score; among equal ones those with the lowest `tie`."""
    pairs = torch.stack([score[candidates], tie[candidates]], -1)
    if count >= len(pairs) or not count:
        return candidates if count else torch.zeros_like(candidates)
    pairs = pairs[pairs[:, 1].argsort(stable=True)]
    last = pairs[pairs[:, 0].argsort(stable=True)][count - 1]
    return candidates & ((score < last[0]) | ((score == last[0]) & (tie <= last[1])))


def drop_truncated(rollout: Rollout, adv: Float[Tensor, "P G T"]) -> Bool[Tensor, "P G"]:
    """Samples that ended by themselves, not at the length limit.

    Overlong filtering (DAPO, arXiv:2503.14476, section 3.4): a truncated answer says nothing about how good the
    reasoning in it was.

    Use it when: a truncated answer should be no evidence against its reasoning.
    Peers: TRL `mask_truncated_completions`.
    """
    return rearrange(~rollout.truncated, "(p g) -> p g", p=len(adv))


def drop_incomparable(rollout: Rollout, adv: Float[Tensor, "P G T"]) -> Bool[Tensor, "P G"]:
    """Samples of groups in which some token has an advantage: the others would only dilute the denominators.

    As Clip-Cov and KL-Cov are published (arXiv:2505.22617, section 4.3).

    Use it when: groups without signal would only dilute the mean; cheaper than sampling more
    (`group_sampling.dynamic`).
    """
    return repeat((adv != 0).any(-1).any(-1), "p -> p g", g=adv.shape[1])


def drop_zero_advantage(rollout: Rollout, adv: Float[Tensor, "P G T"]) -> Bool[Tensor, "P G"]:
    """Samples in which some token has an advantage: the others would only dilute the denominators.

    With a teacher alone, those that it was asked about: SDPO (arXiv:2601.20802; from TRL's code) masks the others out.

    Use it when: a teacher has nothing to say about some rows, and a step is to be as large as if they were not there.
    Peers: TRL SDPO.
    """
    return (adv != 0).any(-1)
