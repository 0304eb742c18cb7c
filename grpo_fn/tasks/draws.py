"""Problems that are made of uniform random numbers as they are drawn, and the held-out ones among them."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from itertools import count as count_from

import torch
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import FrozenKey, Task, frozen_key, generated_task, thawed_key

_SPLIT_SEED = 20_261_125  # decides what is held out, for every run and every seed alike
_BLOCK = 256  # problems whose random numbers are made at once: a tensor operation per problem would dominate
_ATTEMPTS = 1 << 33  # of the key's children: those from which a problem that is held out is drawn again

Make = Callable[[Sequence[float]], Problem]


def drawn_task(
    make: Make, content: Callable[[Problem], Hashable], *, width: int, contents: int, test_size: int
) -> Task:
    """The task of problems that `make` makes of `width` uniforms each, held out by their content.

    The held-out ones are the first `test_size` of different content that a fixed key draws; so a larger test_size
    extends a smaller one. A training problem with the content of one of them is drawn again.

    Args:
        make: numbers in [0, 1) -> the problem; any uid.
        content: what is asked, without the words.
        width: how many numbers a problem takes.
        contents: how many contents there are.
        test_size: held-out problems.

    Returns:
        The task; an epoch is as many problems as there are contents that are not held out.

    Raises:
        ValueError: for a test_size below 1 or above half of the contents.
    """
    if not 1 <= test_size <= contents // 2:
        raise ValueError(f"test_size: got {test_size}, wanted 1 to {contents // 2}, half of the {contents} contents")
    split = frozen_key(prng.key(_SPLIT_SEED, device="cpu"))
    test: dict[Hashable, Problem] = {}
    for index in count_from():
        problem = make(block_uniforms(split, width, index))
        test.setdefault(content(problem), problem)
        if len(test) == test_size:
            break
    train = partial(_train, make, content, width, frozenset(test))
    return generated_task(train, list(test.values()), contents - test_size)


def block_uniforms(frozen: FrozenKey, width: int, index: int) -> list[float]:
    """The uniforms of one problem: a row of its block, so that reading a stream in order makes each block once.

    Args:
        frozen: the stream's key, from `frozen_key`.
        width: numbers of a problem.
        index: place of the problem in the stream, from 0.

    Returns:
        `width` numbers in [0, 1).
    """
    return _block(frozen, width, index // _BLOCK)[index % _BLOCK]


def _train(
    make: Make, content: Callable[[Problem], Hashable], width: int, held_out: frozenset, key: Tensor, index: int
) -> Problem:
    if index < 0:
        raise ValueError(f"training index: got {index}, wanted an integer >= 0")
    frozen = frozen_key(key)
    for attempt in count_from():
        problem = make(block_uniforms(frozen, width, index))
        if content(problem) not in held_out:
            return problem._replace(uid=index)
        frozen = frozen_key(prng.fold_in(key, _ATTEMPTS + attempt))


@lru_cache(maxsize=64)
def _block(frozen: FrozenKey, width: int, block: int) -> list[list[float]]:
    key = prng.fold_in(thawed_key(frozen), block)
    return prng.uniform(key, _BLOCK, width, dtype=torch.float64, low=0.0, high=1.0).tolist()
