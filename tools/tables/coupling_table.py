"""How often two policies that share their random numbers draw another token, by formula: docs/experiments/paired.md.

A coupling of p and q is a way to draw from both at once. Its meetings are the probabilities, [V], that both draws are
token i; the draws part with what is left of 1. No coupling meets more often than sum_i min(p_i, q_i) = 1 - TV(p, q).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from tiny_worlds import POLICIES, uniform
from torch import Tensor

from grpo_fn.core import prng

Chances = Float[Tensor, "V"]  # of every token; they add up to 1


def maximal_meetings(p: Chances, q: Chances) -> Chances:
    """min(p_i, q_i): what the best coupling reaches, which has to know both distributions."""
    return torch.minimum(p, q)


def inversion_meetings(p: Chances, q: Chances) -> Chances:
    """Meetings of `sampling.categorical`: the length that token i's intervals of both distribution functions share."""
    ends = torch.minimum(p.cumsum(0), q.cumsum(0))
    starts = torch.maximum(p.cumsum(0) - p, q.cumsum(0) - q)
    return (ends - starts).clamp(min=0)


def gumbel_meetings(p: Chances, q: Chances) -> Chances:
    """Meetings of `sampling.gumbel_max`: 1 / sum_j max(p_j / p_i, q_j / q_i), 0 where p_i or q_i is.

    Both draws are i when e_j >= e_i max(p_j / p_i, q_j / q_i) for every j. Given e_i that has the chance
    exp(-e_i sum_{j != i} max(...)); its mean over the exponential e_i is the formula, the collision probability of
    Moulton and Jiang 2018, "Maximally consistent sampling and the Jaccard index of probability distributions",
    arXiv:1809.04052. Its sum is at least (1 - TV) / (1 + TV), than which no coupling is better for all p and q whose
    draws know only one of both (Daliri, Musco and Suresh 2024, arXiv:2408.07978).
    """
    ratio = torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)
    return torch.where((p > 0) & (q > 0), 1 / ratio, 0.0)


COUPLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "best there can be": maximal_meetings,
    "`gumbel_max`": gumbel_meetings,
    "`categorical`": inversion_meetings,
    "none": torch.mul,
}


def table(words: str) -> str:
    """A line for each coupling, a column for each size of the vocabulary."""
    sizes = [*map(int, words.split())]
    lines = [f"| coupling | {' | '.join(f'{size} tokens' for size in sizes)} |", "|---" * (1 + len(sizes)) + "|"]
    lines += [
        f"| {name} | {' | '.join(f'{parting(meetings, size):.4f}' for size in sizes)} |"
        for name, meetings in COUPLINGS.items()
    ]
    return "\n".join(lines)


def parting(meetings: Callable[[Tensor, Tensor], Tensor], size: int) -> float:
    """How often a token parts, of random logits over `size` tokens and others that are at most 0.1 away."""
    keys = [prng.split(prng.key(seed, device="cpu"), 2) for seed in range(POLICIES)]
    pairs = [(2 * uniform(a, -1.0, (size,)), 0.1 * uniform(b, -1.0, (size,))) for a, b in keys]
    return float(torch.stack([1 - meetings(x.softmax(0), (x + dx).softmax(0)).sum() for x, dx in pairs]).mean())
