"""Rows and batches, drawn (those of the published test kit, under the name that the tests know), and cut."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from grpo_fn.core.batch import by_width, cut
from grpo_fn.core.packing import Share, by_reading, together
from grpo_fn.core.types import Batch
from grpo_fn.testing.strategies import GARBAGE, UNMOVED, batches, padded, row_of, rows, scores, spoiled, totals

__all__ = [
    "GARBAGE",
    "UNMOVED",
    "batches",
    "dealt",
    "packed_split",
    "padded",
    "row_of",
    "rows",
    "scores",
    "split",
    "spoiled",
    "totals",
]


def dealt(batch: Batch, micro_tokens: int, devices: int, parts: Callable = by_width) -> list[Tensor]:
    """The rows of micro-batches, found by `parts`."""
    return parts(batch.tokens, batch.mask, micro_tokens, devices)


def split(batch: Batch, micro_tokens: int, devices: int, parts: Callable = by_width) -> list[Batch]:
    """Micro-batches, their rows found by `parts`."""
    return [cut(batch, rows) for rows in dealt(batch, micro_tokens, devices, parts)]


def packed_split(batch: Batch, micro_tokens: int, devices: int, *, share: Share = together) -> list[Batch]:
    """Micro-batches by what is read."""
    return split(batch, micro_tokens, devices, partial(by_reading, share=share))
