"""Rows of docs/algorithms/bias.md as episodes, each token a turn with a reward and a state, and their credits."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from grpo_fn.algo import advantage, turn_credit
from grpo_fn.core.types import Reward
from grpo_fn.testing.steps import scored_step

group_normalized = partial(advantage.group_normalized, eps=1e-4, ddof=1)


def with_turns(reward: Reward, worth: Tensor, rows: Tensor, mask: Tensor, step: Tensor) -> Reward:
    """The first token is worth half of what rows that begin with it are worth on average, the second what is left.

    Every first token is written in one state, a second one in that of its first. `worth` [P, N] of the N rows [N, 2]
    with their mask, `step` [P, G] which of them were written.
    """
    alike = (rows[:, 0] == rows[:, :1]).to(worth.dtype)
    begun = worth @ (alike / alike.sum(-1, keepdim=True)).T / 2
    first = torch.where(mask[:, 1], begun, worth)
    turns = torch.stack([first, worth - first], -1)
    states = torch.where(mask, torch.stack([torch.zeros_like(rows[:, 0]), 1 + rows[:, 0]], -1), -1)
    chosen = step[..., None].expand(*step.shape, 2)
    return reward._replace(turns=turns.gather(1, chosen), states=states[step])


def between_turns(assign: Callable) -> Callable:
    """The credit with an observation after every token, so that each is a run of its own."""

    def spread(x: Tensor) -> Tensor:
        return torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)

    return lambda scored: assign(scored_step(scored.reward, spread(scored.mask)))[..., ::2]


def rewards_alone(reward: Tensor, valid: Tensor) -> Tensor:
    """The rewards themselves."""
    return torch.where(valid, reward, 0.0)


def assigned(compare: Callable, gamma: float) -> dict[str, Callable]:
    """Both credits of one comparison, by the name of their line."""
    name = getattr(compare, "func", compare).__name__
    returns = partial(turn_credit.turn_returns, advantage=compare, gamma=gamma)
    states = partial(turn_credit.group_in_group, advantage=compare, gamma=gamma, state_weight=1.0)
    if compare is rewards_alone:
        return {f"no baseline: `turn_returns`, gamma {gamma:g}": returns}
    found = {f"`turn_returns` of `{name}`, gamma {gamma:g}": returns}
    return found | {f"`group_in_group` of `{name}`, w 1, gamma {gamma:g}": states}


CREDITS: dict[str, Callable] = {
    name: between_turns(assign)
    for compare, gamma in (
        (rewards_alone, 1.0),
        (advantage.leave_one_out, 1.0),
        (advantage.leave_one_out, 0.95),
        (group_normalized, 0.95),
    )
    for name, assign in assigned(compare, gamma).items()
}
