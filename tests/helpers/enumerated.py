"""A policy whose every outcome is enumerated: expectations are finite sums, with no sampling and no tolerance for luck.

It writes T = 2 tokens of V = 3, tabular: one row of logits for the first token, one for the second after each first.
Expectations are sums over the 9 sequences in float64.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.func import vmap

from grpo_fn.core.types import Batch

V = 3
SEQUENCES = torch.tensor(list(product(range(V), repeat=2)))  # [9, 2]
FULL = torch.ones(9, 2, dtype=torch.bool)


def policy(seed: int) -> Tensor:
    """Logits [1 + V, V] of a random policy: row 0 for the first token, row 1 + a for the token after a."""
    return torch.randn(1 + V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logps(theta: Tensor) -> Tensor:
    """log pi of both tokens of every sequence, [9, 2]."""
    table = theta.log_softmax(-1)
    return torch.stack([table[0][SEQUENCES[:, 0]], table[1 + SEQUENCES[:, 0], SEQUENCES[:, 1]]], dim=1)


def token_kl(theta: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    """sum_t KL(pi(. | o_<t) || pi_ref(. | o_<t)), the prefixes drawn from pi_old and held fixed."""
    p, q = theta.log_softmax(-1), ref.log_softmax(-1)
    visits = torch.cat([torch.ones(1), old.log_softmax(-1)[0].exp()])
    return (visits * (p.exp() * (p - q)).sum(-1)).sum()


def expected(f: Callable, theta: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    """E over sequences of pi_old of the estimate summed over both tokens; the probabilities carry no gradient."""
    logp_old, logp_ref = logps(old), logps(ref)
    nothing = torch.zeros(9, 2, dtype=torch.float64)
    batch = Batch(SEQUENCES, FULL, logp_old, logp_old, logp_ref, logp_ref, nothing, ~FULL, FULL.long())
    return (logp_old.sum(-1).exp() * vmap(f)(logps(theta), batch).sum(-1)).sum()


def expected_in(f: Callable, ref: Tensor, old: Tensor) -> Callable[[Tensor], Tensor]:
    """The expectation as a function of theta alone."""
    return lambda theta: expected(f, theta, ref, old)
