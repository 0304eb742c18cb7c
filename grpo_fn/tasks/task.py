"""What a task is: an endless keyed stream of training problems and a fixed held-out set."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fn import prng
from grpo_fn.problem import Problem

# Held-out problems are numbered from here, far above any training index: no test problem shares a uid, and with it
# the sampler's randomness, with a training draw.
TEST_UID = 1 << 31


class Task(NamedTuple):
    """`train(key, index)` is a pure function with `uid == index`, any index >= 0; `test` never meets it."""

    train: Callable[[Tensor, int], Problem]
    test: tuple[Problem, ...]
    size: int  # training rows per epoch


def from_rows(rows: Sequence[Problem], test: Sequence[Problem]) -> Task:
    """The task that walks `rows` epoch by epoch, each epoch in its own keyed order.

    Stream index i draws row `permutation(fold_in(key, i // size))[i % size]`; the problem's uid is i and
    `meta["row"]` names the row, so the same row drawn in two epochs is asked with different randomness.
    Raises ValueError when there are no rows.
    """
    if len(rows) == 0:
        raise ValueError("a task needs training rows: got none, wanted at least one")
    return Task(partial(_draw, tuple(rows)), number_tests(test), len(rows))


def number_tests(test: Sequence[Problem]) -> tuple[Problem, ...]:
    """The held-out problems with uids `TEST_UID, TEST_UID + 1, ...` in their given order."""
    return tuple(problem._replace(uid=TEST_UID + i) for i, problem in enumerate(test))


def train_problems(task: Task, key: Tensor, start: int, count: int) -> tuple[Problem, ...]:
    """Training problems `start, ..., start + count - 1` of the stream under `key`."""
    return tuple(task.train(key, index) for index in range(start, start + count))


def frozen_key(key: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """A key as a hashable value, for caches; `thawed_key` turns it back."""
    return tuple(key.tolist()), key.dtype


def thawed_key(frozen: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
    """The CPU key that `frozen_key` froze."""
    words, dtype = frozen
    return torch.tensor(words, dtype=dtype)


def _draw(rows: tuple[Problem, ...], key: Tensor, index: int) -> Problem:
    if index < 0:
        raise ValueError(f"training index: got {index}, wanted an integer >= 0")
    epoch, place = divmod(index, len(rows))
    row = _order(frozen_key(key), epoch, len(rows))[place]
    return rows[row]._replace(uid=index, meta={**rows[row].meta, "row": row})


# A step that straddles two epochs needs two orders; evaluation of several tasks a few more.
@lru_cache(maxsize=8)
def _order(frozen: tuple[tuple[int, ...], torch.dtype], epoch: int, size: int) -> tuple[int, ...]:
    return tuple(prng.permutation(prng.fold_in(thawed_key(frozen), epoch), size).tolist())
