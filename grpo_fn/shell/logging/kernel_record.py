"""The kernels that a run computes with on CUDA: a line in kernels.jsonl for each start of its process."""

from collections.abc import Mapping
from pathlib import Path

from grpo_fn.core.json_lines import step_lines
from grpo_fn.shell.atomic_io import flush_file, to_json

FILE = "kernels.jsonl"


def append_kernels(run_dir: Path, step: int, kernels: Mapping[str, str]) -> None:
    """Add what was chosen, as of that step, and wait until it is on the disk."""
    with open(run_dir / FILE, "ab") as file:
        file.write((to_json({"step": step, "kernels": dict(kernels)}) + "\n").encode("ascii"))
    flush_file(run_dir / FILE)


def recorded_kernels(run_dir: Path, step: int) -> dict[str, str]:
    """The kernels that a step was taken with."""
    found = [line.row["kernels"] for line in step_lines(run_dir / FILE, torn_end=True) if line.step <= step]
    return found[-1] if found else {}
