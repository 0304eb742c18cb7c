"""The lines of digests.jsonl: checksums of a step, and what they may depend on besides."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_fn.core.json_lines import step_lines
from grpo_fn.shell.atomic_io import flush_file, to_json

FILE = "digests.jsonl"


def append(run_dir: Path, line: Mapping[str, Any]) -> None:
    """Add a step's line to digests.jsonl and wait until it is on the disk."""
    with open(run_dir / FILE, "ab") as file:
        file.write((to_json(line) + "\n").encode("ascii"))
    flush_file(run_dir / FILE)


def read_checksums(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of digests.jsonl by step; a run that is going on may be writing the last one.

    Raises ValueError for a line before the last that is no object with a step.
    """
    return {line.step: line.row for line in step_lines(run_dir / FILE, torn_end=True)}
