"""Any file or dataset whose rows have a prompt (text or chat messages) and an answer.

A *source* is a function without arguments that returns problems, such as `read_problems` with its knobs bound by gin. A
task is made of sources; each may have fields, a template and a reader of its own (gin scopes keep them apart).

    fields         fields that every row has to have
    read           a reader of rows with its knobs bound: `rows.file`, `rows.hub` or one of your own
    source         a name of your choice, kept in `meta["source"]`
    prompt_field   the field with the prompt, text or chat messages
    template       holds `{prompt}`, in whose place the prompt's text stands
    size           rows to read; 0 for all
    test_size      held-out problems
"""

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_fn.core import prng
from grpo_fn.core.json_lines import Row, json_rows
from grpo_fn.core.problem import COMPLETION, Problem, chat_prompt, is_message_list, read_messages
from grpo_fn.tasks import task as templates
from grpo_fn.tasks.task import (
    Task,
    all_answered,
    drop_duplicates,
    drop_unanswered,
    from_rows,
    held_out_only,
    list_places,
    with_notes,
)

# -- Readers of rows: JSON lines, parquet and hub data sets, with errors that name file and line.
#
# Files are not read by `datasets`: it makes 27.0 of a 27 beside 0.5, a date of text that looks like one, null of a
# field that is missing, and takes 5.7 s to import.


def jsonl_rows(folder: Path, name: str, *, fields: Sequence[str]) -> list[Row]:
    """The objects of a file in a folder, one a line, each with text in all of `fields`. Blank lines are skipped.

    Raises ValueError, naming file and line, for what is no such object, and for a file that is missing or empty.
    """
    if not folder.is_dir():
        beside = folder_listing(folder.parent) if folder.parent.is_dir() else "no such folder either"
        raise ValueError(
            f"data: got {folder}, which is no folder, expected one with {name}; {folder.parent} has: {beside}"
        )
    if not (folder / name).is_file():
        raise ValueError(f"data: got {folder} without {name}, expected that file; there are: {folder_listing(folder)}")
    rows = list(json_lines(folder / name, fields))
    for row in rows:
        for field in fields:
            text_field(row, field)
    return rows


def json_lines(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """The objects of a file, one a line, as they are read; an error names `fields` as expected, which are not checked.

    Raises ValueError for a line that is no object, naming file and line, and for a file that is unreadable or empty.
    """
    row = None
    try:
        for row in json_rows(path, expected=f"an object with {', '.join(fields)}"):
            yield row
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: got a file that cannot be read, expected UTF-8 text: {error}") from error
    if row is None:
        raise ValueError(f"{path}: got an empty file, expected one JSON object a line")


def text_field(row: Row, field: str) -> str:
    """The text in a field, as it is. Raises ValueError when there is none, with the fields that there are."""
    value = row.value.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{row.where}: got the fields {', '.join(row.value) or 'none'}, expected text in {field!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell a surrogate alone; no tokenizer takes it
        raise ValueError(
            f"{row.where}: got {field!r} with {error.object[error.start]!a}, expected Unicode text"
        ) from error
    return value


def folder_listing(folder: Path) -> str:
    """The first ten names in a folder, sorted, for a message; "nothing" for an empty one."""
    return list_places(sorted(path.name for path in folder.iterdir())) or "nothing"


def file(fields: Sequence[str], *, path: str) -> Iterator[Row]:
    """The rows of a .jsonl file (.json where it holds an object a line) or a .parquet file.

    Parquet needs pyarrow, and reads the named fields alone.

    Args:
        path: path of the file; `*` or `?` in its name stand for all files that match, in the order of their names.

    Returns:
        The rows, as they are read.

    Raises:
        ValueError: for another kind of file; when nothing is at `path`, with what is there; for a row that is no object
            or lacks a field, naming file and line (row).
    """
    for found in _files(Path(path).expanduser()):
        reader = _READERS.get(found.suffix)
        if reader is None:
            raise ValueError(f"path: got {found}, expected a file that ends in {', '.join(_READERS)}")
        yield from reader(found, fields)


def hub(
    fields: Sequence[str], *, name: str, config: str = "", split: str = "train", revision: str = ""
) -> Iterator[Row]:
    """The rows of a split of a hub dataset, or of a folder that the `datasets` library can load; needs that library.

    Args:
        name: name of the dataset, or path of a folder.
        config: configuration of the dataset; "" for the default one.
        split: split, which can be cut as the library allows: `train[:1000]`.
        revision: commit, branch or tag; "" for the default one.

    Returns:
        The rows, as they are read.

    Raises:
        ValueError: when the library, dataset or split is not there, and when its rows lack a field.
    """
    datasets = library("datasets", "data")
    try:
        rows = datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    except Exception as error:  # a dozen kinds, by what is wrong with name, network or files
        got = f"dataset {name!r}, config {config!r}, split {split!r}, revision {revision!r}"
        raise ValueError(f"got {got}, expected one that can be loaded: {type(error).__name__}: {error}") from error
    _check_fields(f"{name}, split {split}", rows.column_names, fields)
    for number, value in zip(count(1), rows.select_columns(list(fields)), strict=False):
        yield Row(f"{name}/{split}:{number}", value)


def _files(path: Path) -> list[Path]:
    found = sorted(path.parent.glob(path.name)) if {"*", "?"} & {*path.name} else [path] if path.is_file() else []
    if not found:
        there = folder_listing(path.parent) if path.parent.is_dir() else "no such folder"
        raise ValueError(f"path: got {path}, which is no file, expected one; {path.parent} has: {there}")
    return found


def _json_rows(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    for row in json_lines(path, fields):
        _check_fields(row.where, list(row.value), fields)
        yield row


def _parquet_rows(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    arrow, parquet = library("pyarrow", "data"), library("pyarrow.parquet", "data")
    try:
        with parquet.ParquetFile(path) as table:
            _check_fields(str(path), table.schema_arrow.names, fields)
            batches = table.iter_batches(columns=list(fields))
            values = (value for batch in batches for value in batch.to_pylist())
            for number, value in enumerate(values, start=1):
                yield Row(f"{path}:{number}", value)
    except (OSError, arrow.ArrowException) as error:
        raise ValueError(f"{path}: got a file that cannot be read, expected parquet: {error}") from error


def library(name: str, extra: str) -> ModuleType:
    """A module of a library that one of grpo_fn's extras installs. Raises ValueError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"got no library {name!r}, expected it: pip install 'grpo-fn[{extra}]' ({error})") from error


def _check_fields(where: str, there: Sequence[str], fields: Sequence[str]) -> None:
    absent = [field for field in fields if field not in there]
    if absent:
        raise ValueError(f"{where}: got the fields {', '.join(there) or 'none'}, expected also {', '.join(absent)}")


_READERS = {".jsonl": _json_rows, ".json": _json_rows, ".parquet": _parquet_rows}


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
        raise ValueError("rows.task: got no source, expected one at least, to train on or to hold out")
    return held_out_only(tests)


def hold_out(*, rows: Sequence[Source], test_size: int) -> Task:
    """The problems of the sources, `test_size` of them held out, the same ones in every run, and the rest to train on.

    Which ones is decided by a fixed shuffle of the rows that have an answer and repeat no earlier one; a larger
    `test_size` extends a smaller.

    Args:
        rows: sources of rows.

    Returns:
        The task.

    Raises:
        ValueError: for a `test_size` that leaves no training row, or holds out none.
    """
    every, notes = drop_duplicates(_all(rows))
    usable = drop_unanswered(with_notes(from_rows(every, ()), *notes))
    if not 0 < test_size < usable.size:
        raise ValueError(f"test_size: got {test_size}, expected 1 to {usable.size - 1} of the {usable.size} rows")
    order = prng.permutation(prng.key(_SPLIT_SEED, device="cpu"), usable.size).tolist()
    shuffled = [usable.rows[i] for i in order]
    made = from_rows(shuffled[test_size:], shuffled[:test_size])
    return made._replace(notes=(*usable.notes, *made.notes))


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
    raise ValueError(f"got {type(value).__name__} {str(value)[:80]!r}, expected text or a finite number")


def read_problems(
    *,
    read: Reader,
    source: str = "rows",
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    meta_fields: Sequence[str] = (),
    gold: Callable[[Any], str | None] = field_text,
    template: str = "{prompt}",
    size: int = 0,
) -> list[Problem]:
    """The first rows that `read` finds, as problems.

    A field of chat messages (`[{"role": "user", "content": ...}, ...]`) is a prompt as well as text is: the template
    goes round the last user message, and a chat template turns all of them into tokens. Where prompt and answer are the
    same field, its last message is the assistant's: the answer, and no part of the prompt.

    Args:
        answer_field: the field with the answer.
        meta_fields: fields kept in `meta` as they are, beside `source` and `row`, counted from 0.
        gold: makes the answer of what `answer_field` holds (of the last message's text, for messages).

    Returns:
        The problems, in the order of the rows; an answer is empty where `gold` makes nothing of the field.

    Raises:
        ValueError: for a row without the fields or with messages that are none, with file and line; for a source
            without rows, a template without `{prompt}`, a negative `size`.
    """
    taken = [field for field in meta_fields if field in _TAKEN]
    if taken:
        raise ValueError(f"meta_fields: got {', '.join(taken)}, expected other fields: these names mean something else")

    def problem(row: Row, prompt: str, answer: Any, meta: dict[str, Any]) -> Problem:
        try:
            text = (gold(answer) or "").strip()
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{row.where}: {answer_field!r}: {error}") from error
        return Problem(0, prompt, text, meta | {field: row.value[field] for field in meta_fields})

    return _read(read, source, (prompt_field, answer_field, *meta_fields), template, size, problem)


def read_demonstrations(
    *,
    read: Reader,
    source: str = "rows",
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    template: str = "{prompt}",
    size: int = 0,
) -> list[Problem]:
    """The first rows that `read` finds, as problems with the completion that each is to be answered with.

    The completion is kept word for word, white space included, in `meta`; the answer, for graders, is its text without
    white space around it. Messages as in `read_problems`: where prompt and completion are the same field, the last
    message is the completion, and the ones before it are the prompt; a completion of its own may be a list of one
    message of the assistant.

    Args:
        completion_field: the field with the completion.

    Returns:
        The problems, in the order of the rows.

    Raises:
        ValueError: for a row without the fields, with an empty completion or with messages that are none, with file and
            line; for a source without rows, a template without `{prompt}`, a negative `size`.
    """

    def problem(row: Row, prompt: str, completion: Any, meta: dict[str, Any]) -> Problem:
        text = _completion(row.where, completion_field, completion)
        return Problem(0, prompt, text.strip(), meta | {COMPLETION: text})

    return _read(read, source, (prompt_field, completion_field), template, size, problem)


def _read(
    read: Reader,
    source: str,
    fields: Sequence[str],
    template: str,
    size: int,
    problem: Callable[[Row, str, Any, dict[str, Any]], Problem],
) -> list[Problem]:
    """The first `size` rows, made into problems of (row, prompt, answer, meta); `fields` begin with those two."""
    templates.check_template(template, ["prompt"])
    if size < 0:
        raise ValueError(f"size: got {size}, expected 0 for all rows, or how many")
    rows = islice(read(list(dict.fromkeys(fields))), size or None)
    problems = [
        problem(row, *_prompt_and_answer(row, fields[0], fields[1], template), {"row": number, "source": source})
        for number, row in enumerate(rows)
    ]
    if not problems:
        raise ValueError(f"{source}: got no rows, expected at least one")
    return problems


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
                raise ValueError(f"last message: got one of {last['role']!r}, expected the answer, one of 'assistant'")
            answer = last["content"]
        return chat_prompt(messages, fill), answer
    except ValueError as error:
        raise ValueError(f"{row.where}: {prompt_field!r}: {error}") from error


def _completion(where: str, field: str, value: Any) -> str:
    try:
        if is_message_list(value):
            (message,) = read_messages(value) if len(value) == 1 else [{"role": f"{len(value)} messages"}]
            if message["role"] != "assistant":
                raise ValueError(f"got {message['role']!r}, expected one message of 'assistant'")
            value = message["content"]
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"got {type(value).__name__} {str(value)[:80]!r}, expected text that is not empty")
    except ValueError as error:
        raise ValueError(f"{where}: {field!r}: {error}") from error
    return value
