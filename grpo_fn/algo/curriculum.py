"""Curricula that follow the policy: which arms a step asks, as pure functions over a state that is carried.

An arm is what a curriculum chooses among: a level, a part of a mixture, or a row. A task with A arms numbers its stream
so that problem `turn * A + arm` is the arm's own problem number `turn`; so a problem's uid says which arm it is of, and
no two draws share a uid.
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
    """How a run chooses among the arms of its task. All four are pure functions, and everything is on the CPU."""

    start: Callable[[int, Tensor], Arrays]  # (arms, key) -> the state before the first step
    select: Callable[[Arrays, Tensor, int], Tensor]  # (state, key of these draws, count) -> arms, int64 [count]
    update: Callable[[Arrays, Tensor, Tensor], Arrays]  # (state, arms [N], pass rates [N]) -> the next step's state
    figures: Callable[[Arrays, Arrays], Mapping[str, float]]  # (state before the step, state after it) -> metrics
    pass_rate: Callable[[Reward], Tensor]  # rewards -> share of each problem's samples that pass, [P]; NaN: not known


def begin_curriculum(curriculum: Curriculum, arms: int, key: Int[Tensor, "2"]) -> CurriculumState:
    """The state before the first step: no arm has had a turn. Raises ValueError for a task without arms."""
    if arms < 1:
        raise ValueError(
            "train.train.curriculum: got a task without arms to choose among, wanted one that has them: "
            "@mixture.arms, @arms.levels or @arms.rows as sections.Data.task"
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
        found = GroupBatch(groups, groups, carried._replace(drawn=carried.drawn + prompts), {})
    else:
        found = group_sampling(explore, carried, prompts)
    before, uids = carried.curriculum, [problem.uid for problem in found.fresh.problems]
    rates = curriculum.pass_rate(found.fresh.reward)
    if rates.shape != (len(uids),):
        raise ValueError(
            f"curriculum.pass_rate: got shape {[*rates.shape]}, wanted [{len(uids)}], one for each problem"
        )
    after = update_curriculum(curriculum, before, uids, rates)
    figures = curriculum_figures(curriculum, labels, before, after, uids, rates)
    moved = found.carried._replace(curriculum=after)
    return found._replace(carried=moved, figures={**found.figures, **figures})


def choose_uids(
    curriculum: Curriculum, state: CurriculumState, key: Int[Tensor, "2"], drawn: int, first: int, count: int
) -> list[int]:
    """The uids of draws first, ..., first + count - 1, each a turn of an arm that it had not before.

    Draws are chosen in batches of `count` from `drawn` on, each with a key of its own, by the state before the step: so
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
        raise ValueError(f"curriculum.select: got {got}, wanted torch.int64 of shape [{count}]")
    odd = [arm for arm in chosen.tolist() if not 0 <= arm < arms]
    if odd:
        raise ValueError(f"curriculum.select: got arm {odd[0]}, wanted 0 to {arms - 1}")
    return chosen.tolist()


def update_curriculum(
    curriculum: Curriculum, state: CurriculumState, uids: Sequence[int], rates: Float[Tensor, "P"]
) -> CurriculumState:
    """The state of the next step. Problems of which no sample could be scored count as asked, and say nothing.

    Raises ValueError where the curriculum returns arrays of other names, shapes or dtypes than before.
    """
    arms = torch.tensor([uid % len(state.turns) for uid in uids], dtype=torch.int64)
    rates = rates.detach().to("cpu", torch.float64)
    known = ~rates.isnan()
    arrays = curriculum.update(state.arrays, arms[known], rates[known])
    check_arrays(arrays, state.arrays, "curriculum.update")
    return CurriculumState(state.turns + arms.bincount(minlength=len(state.turns)), arrays)


def check_arrays(got: Arrays, wanted: Arrays, what: str) -> None:
    """Raise ValueError unless arrays have the names, shapes and dtypes of others; `what` made them."""
    shown = [{name: f"{x.dtype} {[*x.shape]}" for name, x in some.items()} for some in (got, wanted)]
    if shown[0] != shown[1]:
        raise ValueError(f"{what}: got arrays {shown[0]}, wanted {shown[1]}")


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
    label was asked and could be scored.
    """
    found: dict[str, float] = {}
    asked = [labels[uid % len(labels)] for uid in uids]
    values = rates.detach().to("cpu", torch.float64).tolist()
    for label in dict.fromkeys(labels):
        mine = [rate for one, rate in zip(asked, values, strict=True) if one == label]
        found[f"curriculum/share/{label}"] = len(mine) / len(asked)
        known = [rate for rate in mine if rate == rate]
        if known:
            found[f"curriculum/pass_rate/{label}"] = sum(known) / len(known)
    own = curriculum.figures(before.arrays, after.arrays)
    return found | {f"curriculum/{name}": float(value) for name, value in own.items()}
