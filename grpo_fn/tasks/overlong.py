"""Prompts that leave no tokens for a completion, in one signature: `(task, length, limit) -> (task, rows left out)`.

    task      the task
    length    tokens of a problem's prompt as the sampler counts them, of an episode those of what its environment
              begins with
    limit     most tokens of a prompt: the model's positions less `max_new_tokens`, or one less than `max_total_tokens`
    returns   the task, and how many of its rows and held-out problems were left out

A task that makes its problems as they are drawn has no rows to look at: one who has the key looks at its draws.
"""

from collections.abc import Callable, Sequence

from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import Task, filter_rows, list_places, place_of, with_notes

Length = Callable[[Problem], int]


def refuse(task: Task, length: Length, limit: int) -> tuple[Task, int]:
    """The task as it is: a prompt over the limit, among rows or held-out problems, raises ValueError."""
    _check("training", task.rows, length, limit)
    _check("held-out", task.test, length, limit)
    return task, 0


def drop(task: Task, length: Length, limit: int) -> tuple[Task, int]:
    """The task without the training rows over the limit, which are noted. A held-out problem over it raises ValueError.

    So a benchmark has the same problems for every model and every `max_new_tokens`.
    """
    _check("held-out", task.test, length, limit)
    return _without_long_rows(task, length, limit)


def drop_both(task: Task, length: Length, limit: int) -> tuple[Task, int]:
    """As `drop`, and held-out problems over the limit are left out and noted too.

    Accuracy is then comparable between runs that held out the same ones only. Raises ValueError when none is left.
    """
    left, rows = _without_long_rows(task, length, limit)
    over = [str(i) for i, problem in enumerate(task.test) if length(problem) > limit]
    if not over:
        return left, rows
    fit = tuple(problem for problem in task.test if length(problem) <= limit)  # each with the uid it had
    if not fit:
        _check("held-out", task.test, length, limit)
    line = f"left out {len(over)} held-out problems with prompts of more than {limit} tokens: {list_places(over)}"
    return with_notes(left._replace(test=fit), line), rows + len(over)


def _without_long_rows(task: Task, length: Length, limit: int) -> tuple[Task, int]:
    left, count = filter_rows(task, lambda problem: length(problem) <= limit)
    if not count:
        return left, 0
    over = [place_of(problem) for problem in task.rows if length(problem) > limit]
    line = f"left out {count} training rows with prompts of more than {limit} tokens: {list_places(over)}"
    return with_notes(left, line), count


def _check(side: str, problems: Sequence[Problem], length: Length, limit: int) -> None:
    lengths = [length(problem) for problem in problems]
    over = sum(tokens > limit for tokens in lengths)
    if over:
        longest = max(lengths)
        prompt = problems[lengths.index(longest)].prompt
        raise ValueError(
            f"prompts: got {over} of {len(problems)} {side} ones over the {limit} tokens that are left for a prompt "
            f"(max_new_tokens, max_total_tokens), expected none; the longest has at least {longest}: {prompt[:80]!r}"
        )
