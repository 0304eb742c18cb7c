"""What was asked at an evaluation, and what came back: one object a problem, in files that people and tools read."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_fn.core.json_lines import json_rows
from grpo_fn.shell.atomic_io import to_json, write_bytes

Rows = Sequence[Mapping[str, Any]]


def store_evaluation(root: Path, step: int, rows: Rows) -> None:
    """Write `root/step_N.jsonl`. Files of later steps belong to a future that a resume has undone and are removed."""
    root.mkdir(parents=True, exist_ok=True)
    write_evaluation_rows(root / f"step_{step}.jsonl", rows)
    for later in evaluation_steps(root):
        if later > step:
            (root / f"step_{later}.jsonl").unlink()


def write_evaluation_rows(path: Path, rows: Rows) -> None:
    """Replace the file at once, one object a line.

    NaN and infinities become null, and what JSON has no form for becomes its text. Equal rows give equal bytes.
    """
    write_bytes(path, "".join(to_json(_plain(row)) + "\n" for row in rows).encode("ascii"))


def load_evaluation(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, in order. Raises ValueError, naming the line, for what is not an object."""
    return [row.value for row in json_rows(path, wanted="an object")]


def evaluation_steps(root: Path) -> list[int]:
    """The steps that have a file, ascending."""
    found = (re.fullmatch(r"step_(0|[1-9]\d*)\.jsonl", path.name) for path in root.iterdir())
    return sorted(int(match[1]) for match in found if match)


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return str(value)
