"""Reading JSON lines, with errors that say where to look."""

import json
from collections.abc import Sequence
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
    # Not splitlines(), which also cuts at separators that JSON allows inside a string.
    lines = enumerate(_text(folder, name).split("\n"), start=1)
    rows = [_row(f"{folder / name}:{number}", line, fields) for number, line in lines if line.strip()]
    if not rows:
        raise ValueError(f"{folder / name}: got an empty file, wanted one JSON object a line")
    return rows


def _text(folder: Path, name: str) -> str:
    if not folder.is_dir():
        beside = _listing(folder.parent) if folder.parent.is_dir() else "no such folder either"
        raise ValueError(
            f"data: got {folder}, which is no folder, wanted one with {name}; {folder.parent} has: {beside}"
        )
    if not (folder / name).is_file():
        raise ValueError(f"data: got {folder} without {name}, wanted that file; there are: {_listing(folder)}")
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / name}: got a file that cannot be read, wanted UTF-8 text: {error}") from error


def _row(where: str, line: str, fields: Sequence[str]) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: got {line[:80]!r}, wanted JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got a JSON {type(value).__name__}, wanted an object with {', '.join(fields)}")
    for field in fields:
        if not isinstance(value.get(field), str):
            raise ValueError(f"{where}: got the fields {', '.join(value) or 'none'}, wanted text in {field!r}")
    return Row(where, value)


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(names[:10]) or "nothing"
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown
