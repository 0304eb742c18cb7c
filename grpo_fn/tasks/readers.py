"""Reading JSON lines, with errors that say where to look."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One object of the file and where it stands, as `file:line`."""

    where: str
    value: dict[str, Any]


def jsonl_rows(folder: Path, name: str, *, fields: Sequence[str]) -> list[Row]:
    """The objects of the file `name` in `folder`, one a line, each with text in all of `fields`.

    Blank lines are skipped. Raises ValueError naming file and line for a line that is not such an object, and for a
    folder or a file that is missing, unreadable or empty.
    """
    if not folder.is_dir():
        beside = listing(folder.parent) if folder.parent.is_dir() else "no such folder either"
        raise ValueError(
            f"data: got {folder}, which is no folder, wanted one with {name}; {folder.parent} has: {beside}"
        )
    if not (folder / name).is_file():
        raise ValueError(f"data: got {folder} without {name}, wanted that file; there are: {listing(folder)}")
    rows = list(json_lines(folder / name, fields))
    for row in rows:
        for field in fields:
            text(row, field)
    return rows


def json_lines(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """The objects of a file, one a line, as they are read; `fields` is what an error says they should hold."""
    empty = True
    try:
        # newline: without it a line would also end at separators that JSON allows inside a string. A byte-order mark,
        # which some editors put in front, is no part of the first line.
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    empty = False
                    yield _row(f"{path}:{number}", line.strip(), fields)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: got a file that cannot be read, wanted UTF-8 text: {error}") from error
    if empty:
        raise ValueError(f"{path}: got an empty file, wanted one JSON object a line")


def text(row: Row, field: str) -> str:
    """The text in a field. Raises ValueError with the fields that there are when it holds none, or half a character."""
    value = row.value.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{row.where}: got the fields {', '.join(row.value) or 'none'}, wanted text in {field!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell a surrogate alone; no tokenizer takes it
        raise ValueError(
            f"{row.where}: got {field!r} with {error.object[error.start]!a}, wanted Unicode text"
        ) from error
    return value


def listing(folder: Path) -> str:
    """The names in a folder, the first ten of them."""
    names = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(names[:10]) or "nothing"
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


def _row(where: str, line: str, fields: Sequence[str]) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: got {line[:80]!r}, wanted JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got a JSON {type(value).__name__}, wanted an object with {', '.join(fields)}")
    return Row(where, value)
