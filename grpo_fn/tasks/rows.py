"""Any file or dataset whose rows have a prompt and an answer.

A *source* is a function without arguments that returns problems, such as `read_problems` with its knobs bound by gin. A
task is made of sources; each may have fields, a template and a reader of its own (gin scopes keep them apart).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks import task as templates
from grpo_fn.tasks.readers import Row, text_field
from grpo_fn.tasks.task import (
    Task,
    all_answered,
    drop_duplicates,
    drop_unanswered,
    from_rows,
    held_out_only,
    with_notes,
)

Source = Callable[[], Sequence[Problem]]
Reader = Callable[[Sequence[str]], Iterable[Row]]

_SPLIT_SEED = 20_260_412  # decides what `hold_out` holds out, for every run and every seed alike
_TAKEN = ("row", "source", "task")  # names in `meta` that the program gives a meaning


def task(*, train: Sequence[Source], test: Sequence[Source]) -> Task:
    """The problems of the sources `train`, with those of the sources `test` held out, one source after the other.

    Training rows that repeat an earlier one (prompt and answer), have no answer or are held-out problems are left
    out and noted; a held-out one without an answer is refused. Without training sources the task can be evaluated
    on, or be a part of a mixture, and no more. Raises ValueError when there are no sources, or no training rows left.
    """
    tests = all_answered(_all(test))
    if train:
        rows, notes = drop_duplicates(_all(train))
        return drop_unanswered(with_notes(from_rows(rows, tests), *notes))
    if not test:
        raise ValueError("rows.task: got no source, wanted one at least, to train on or to hold out")
    return held_out_only(tests)


def hold_out(*, rows: Sequence[Source], test_size: int) -> Task:
    """The problems of the sources, `test_size` of them held out, the same ones in every run, and the rest to train on.

    Which ones is decided by a fixed shuffle of the rows that have an answer and repeat no earlier one; a larger
    `test_size` extends a smaller. Raises ValueError for a test_size that leaves nothing on a side.
    """
    every, notes = drop_duplicates(_all(rows))
    usable = drop_unanswered(with_notes(from_rows(every, ()), *notes))
    if not 0 < test_size < usable.size:
        raise ValueError(f"test_size: got {test_size}, wanted 1 to {usable.size - 1} of the {usable.size} rows")
    order = prng.permutation(prng.key(_SPLIT_SEED, device="cpu"), usable.size).tolist()
    shuffled = [usable.rows[i] for i in order]
    made = from_rows(shuffled[test_size:], shuffled[:test_size])
    return made._replace(notes=(*usable.notes, *made.notes))


def read_problems(
    *,
    read: Reader,
    source: str,
    prompt_field: str,
    answer_field: str,
    meta_fields: Sequence[str],
    gold: Callable[[Any], str | None],
    template: str,
    size: int,
) -> list[Problem]:
    """The first `size` rows that `read` finds, 0 for all, as problems.

    The prompt is `template` with `{prompt}` replaced by the text of `prompt_field`. The answer is what `gold` makes of
    `answer_field`, empty where it makes nothing. `meta` holds the `meta_fields` as they are, `source`, which is a name
    of your choice, and `row`, counted from 0. Raises ValueError naming file and line for a row without the fields.
    """
    templates.check_template(template, ["prompt"])
    if size < 0:
        raise ValueError(f"size: got {size}, wanted 0 for all rows, or how many")
    taken = [field for field in meta_fields if field in _TAKEN]
    if taken:
        raise ValueError(f"meta_fields: got {', '.join(taken)}, wanted other fields: these names mean something else")
    fields = dict.fromkeys((prompt_field, answer_field, *meta_fields))
    found = []
    for number, row in enumerate(islice(read(list(fields)), size or None)):
        prompt = templates.fill_template(template, {"prompt": text_field(row, prompt_field)})
        meta = {"row": number, "source": source, **{field: row.value[field] for field in meta_fields}}
        found.append(Problem(0, prompt, _gold(row, answer_field, gold), meta))
    if not found:
        raise ValueError(f"{source}: got no rows, wanted at least one")
    return found


def field_text(value: Any) -> str | None:
    """A text as it is, a whole number without a decimal point (27.0 is "27"), others as Python has them.

    None for null. Raises ValueError for anything else.
    """
    match value:
        case None:
            return None
        case str():
            return value
        case int() if not isinstance(value, bool):
            return str(value)
        case float() if math.isfinite(value):
            # Beyond 2**53 a float no longer says which whole number was meant.
            return str(int(value)) if value.is_integer() and abs(value) <= 2**53 else repr(value)
    raise ValueError(f"got {type(value).__name__} {str(value)[:80]!r}, wanted text or a finite number")


def _all(sources: Sequence[Source]) -> list[Problem]:
    return [problem for source in sources for problem in source()]


def _gold(row: Row, field: str, gold: Callable[[Any], str | None]) -> str:
    if isinstance(row.value[field], str):
        text_field(row, field)
    try:
        return (gold(row.value[field]) or "").strip()
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{row.where}: {field!r}: {error}") from error
