"""JSON lines, one object each: data files, rollouts and evaluations, and the files that a run adds a step's line to."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One object of the file and where it stands, as `file:line`."""

    where: str
    value: dict[str, Any]


class StepLine(NamedTuple):
    """A line that a run has added for a step."""

    step: int
    line: bytes  # as it stands in the file, with its end also where that is missing
    row: dict[str, Any]


def json_object(where: str, line: str | bytes, *, expected: str) -> dict[str, Any]:
    """The object in a line. Raises ValueError naming `where`; `expected` is what it says the object should be."""
    try:
        value = json.loads(line if isinstance(line, str) else line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: got {line[:80]!r}, expected a JSON object in UTF-8: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got a JSON {type(value).__name__}, expected {expected}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"it has the key {twice!r} twice")  # Python would take the last without a word
    return found


def json_rows(path: Path, *, expected: str) -> Iterator[Row]:
    """The objects of a file, of one that ends in .gz too, as they are read; blank lines are skipped.

    Raises ValueError as `json_object` does, UnicodeDecodeError for what is not UTF-8, OSError for what cannot be read.
    """
    # newline: without it a line would also end at separators that JSON allows inside a string. A byte-order mark,
    # which some editors put in front, is no part of the first line.
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if text := line.strip():
                yield Row(f"{path}:{number}", json_object(f"{path}:{number}", text, expected=expected))


def step_lines(path: Path, *, torn_end: bool) -> list[StepLine]:
    """The lines of metrics.jsonl or digests.jsonl; none where there is no file.

    With `torn_end` a last line that is not whole is left out: a run that was killed has left it, or one that is going
    on is writing it. Raises ValueError, naming file and line, for any other line that is no object with a step.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    step_rows, last = [], len(lines)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            step_rows.append(StepLine(int(row["step"]), line if line.endswith(b"\n") else line + b"\n", row))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if torn_end and number == last:  # a lost page of the disk reads as zeros and may well end in a newline
                break
            raise ValueError(f"{path}:{number}: got {line[:80]!r}, expected a JSON object with a step") from error
    return step_rows


DIGESTS = "digests.jsonl"  # checksums of every step, and what they may depend on besides


def digests_by_step(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of a run's digests.jsonl by step; a run that is going on may be writing the last one."""
    return {line.step: line.row for line in step_lines(run_dir / DIGESTS, torn_end=True)}


def metrics_by_step(run_dir: Path, *, torn_end: bool) -> dict[int, dict[str, float | None]]:
    """The figures in a run's metrics.jsonl by step, null where one is not finite. Raises as `step_lines` does."""
    lines = step_lines(run_dir / "metrics.jsonl", torn_end=torn_end)
    return {line.step: {name: value for name, value in line.row.items() if name != "step"} for line in lines}
