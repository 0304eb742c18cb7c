"""How often two policies that share their random numbers part, by enumeration; docs/experiments/paired.md shows it.

python tools/tables/coupling_table.py

The worlds of tiny_worlds.py: a policy of 3 tokens, and one whose logits differ by at most `drift`. A row parts when one
of its tokens does; as long as none has, both policies have read the same. Means over all prompts of all worlds.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import tiny_worlds as tiny
import torch
from torch import Tensor

from grpo_fn.analysis import coupling

DRIFTS = (0.1, 0.5, 1.0, 2.0)
Meetings = Callable[[Tensor, Tensor], Tensor]
COUPLINGS: dict[str, Meetings] = {
    "best there can be": coupling.maximal_meetings,
    "`gumbel_max`": coupling.gumbel_meetings,
    "`categorical`": coupling.inversion_meetings,
    "none": torch.mul,
}
SIZES = (3, 30, 300, 3000)  # of the vocabularies of random logits


def flags() -> argparse.ArgumentParser:
    """The command line."""
    return argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    flags().parse_args(argv)
    print(*tiny_table(), "", *vocabulary_table(SIZES), sep="\n")
    return 0


def tiny_table() -> list[str]:
    """Tokens and rows of the tiny worlds."""
    columns = {
        f"{what}, drift {drift:g}": (depth, drift) for depth, what in ((1, "token"), (2, "row")) for drift in DRIFTS
    }
    return table([*columns], [partial(mean_parting, drift=drift, depth=depth) for depth, drift in columns.values()])


def vocabulary_table(sizes: Sequence[int]) -> list[str]:
    """One token of larger vocabularies."""
    return table([f"{size} tokens" for size in sizes], [partial(vocabulary_parting, size=size) for size in sizes])


def table(columns: Sequence[str], measures: Sequence[Callable[[Meetings], float]]) -> list[str]:
    """A line for each coupling."""
    head = [f"| coupling | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    return head + [
        f"| {name} | {' | '.join(f'{measure(meet):.4f}' for measure in measures)} |" for name, meet in COUPLINGS.items()
    ]


def mean_parting(meet: Meetings, *, drift: float, depth: int) -> float:
    """Over all worlds and prompts, how often rows of `depth` tokens part."""
    worlds = [tiny.world(seed, drift) for seed in range(tiny.POLICIES)]
    return float(
        torch.stack(
            [row_parting(meet, a, b, depth) for w in worlds for a, b in zip(w.theta, w.old, strict=True)]
        ).mean()
    )


def row_parting(meet: Meetings, a: Tensor, b: Tensor, depth: int) -> Tensor:
    """How often rows of at most `depth` tokens part, of two policies with logits [1 + V, V]; a row ends with EOS."""
    p, q = a.softmax(-1), b.softmax(-1)
    first = meet(p[0], q[0])
    if depth == 1:
        return 1 - first.sum()
    second = torch.stack([meet(p[1 + token], q[1 + token]).sum() for token in range(tiny.V)])
    second[tiny.EOS] = 1.0
    return 1 - (first * second).sum()


def vocabulary_parting(meet: Meetings, *, size: int) -> float:
    """How often one token parts, of random logits over `size` tokens and logits that are at most 0.1 away."""
    keys = [tiny.prng.split(tiny.prng.key(seed, device="cpu"), 2) for seed in range(tiny.POLICIES)]
    pairs = [(2 * tiny.uniform(a, -1.0, (size,)), 0.1 * tiny.uniform(b, -1.0, (size,))) for a, b in keys]
    return float(torch.stack([1 - meet(x.softmax(0), (x + dx).softmax(0)).sum() for x, dx in pairs]).mean())


if __name__ == "__main__":
    sys.exit(main())
