"""Any file or dataset whose rows have a prompt (text or chat messages) and an answer.

A *source* is a function without arguments that returns problems, such as `read_problems` with its knobs bound by gin. A
task is made of sources; each may have fields, a template and a reader of its own (gin scopes keep them apart).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from grpo_fn.core import prng
from grpo_fn.core.conversation import chat_prompt, is_message_list, read_messages
from grpo_fn.core.problem import COMPLETION, Problem
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
    out and noted. Without training sources the task can be evaluated on, or be a part of a mixture, and no more.

    Args:
        train: sources of training rows.
        test: sources of held-out problems.

    Returns:
        The task.

    Raises:
        ValueError: without any source, without training rows left, or for a held-out row without an answer.
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
    `test_size` extends a smaller.

    Args:
        rows: sources of rows.
        test_size: held-out problems.

    Returns:
        The task.

    Raises:
        ValueError: for a `test_size` that leaves no training row, or holds out none.
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
    """The first rows that `read` finds, as problems.

    A field of chat messages (`[{"role": "user", "content": ...}, ...]`) is a prompt as well as text is: the template
    goes round the last user message, and a chat template turns all of them into tokens. Where prompt and answer are the
    same field, its last message is the assistant's: the answer, and no part of the prompt.

    Args:
        read: a reader of rows with its knobs bound: `readers.file`, `readers.hub` or one of your own.
        source: a name of your choice, kept in `meta["source"]`.
        prompt_field: the field with the prompt, text or chat messages.
        answer_field: the field with the answer.
        meta_fields: fields kept in `meta` as they are, beside `source` and `row`, counted from 0.
        gold: makes the answer of what `answer_field` holds (of the last message's text, for messages).
        template: holds `{prompt}`, in whose place the prompt's text stands.
        size: rows to read; 0 for all.

    Returns:
        The problems, in the order of the rows; an answer is empty where `gold` makes nothing of the field.

    Raises:
        ValueError: for a row without the fields or with messages that are none, with file and line; for a source
            without rows, a template without `{prompt}`, a negative `size`.
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
        prompt, answer = _prompt_and_answer(row, prompt_field, answer_field, template)
        meta = {"row": number, "source": source, **{field: row.value[field] for field in meta_fields}}
        found.append(Problem(0, prompt, _gold(row.where, answer_field, answer, gold), meta))
    if not found:
        raise ValueError(f"{source}: got no rows, wanted at least one")
    return found


def read_demonstrations(
    *, read: Reader, source: str, prompt_field: str, completion_field: str, template: str, size: int
) -> list[Problem]:
    """The first rows that `read` finds, as problems with the completion that each is to be answered with.

    The completion is kept word for word, white space included, in `meta`; the answer, for graders, is its text without
    white space around it. Messages as in `read_problems`: where prompt and completion are the same field, the last
    message is the completion, and the ones before it are the prompt; a completion of its own may be a list of one
    message of the assistant.

    Args:
        read: a reader of rows with its knobs bound: `readers.file`, `readers.hub` or one of your own.
        source: a name of your choice, kept in `meta["source"]`.
        prompt_field: the field with the prompt, text or chat messages.
        completion_field: the field with the completion.
        template: holds `{prompt}`, in whose place the prompt's text stands.
        size: rows to read; 0 for all.

    Returns:
        The problems, in the order of the rows.

    Raises:
        ValueError: for a row without the fields, with an empty completion or with messages that are none, with file and
            line; for a source without rows, a template without `{prompt}`, a negative `size`.
    """
    templates.check_template(template, ["prompt"])
    if size < 0:
        raise ValueError(f"size: got {size}, wanted 0 for all rows, or how many")
    found = []
    for number, row in enumerate(islice(read(list(dict.fromkeys((prompt_field, completion_field)))), size or None)):
        prompt, completion = _prompt_and_answer(row, prompt_field, completion_field, template)
        text = _completion(row.where, completion_field, completion)
        found.append(Problem(0, prompt, text.strip(), {"row": number, "source": source, COMPLETION: text}))
    if not found:
        raise ValueError(f"{source}: got no rows, wanted at least one")
    return found


def field_text(value: Any) -> str | None:
    """A text as it is, a whole number without a decimal point (27.0 is "27"), others as Python has them.

    Args:
        value: what a field of a row holds.

    Returns:
        The text; None for null.

    Raises:
        ValueError: for anything else.
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


def _prompt_and_answer(row: Row, prompt_field: str, answer_field: str, template: str) -> tuple[str, Any]:
    """The prompt, and what `gold` is given."""

    def fill(text: str) -> str:
        return templates.fill_template(template, {"prompt": text})

    answer = row.value[answer_field]
    if isinstance(answer, str):
        text_field(row, answer_field)
    if not is_message_list(row.value[prompt_field]):
        return fill(text_field(row, prompt_field)), answer
    try:
        messages = read_messages(row.value[prompt_field])
        if answer_field == prompt_field:
            last = messages.pop()
            if last["role"] != "assistant":
                raise ValueError(f"last message: got one of {last['role']!r}, wanted the answer, one of 'assistant'")
            answer = last["content"]
        return chat_prompt(messages, fill), answer
    except ValueError as error:
        raise ValueError(f"{row.where}: {prompt_field!r}: {error}") from error


def _completion(where: str, field: str, value: Any) -> str:
    try:
        if is_message_list(value):
            (message,) = read_messages(value) if len(value) == 1 else [{"role": f"{len(value)} messages"}]
            if message["role"] != "assistant":
                raise ValueError(f"got {message['role']!r}, wanted one message of 'assistant'")
            value = message["content"]
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"got {type(value).__name__} {str(value)[:80]!r}, wanted text that is not empty")
    except ValueError as error:
        raise ValueError(f"{where}: {field!r}: {error}") from error
    return value


def _gold(where: str, field: str, value: Any, gold: Callable[[Any], str | None]) -> str:
    try:
        return (gold(value) or "").strip()
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {field!r}: {error}") from error
