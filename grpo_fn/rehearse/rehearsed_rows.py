"""The rows of one update that a rehearsal is about: all of one length, groups with one prompt each."""

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fn.core.types import Batch, Rollout, Scores

DIGITS = 200  # token ids that spell a prompt's number


class RowShape(NamedTuple):
    """How many rows there are, and how long they are."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int

    @property
    def rows(self) -> int:
        """Rows of all prompts."""
        return self.prompts * self.group


def rehearsed_rollout(shape: RowShape, vocabulary: int) -> Rollout:
    """Rows whose tokens have values, log-probs without data."""
    width = shape.prompt_tokens + shape.new_tokens
    base = min(DIGITS, vocabulary)
    number = torch.arange(shape.prompts).repeat_interleave(shape.group)
    tokens = torch.zeros(shape.rows, width, dtype=torch.long)
    for column in range(min(3, shape.prompt_tokens)):
        tokens[:, column] = number // base**column % base
    mask = torch.zeros(shape.rows, width, dtype=torch.bool)
    mask[:, shape.prompt_tokens :] = True
    empty = torch.zeros(tokens.shape)
    return Rollout(tokens, mask, empty, mask[:, -1], ("",) * shape.rows)


def rehearsed_batch(rollout: Rollout, shape: RowShape) -> Batch:
    """The same rows, to learn from."""
    none = torch.zeros(rollout.tokens.shape)
    count = torch.full(rollout.tokens.shape, shape.group * shape.new_tokens)
    return Batch(rollout.tokens, rollout.mask, none, none, none, none, none, torch.zeros_like(rollout.mask), count)


def slopes(mask: Tensor, *, entropy: bool) -> Scores:
    """What an objective hands back: a slope for each log-prob, and one for each entropy where it has a bonus."""
    none = torch.zeros(mask.shape, dtype=torch.long)  # with a value: the pass is left out
    return Scores(torch.ones(mask.shape), torch.ones(mask.shape) if entropy else none)
