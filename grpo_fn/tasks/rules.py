"""Which rows may stay: those with an answer, and each but once. Never silently: what is left out is noted."""

from collections.abc import Sequence

from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import Task, keep, listing, noted, numbered, place


def answered(task: Task) -> Task:
    """The task without the training rows whose answer is empty: no completion of theirs could be scored."""
    without = [place(problem) for problem in task.rows if not problem.answer]
    if not without:
        return task
    left, count = keep(task, lambda problem: bool(problem.answer))
    return noted(left, f"left out {count} training rows without an answer: {listing(without)}")


def all_answered(test: Sequence[Problem]) -> Sequence[Problem]:
    """The held-out problems themselves. A benchmark is whole: raises ValueError when an answer is empty."""
    without = [place(problem) for problem in numbered(test) if not problem.answer]
    if without:
        raise ValueError(f"held-out rows: got no answer in {listing(without)} (counted from 0), wanted one in each")
    return test


def distinct(rows: Sequence[Problem]) -> tuple[list[Problem], tuple[str, ...]]:
    """The rows without those that repeat the prompt and the answer of an earlier one, and a note if there are any."""
    left: dict[tuple[str, str], Problem] = {}
    again = [
        place(problem) for problem in rows if left.setdefault((problem.prompt, problem.answer), problem) is not problem
    ]
    notes = (f"left out {len(again)} rows that repeat an earlier one: {listing(again)}",) if again else ()
    return list(left.values()), notes
