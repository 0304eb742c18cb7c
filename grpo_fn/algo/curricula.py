"""Curricula: which levels, parts or rows the next step asks, by how often the policy passed them.

Each function returns a `Curriculum` (algo.curriculum), whose functions are pure; its state is a few arrays, an entry
for each of A arms. Pass rates of a step are averaged over the groups of an arm, then over steps with weight `decay` for
what was known before; an arm's first average is that of its first step.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_fn.algo.curriculum import Curriculum
from grpo_fn.core import prng
from grpo_fn.core.types import Arrays, Reward

PassRate = Callable[[Reward], Tensor]


def reward_at_least(reward: Reward, *, threshold: float) -> Float[Tensor, "P"]:
    """The share of each problem's samples whose reward is `threshold` or more, of those that could be scored.

    Args:
        reward: values [P, G] and which of them are valid.
        threshold: least reward of a sample that passes.

    Returns:
        Pass rates, [P]; NaN where no sample could be scored.
    """
    return _share(reward.value >= threshold, reward.valid)


def part_at_least(reward: Reward, *, part: str, threshold: float) -> Float[Tensor, "P"]:
    """The share of each problem's samples with `threshold` or more in one part of the reward, as `reward_at_least`.

    Args:
        reward: parts [P, G] by name and which samples are valid.
        part: name of the part.
        threshold: least score of a sample that passes.

    Returns:
        Pass rates, [P]; NaN where no sample could be scored.

    Raises:
        ValueError: for a part that the reward does not have.
    """
    if part not in reward.parts:
        raise ValueError(f"part: got {part!r}, wanted one of {', '.join(reward.parts) or 'none'}")
    return _share(reward.parts[part] >= threshold, reward.valid)


def uniform_arms(*, pass_rate: PassRate) -> Curriculum:
    """Every arm alike, whatever the pass rates: what the others are compared with.

    Args:
        pass_rate: which samples pass; only shown in the metrics.

    Returns:
        The curriculum; its state is empty.
    """
    return Curriculum(
        start=_nothing,
        select=_select_uniform,
        update=_leave,
        figures=_no_figures,
        pass_rate=pass_rate,
    )


def threshold_levels(
    *, threshold: float, decay: float, min_groups: int, review: float, pass_rate: PassRate
) -> Curriculum:
    """One level after another, in the order of the arms: the next one when the pass rate is `threshold` or more.

    Args:
        threshold: average pass rate of the level from which on the next one is asked, in (0, 1].
        decay: weight of the average before a step, in [0, 1).
        min_groups: problems of a level that are asked at least.
        review: share of the draws that goes to the levels before, all of them alike, in [0, 1).
        pass_rate: which samples pass.

    Returns:
        The curriculum; `curriculum/level` is the number of the level, from 0.

    Raises:
        ValueError: for numbers outside of these ranges.
    """
    _check_shares(threshold=(0 < threshold <= 1, threshold), decay=(0 <= decay < 1, decay))
    _check_shares(review=(0 <= review < 1, review), min_groups=(min_groups >= 1, min_groups))
    return Curriculum(
        start=_start_levels,
        select=partial(_select_level, review),
        update=partial(_update_level, threshold, decay, min_groups),
        figures=_level_figures,
        pass_rate=pass_rate,
    )


def learnability_bandit(*, temperature: float, decay: float, floor: float, pass_rate: PassRate) -> Curriculum:
    """Arms by a softmax over the variance p (1 - p) of their problems' verdicts, the most where half of them pass.

    Learnability of Foster et al. 2025 (arXiv:2502.12272), over arms in the place of single questions.

        weight = (1 - floor) softmax(v / (temperature max v)) + floor / A,   v = average of p (1 - p) over groups

    An arm that was not asked yet counts as p = 1/2.

    Args:
        temperature: of the softmax, in units of the best arm's v; small: the best arm alone.
        decay: weight of the average before a step, in [0, 1).
        floor: share of the draws that is spread over all arms alike, in [0, 1].
        pass_rate: which samples pass.

    Returns:
        The curriculum.

    Raises:
        ValueError: for numbers outside of these ranges, or a temperature that is not above 0.
    """
    _check_bandit(temperature, decay, floor)
    return Curriculum(
        start=partial(_start_bandit, ("variance",)),
        select=partial(_select_bandit, _variance_score, temperature, floor),
        update=partial(_update_bandit, (("variance", decay, _variance),)),
        figures=_no_figures,
        pass_rate=pass_rate,
    )


def progress_bandit(
    *, temperature: float, decay: float, slow_decay: float, floor: float, pass_rate: PassRate
) -> Curriculum:
    """Arms by a softmax over learning progress: how fast their pass rate moves, up or down.

    After Matiisen et al. 2017, Teacher-Student Curriculum Learning (arXiv:1707.00183), who take the slope of the score,
    and its absolute value against forgetting; here it is the distance of a fast average from a slow one. An arm that
    was not asked yet counts as the best.

    Args:
        temperature: of the softmax, in units of the best arm's progress.
        decay: weight of the fast average before a step, in [0, 1).
        slow_decay: of the slow one, between `decay` and 1.
        floor: share of the draws that is spread over all arms alike, in [0, 1].
        pass_rate: which samples pass.

    Returns:
        The curriculum.

    Raises:
        ValueError: for numbers outside of these ranges, or a temperature that is not above 0.
    """
    _check_bandit(temperature, decay, floor)
    _check_shares(slow_decay=(decay < slow_decay < 1, slow_decay))
    averages = (("fast", decay, _as_it_is), ("slow", slow_decay, _as_it_is))
    return Curriculum(
        start=partial(_start_bandit, ("fast", "slow")),
        select=partial(_select_bandit, _progress_score, temperature, floor),
        update=partial(_update_bandit, averages),
        figures=_no_figures,
        pass_rate=pass_rate,
    )


def step_means(
    arms: Int[Tensor, "N"], values: Float[Tensor, "N"], count: int
) -> tuple[Float[Tensor, "A"], Int[Tensor, "A"]]:
    """The mean of each arm's values in a step, and how many there are; 0 where there is none."""
    number = arms.bincount(minlength=count)
    total = torch.zeros(count, dtype=torch.float64).index_add(0, arms, values.to(torch.float64))
    return total / number.clamp(min=1), number


def average_rates(
    average: Float[Tensor, "A"],
    asked: Int[Tensor, "A"],
    mean: Float[Tensor, "A"],
    number: Int[Tensor, "A"],
    decay: float,
) -> Float[Tensor, "A"]:
    """decay * average + (1 - decay) * mean where an arm was asked in the step; its first mean as it is."""
    moved = torch.where(asked > 0, decay * average + (1 - decay) * mean, mean)
    return torch.where(number > 0, moved, average)


def spread_choice(weights: Float[Tensor, "A"], key: Int[Tensor, "2"], count: int) -> Int[Tensor, "N"]:
    """`count` arms in proportion to weights, in random order; an arm's number is its share rounded up or down.

    Systematic sampling: draw j is where (j + u) / count falls among the cumulated weights, with one uniform u.
    """
    place, order = prng.split(key, 2)
    u = prng.uniform(place, 1, dtype=torch.float64, low=0.0, high=1.0)
    ends = weights.to(torch.float64).cumsum(0)
    where = (torch.arange(count, dtype=torch.float64) + u) / count * ends[-1]
    last = int((weights > 0).nonzero()[-1])  # rounding must not lead behind it
    chosen = torch.searchsorted(ends, where, right=True).clamp(max=last)
    return chosen[prng.permutation(order, count)]


def _share(passed: Tensor, valid: Tensor) -> Tensor:
    return (passed & valid).sum(-1).double() / valid.sum(-1)


def _check_shares(**knobs: tuple[bool, int | float]) -> None:
    wanted = {
        "threshold": "more than 0 and at most 1",
        "decay": "0 or more and below 1",
        "slow_decay": "more than decay and below 1",
        "review": "0 or more and below 1",
        "floor": "0 to 1",
        "min_groups": "at least 1",
        "temperature": "more than 0",
    }
    for name, (fits, value) in knobs.items():
        if not fits:
            raise ValueError(f"curricula {name}: got {value}, wanted {wanted[name]}")


def _check_bandit(temperature: float, decay: float, floor: float) -> None:
    _check_shares(
        temperature=(temperature > 0, temperature), decay=(0 <= decay < 1, decay), floor=(0 <= floor <= 1, floor)
    )


def _no_figures(before: Arrays, after: Arrays) -> dict[str, float]:
    return {}


# -- uniform


def _nothing(arms: int, key: Tensor) -> Arrays:
    return {"arms": torch.tensor(arms)}


def _select_uniform(state: Arrays, key: Tensor, count: int) -> Tensor:
    return spread_choice(torch.ones(int(state["arms"])), key, count)


def _leave(state: Arrays, arms: Tensor, rates: Tensor) -> Arrays:
    return state


# -- one level after another


def _start_levels(arms: int, key: Tensor) -> Arrays:
    return {
        "level": torch.tensor(0),
        "rate": torch.zeros(arms, dtype=torch.float64),
        "asked": torch.zeros(arms, dtype=torch.int64),
    }


def _select_level(review: float, state: Arrays, key: Tensor, count: int) -> Tensor:
    level = int(state["level"])
    weights = torch.zeros(len(state["rate"]), dtype=torch.float64)
    weights[:level] = review / max(level, 1)
    weights[level] = 1 - review if level else 1.0
    return spread_choice(weights, key, count)


def _update_level(
    threshold: float, decay: float, min_groups: int, state: Arrays, arms: Tensor, rates: Tensor
) -> Arrays:
    mean, number = step_means(arms, rates, len(state["rate"]))
    rate = average_rates(state["rate"], state["asked"], mean, number, decay)
    asked = state["asked"] + number
    now = int(state["level"])
    passed = float(rate[now]) >= threshold and int(asked[now]) >= min_groups
    level = state["level"] + int(passed and now + 1 < len(rate))
    return {"level": level, "rate": rate, "asked": asked}


def _level_figures(before: Arrays, after: Arrays) -> dict[str, float]:
    return {"level": float(after["level"])}


# -- bandits


def _start_bandit(names: tuple[str, ...], arms: int, key: Tensor) -> Arrays:
    averages = {name: torch.zeros(arms, dtype=torch.float64) for name in names}
    return {**averages, "asked": torch.zeros(arms, dtype=torch.int64)}


def _select_bandit(
    score: Callable[[Arrays], Tensor], temperature: float, floor: float, state: Arrays, key: Tensor, count: int
) -> Tensor:
    value = score(state)
    scaled = value / value.max().clamp(min=torch.finfo(torch.float64).tiny)
    weights = (1 - floor) * (scaled / temperature).softmax(0) + floor / len(value)
    return spread_choice(weights, key, count)


def _update_bandit(
    averages: tuple[tuple[str, float, Callable[[Tensor], Tensor]], ...], state: Arrays, arms: Tensor, rates: Tensor
) -> Arrays:
    asked, found = state["asked"], {}
    for name, decay, of_rates in averages:
        mean, number = step_means(arms, of_rates(rates), len(asked))
        found[name] = average_rates(state[name], asked, mean, number, decay)
    return {**found, "asked": asked + arms.bincount(minlength=len(asked))}


def _variance(rates: Tensor) -> Tensor:
    return rates * (1 - rates)


def _as_it_is(rates: Tensor) -> Tensor:
    return rates


def _variance_score(state: Arrays) -> Tensor:
    return torch.where(state["asked"] > 0, state["variance"], 0.25)


def _progress_score(state: Arrays) -> Tensor:
    moved = (state["fast"] - state["slow"]).abs()
    return torch.where(state["asked"] > 0, moved, moved.max().clamp(min=1e-3))
