"""Shares of problems: what a share says, and what samples say about one."""

from collections import Counter
from collections.abc import Sequence
from math import comb, fsum


def exact_mean(values: Sequence[float | int]) -> float:
    """Their mean, to the last bit the same in any order; nan of none."""
    return fsum(values) / len(values) if values else float("nan")


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a binomial share (Wilson 1927); (0, 1) of no trials."""
    if n == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    p, scale = right / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5 / scale
    return centre - half if right else 0.0, centre + half if right < n else 1.0  # not a rounding off 0 or 1


def estimate_pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold one of the c right ones: 1 - C(n-c, k) / C(n, k).

    An unbiased estimate of the chance that k samples hold a right one, 1 - (1 - p)^k (Chen et al. 2021,
    arXiv:2107.03374, eq. 1 in section 2.1). Wants 0 <= c <= n and 1 <= k <= n.
    """
    return 1 - comb(n - c, k) / comb(n, k)


def maj_at_k(votes: Sequence[str], right: Sequence[bool], k: int) -> float:
    """How often the majority of k samples is right, in the n // k disjoint runs of k consecutive samples of n.

    A sample votes for the answer it marks, if it marks one. A run is right when the sample that first gave the winning
    answer is; without any vote it is wrong. The vote is that of self-consistency (Wang et al. 2022, arXiv:2203.11171).
    """
    starts = range(0, len(votes) - k + 1, k)
    winners = ((start, majority(votes[start : start + k])) for start in starts)
    return exact_mean([place is not None and right[start + place] for start, place in winners])


def majority(votes: Sequence[str]) -> int | None:
    """The place of the first vote for the winner: of the answers with most votes the one given first; "" is no vote."""
    counts = Counter(filter(None, votes))
    return votes.index(max(counts, key=counts.__getitem__)) if counts else None
