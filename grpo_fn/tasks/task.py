"""Tasks: an endless keyed stream of training problems and a fixed held-out set; prompt templates, rules for rows."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem

# Held-out problems are numbered from here, far above any training index: no test problem shares a uid, and with it
# the sampler's randomness, with a training draw.
TEST_UID = 1 << 31
# Fields of a problem by which held-out problems are alike when a limit leaves some of them out.
STRATA = ("task", "source", "level")

Predicate = Callable[[Problem], bool]
FrozenKey = tuple[tuple[int, ...], torch.dtype]


class Task(NamedTuple):
    """`train(key, index)` is a pure function with `uid == index`, any index >= 0; `test` never meets it.

    Made by `from_rows`, `generated_task` or `held_out_only`; `filter_rows` leaves training rows out.
    """

    train: Callable[[Tensor, int], Problem]
    test: tuple[Problem, ...]
    size: int  # training rows per epoch; 0 where there is a held-out set alone
    rows: tuple[Problem, ...]  # what the stream draws from; none where problems are made as they are drawn
    narrow: Callable[["Task", Predicate], "Task"]  # how `filter_rows` leaves rows out of this kind of task
    notes: tuple[str, ...]  # what was left out and why, a line each, for the log
    arms: tuple[str, ...] = ()  # names of what a curriculum chooses among; problem i is of arm i % len(arms)


def from_rows(rows: Sequence[Problem], test: Sequence[Problem]) -> Task:
    """The task that walks `rows` epoch by epoch, each epoch in its own keyed order.

    Stream index i draws `rows[permutation(fold_in(key, i // size))[i % size]]`; the problem's uid is i and
    `meta["row"]` names the row (its place in `rows` where it has no number), so one row has other randomness in another
    epoch. A training row whose prompt is that of a held-out problem, white space aside, is left out and noted. Raises
    ValueError when no rows are left.
    """
    if len(rows) == 0:
        raise ValueError("a task needs training rows: got none, expected at least one")
    tests = number_tests(test)
    asked = {normalize_prompt(problem.prompt) for problem in tests}
    every = number_rows(rows)
    left = tuple(problem for problem in every if normalize_prompt(problem.prompt) not in asked)
    if not left:
        raise ValueError(f"training rows: got {len(every)}, all of them held-out problems, expected rows that are not")
    task = _over(Task(_no_training, tests, 0, (), partial(narrow_rows, _over), ()), left)
    if len(left) == len(every):
        return task
    shared = [place_of(problem) for problem in every if normalize_prompt(problem.prompt) in asked]
    return with_notes(task, f"left out {len(shared)} training rows that are held-out problems: {list_places(shared)}")


def generated_task(train: Callable[[Tensor, int], Problem], test: Sequence[Problem], size: int) -> Task:
    """The task whose problems `train` makes as they are drawn, none of them held out; `size` is called an epoch."""
    return Task(train, number_tests(test), size, (), _narrow_nothing, ())


def held_out_only(test: Sequence[Problem]) -> Task:
    """The task with a held-out set alone: to evaluate on, or as a part of a mixture; drawing from it raises."""
    return Task(_no_training, number_tests(test), 0, (), lambda task, _: task, ())


def filter_rows(task: Task, predicate: Predicate) -> tuple[Task, int]:
    """The task without the training rows for which the predicate is false, and their number. Rows keep their numbers.

    Raises ValueError when no row stays, and for a task that makes its problems as they are drawn.
    """
    kept = task.narrow(task, predicate)
    left_out = task.size - kept.size
    return (kept if left_out else task), left_out


def sample_tests(task: Task, count: int) -> Task:
    """The task with `count` of its held-out problems: a share of every part, source and level, in their own order.

    Problems are alike in their `STRATA`. Every kind gives its first problem before any gives a second, the largest kind
    first; then each gives in proportion to its size, from its front. So a smaller count takes some of what a larger one
    takes. A note says how many of each kind are left where there are several.
    """
    if count >= len(task.test):
        return task
    kinds: dict[tuple[str, ...], list[int]] = {}
    for place, problem in enumerate(task.test):
        kinds.setdefault(_kind(problem), []).append(place)
    order = [
        ((j > 0, (j + 0.5) / len(places) if j else -len(places), places[0]), place)
        for places in kinds.values()
        for j, place in enumerate(places)
    ]
    kept = sorted(place for _, place in sorted(order)[:count])
    chosen = task._replace(test=tuple(task.test[place] for place in kept))
    if len(kinds) == 1:
        return chosen
    left = Counter(map(_kind, chosen.test))
    shares = [f"{left[kind]} of {len(places)} {' '.join(kind) or 'others'}" for kind, places in kinds.items()]
    return with_notes(chosen, f"evaluating {count} of {len(task.test)} held-out problems: {list_places(shares)}")


def _kind(problem: Problem) -> tuple[str, ...]:
    """The fields by which a subset of problems is balanced."""
    return tuple(f"{name} {problem.meta[name]}" for name in STRATA if name in problem.meta)


def with_notes(task: Task, *lines: str) -> Task:
    """The task with more lines for the log."""
    return task._replace(notes=(*task.notes, *lines))


def number_rows(rows: Sequence[Problem]) -> tuple[Problem, ...]:
    """The rows, each with its place in `meta["row"]` unless it has a number already."""
    return tuple(problem._replace(meta={"row": i, **problem.meta}) for i, problem in enumerate(rows))


def number_tests(test: Sequence[Problem]) -> tuple[Problem, ...]:
    """The held-out problems with uids `TEST_UID, TEST_UID + 1, ...` in their given order."""
    return tuple(problem._replace(uid=TEST_UID + i) for i, problem in enumerate(test))


def train_problems(task: Task, key: Tensor, start: int, count: int) -> tuple[Problem, ...]:
    """Training problems `start, ..., start + count - 1` of the stream under `key`."""
    return tuple(task.train(key, index) for index in range(start, start + count))


def check_index(index: int) -> None:
    """Raise ValueError for a place that no stream of training problems has."""
    if index < 0:
        raise ValueError(f"training index: got {index}, expected an integer >= 0")


def turn_and_arm(index: int, arms: int) -> tuple[int, int]:
    """Of a stream that takes arms in turn: the arm's own number of a problem, and the arm."""
    check_index(index)
    return divmod(index, arms)


def normalize_prompt(prompt: str) -> str:
    """The prompt with every run of white space as one space, to compare prompts."""
    return " ".join(prompt.split())


def different_prompts(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The first problem of every prompt."""
    seen: set[str] = set()
    for problem in problems:
        prompt = normalize_prompt(problem.prompt)
        if prompt not in seen:
            seen.add(prompt)
            yield problem


def place_of(problem: Problem) -> str:
    """A row's place, for people: its part of a mixture and its source, if it has them, and its number."""
    return " ".join(str(problem.meta[name]) for name in ("task", "source", "row") if name in problem.meta)


def list_places(places: Sequence[str]) -> str:
    """The first ten places, and how many more there are."""
    shown = ", ".join(places[:10])
    return f"{shown} and {len(places) - 10} more" if len(places) > 10 else shown


def frozen_key(key: Tensor) -> FrozenKey:
    """A key as a hashable value, for caches; `thawed_key` turns it back."""
    return tuple(key.tolist()), key.dtype


def thawed_key(frozen: FrozenKey) -> Tensor:
    """The CPU key that `frozen_key` froze."""
    words, dtype = frozen
    return torch.tensor(words, dtype=dtype)


def _over(task: Task, rows: tuple[Problem, ...]) -> Task:
    return task._replace(train=partial(_draw, rows), size=len(rows), rows=rows)


def narrow_rows(over: Callable[[Task, tuple[Problem, ...]], Task], task: Task, predicate: Predicate) -> Task:
    """The task over the rows that stay; `over(task, rows)` makes it."""
    left = tuple(filter(predicate, task.rows))
    if not left:
        raise ValueError(f"training rows: got {task.size}, of which none may stay, expected at least one that does")
    return over(task, left)


def _narrow_nothing(task: Task, predicate: Predicate) -> Task:
    raise ValueError("got problems that are made as they are drawn, of which none can be left out, expected rows")


def _no_training(key: Tensor, index: int) -> Problem:
    raise ValueError(
        f"training index: got {index} of a task with a held-out set alone, expected one with training rows"
    )


def _draw(rows: tuple[Problem, ...], key: Tensor, index: int) -> Problem:
    check_index(index)
    epoch, turn = divmod(index, len(rows))
    return rows[int(_order(frozen_key(key), epoch, len(rows))[turn])]._replace(uid=index)


# A step that straddles two epochs needs two orders; every part of a mixture has orders of its own.
@lru_cache(maxsize=32)
def _order(frozen: FrozenKey, epoch: int, size: int) -> Tensor:
    return prng.permutation(prng.fold_in(thawed_key(frozen), epoch), size)


def check_template(template: str, names: Sequence[str]) -> None:
    """Raise ValueError unless the template holds `{name}` for each of `names`."""
    for name in names:
        if f"{{{name}}}" not in template:
            raise ValueError(f"template: got {template!r}, expected one that holds {{{name}}}")


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """The template with every `{name}` replaced by its value, once: what a value says is not looked at again."""
    places = "|".join(re.escape(f"{{{name}}}") for name in values)
    return re.sub(places, lambda found: values[found.group()[1:-1]], template)


def drop_unanswered(task: Task) -> Task:
    """The task without the training rows whose answer is empty: no completion of theirs could be scored."""
    without = [place_of(problem) for problem in task.rows if not problem.answer]
    if not without:
        return task
    left, count = filter_rows(task, lambda problem: bool(problem.answer))
    return with_notes(left, f"left out {count} training rows without an answer: {list_places(without)}")


def all_answered(test: Sequence[Problem]) -> Sequence[Problem]:
    """The held-out problems themselves, all of them with an answer: a benchmark is whole. Raises ValueError."""
    without = [place_of(problem) for problem in number_rows(test) if not problem.answer]
    if without:
        raise ValueError(
            f"held-out rows: got no answer in {list_places(without)} (counted from 0), expected one in each"
        )
    return test


def drop_duplicates(rows: Sequence[Problem]) -> tuple[list[Problem], tuple[str, ...]]:
    """The rows without those that repeat the prompt and the answer of an earlier one, and a note if there are any."""
    left: dict[tuple[str, str], Problem] = {}
    again = [place_of(row) for row in rows if left.setdefault((row.prompt, row.answer), row) is not row]
    notes = (f"left out {len(again)} rows that repeat an earlier one: {list_places(again)}",) if again else ()
    return list(left.values()), notes
