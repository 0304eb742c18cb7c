"""Word problems with integer answers, made on the spot: no network and no data file.

What is asked is one of a finite list of *contents*: a first number and some additions and subtractions, operands in
1..max_value, never below zero on the way. Sentences drawn at random turn a content into English. A content is either
held out or trained on, whatever the words, so no training draw can touch a held-out problem.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, product
from itertools import count as count_from
from typing import NamedTuple, TypeVar

from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import COMPLETION, Problem
from grpo_fn.tasks.task import FrozenKey, Task, block_uniforms, frozen_key, generated_task

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
_WORDS = 6  # uniforms per problem besides one per change: content, two names, thing, start, question


class Content(NamedTuple):
    """What is asked, without the words: `start`, then the changes, each "+" or "-" and an operand."""

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
    extends a smaller one.

    Args:
        max_value: largest operand.
        operations: additions and subtractions in each problem.
        test_size: held-out problems.

    Returns:
        The task; problems bring `changes` and `values` in `meta`, for `worked_solution`.

    Raises:
        ValueError: for a max_value below 2, no operations, or a test_size that leaves nothing on a side.
    """
    if max_value < 2 or operations < 1:
        raise ValueError(f"got max_value {max_value} and operations {operations}, wanted at least 2 and at least 1")
    total = len(expression_contents(max_value=max_value, operations=operations))
    if not 0 < test_size < total:
        raise ValueError(f"test_size: got {test_size}, wanted 1 to {total - 1} of the {total} contents")
    held_out, rest = split_contents(max_value=max_value, operations=operations, test_size=test_size)
    words = frozen_key(_split_key(1))
    test = [_word(content, i, _draw(words, operations, i)) for i, content in enumerate(held_out)]
    return generated_task(partial(_train, rest, operations), test, len(rest))


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
    r"""A solution that shows its working: `7+5=12 12-3=9 \boxed{9}`.

    Args:
        problem: a problem of `arithmetic.task`.

    Returns:
        The text of a right completion.
    """
    changes, values = problem.meta["changes"], problem.meta["values"]
    steps = (f"{x}{op}{b}={y}" for x, (op, b), y in zip(values[:-1], changes, values[1:], strict=True))
    return f"{' '.join(steps)} {answer_only(problem)}"


def answer_only(problem: Problem) -> str:
    r"""A solution that states the answer alone: `\boxed{9}`.

    Args:
        problem: a problem with an answer.

    Returns:
        The text of a right completion.
    """
    return rf"\boxed{{{problem.answer}}}"


def worked_solutions(task: Task, key: Tensor, *, worked_share: float) -> Iterator[tuple[str, str]]:
    """Endless (prompt, completion) pairs for a supervised warm start, from the training side alone.

    A share of them shows the working, the others state the answer alone; all are right.
    """
    style = frozen_key(prng.fold_in(key, _STYLE))
    for index in count_from():
        problem = task.train(key, index)
        solution = worked_solution if _draw(style, 0, index)[0] < worked_share else answer_only
        yield problem.prompt, solution(problem)


def demonstration_task(*, max_value: int, operations: int, test_size: int, worked_share: float) -> Task:
    """The task, each of its problems with a right solution to be answered with: those that a warm start learns.

    Args:
        max_value: largest number of a word problem.
        operations: steps of a word problem.
        test_size: held-out problems.
        worked_share: probability that a completion shows the working, in [0, 1].

    Returns:
        The task.

    Raises:
        ValueError: as `task`.
    """
    whole = task(max_value=max_value, operations=operations, test_size=test_size)
    key = prng.key(_STYLE, device="cpu")
    show = partial(_demonstrated, frozen_key(key), worked_share)
    tests = tuple(show(problem, index) for index, problem in enumerate(whole.test))
    return whole._replace(train=partial(_demonstrated_train, whole.train, show), test=tests)


def corpus(task: Task, key: Tensor, count: int) -> list[str]:
    """`count` training prompts with both of their solutions, as text to train a tokenizer on."""
    problems = (task.train(key, index) for index in range(count))
    return [f"{problem.prompt} {worked_solution(problem)} {answer_only(problem)}" for problem in problems]


def _demonstrated(style: FrozenKey, worked_share: float, problem: Problem, index: int) -> Problem:
    solution = worked_solution if _draw(style, 0, index)[0] < worked_share else answer_only
    return problem._replace(meta={**problem.meta, COMPLETION: solution(problem)})


def _demonstrated_train(
    train: Callable[[Tensor, int], Problem], show: Callable[[Problem, int], Problem], key: Tensor, index: int
) -> Problem:
    return show(train(key, index), index)


def _train(rest: tuple[Content, ...], operations: int, key: Tensor, index: int) -> Problem:
    if index < 0:
        raise ValueError(f"training index: got {index}, wanted an integer >= 0")
    draw = _draw(frozen_key(key), operations, index)
    return _word(_pick(rest, draw[0]), index, draw)


def _draw(frozen: FrozenKey, operations: int, index: int) -> list[float]:
    """The uniforms of one problem."""
    return block_uniforms(frozen, _WORDS + operations, index)


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
