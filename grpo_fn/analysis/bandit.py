"""A bandit over arms with unknown mean rewards: UCB1 (Auer, Cesa-Bianchi and Fischer 2002, figure 1), as a value.

There is no chance in it: the same rewards give the same pulls.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Arms(NamedTuple):
    """What is known of each arm: how often it was pulled, and the sum of what it paid."""

    pulls: tuple[int, ...]
    paid: tuple[float, ...]


def fresh_arms(count: int) -> Arms:
    """Arms of which none has been pulled."""
    return Arms((0,) * count, (0.0,) * count)


def record_pull(arms: Arms, arm: int, reward: float) -> Arms:
    """The arms after one more pull."""
    pulls, paid = list(arms.pulls), list(arms.paid)
    pulls[arm] += 1
    paid[arm] += reward
    return Arms(tuple(pulls), tuple(paid))


def mean_paid(arms: Arms) -> list[float]:
    """The mean reward of each arm; minus infinity for one that was never pulled."""
    return [paid / pulls if pulls else -math.inf for pulls, paid in zip(arms.pulls, arms.paid, strict=True)]


def next_arm(arms: Arms, *, spread: float) -> int:
    """The arm with the highest mean + spread * sqrt(2 ln n / n_j); one that was never pulled comes first."""
    if 0 in arms.pulls:
        return arms.pulls.index(0)
    total = math.log(sum(arms.pulls))
    bounds: Sequence[float] = [
        mean + spread * math.sqrt(2 * total / pulls) for mean, pulls in zip(mean_paid(arms), arms.pulls, strict=True)
    ]
    return max(range(len(bounds)), key=bounds.__getitem__)
