"""Several tasks in one stream, each with its share. Which part a draw belongs to is a function of (key, index) alone.

The stream is made of blocks. A block has a whole number of draws of each part, in the ratio of the weights, so shares
are exact over whole blocks, and a part's place in its own stream is known without counting: every part is walked
without a gap, epoch by epoch. Within a block draws are spread: the j-th of a part's c stands at (j + u) / c of the
block, u uniform, and the block is the order of these places. So a stretch of the stream is off its shares by less
than the number of parts at each of its two ends, and still has no rhythm that could fall in with ranks or minibatches.

    tasks     function that makes each part, by the part's name
    base      function that makes the task, whose held-out problems stay
    returns   the task
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from itertools import islice
from math import gcd, isfinite, lcm

import torch
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import (
    FrozenKey,
    Predicate,
    Task,
    check_index,
    different_prompts,
    filter_rows,
    frozen_key,
    list_places,
    narrow_rows,
    normalize_prompt,
    number_rows,
    number_tests,
    place_of,
    thawed_key,
    turn_and_arm,
    with_notes,
)

LARGEST_BLOCK = 10_000  # draws
_AT_ONCE = 256  # draws at least whose places are found at once: a tensor operation for each would dominate

Parts = tuple[tuple[str, Task, int], ...]  # name, task, draws in a block


def task(*, tasks: Mapping[str, Callable[[], Task]], weights: Mapping[str, int | float]) -> Task:
    """The named tasks in one stream, in the ratio of their weights, with all of their held-out problems.

    `meta["task"]` names a problem's part, in training and in the held-out set, which has one part after the other in
    the order given. `size` is the number of training rows of the parts that are drawn. A training row of one part that
    is a held-out problem of another is left out and noted.

    Args:
        weights: weight of each part in the stream, by the same names; a part of weight 0 adds held-out problems alone.

    Raises:
        ValueError: when names differ, for weights as `whole_counts`, for a weight on a task without training rows, and
            what a part raises, with its name.
    """
    test, notes, parts = _apart_parts(tasks, weights)
    counts = [(name, count) for name, _, count in parts]
    shares = ", ".join(f"{count} of {name}" for name, count in counts)
    return _over(test, (f"of every {sum(n for _, n in counts)} training problems: {shares}", *notes), parts)


def arms(*, tasks: Mapping[str, Callable[[], Task]]) -> Task:
    """The named tasks as arms of one task, for a curriculum to choose among: problem `turn * A + arm` is the arm's own.

    Parts are levels from the easy to the hard; `meta["task"]` names a problem's part. Raises ValueError as `task` does,
    and for a part without training rows.
    """
    test, notes, parts = _apart_parts(tasks, dict.fromkeys(tasks, 1))
    return _with_arms(test, notes, parts)


def whole_counts(weights: Sequence[int | float]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratio of the weights; a float counts as the decimal it is printed as.

    Raises ValueError for other weights, and when the numbers add up to more than `LARGEST_BLOCK`.
    """
    numbers = all(isinstance(weight, int | float) and isfinite(weight) and weight >= 0 for weight in weights)
    if not numbers or not any(weights):
        raise ValueError(f"weights: got {list(weights)}, expected finite numbers from 0 up, not all of them 0")
    ratio = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(share.denominator for share in ratio))
    whole = [int(share * scale) for share in ratio]
    counts = tuple(count // gcd(*whole) for count in whole)
    if sum(counts) > LARGEST_BLOCK:
        raise ValueError(
            f"weights: got {list(weights)}, a ratio of whole numbers that add up to {sum(counts)}, expected at most "
            f"{LARGEST_BLOCK}, as 3 and 1 do"
        )
    return counts


def part_at(key: Tensor, index: int, counts: tuple[int, ...]) -> tuple[int, int]:
    """The part that is drawn at `index` of the stream under `key`, and its place in its own stream."""
    block, there = divmod(index, sum(counts))
    at_once = -(-_AT_ONCE // sum(counts))
    part, before = _blocks(frozen_key(key), block // at_once, at_once, counts)[block % at_once][there]
    return part, block * counts[part] + before


@lru_cache(maxsize=16)
def _blocks(frozen: FrozenKey, chunk: int, at_once: int, counts: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """The turns of `at_once` blocks: (part, its turns before in the same block)."""
    turns = [(part, j) for part, count in enumerate(counts) for j in range(count)]
    before = torch.tensor([j for _, j in turns])
    count = torch.tensor([counts[part] for part, _ in turns])
    key = prng.fold_in(thawed_key(frozen), chunk)
    u = prng.uniform(key, at_once, len(turns), dtype=torch.float64, low=0.0, high=1.0)
    order = ((before + u) / count).argsort(dim=-1, stable=True)
    return [[turns[i] for i in block] for block in order.tolist()]


def _apart_parts(
    tasks: Mapping[str, Callable[[], Task]], weights: Mapping[str, int | float]
) -> tuple[tuple[Problem, ...], list[str], Parts]:
    """All held-out problems, the notes of the parts, and the parts without what is held out in any of them."""
    if set(tasks) != set(weights):
        raise ValueError(
            f"weights: got {', '.join(weights) or 'none'}, expected one each of {', '.join(tasks) or 'none'}"
        )
    counts = whole_counts([weights[name] for name in tasks])
    parts = [(name, _of(name, make), count) for (name, make), count in zip(tasks.items(), counts, strict=True)]
    for name, part, count in parts:
        if count and not part.size:
            raise ValueError(f"weights: got {weights[name]} for {name}, which has no training rows, expected 0")
    test = number_tests([_named(name, problem) for name, part, _ in parts for problem in part.test])
    apart = tuple((name, _apart(name, part, test) if count else part, count) for name, part, count in parts)
    return test, [f"{name}: {line}" for name, part, _ in apart for line in part.notes], apart


def _with_arms(test: tuple[Problem, ...], notes: Sequence[str], parts: Parts) -> Task:
    def train(key: Tensor, index: int) -> Problem:
        turn, arm = turn_and_arm(index, len(parts))
        name, part, _ = parts[arm]
        return _named(name, part.train(_keys(frozen_key(key), 1 + len(parts))[1 + arm], turn))._replace(uid=index)

    def narrow(task: Task, predicate: Predicate) -> Task:
        left = tuple((name, _kept(name, part, predicate), count) for name, part, count in parts)
        return _with_arms(task.test, task.notes, left)

    whole = _over(test, tuple(notes), parts)
    return whole._replace(train=train, narrow=narrow, arms=tuple(name for name, _, _ in parts))


def _over(test: tuple[Problem, ...], notes: tuple[str, ...], parts: Parts) -> Task:
    def train(key: Tensor, index: int) -> Problem:
        check_index(index)
        order, *keys = _keys(frozen_key(key), 1 + len(parts))
        turn, before = part_at(order, index, tuple(count for _, _, count in parts))
        name, part, _ = parts[turn]
        return _named(name, part.train(keys[turn], before))._replace(uid=index)

    def narrow(task: Task, predicate: Predicate) -> Task:
        left = tuple((name, _kept(name, part, predicate) if count else part, count) for name, part, count in parts)
        return _over(task.test, task.notes, left)

    drawn = [(name, part) for name, part, count in parts if count]
    rows = tuple(_named(name, row) for name, part in drawn for row in part.rows)
    return Task(train, test, sum(part.size for _, part in drawn), rows, narrow, notes)


@lru_cache(maxsize=16)
def _keys(frozen: FrozenKey, count: int) -> tuple[Tensor, ...]:
    """Keys of streams: in a mixture the key of the order, then that of each part's own stream."""
    return tuple(prng.split(thawed_key(frozen), count))


def _kept(name: str, part: Task, predicate: Predicate) -> Task:
    return _of(name, lambda: filter_rows(part, lambda row: predicate(_named(name, row)))[0])


def _of(name: str, make: Callable[[], Task]) -> Task:
    """The problem, or an error that names the part."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _apart(name: str, part: Task, test: Sequence[Problem]) -> Task:
    """The part without the rows that are held out anywhere in the mixture."""
    held_out = {normalize_prompt(problem.prompt) for problem in test}
    shared = [place_of(row) for row in part.rows if normalize_prompt(row.prompt) in held_out]
    if not shared:
        return part
    left = _kept(name, part, lambda row: normalize_prompt(row.prompt) not in held_out)
    line = f"left out {len(shared)} training rows that are held-out problems of another part: {list_places(shared)}"
    return with_notes(left, line)


def _named(name: str, problem: Problem) -> Problem:
    return problem._replace(meta={**problem.meta, "task": name})


# -- Tasks with arms: levels or rows that a curriculum chooses among, where a stream has them one after the other.
#
# Problem `turn * A + arm` of the stream is problem number `turn` of the arm. Without a curriculum the stream takes them
# in turn, each as often as every other. `mixture.arms` makes arms of several tasks.


_ROWS_SEED = 20_261_125  # of the problems that become rows, for every run and every seed alike


def levels(*, base: Callable[[], Task]) -> Task:
    """A task over rows, an arm for each level of `meta["level"]`, in ascending order; each arm is walked by epochs.

    Raises ValueError for a task without rows, and for a row without a level.
    """
    return _of_levels(base())


def rows(*, base: Callable[[], Task], size: int) -> Task:
    """A task whose arms are single rows, each of which can be asked again and again, with other randomness each time.

    Args:
        size: rows, the first ones; of a task that makes its problems as they are drawn, the first different ones of a
            fixed stream. 0: all rows of a task that has them.

    Raises:
        ValueError: for a size below 0, or 0 for a task without rows; and where there are not so many.
    """
    made = base()
    if size < 0 or (size == 0 and not made.rows):
        raise ValueError(
            f"mixture.rows size: got {size}, expected how many of the problems, which are made as they are drawn"
        )
    key = prng.key(_ROWS_SEED, device="cpu")
    drawn = (made.train(key, index) for index in range(20 * size))
    found = made.rows or tuple(islice(different_prompts(drawn), size))
    if len(found) < size:
        raise ValueError(f"mixture.rows size: got {size}, expected at most the {len(found)} rows that there are")
    return _of_rows(made, number_rows(found)[: size or None])


def _of_levels(made: Task) -> Task:
    without = [row for row in made.rows if "level" not in row.meta]
    if not made.rows or without:
        got = f"row {without[0].meta.get('row')} without one" if without else "a task without rows"
        raise ValueError(f"mixture.levels: got {got}, expected rows with meta['level']")
    values = sorted({row.meta["level"] for row in made.rows}, key=lambda level: (level is None, level))
    parts = tuple(filter_rows(made, lambda row, level=level: row.meta["level"] == level)[0] for level in values)

    def train(key: Tensor, index: int) -> Problem:
        turn, arm = turn_and_arm(index, len(parts))
        return parts[arm].train(_keys(frozen_key(key), len(parts))[arm], turn)._replace(uid=index)

    def narrow(task: Task, predicate: Predicate) -> Task:
        left = _of_levels(filter_rows(made, predicate)[0])
        return left._replace(test=task.test, notes=task.notes)

    return made._replace(train=train, narrow=narrow, arms=tuple(f"level_{level}" for level in values))


def _of_rows(made: Task, chosen: tuple[Problem, ...]) -> Task:
    return made._replace(
        train=lambda key, index: chosen[turn_and_arm(index, len(chosen))[1]]._replace(uid=index),
        size=len(chosen),
        rows=chosen,
        narrow=partial(narrow_rows, _of_rows),
        arms=tuple(_label(row) for row in chosen),
    )


def _label(row: Problem) -> str:
    """By what metrics count rows together: part and level, where they have them."""
    named = [str(row.meta["task"])] if "task" in row.meta else []
    return "_".join([*named, *([f"level_{row.meta['level']}"] if "level" in row.meta else [])]) or "rows"
