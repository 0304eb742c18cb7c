"""A curriculum by level, as a task that wraps another: how much of which level is a function of the index alone."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.mixture import part_at
from grpo_fn.tasks.task import FrozenKey, Predicate, Task, filter_rows, frozen_key, thawed_key, with_notes

Stages = Sequence[Mapping[int, int]]


def task(*, base: Callable[[], Task], stages: Stages, stage_draws: int) -> Task:
    """The rows of `base` level by level: training problem i is of stage `i // stage_draws`, the last stage goes on.

    A stage says how many of each level it asks in every so many draws: `{1: 3, 2: 1}` is three of level 1 to one of
    level 2. A level's rows are walked without a gap through all stages, and nothing has to be remembered: the state
    of the curriculum is the index, so resume is exact. The held-out set is that of `base`.

    Raises ValueError when a stage does not fit into `stage_draws` a whole number of times, or names a level of which
    there is no row.
    """
    totals = [sum(stage.values()) for stage in stages]
    if not stages or any(n < 0 for stage in stages for n in stage.values()) or not all(totals):
        raise ValueError(
            f"stages: got {stages!r}, expected at least one, each with a draw of some level and none below 0"
        )
    if stage_draws < 1 or any(stage_draws % total for total in totals):
        raise ValueError(f"stage_draws: got {stage_draws}, expected a multiple of each stage's draws: {totals}")
    return _over(base(), stages, stage_draws)


def _over(base: Task, stages: Stages, stage_draws: int) -> Task:
    levels = sorted({level for stage in stages for level, count in stage.items() if count})
    parts = tuple(_of_level(base, level) for level in levels)
    counts = tuple(tuple(stage.get(level, 0) for level in levels) for stage in stages)
    left_out = base.size - sum(part.size for part in parts)
    made = base._replace(
        train=partial(_train, parts, counts, stage_draws),
        size=base.size - left_out,
        rows=tuple(row for part in parts for row in part.rows),
        narrow=partial(_narrow, base, stages, stage_draws),
    )
    return with_notes(made, f"left out {left_out} rows of levels that no stage asks") if left_out else made


def _of_level(base: Task, level: int) -> Task:
    try:
        return filter_rows(base, lambda row: row.meta["level"] == level)[0]
    except ValueError as error:
        raise ValueError(f"level {level}: {error}") from error


def _train(parts: Sequence[Task], counts: Sequence[tuple[int, ...]], stage_draws: int, key: Tensor, i: int) -> Problem:
    if i < 0:
        raise ValueError(f"training index: got {i}, expected an integer >= 0")
    stage = min(i // stage_draws, len(counts) - 1)
    orders, streams = _keys(frozen_key(key), len(counts), len(parts))
    part, before = part_at(orders[stage], i - stage * stage_draws, counts[stage])
    before += sum(stage_draws // sum(past) * past[part] for past in counts[:stage])
    return parts[part].train(streams[part], before)._replace(uid=i)


@lru_cache(maxsize=4)
def _keys(frozen: FrozenKey, stages: int, parts: int) -> tuple[Tensor, Tensor]:
    """The key of each stage's order, and that of each level's own stream."""
    orders, streams = prng.split(thawed_key(frozen), 2)
    return prng.split(orders, stages), prng.split(streams, parts)


def _narrow(base: Task, stages: Stages, stage_draws: int, task: Task, predicate: Predicate) -> Task:
    left = _over(filter_rows(base, predicate)[0], stages, stage_draws)
    return left._replace(test=task.test, notes=task.notes)
