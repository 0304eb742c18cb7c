"""Curricula: which levels, parts or rows the next step asks, by how often the policy passed them.

    reward        rewards of the samples and their parts, [P, G], and which could be scored
    pass_rate     rewards -> share of each problem's samples that pass, [P]
    temperature   of the softmax, in units of the best arm's value
    decay         weight of the average before a step, in [0, 1)
    floor         share of the draws that is spread over all arms alike, in [0, 1]
    returns       the curriculum; its metrics are under `curriculum/`

An arm is what a curriculum chooses among: a level, a part of a mixture, or a row. A task with A arms numbers its stream
so that problem `turn * A + arm` is the arm's own problem number `turn`; so a problem's uid says which arm it is of, and
no two draws share a uid.

Each curriculum is pure functions over a state that is carried, a few arrays with an entry for each of A arms. Pass
rates of a step are averaged over the groups of an arm, then over steps with weight `decay` for what was known before;
an arm's first average is that of its first step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_fn.algo.group_sampling import Explore, GroupBatch
from grpo_fn.core import prng
from grpo_fn.core.types import Arrays, Carry, CurriculumState, Reward


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """How a run chooses among the arms of its task. All are pure functions, and everything is on the CPU."""

    start: Callable[[int, Tensor], Arrays]  # (arms, key) -> the state before the first step
    select: Callable[[Arrays, Tensor, int], Tensor]  # (state, key of these draws, count) -> arms, int64 [count]
    update: Callable[[Arrays, Tensor, Tensor], Arrays]  # (state, arms [N], pass rates [N]) -> the next step's state
    pass_rate: Callable[[Reward], Tensor]  # rewards -> share of each problem's samples that pass, [P]; NaN: not known
    figures: Callable[[Arrays, Arrays], Mapping[str, float]] = lambda before, after: {}  # states of a step -> metrics


def begin_curriculum(curriculum: Curriculum, arms: int, key: Int[Tensor, "2"]) -> CurriculumState:
    """The state before the first step: no arm has had a turn. Raises ValueError for a task without arms."""
    if arms < 1:
        raise ValueError(
            "train.train.curriculum: got a task without arms to choose among, expected one that has them: "
            "@mixture.arms, @mixture.levels or @mixture.rows as sections.Data.task"
        )
    return CurriculumState(torch.zeros(arms, dtype=torch.int64), curriculum.start(arms, key))


def sample_and_follow(
    explore: Explore,
    carried: Carry,
    prompts: int,
    *,
    group_sampling: Callable[[Explore, Carry, int], GroupBatch] | None,
    curriculum: Curriculum,
    labels: Sequence[str],
) -> GroupBatch:
    """As `group_sampling`, and the curriculum's state moved on by all that was sampled for the step.

    Without a `group_sampling` the next groups are learned from, whatever comes of them. `labels` name the arms in the
    metrics. Raises ValueError where the curriculum returns what it must not.
    """
    if group_sampling is None:
        groups = explore(carried.drawn, prompts)
        sampled = GroupBatch(groups, groups, carried._replace(drawn=carried.drawn + prompts), {})
    else:
        sampled = group_sampling(explore, carried, prompts)
    before, uids = carried.curriculum, [problem.uid for problem in sampled.fresh.problems]
    rates = curriculum.pass_rate(sampled.fresh.reward)
    if rates.shape != (len(uids),):
        raise ValueError(
            f"curriculum.pass_rate: got shape {[*rates.shape]}, expected [{len(uids)}], one for each problem"
        )
    after = update_curriculum(curriculum, before, uids, rates)
    figures = curriculum_figures(curriculum, labels, before, after, uids, rates)
    moved = sampled.carried._replace(curriculum=after)
    return sampled._replace(carried=moved, figures={**sampled.figures, **figures})


def choose_uids(
    curriculum: Curriculum, state: CurriculumState, key: Int[Tensor, "2"], drawn: int, first: int, count: int
) -> list[int]:
    """The uids of draws first, ..., first + count - 1, each a turn of an arm that it had not before.

    Draws are chosen in batches of `count` from `drawn` on, each with its own key, by the state before the step: so
    it does not matter whether the batches before were asked for in this call or in others. Raises ValueError where the
    curriculum chooses what is no arm.
    """
    turns = state.turns.tolist()
    uids: list[int] = []
    for start in range(drawn, first + 1, count):
        chosen = curriculum.select(state.arrays, prng.fold_in(key, start), count)
        uids = []
        for arm in check_arms(chosen, count, len(turns)):
            uids.append(turns[arm] * len(turns) + arm)
            turns[arm] += 1
    return uids


def check_arms(chosen: object, count: int, arms: int) -> list[int]:
    """The chosen arms as integers. Raises ValueError unless they are `count` integers in 0 .. arms - 1."""
    got = f"{chosen.dtype} of shape {[*chosen.shape]}" if isinstance(chosen, Tensor) else type(chosen).__name__
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.int64 or chosen.shape != (count,):
        raise ValueError(f"curriculum.select: got {got}, expected torch.int64 of shape [{count}]")
    odd = [arm for arm in chosen.tolist() if not 0 <= arm < arms]
    if odd:
        raise ValueError(f"curriculum.select: got arm {odd[0]}, expected 0 to {arms - 1}")
    return chosen.tolist()


def update_curriculum(
    curriculum: Curriculum, state: CurriculumState, uids: Sequence[int], rates: Float[Tensor, "P"]
) -> CurriculumState:
    """The state of the next step. Problems of which no sample could be scored count as asked, and say nothing.

    Raises ValueError where the curriculum returns arrays of other names, shapes or dtypes than before.
    """
    arms = torch.tensor([uid % len(state.turns) for uid in uids], dtype=torch.int64)
    rates = rates.detach().to("cpu", torch.float64)
    scored = ~rates.isnan()
    arrays = curriculum.update(state.arrays, arms[scored], rates[scored])
    check_arrays(arrays, state.arrays, "curriculum.update")
    return CurriculumState(state.turns + arms.bincount(minlength=len(state.turns)), arrays)


def check_arrays(got: Arrays, expected: Arrays, what: str) -> None:
    """Raise ValueError unless arrays have the names, shapes and dtypes of others; `what` made them."""
    shown = [{name: f"{x.dtype} {[*x.shape]}" for name, x in some.items()} for some in (got, expected)]
    if shown[0] != shown[1]:
        raise ValueError(f"{what}: got arrays {shown[0]}, expected {shown[1]}")


def curriculum_figures(
    curriculum: Curriculum,
    labels: Sequence[str],
    before: CurriculumState,
    after: CurriculumState,
    uids: Sequence[int],
    rates: Float[Tensor, "P"],
) -> dict[str, float]:
    """Metrics of a step of a curriculum: `curriculum/share/<label>` and `curriculum/pass_rate/<label>`, and its own.

    Arms of one label, such as the rows of a level, are counted together. A pass rate is missing where no problem of the
    label was drawn and could be scored.
    """
    figures: dict[str, float] = {}
    drawn = [labels[uid % len(labels)] for uid in uids]
    values = rates.detach().to("cpu", torch.float64).tolist()
    for label in dict.fromkeys(labels):
        of_label = [rate for name, rate in zip(drawn, values, strict=True) if name == label]
        figures[f"curriculum/share/{label}"] = len(of_label) / len(drawn)
        scored = [rate for rate in of_label if rate == rate]
        if scored:
            figures[f"curriculum/pass_rate/{label}"] = sum(scored) / len(scored)
    own = curriculum.figures(before.arrays, after.arrays)
    return figures | {f"curriculum/{name}": float(value) for name, value in own.items()}


PassRate = Callable[[Reward], Tensor]


def reward_at_least(reward: Reward, *, threshold: float) -> Float[Tensor, "P"]:
    """The share of each problem's samples whose reward is `threshold` or more, of those that could be scored.

    Args:
        threshold: least reward of a sample that passes.
    """
    return _share(reward.value >= threshold, reward.valid)


def part_at_least(reward: Reward, *, part: str, threshold: float) -> Float[Tensor, "P"]:
    """The share of each problem's samples with `threshold` or more in one part of the reward, as `reward_at_least`.

    Args:
        part: name of the part.
        threshold: least score of a sample that passes.

    Raises:
        ValueError: for a part that the reward does not have.
    """
    if part not in reward.parts:
        raise ValueError(f"part: got {part!r}, expected one of {', '.join(reward.parts) or 'none'}")
    return _share(reward.parts[part] >= threshold, reward.valid)


def uniform_arms(*, pass_rate: PassRate) -> Curriculum:
    """Every arm alike, whatever the pass rates: what the others are compared with."""
    return Curriculum(
        start=lambda arms, key: {"arms": torch.tensor(arms)},
        select=lambda state, key, count: spread_choice(torch.ones(int(state["arms"])), key, count),
        update=lambda state, arms, rates: state,
        pass_rate=pass_rate,
    )


def threshold_levels(
    *, threshold: float, decay: float, min_groups: int, review: float, pass_rate: PassRate
) -> Curriculum:
    """One level after another, in the order of the arms: the next one when the pass rate is `threshold` or more.

    `curriculum/level` is the number of the level, from 0.

    Args:
        threshold: average pass rate of the level from which on the next one is asked, in (0, 1].
        min_groups: problems of a level that are asked at least.
        review: share of the draws that goes to the levels before, all of them alike, in [0, 1).

    Raises:
        ValueError: for numbers outside of these ranges.
    """
    _check_ranges(threshold=(0 < threshold <= 1, threshold), decay=(0 <= decay < 1, decay))
    _check_ranges(review=(0 <= review < 1, review), min_groups=(min_groups >= 1, min_groups))

    def select(state: Arrays, key: Tensor, count: int) -> Tensor:
        level = int(state["level"])
        weights = torch.zeros(len(state["rate"]), dtype=torch.float64)
        weights[:level] = review / max(level, 1)
        weights[level] = 1 - review if level else 1.0
        return spread_choice(weights, key, count)

    def update(state: Arrays, arms: Tensor, rates: Tensor) -> Arrays:
        after = _averaged(state, arms, {"rate": (decay, rates)})
        now = int(state["level"])
        passed = float(after["rate"][now]) >= threshold and int(after["asked"][now]) >= min_groups
        return {"level": state["level"] + int(passed and now + 1 < len(after["rate"])), **after}

    return Curriculum(
        start=lambda arms, key: {"level": torch.tensor(0), **_unasked(arms, "rate")},
        select=select,
        update=update,
        figures=lambda before, after: {"level": float(after["level"])},
        pass_rate=pass_rate,
    )


def learnability_bandit(*, temperature: float, decay: float, floor: float, pass_rate: PassRate) -> Curriculum:
    """Arms by a softmax over the variance p (1 - p) of their problems' verdicts, the most where half of them pass.

    Learnability of Foster et al. 2025 (arXiv:2502.12272), over arms in the place of single questions.

        weight = (1 - floor) softmax(v / (temperature max v)) + floor / A,   v = average of p (1 - p) over groups

    An arm that was not asked yet counts as p = 1/2.

    Raises:
        ValueError: for numbers outside of these ranges, or a temperature that is not above 0.
    """
    _check_ranges(decay=(0 <= decay < 1, decay))

    def score(state: Arrays) -> Tensor:
        return torch.where(state["asked"] > 0, state["variance"], 0.25)

    def update(state: Arrays, arms: Tensor, rates: Tensor) -> Arrays:
        return _averaged(state, arms, {"variance": (decay, rates * (1 - rates))})

    return _bandit(("variance",), score, update, temperature, floor, pass_rate)


def progress_bandit(
    *, temperature: float, decay: float, slow_decay: float, floor: float, pass_rate: PassRate
) -> Curriculum:
    """Arms by a softmax over learning progress: how fast their pass rate moves, up or down.

    After Matiisen et al. 2017, Teacher-Student Curriculum Learning (arXiv:1707.00183), who take the slope of the score,
    and its absolute value against forgetting; here it is the distance of a fast average from a slow one. An arm that
    was not asked yet counts as the best.

    Args:
        slow_decay: of the slow one, between `decay` and 1.

    Raises:
        ValueError: for numbers outside of these ranges, or a temperature that is not above 0.
    """
    _check_ranges(decay=(0 <= decay < 1, decay), slow_decay=(decay < slow_decay < 1, slow_decay))

    def score(state: Arrays) -> Tensor:
        moved = (state["fast"] - state["slow"]).abs()
        return torch.where(state["asked"] > 0, moved, moved.max().clamp(min=1e-3))

    def update(state: Arrays, arms: Tensor, rates: Tensor) -> Arrays:
        return _averaged(state, arms, {"fast": (decay, rates), "slow": (slow_decay, rates)})

    return _bandit(("fast", "slow"), score, update, temperature, floor, pass_rate)


def _bandit(
    averages: tuple[str, ...],
    score: Callable[[Arrays], Tensor],
    update: Callable[[Arrays, Tensor, Tensor], Arrays],
    temperature: float,
    floor: float,
    pass_rate: PassRate,
) -> Curriculum:
    """Arms by a softmax over a score of their averages, in units of the best one's."""
    _check_ranges(temperature=(temperature > 0, temperature), floor=(0 <= floor <= 1, floor))

    def select(state: Arrays, key: Tensor, count: int) -> Tensor:
        value = score(state)
        scaled = value / value.max().clamp(min=torch.finfo(torch.float64).tiny)
        weights = (1 - floor) * (scaled / temperature).softmax(0) + floor / len(value)
        return spread_choice(weights, key, count)

    return Curriculum(
        start=lambda arms, key: _unasked(arms, *averages), select=select, update=update, pass_rate=pass_rate
    )


def _unasked(arms: int, *averages: str) -> Arrays:
    """Averages of arms that were not asked yet, and how often each was."""
    zeros = {name: torch.zeros(arms, dtype=torch.float64) for name in averages}
    return {**zeros, "asked": torch.zeros(arms, dtype=torch.int64)}


def _averaged(state: Arrays, arms: Tensor, values: Mapping[str, tuple[float, Tensor]]) -> Arrays:
    """The averages after a step, each of (decay, what is averaged for each of `arms`), and how often each was asked."""
    asked, after = state["asked"], {}
    for name, (decay, of_step) in values.items():
        mean, number = step_means(arms, of_step, len(asked))
        after[name] = average_rates(state[name], asked, mean, number, decay)
    return {**after, "asked": asked + arms.bincount(minlength=len(asked))}


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


def _check_ranges(**knobs: tuple[bool, int | float]) -> None:
    ranges = {
        **{"threshold": "more than 0 and at most 1", "decay": "0 or more and below 1", "floor": "0 to 1"},
        **{"slow_decay": "more than decay and below 1", "review": "0 or more and below 1"},
        **{"min_groups": "at least 1", "temperature": "more than 0"},
    }
    for name, (fits, value) in knobs.items():
        if not fits:
            raise ValueError(f"curricula {name}: got {value}, expected {ranges[name]}")


# A pool of problems.


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
        min_asked: problems of an arm before it is judged.

    Returns:
        The curriculum, with `curriculum/pool_size`, `curriculum/admitted`, `curriculum/retired`, `curriculum/set_aside`
        (of the step) and `curriculum/fresh`, the arms that were never asked.

    Raises:
        ValueError: for numbers outside of these ranges.
    """
    if size < 1 or min_asked < 1:
        raise ValueError(f"pool_in_band: got size {size} and min_asked {min_asked}, expected at least 1 of each")
    if not (0 <= low <= high <= 1 and 0 <= decay < 1):
        raise ValueError(
            f"pool_in_band: got low {low}, high {high}, decay {decay}, expected 0 <= low <= high <= 1 and 0 <= decay "
            "< 1"
        )

    def start(arms: int, key: Tensor) -> Arrays:
        place = torch.zeros(arms, dtype=torch.int64)  # in the queue
        place[prng.permutation(key, arms)] = torch.arange(arms)
        return {"place": place, "member": place < size, **_unasked(arms, "rate")}

    def select(state: Arrays, key: Tensor, count: int) -> Tensor:
        order = prng.permutation(key, len(state["member"]))
        members = order[state["member"][order]]
        return members[torch.arange(count) % len(members)]

    def update(state: Arrays, arms: Tensor, rates: Tensor) -> Arrays:
        member, place, after = state["member"], state["place"], _averaged(state, arms, {"rate": (decay, rates)})
        rate, asked = after["rate"], after["asked"]
        stays = member & ~((asked >= min_asked) & ((rate > high) | (rate < low)))
        missing = int(member.sum() - stays.sum())
        turn = torch.where(stays, asked.max() + 1, asked) * len(place) + place  # of members: behind all the others
        admitted = torch.zeros_like(member)
        admitted[turn.argsort()[:missing]] = True
        return {"place": place, "member": stays | admitted, **after}

    def figures(before: Arrays, after: Arrays) -> dict[str, float]:
        gone = before["member"] & ~after["member"]
        return {
            "pool_size": float(after["member"].sum()),
            "admitted": float((after["member"] & ~before["member"]).sum()),
            "retired": float((gone & (after["rate"] > high)).sum()),
            "set_aside": float((gone & (after["rate"] <= high)).sum()),
            "fresh": float((after["asked"] == 0).sum()),
        }

    return Curriculum(start=start, select=select, update=update, figures=figures, pass_rate=pass_rate)
