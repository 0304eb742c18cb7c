"""The same sampled tokens behind other prompts, and what is found of them there back at their places."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_fn.core.batch import lengths
from grpo_fn.core.types import Rollout


def change_prompts(rollout: Rollout, prompts: Sequence[Sequence[int]]) -> Rollout:
    """Rows of other prompts and the same tokens from the first sampled one to the last, ids and mask alike.

    Args:
        rollout: B rows, each with a sampled token.
        prompts: token ids, at least one, for each row.

    Returns:
        B rows `[prompt | completion | padding]`, as wide as the longest.
    """
    device = rollout.tokens.device
    begin, end = sampled_span(rollout)
    size = torch.tensor([len(ids) for ids in prompts], device=device)
    column = torch.arange(int((size + end - begin).max()), device=device)
    source = column - size[:, None] + begin[:, None]
    inside = (column >= size[:, None]) & (source < end[:, None])
    before = pad_sequence([torch.tensor(ids, device=device) for ids in prompts], batch_first=True)
    at = column.clamp(max=before.shape[1] - 1).expand(len(prompts), -1)
    tokens = torch.where(column < size[:, None], before.gather(1, at), 0)
    return rollout._replace(
        tokens=torch.where(inside, take(rollout.tokens, source), tokens),
        mask=inside & take(rollout.mask, source),
        logp_sampled=torch.where(inside, take(rollout.logp_sampled, source), 0.0),
    )


def restore_places(
    values: Float[Tensor, "B S"], prompts: Sequence[Sequence[int]], rollout: Rollout
) -> Float[Tensor, "B T"]:
    """Values of the rows that `change_prompts` made, at the places of the same tokens in the rows that it was given.

    Args:
        values: of each token behind the other prompts, [B, S].
        prompts: the other prompts.
        rollout: the rows as they were sampled, [B, T].

    Returns:
        [B, T]; 0 where nothing was sampled.
    """
    begin, _ = sampled_span(rollout)
    size = torch.tensor([len(ids) for ids in prompts], device=values.device)
    column = torch.arange(rollout.tokens.shape[1], device=values.device)
    found = take(values, column - begin[:, None] + size[:, None])
    return torch.where(rollout.mask, found, torch.zeros_like(found))


def sampled_span(rollout: Rollout) -> tuple[Int[Tensor, "B"], Int[Tensor, "B"]]:
    """Columns of each row's first sampled token and of what comes behind its last one."""
    return rollout.mask.long().argmax(-1), lengths(rollout.mask)


def take(rows: Shaped[Tensor, "B T"], at: Int[Tensor, "B S"]) -> Shaped[Tensor, "B S"]:
    """The value of each row at these columns; any value for a column that it has not."""
    return rows.gather(1, at.clamp(0, rows.shape[1] - 1))
