"""Rows and batches, drawn (those of the published test kit, under the name that the tests know), and cut."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from grpo_fn.algo import losses, objective
from grpo_fn.core.batch import by_reading, by_width, trim_rows
from grpo_fn.core.types import Batch, Gains, Scores, Totals
from grpo_fn.testing.strategies import GARBAGE, batches, loss_rows, one_row, with_garbage, with_padding

__all__ = [
    "GARBAGE",
    "UNMOVED",
    "batches",
    "dealt",
    "loss_rows",
    "one_row",
    "packed_split",
    "policy_objective",
    "scores",
    "split",
    "totals",
    "with_garbage",
    "with_padding",
]

UNMOVED = Gains(kl=1.0, entropy=1.0)


def totals(batch: Batch) -> Totals:
    """The denominators of a batch that is a whole step."""
    samples = torch.tensor(len(batch.mask)).double()
    groups = torch.tensor(sum(1 / n for n in batch.group_tokens[batch.mask].tolist()), dtype=torch.float64).round()
    return Totals(batch.mask.sum().double(), batch.mask.any(-1).sum().double(), samples, groups)


def policy_objective(**changes: object) -> partial:
    """PPO's clip, a mean over tokens, no KL, no bonus and no correction; with these knobs changed."""
    plain = {"token_loss": partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.2), "importance_correction": None}
    plain |= {"kl": objective.k3, "loss_aggregation": objective.token_mean, "beta": 0.0, "entropy_bonus": 0.0}
    return partial(objective.policy_objective, **{**plain, **changes})


def scores(logp: Tensor) -> Scores:
    """Scores with an entropy that is easy to distinguish from anything else."""
    return Scores(logp=logp, entropy=-logp)


def dealt(batch: Batch, micro_tokens: int, devices: int, parts: Callable = by_width) -> list[Tensor]:
    """The rows of micro-batches, found by `parts`."""
    return parts(batch.tokens, batch.mask, micro_tokens, devices)


def split(batch: Batch, micro_tokens: int, devices: int, parts: Callable = by_width) -> list[Batch]:
    """Micro-batches, their rows found by `parts`."""
    return [trim_rows(batch, rows) for rows in dealt(batch, micro_tokens, devices, parts)]


def packed_split(batch: Batch, micro_tokens: int, devices: int) -> list[Batch]:
    """Micro-batches by what is read."""
    return split(batch, micro_tokens, devices, by_reading)
