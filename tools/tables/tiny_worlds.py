"""Worlds so small that the expectation of anything is a finite sum: what bias_table.py enumerates.

A policy writes at most T = 2 tokens of V = 3; token 0 ends a row. So 7 rows can come out, and a group or a step is one
of finitely many. No sampling, float64, and the same digits on every machine.
"""

from collections import Counter
from functools import cache
from itertools import combinations_with_replacement, product
from math import factorial, prod
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fn.core import prng

V, EOS = 3, 0
ROWS = torch.tensor([(EOS, EOS), *product(range(1, V), range(V))])  # [7, 2]; what follows EOS is not written
MASK = torch.stack([torch.ones(len(ROWS), dtype=torch.bool), ROWS[:, 0] != EOS], 1)
TRUNCATED = (ROWS != EOS).all(-1)  # ran into the limit of two tokens
POLICIES = 10
PROMPTS = 2  # with a policy each, as if nothing were shared between them


class World(NamedTuple):
    """A policy for every prompt, another that the samples came from, a reference, and what the rows are worth."""

    theta: Tensor  # [P, 1 + V, V] logits: row 0 of the first token, row 1 + a of the token after a
    old: Tensor
    ref: Tensor
    reward: Tensor  # [P, 7] in 0..1
    solved: Tensor  # [P, 7] 1.0 where the reward is among the prompt's three highest, else 0.0


def world(seed: int, drift: float) -> World:
    """Random logits within 2 of 0; those of the sampling policy within `drift` of the policy's."""
    keys = prng.split(prng.key(seed, device="cpu"), 4)
    theta, ref, step = (2 * uniform(k, -1.0, (PROMPTS, 1 + V, V)) for k in keys[:3])
    reward = uniform(keys[3], 0.0, (PROMPTS, len(ROWS)))
    solved = (reward >= reward.sort(-1).values[:, -3:-2]).double()
    return World(theta, theta + drift * step / 2, ref, reward, solved)


def uniform(key: Tensor, low: float, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [low, 1)."""
    return prng.uniform(key, torch.Size(shape).numel(), dtype=torch.float64, low=low, high=1.0).view(shape)


def logps(logits: Tensor) -> Tensor:
    """log pi of both tokens of every row under one prompt's policy, [7, 2]; 0 where nothing is written."""
    table = logits.log_softmax(-1)
    first, second = table[0][ROWS[:, 0]], table[1 + ROWS[:, 0], ROWS[:, 1]]
    return torch.where(MASK, torch.stack([first, second], 1), 0.0)


def chances(logits: Tensor) -> Tensor:
    """pi of every row, [7]."""
    return logps(logits).sum(-1).exp()


def energies(logits: Tensor) -> Tensor:
    """1 - 2 pi + sum_v pi_v^2 of both tokens of every row under one prompt's policy, [7, 2]; 0 where nothing is."""
    square = logits.softmax(-1).square().sum(-1)
    sums = torch.stack([square[0].expand(len(ROWS)), square[1 + ROWS[:, 0]]], 1)
    return torch.where(MASK, 1 - 2 * logps(logits).exp() + sums, 0.0)


@cache
def steps(prompts: int, size: int) -> tuple[Tensor, Tensor]:
    """All steps of `prompts` groups of `size` rows, [N, P, G], the order within a group aside; how often each comes."""
    groups = [*combinations_with_replacement(range(len(ROWS)), size)]
    orders = [factorial(size) // prod(factorial(n) for n in Counter(group).values()) for group in groups]
    chosen = [*product(range(len(groups)), repeat=prompts)]
    often = [prod(orders[i] for i in step) for step in chosen]
    return torch.tensor([[groups[i] for i in step] for step in chosen]), torch.tensor(often).double()
