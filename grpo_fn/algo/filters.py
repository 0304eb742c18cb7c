"""Which samples a step leaves out of the loss after their advantages are known: `(rollout, adv [P G T]) -> keep [P G]`.

A sample left out here still was part of its group's baseline; it has no gradient and counts in no denominator. (One
that could not be scored is left out of both, by `reward.valid`.)
"""

from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_fn.core.types import Rollout


def finished(rollout: Rollout, adv: Float[Tensor, "P G T"]) -> Bool[Tensor, "P G"]:
    """Samples that ended by themselves. Overlong filtering (DAPO, arXiv:2503.14476, section 3.4).

    A truncated answer says nothing about how good the reasoning in it was.
    """
    return rearrange(~rollout.truncated, "(p g) -> p g", p=len(adv))


def comparable(rollout: Rollout, adv: Float[Tensor, "P G T"]) -> Bool[Tensor, "P G"]:
    """Samples of groups in which some token has an advantage: the others would only dilute the denominators.

    As Clip-Cov and KL-Cov are published (arXiv:2505.22617, section 4.3).
    """
    return repeat((adv != 0).any(-1).any(-1), "p -> p g", g=adv.shape[1])
