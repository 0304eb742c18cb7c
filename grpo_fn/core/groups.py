"""Putting groups together and taking them apart: P prompts with G samples each, whatever the widths of their rows."""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from grpo_fn.core import prng
from grpo_fn.core.problem import Turn
from grpo_fn.core.types import Groups, Reward, Rollout


def concat_groups(parts: Sequence[Groups]) -> Groups:
    """All groups in the order of the parts, padded on the right to the widest rows, where the last part's tensors are.

    Wants at least one part.
    """
    device = parts[-1].rollout.tokens.device
    parts = [tree_map_only(torch.Tensor, lambda x: x.to(device), part) for part in parts]
    return Groups(
        tuple(problem for part in parts for problem in part.problems),
        concat_rollouts([part.rollout for part in parts]),
        concat_rewards([part.reward for part in parts]),
    )


def concat_rewards(rewards: Sequence[Reward]) -> Reward:
    """The groups of all rewards in their order, padded to the most turns. Wants at least one reward."""
    most = max(r.turns.shape[-1] for r in rewards)
    return Reward(
        torch.cat([r.value for r in rewards]),
        torch.cat([r.valid for r in rewards]),
        {name: torch.cat([r.parts[name] for r in rewards]) for name in rewards[0].parts},
        torch.cat([pad(r.turns, (0, most - r.turns.shape[-1])) for r in rewards]),
        torch.cat([pad(r.states, (0, most - r.states.shape[-1]), value=-1) for r in rewards]),
    )


def unpack_reward(fields: Sequence[Any]) -> Reward:
    """The reward of its fields, one after the other; also of those that were stored when there were no turns."""
    return Reward(*fields) if len(fields) > 3 else outcome_reward(*fields)


def outcome_reward(
    value: Float[Tensor, "P G"], valid: Bool[Tensor, "P G"], parts: dict[str, Float[Tensor, "P G"]]
) -> Reward:
    """The reward of samples without turns: each is one turn, worth its value, and a prompt's all begin in one state."""
    prompt = torch.arange(len(value), device=value.device)[:, None]
    return Reward(value, valid, parts, value[..., None], prompt.expand(value.shape)[..., None])


def concat_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """The rows of all parts in their order, padded on the right to the widest. Wants at least one part."""
    width = max(part.tokens.shape[1] for part in parts)
    rollouts = [pad_rollout(part, width) for part in parts]
    return Rollout(
        *(torch.cat(field) for field in zip(*(r[:4] for r in rollouts), strict=True)),
        tuple(text for r in rollouts for text in r.text),
        tuple(turns for r in rollouts for turns in r.turns),
    )


def select_groups(groups: Groups, chosen: Sequence[int]) -> Groups:
    """The groups with these numbers, in this order."""
    rollout, reward = groups.rollout, groups.reward
    size = len(rollout.text) // len(groups.problems)
    rows = [p * size + g for p in chosen for g in range(size)]
    return Groups(
        tuple(groups.problems[p] for p in chosen),
        select_rows(rollout, rows),
        tree_map_only(torch.Tensor, lambda x: x[list(chosen)], reward),
    )


def select_rows(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    """The rows with these numbers, in this order."""
    text, turns = (tuple(column[b] for b in rows if column) for column in (rollout.text, rollout.turns))
    return Rollout(*(field[list(rows)] for field in rollout[:4]), text, turns)


def pack_rollout(rollout: Rollout) -> list[Any]:
    """The rollout as containers of numbers, strings and tensors, for a checkpoint."""
    return [*rollout[:4], list(rollout.text), [[list(turn) for turn in turns] for turns in rollout.turns]]


def unpack_rollout(fields: Sequence[Any]) -> Rollout:
    """The inverse of `pack_rollout`; also of rollouts that were packed when there were no turns."""
    turns = fields[5] if len(fields) > 5 else ()
    return Rollout(*fields[:4], tuple(fields[4]), tuple(tuple(Turn(*turn) for turn in row) for row in turns))


def with_signal(reward: Reward) -> Bool[Tensor, "P"]:
    """Which groups hold two valid samples of different reward; in the others there is nothing to compare."""
    highest = torch.where(reward.valid, reward.value, -torch.inf).amax(-1)
    lowest = torch.where(reward.valid, reward.value, torch.inf).amin(-1)
    return highest > lowest


def by_group(rows: Shaped[Tensor, "B T"], groups: int) -> Shaped[Tensor, "P G T"]:
    """Row b = p * G + g to [p, g]."""
    return rearrange(rows, "(p g) t -> p g t", p=groups)


def pad_rollout(rollout: Rollout, width: int) -> Rollout:
    """The rollout with padding on the right up to `width` columns."""
    extra = (0, width - rollout.tokens.shape[1])
    tokens, mask, logp = (pad(field, extra) for field in rollout[:3])
    return rollout._replace(tokens=tokens, mask=mask, logp_sampled=logp)


def row_keys(groups: Groups, key: Tensor) -> Tensor:
    """fold_in(key, uid, g) of every row, whatever batch the row is in.

    Args:
        groups: P problems, their samples and rewards.
        key: random key, [2].

    Returns:
        One key a row, [B, 2].
    """
    size = groups.reward.value.shape[1]
    uid = torch.tensor([problem.uid for problem in groups.problems]).repeat_interleave(size)
    return prng.fold_in(key, uid, torch.arange(size).repeat(len(groups.problems))).to(groups.rollout.tokens.device)
