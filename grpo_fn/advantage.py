"""How much better a sample did than the rest of its group. One group at a time; the caller vmaps over P groups.

Rules that hold for every function here: an invalid sample gets exactly 0 and moves nobody, whatever its reward says;
a group whose valid rewards are all equal gets exactly 0, in every dtype and at every size; so does a group with one
valid sample, or none: there is nothing to compare with. A valid reward that is not finite comes out as nan or inf,
which the seam to the batch refuses.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def group_normalized(
    reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"], *, eps: float, ddof: int
) -> Float[Tensor, "G"]:
    """A = (R - mean R) / (std R + eps), std with n - `ddof` in its denominator over the n valid samples.

    GRPO's outcome supervision (arXiv:2402.03300, section 4.1.2). Unchanged by shifting the rewards, and by scaling
    them as long as eps is small against std. `eps` has the unit of the reward.
    """
    dev = centered(reward, valid)
    # Measured in units of the largest deviation, squares neither overflow nor vanish, whatever the reward's unit.
    unit = dev.abs().amax()
    safe = torch.where(unit == 0, 1.0, unit)
    relative = dev / safe
    count = valid.sum().to(reward.dtype)
    std = ((relative**2).sum() / (count - ddof).clamp(min=1)).sqrt()
    return torch.where(unit == 0, 0.0, relative / (std + eps / safe))


def centered(reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"]) -> Float[Tensor, "G"]:
    """A = R - mean R over the valid samples. Dr. GRPO (arXiv:2503.20783).

    In expectation the policy gradient times (n - 1) / n, since a sample is part of its own baseline.
    """
    # sum(R) / n differs from R by an ulp even if all R are equal. Measured from one of them, equal rewards are exact
    # zeros, and so is their mean. The smallest is the one that does not depend on the order of the group.
    least = torch.where(valid, reward, torch.inf).amin()
    above = torch.where(valid, reward - least, 0.0)
    return torch.where(valid, above - above.sum() / valid.sum().clamp(min=1), 0.0)


def leave_one_out(reward: Float[Tensor, "G"], valid: Bool[Tensor, "G"]) -> Float[Tensor, "G"]:
    """A_i = R_i - mean of the others' R = n / (n - 1) (R_i - mean R), n valid samples: the unbiased baseline.

    RLOO (arXiv:2402.14740; Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free").
    """
    count = valid.sum().to(reward.dtype)
    return centered(reward, valid) * (count / (count - 1).clamp(min=1))
