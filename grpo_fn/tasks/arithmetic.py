"""Word problems with integer answers, made on the spot: no network and no data file.

What is asked is one of a finite list of *contents*: a first number and some additions and subtractions, operands in
1..max_value, never below zero on the way. Sentences drawn at random turn a content into English. A content is either
held out or trained on, whatever the words, so no training draw can touch a held-out problem. The arguments
of both tasks:

    max_value     largest operand
    operations    additions and subtractions in each problem
    test_size     held-out problems
    returns       the task
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import COMPLETION, Problem
from grpo_fn.tasks.task import FrozenKey, Task, check_index, frozen_key, generated_task, thawed_key

T = TypeVar("T")

NAMES = (("Tom", "He"), ("Ann", "She"), ("Sam", "He"), ("Mia", "She"), ("Ben", "He"), ("Eva", "She"))
THINGS = ("apple", "book", "coin", "pen", "card", "egg", "cup", "nut")

# {x}: the first number with its thing ("5 apples"), {v}: an operand, {s}: the things, {n}, {m}: names, {p}: the first
# one's pronoun.
STARTS = ("{n} has {x}.", "{n} starts with {x}.", "{n} had {x}.", "{n} sees {x}.")
GAINS = ("{p} buys {v}.", "{p} finds {v} more.", "{m} brings {v}.", "Then {v} come in.")
LOSSES = ("{p} sells {v}.", "{p} loses {v} more.", "{m} takes {v}.", "Then {v} are gone.")
QUESTIONS = ("How many {s} now?", "How many {s} are there?", "How many {s} in the end?")

_SPLIT_SEED = 20_260_117  # decides what is held out, for every run and every seed alike
_STYLE = 1 << 32  # of the key's children: blocks of problems are numbered from 0 and never get this far
_BLOCK = 256  # problems whose random numbers are made at once: a tensor operation per problem would dominate
_WORDS = 6  # uniforms per problem besides one per change: content, two names, thing, start, question


class Content(NamedTuple):
    """A word problem without its words: `start`, then the changes, each "+" or "-" and an operand."""

    start: int
    changes: tuple[tuple[str, int], ...]

    def values(self) -> list[int]:
        """The running value: at the start and after each change; the last one is the answer."""
        signed = (b if op == "+" else -b for op, b in self.changes)
        return list(accumulate(signed, initial=self.start))


def task(*, max_value: int, operations: int, test_size: int) -> Task:
    """Problems of `operations` steps over 1..max_value in English, `test_size` of the contents held out.

    Training draws a content uniformly among the rest and words it at random: `size` counts those contents.
    The held-out set has one problem per held-out content; it depends on the knobs alone, and a larger `test_size`
    extends a smaller one. Problems bring `changes` and `values` in `meta`, for `worked_solution`.

    Raises:
        ValueError: for a max_value below 2, no operations, or a test_size that leaves nothing on a side.
    """
    if max_value < 2 or operations < 1:
        raise ValueError(f"got max_value {max_value} and operations {operations}, expected at least 2 and at least 1")
    total = len(expression_contents(max_value=max_value, operations=operations))
    if not 0 < test_size < total:
        raise ValueError(f"test_size: got {test_size}, expected 1 to {total - 1} of the {total} contents")
    held_out, rest = split_contents(max_value=max_value, operations=operations, test_size=test_size)
    words = frozen_key(_split_key(1))
    test = [_word(content, i, block_uniforms(words, _WORDS + operations, i)) for i, content in enumerate(held_out)]

    def train(key: Tensor, index: int) -> Problem:
        check_index(index)
        draw = block_uniforms(frozen_key(key), _WORDS + operations, index)
        return _word(_pick(rest, draw[0]), index, draw)

    return generated_task(train, test, len(rest))


@lru_cache(maxsize=4)
def expression_contents(*, max_value: int, operations: int) -> tuple[Content, ...]:
    """Every content with operands in 1..max_value that never goes below zero."""
    operands = range(1, max_value + 1)
    changes = product("+-", operands)
    every = (Content(start, tail) for start, tail in product(operands, product(changes, repeat=operations)))
    return tuple(content for content in every if min(content.values()) >= 0)


@lru_cache(maxsize=4)
def split_contents(
    *, max_value: int, operations: int, test_size: int
) -> tuple[tuple[Content, ...], tuple[Content, ...]]:
    """(held out, trained on): the contents in a fixed shuffled order, cut at `test_size`."""
    every = expression_contents(max_value=max_value, operations=operations)
    shuffled = [every[i] for i in prng.permutation(_split_key(0), len(every)).tolist()]
    return tuple(shuffled[:test_size]), tuple(shuffled[test_size:])


def worked_solution(problem: Problem) -> str:
    r"""A solution that shows its working: `7+5=12 12-3=9 \boxed{9}`."""
    changes, values = problem.meta["changes"], problem.meta["values"]
    steps = (f"{x}{op}{b}={y}" for x, (op, b), y in zip(values[:-1], changes, values[1:], strict=True))
    return f"{' '.join(steps)} {answer_only(problem)}"


def answer_only(problem: Problem) -> str:
    r"""A solution that states the answer alone: `\boxed{9}`."""
    return rf"\boxed{{{problem.answer}}}"


def demonstration_task(*, max_value: int, operations: int, test_size: int, worked_share: float) -> Task:
    """The task, each of its problems with a right solution to be answered with: those that a warm start learns.

    Args:
        worked_share: probability that a completion shows the working, in [0, 1].
    """
    whole = task(max_value=max_value, operations=operations, test_size=test_size)
    style = frozen_key(prng.key(_STYLE, device="cpu"))

    def show(problem: Problem, index: int) -> Problem:
        solution = worked_solution if block_uniforms(style, _WORDS, index)[0] < worked_share else answer_only
        return problem._replace(meta={**problem.meta, COMPLETION: solution(problem)})

    tests = tuple(show(problem, index) for index, problem in enumerate(whole.test))
    return whole._replace(train=lambda key, index: show(whole.train(key, index), index), test=tests)


def block_uniforms(frozen: FrozenKey, width: int, index: int) -> list[float]:
    """The uniforms of one problem: a row of its block, so that reading a stream in order makes each block once."""
    return _block(frozen, width, index // _BLOCK)[index % _BLOCK]


@lru_cache(maxsize=64)
def _block(frozen: FrozenKey, width: int, block: int) -> list[list[float]]:
    key = prng.fold_in(thawed_key(frozen), block)
    return prng.uniform(key, _BLOCK, width, dtype=torch.float64, low=0.0, high=1.0).tolist()


def _word(content: Content, uid: int, draw: list[float]) -> Problem:
    """Content to English; what is drawn is decoration and changes no number."""
    _, name, other, thing, start, question, *verbs = draw
    subject = int(name * len(NAMES))
    friend = (subject + 1 + int(other * (len(NAMES) - 1))) % len(NAMES)  # never the same again
    noun = _pick(THINGS, thing)
    words = {"s": f"{noun}s", "n": NAMES[subject][0], "m": NAMES[friend][0], "p": NAMES[subject][1]}
    first = f"{content.start} {noun}" if content.start == 1 else f"{content.start} {noun}s"
    changes = (
        _pick(GAINS if op == "+" else LOSSES, u).format(v=b, **words)
        for (op, b), u in zip(content.changes, verbs, strict=True)
    )
    sentences = [_pick(STARTS, start).format(x=first, **words), *changes, _pick(QUESTIONS, question).format(**words)]
    values = content.values()
    return Problem(uid, " ".join(sentences), str(values[-1]), {"changes": content.changes, "values": values})


def _pick(choices: Sequence[T], u: float) -> T:
    return choices[int(u * len(choices))]


def _split_key(stream: int) -> Tensor:
    return prng.fold_in(prng.key(_SPLIT_SEED, device="cpu"), stream)
