"""Word problems of two operations with integer answers, made on the spot: no network and no data file.

What is asked is one of a finite list of *contents*, `a op b op c` with a, b, c in 1..max_value and no negative
value on the way. Sentences drawn at random turn a content into English. A content is either held out or trained on,
whatever the words, so no training draw can touch a held-out problem.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import count as count_from
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_fn import prng
from grpo_fn.problem import Problem
from grpo_fn.tasks.task import Task, frozen_key, number_tests, thawed_key

T = TypeVar("T")

NAMES = (("Tom", "He"), ("Ann", "She"), ("Sam", "He"), ("Mia", "She"), ("Ben", "He"), ("Eva", "She"))
THINGS = ("apple", "book", "coin", "pen", "card", "egg", "cup", "nut")

# {x}: a number with its thing ("12 apples"), {v}: a number alone, {s}: the things, {n}, {m}: two names, {p}: the
# first one's pronoun.
STARTS = (
    "{n} has {x}.",
    "{n} starts with {x}.",
    "{n} had {x}.",
    "{n} sees {x}.",
)
GAINS = (
    "{p} buys {v}.",
    "{p} finds {v} more.",
    "{m} brings {v}.",
    "Then {v} come in.",
)
LOSSES = (
    "{p} sells {v}.",
    "{p} loses {v} more.",
    "{m} takes {v}.",
    "Then {v} are gone.",
)
QUESTIONS = (
    "How many {s} now?",
    "How many {s} are there?",
    "How many {s} in the end?",
)

_SPLIT_SEED = 20_260_117  # decides what is held out, for every run and every seed alike
_BLOCK = 256  # problems whose random numbers are made at once: a tensor operation per problem would dominate
_STYLE = 1 << 32  # of the key's children: blocks of problems are numbered from 0 and never get this far
_DRAWS = 8  # uniforms per problem: content, two names, thing, start, first and second change, question


class Content(NamedTuple):
    """What is asked, without the words: `a first b second c`, the operations being + or -."""

    a: int
    first: str
    b: int
    second: str
    c: int

    @property
    def between(self) -> int:
        """The value after the first operation."""
        return self.a + self.b if self.first == "+" else self.a - self.b

    @property
    def answer(self) -> int:
        """The value after both."""
        return self.between + self.c if self.second == "+" else self.between - self.c


def task(*, max_value: int, test_size: int) -> Task:
    """Two-step problems over 1..max_value in English, `test_size` of the contents held out.

    Training draws a content uniformly among the rest and words it at random: `size` counts those contents.
    The held-out set has one problem per held-out content; it depends on the knobs alone, and a larger `test_size`
    extends a smaller one. Raises ValueError for a max_value below 2 or a test_size that leaves nothing on a side.
    """
    if max_value < 2:
        raise ValueError(f"max_value: got {max_value}, wanted at least 2")
    total = len(contents(max_value=max_value))
    if not 0 < test_size < total:
        raise ValueError(f"test_size: got {test_size}, wanted 1 to {total - 1} of the {total} contents")
    held_out, rest = split(max_value=max_value, test_size=test_size)
    words = frozen_key(_split_key(1))
    test = [_word(content, i, _draw(words, i)) for i, content in enumerate(held_out)]
    return Task(partial(_train, rest), number_tests(test), len(rest))


@lru_cache(maxsize=4)
def contents(*, max_value: int) -> tuple[Content, ...]:
    """Every content with operands in 1..max_value that never goes below zero."""
    operands = range(1, max_value + 1)
    every = (
        Content(a, first, b, second, c)
        for a in operands
        for first in "+-"
        for b in operands
        for second in "+-"
        for c in operands
    )
    return tuple(content for content in every if content.between >= 0 and content.answer >= 0)


@lru_cache(maxsize=4)
def split(*, max_value: int, test_size: int) -> tuple[tuple[Content, ...], tuple[Content, ...]]:
    """(held out, trained on): the contents in a fixed shuffled order, cut at `test_size`."""
    every = contents(max_value=max_value)
    shuffled = [every[i] for i in prng.permutation(_split_key(0), len(every)).tolist()]
    return tuple(shuffled[:test_size]), tuple(shuffled[test_size:])


def worked(problem: Problem) -> str:
    r"""A solution that shows its working: `7+5-3=12-3=9 \boxed{9}`."""
    content = Content(*(problem.meta[field] for field in Content._fields))
    a, first, b, second, c = content
    return rf"{a}{first}{b}{second}{c}={content.between}{second}{c}={content.answer} \boxed{{{content.answer}}}"


def terse(problem: Problem) -> str:
    r"""A solution that states the answer alone: `\boxed{9}`."""
    return rf"\boxed{{{problem.answer}}}"


def demonstrations(task: Task, key: Tensor, *, worked_share: float) -> Iterator[tuple[str, str]]:
    """Endless (prompt, completion) pairs for a supervised warm start, from the training side alone.

    A share of them shows the working, the others state the answer, as solutions that people write down do; all are
    right. Which of the two pays is for reinforcement learning to find out.
    """
    style = frozen_key(prng.fold_in(key, _STYLE))
    for index in count_from():
        problem = task.train(key, index)
        solution = worked if _draw(style, index)[0] < worked_share else terse
        yield problem.prompt, solution(problem)


def corpus(task: Task, key: Tensor, count: int) -> list[str]:
    """`count` training prompts with both of their solutions, as text to train a tokenizer on."""
    problems = (task.train(key, index) for index in range(count))
    return [f"{problem.prompt} {worked(problem)} {terse(problem)}" for problem in problems]


def _train(rest: tuple[Content, ...], key: Tensor, index: int) -> Problem:
    if index < 0:
        raise ValueError(f"training index: got {index}, wanted an integer >= 0")
    draw = _draw(frozen_key(key), index)
    return _word(_pick(rest, draw[0]), index, draw)


def _draw(frozen: tuple[tuple[int, ...], torch.dtype], index: int) -> list[float]:
    """The uniforms of one problem: a row of its block, so that reading a stream in order makes each block once."""
    return _block(frozen, index // _BLOCK)[index % _BLOCK]


@lru_cache(maxsize=16)
def _block(frozen: tuple[tuple[int, ...], torch.dtype], block: int) -> list[list[float]]:
    key = prng.fold_in(thawed_key(frozen), block)
    return prng.uniform(key, _BLOCK, _DRAWS, dtype=torch.float64, low=0.0, high=1.0).tolist()


def _word(content: Content, uid: int, draw: list[float]) -> Problem:
    """Content to English; what is drawn is decoration and changes no number."""
    _, name, other, thing, start, first, second, question = draw
    subject = int(name * len(NAMES))
    friend = (subject + 1 + int(other * (len(NAMES) - 1))) % len(NAMES)  # never the same again
    noun = _pick(THINGS, thing)
    words = {"s": f"{noun}s", "n": NAMES[subject][0], "m": NAMES[friend][0], "p": NAMES[subject][1]}
    said = (
        (STARTS, start, content.a),
        (GAINS if content.first == "+" else LOSSES, first, content.b),
        (GAINS if content.second == "+" else LOSSES, second, content.c),
        (QUESTIONS, question, 0),
    )
    text = " ".join(
        _pick(sentences, u).format(x=f"{v} {noun}" if v == 1 else f"{v} {noun}s", v=v, **words)
        for sentences, u, v in said
    )
    return Problem(uid, text, str(content.answer), content._asdict())


def _pick(choices: Sequence[T], u: float) -> T:
    return choices[int(u * len(choices))]


def _split_key(stream: int) -> Tensor:
    return prng.fold_in(prng.key(_SPLIT_SEED, device="cpu"), stream)
