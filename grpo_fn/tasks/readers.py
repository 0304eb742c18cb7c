"""Readers of rows: JSON lines, parquet and hub data sets, with errors that name file and line.

Files are not read by `datasets`: it makes 27.0 of a 27 beside 0.5, a date of text that looks like one, null of a field
that is missing, and takes 5.7 s to import.
"""

import importlib
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType

from grpo_fn.core.json_lines import Row, json_rows
from grpo_fn.tasks.task import list_places


def jsonl_rows(folder: Path, name: str, *, fields: Sequence[str]) -> list[Row]:
    """The objects of the file `name` in `folder`, one a line, each with text in all of `fields`.

    Blank lines are skipped.

    Args:
        folder: folder of the file.
        name: name of the file.
        fields: fields that have to hold text.

    Returns:
        The rows, in the order of the file.

    Raises:
        ValueError: for a line that is not such an object, naming file and line, and for a folder or a file that is
            missing, unreadable or empty.
    """
    if not folder.is_dir():
        beside = folder_listing(folder.parent) if folder.parent.is_dir() else "no such folder either"
        raise ValueError(
            f"data: got {folder}, which is no folder, wanted one with {name}; {folder.parent} has: {beside}"
        )
    if not (folder / name).is_file():
        raise ValueError(f"data: got {folder} without {name}, wanted that file; there are: {folder_listing(folder)}")
    rows = list(json_lines(folder / name, fields))
    for row in rows:
        for field in fields:
            text_field(row, field)
    return rows


def json_lines(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """The objects of a file, one a line, as they are read.

    Args:
        path: path of the file.
        fields: fields that an error names as wanted; they are not checked.

    Returns:
        The rows, in the order of the file.

    Raises:
        ValueError: for a line that is no object, naming file and line, and for a file that is unreadable or empty.
    """
    row = None
    try:
        for row in json_rows(path, wanted=f"an object with {', '.join(fields)}"):
            yield row
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: got a file that cannot be read, wanted UTF-8 text: {error}") from error
    if row is None:
        raise ValueError(f"{path}: got an empty file, wanted one JSON object a line")


def text_field(row: Row, field: str) -> str:
    """The text in a field.

    Args:
        row: one row of a file.
        field: name of the field.

    Returns:
        The text, as it is.

    Raises:
        ValueError: when the field holds no text, with the fields that there are, or half a character.
    """
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


def folder_listing(folder: Path) -> str:
    """The names in a folder, the first ten of them.

    Args:
        folder: path of a folder that exists.

    Returns:
        The names, sorted, for a message; "nothing" for an empty folder.
    """
    return list_places(sorted(path.name for path in folder.iterdir())) or "nothing"


def file(fields: Sequence[str], *, path: str) -> Iterator[Row]:
    """The rows of a .jsonl file (.json where it holds an object a line) or a .parquet file.

    Parquet needs pyarrow, and reads the named fields alone.

    Args:
        fields: fields that every row has to have.
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
            raise ValueError(f"path: got {found}, wanted a file that ends in {', '.join(_READERS)}")
        yield from reader(found, fields)


def hub(fields: Sequence[str], *, name: str, config: str, split: str, revision: str) -> Iterator[Row]:
    """The rows of a split of a hub dataset, or of a folder that the `datasets` library can load; needs that library.

    Args:
        fields: fields that every row has to have.
        name: name of the dataset, or path of a folder.
        config: configuration of the dataset; "" for the default one.
        split: split, which can be cut as the library allows: `train[:1000]`.
        revision: commit, branch or tag; "" for the default one.

    Returns:
        The rows, as they are read.

    Raises:
        ValueError: when the library, dataset or split is not there, and when its rows lack a field.
    """
    datasets = _library("datasets")
    try:
        rows = datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    except Exception as error:  # a dozen kinds, by what is wrong with name, network or files
        got = f"dataset {name!r}, config {config!r}, split {split!r}, revision {revision!r}"
        raise ValueError(f"got {got}, wanted one that can be loaded: {type(error).__name__}: {error}") from error
    _check_fields(f"{name}, split {split}", rows.column_names, fields)
    for number, value in zip(count(1), rows.select_columns(list(fields)), strict=False):
        yield Row(f"{name}/{split}:{number}", value)


def _files(path: Path) -> list[Path]:
    found = sorted(path.parent.glob(path.name)) if {"*", "?"} & {*path.name} else [path] if path.is_file() else []
    if not found:
        there = folder_listing(path.parent) if path.parent.is_dir() else "no such folder"
        raise ValueError(f"path: got {path}, which is no file, wanted one; {path.parent} has: {there}")
    return found


def _json_rows(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    for row in json_lines(path, fields):
        _check_fields(row.where, list(row.value), fields)
        yield row


def _parquet_rows(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    arrow, parquet = _library("pyarrow"), _library("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as table:
            _check_fields(str(path), table.schema_arrow.names, fields)
            batches = table.iter_batches(columns=list(fields))
            values = (value for batch in batches for value in batch.to_pylist())
            for number, value in enumerate(values, start=1):
                yield Row(f"{path}:{number}", value)
    except (OSError, arrow.ArrowException) as error:
        raise ValueError(f"{path}: got a file that cannot be read, wanted parquet: {error}") from error


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"got no library {name!r}, wanted it: pip install 'grpo-fn[data]' ({error})") from error


def _check_fields(where: str, there: Sequence[str], fields: Sequence[str]) -> None:
    absent = [field for field in fields if field not in there]
    if absent:
        raise ValueError(f"{where}: got the fields {', '.join(there) or 'none'}, wanted also {', '.join(absent)}")


_READERS = {".jsonl": _json_rows, ".json": _json_rows, ".parquet": _parquet_rows}
