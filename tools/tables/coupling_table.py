"""How often two policies that share their random numbers draw another token, by formula: docs/experiments/paired.md."""

from collections.abc import Callable

import torch
from tiny_worlds import POLICIES, uniform
from torch import Tensor

from grpo_fn.analysis import coupling
from grpo_fn.core import prng

COUPLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "best there can be": coupling.maximal_meetings,
    "`gumbel_max`": coupling.gumbel_meetings,
    "`categorical`": coupling.inversion_meetings,
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
