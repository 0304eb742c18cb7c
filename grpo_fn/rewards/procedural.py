r"""The verdict on a procedural problem, by the scorer that reasoning-gym has for its kind, read strictly.

Needs the extra `tasks`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from grpo_fn.core.problem import Completion, Problem

# Where this module is loaded, not where the first completion is judged: it takes seconds, which are no completion's.
_missing: ImportError | None = None
try:
    from reasoning_gym import factory
except ImportError as error:
    factory, _missing = None, error

# completion -> the answer that it states; None where it states none.
AnswerOf = Callable[[str], str | None]


def procedural_correct(problem: Problem, completion: Completion, *, answer_of: AnswerOf) -> float:
    """1 iff the answer that the completion states has the whole score of the library's scorer, else 0.

    The library's default scorer pays a share for every answer that holds the right one among other words, and some of
    its scorers raise on what is no number: both are worth 0 here.

    Args:
        problem: a problem of `procedural.task`, with the library's entry in `meta["entry"]`.
        completion: the completion that is judged.
        answer_of: what the completion states as its answer: `format.last_box`.

    Returns:
        1.0 or 0.0.

    Raises:
        ValueError: for a problem of another task, and without the library.
    """
    entry = problem.meta.get("entry")
    if entry is None:
        raise ValueError(f"problem {problem.uid}: got no meta['entry'], expected a problem of procedural.task")
    answer = answer_of(completion.text)
    if answer is None:
        return 0.0
    score = _scorer(entry["metadata"]["source_dataset"])
    try:
        return float(score(answer.strip(), entry) >= 1.0)
    except Exception:  # whatever a scorer of the library raises on an answer that it cannot read
        return 0.0


@lru_cache(maxsize=128)
def _scorer(kind: str) -> Callable[[str, Any], float]:
    if factory is None:
        raise ValueError(f"got no library reasoning-gym, expected it: pip install 'grpo-fn[tasks]' ({_missing})")
    return factory.get_score_answer_fn(kind)
