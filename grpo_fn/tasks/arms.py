"""Tasks with arms: levels or rows that a curriculum chooses among, where a stream has them one after the other.

Problem `turn * A + arm` of the stream is problem number `turn` of the arm. Without a curriculum the stream takes them
in turn, each as often as every other. `mixture.arms` makes arms of several tasks.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import (
    FrozenKey,
    Predicate,
    Task,
    filter_rows,
    frozen_key,
    normalize_prompt,
    number_rows,
    thawed_key,
    turn_and_arm,
)

_ROWS_SEED = 20_261_125  # of the problems that become rows, for every run and every seed alike


def levels(*, base: Callable[[], Task]) -> Task:
    """A task over rows, an arm for each level of `meta["level"]`, in ascending order; each arm is walked by epochs.

    Args:
        base: makes the task.

    Returns:
        The task, with the held-out problems of `base`.

    Raises:
        ValueError: for a task without rows, and for a row without a level.
    """
    return _of_levels(base())


def rows(*, base: Callable[[], Task], size: int) -> Task:
    """A task whose arms are single rows, each of which can be asked again and again, with other randomness each time.

    Args:
        base: makes the task.
        size: rows, the first ones; of a task that makes its problems as they are drawn, the first different ones of a
            fixed stream. 0: all rows of a task that has them.

    Returns:
        The task, with the held-out problems of `base`.

    Raises:
        ValueError: for a size below 0, or 0 for a task without rows; and where there are not so many.
    """
    made = base()
    if size < 0 or (size == 0 and not made.rows):
        raise ValueError(
            f"arms.rows size: got {size}, wanted how many of the problems, which are made as they are drawn"
        )
    found = made.rows or _first_different(made, size)
    if len(found) < size:
        raise ValueError(f"arms.rows size: got {size}, wanted at most the {len(found)} rows that there are")
    return _of_rows(made, number_rows(found)[: size or None])


def _of_levels(made: Task) -> Task:
    without = [row for row in made.rows if "level" not in row.meta]
    if not made.rows or without:
        got = f"row {without[0].meta.get('row')} without one" if without else "a task without rows"
        raise ValueError(f"arms.levels: got {got}, wanted rows with meta['level']")
    values = sorted({row.meta["level"] for row in made.rows}, key=lambda level: (level is None, level))
    parts = tuple(filter_rows(made, lambda row, level=level: row.meta["level"] == level)[0] for level in values)
    return made._replace(
        train=partial(_train_level, parts),
        narrow=partial(_narrow_levels, made),
        arms=tuple(f"level_{level}" for level in values),
    )


def _train_level(parts: Sequence[Task], key: Tensor, index: int) -> Problem:
    turn, arm = turn_and_arm(index, len(parts))
    return parts[arm].train(_arm_keys(frozen_key(key), len(parts))[arm], turn)._replace(uid=index)


@lru_cache(maxsize=16)
def _arm_keys(frozen: FrozenKey, count: int) -> tuple[Tensor, ...]:
    return tuple(prng.split(thawed_key(frozen), count))


def _narrow_levels(made: Task, task: Task, predicate: Predicate) -> Task:
    left = _of_levels(filter_rows(made, predicate)[0])
    return left._replace(test=task.test, notes=task.notes)


def _first_different(made: Task, size: int) -> tuple[Problem, ...]:
    key = prng.key(_ROWS_SEED, device="cpu")
    found: dict[str, Problem] = {}
    for index in range(20 * size):
        problem = made.train(key, index)
        found.setdefault(normalize_prompt(problem.prompt), problem)
        if len(found) == size:
            break
    return tuple(found.values())


def _of_rows(made: Task, chosen: tuple[Problem, ...]) -> Task:
    return made._replace(
        train=partial(_train_row, chosen),
        size=len(chosen),
        rows=chosen,
        narrow=_narrow_chosen,
        arms=tuple(_label(row) for row in chosen),
    )


def _train_row(chosen: Sequence[Problem], key: Tensor, index: int) -> Problem:
    return chosen[turn_and_arm(index, len(chosen))[1]]._replace(uid=index)


def _narrow_chosen(task: Task, predicate: Predicate) -> Task:
    left = tuple(filter(predicate, task.rows))
    if not left:
        raise ValueError(f"training rows: got {task.size}, of which none may stay, wanted at least one that does")
    return _of_rows(task, left)


def _label(row: Problem) -> str:
    """By what metrics count rows together: part and level, where they have them."""
    named = [str(row.meta["task"])] if "task" in row.meta else []
    return "_".join([*named, *([f"level_{row.meta['level']}"] if "level" in row.meta else [])]) or "rows"
