"""An exact test of whether tokens were drawn from the policy's distribution, which needs no more than their log-probs.

Half of the draws say which tokens come; the policy says how likely the others are. Of the other half, the number of
draws that are none of those tokens has a known distribution, whatever the vocabulary. An engine that never draws some
tokens (top-k, top-p, min-p) has too few, though each of its log-probs may be right.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Outside(NamedTuple):
    """Of some draws after one prompt: how many are a token that those before had not shown, and the chance of each."""

    draws: int
    seen: int
    chance: float  # of each draw, by the policy


def count_outside(tokens: Tensor, logp: Tensor) -> Outside:
    """Of the second half of some draws after one prompt, those that are no token of the first half.

    Args:
        tokens: `[N]`, independent draws of one token each.
        logp: `[N]`, the policy's log-probs of them.

    Returns:
        The count, and its chance under the policy.
    """
    half = len(tokens) // 2
    known = dict(zip(tokens[:half].tolist(), logp[:half].double().exp().tolist(), strict=True))
    outside = sum(token not in known for token in tokens[half:].tolist())
    return Outside(len(tokens) - half, outside, min(max(1 - sum(known.values()), 0.0), 1.0))


def p_value(found: Sequence[Outside]) -> float:
    """How likely a total that is at least as far from what is expected is, two-sided; 1 at most.

    The total of independent binomial counts, of which each has a chance of its own, enumerated.

    Args:
        found: a count for each prompt.
    """
    mass = [1.0]  # of 0, 1, 2, ... draws outside
    for count in found:
        for _ in range(count.draws):
            stay, go = (1 - count.chance), count.chance
            mass = [stay * a + go * b for a, b in zip([*mass, 0.0], [0.0, *mass], strict=True)]
    total = sum(count.seen for count in found)
    return min(1.0, 2 * min(sum(mass[: total + 1]), sum(mass[total:])))
