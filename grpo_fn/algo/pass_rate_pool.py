"""A pool of problems whose measured pass rate lies in a band: solved ones retire, fresh ones are admitted."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from grpo_fn.algo.curricula import average_rates, step_means
from grpo_fn.algo.curriculum import Curriculum
from grpo_fn.core import prng
from grpo_fn.core.types import Arrays, Reward


def pool_in_band(
    *, size: int, low: float, high: float, decay: float, min_asked: int, pass_rate: Callable[[Reward], Tensor]
) -> Curriculum:
    """A pool of `size` arms, mostly rows; one whose average pass rate leaves `low` .. `high` makes way for another.

    A step's draws go through the pool in random order, each arm once before any comes twice. After the step an arm of
    the pool that was asked `min_asked` times or more is retired where its average is above `high` (solved), and set
    aside where it is below `low` (too hard for now). Into the pool comes what was asked least, in a random order that
    the start decides: fresh arms before those that were in it, which come back once all were asked.

    Args:
        size: arms in the pool; where there are fewer, all of them are.
        low: least average pass rate of an arm that stays, in [0, 1].
        high: largest one, from `low` to 1.
        decay: weight of the average before a step, in [0, 1).
        min_asked: problems of an arm before it is judged.
        pass_rate: which samples pass.

    Returns:
        The curriculum, with `curriculum/pool_size`, `curriculum/admitted`, `curriculum/retired`, `curriculum/set_aside`
        (of the step) and `curriculum/fresh`, the arms that were never asked.

    Raises:
        ValueError: for numbers outside of these ranges.
    """
    if size < 1 or min_asked < 1:
        raise ValueError(f"pool_in_band: got size {size} and min_asked {min_asked}, wanted at least 1 of each")
    if not (0 <= low <= high <= 1 and 0 <= decay < 1):
        raise ValueError(
            f"pool_in_band: got low {low}, high {high}, decay {decay}, wanted 0 <= low <= high <= 1 and 0 <= decay < 1"
        )
    return Curriculum(
        start=partial(_start_pool, size),
        select=_select_members,
        update=partial(_update_pool, low, high, decay, min_asked),
        figures=partial(_pool_figures, high),
        pass_rate=pass_rate,
    )


def _start_pool(size: int, arms: int, key: Tensor) -> Arrays:
    place = torch.zeros(arms, dtype=torch.int64)
    place[prng.permutation(key, arms)] = torch.arange(arms)
    return {
        "place": place,  # in the queue
        "member": place < size,
        "rate": torch.zeros(arms, dtype=torch.float64),
        "asked": torch.zeros(arms, dtype=torch.int64),
    }


def _select_members(state: Arrays, key: Tensor, count: int) -> Tensor:
    order = prng.permutation(key, len(state["member"]))
    members = order[state["member"][order]]
    return members[torch.arange(count) % len(members)]


def _update_pool(
    low: float, high: float, decay: float, min_asked: int, state: Arrays, arms: Tensor, rates: Tensor
) -> Arrays:
    member, place = state["member"], state["place"]
    mean, number = step_means(arms, rates, len(member))
    rate = average_rates(state["rate"], state["asked"], mean, number, decay)
    asked = state["asked"] + number
    stays = member & ~((asked >= min_asked) & ((rate > high) | (rate < low)))
    missing = int(member.sum() - stays.sum())
    turn = torch.where(stays, asked.max() + 1, asked) * len(place) + place  # of members: behind all the others
    admitted = torch.zeros_like(member)
    admitted[turn.argsort()[:missing]] = True
    return {"place": place, "member": stays | admitted, "rate": rate, "asked": asked}


def _pool_figures(high: float, before: Arrays, after: Arrays) -> dict[str, float]:
    gone = before["member"] & ~after["member"]
    return {
        "pool_size": float(after["member"].sum()),
        "admitted": float((after["member"] & ~before["member"]).sum()),
        "retired": float((gone & (after["rate"] > high)).sum()),
        "set_aside": float((gone & (after["rate"] <= high)).sum()),
        "fresh": float((after["asked"] == 0).sum()),
    }
