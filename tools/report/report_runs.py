"""Run folders as a report reads them: metrics, knobs, warnings and samples, as far as each has come."""

import fcntl
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fn.core.json_lines import metrics_by_step
from grpo_fn.shell.checkpoint.run_dir import LOCK, MARKER
from grpo_fn.trainer import health

WARNINGS = 50  # of a run, the newest


class Run(NamedTuple):
    """What a run folder holds, as far as it has come."""

    name: str
    path: Path
    rows: list[dict[str, float]]  # metrics.jsonl: NaN where it has null
    knobs: dict[str, int | float | str]
    summary: dict[str, Any] | None
    working: bool  # whether a process is in it
    warnings: list[str]
    step: int | None  # whose samples these are
    samples: list[dict[str, Any]]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to distinguish them. Raises ValueError for one given twice."""
    whole = [path.resolve() for path in paths]
    if len({*whole}) < len(whole):
        raise ValueError(f"got {len(whole)} runs of which some are the same, wanted each once")
    for depth in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len({*names}) == len(names):
            break
    return names


def read_run(path: Path, name: str, samples: int) -> Run:
    """All there is in the folder. Raises ValueError for one that is no run's."""
    summary = path / "summary.json"
    if not (path / MARKER).is_file():
        raise ValueError(f"got {path} without {MARKER}, wanted a run folder")
    step, rows = newest_samples(path / "rollouts")
    return Run(
        name=name,
        path=path,
        rows=read_metrics(path),
        knobs=json.loads((path / "run.json").read_bytes()).get("hparams", {}),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None,
        working=is_locked(path / LOCK),
        warnings=warning_lines(path / "log.txt"),
        step=step,
        samples=extreme_samples(rows, samples),
    )


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl. A last line that is not whole is being written; another one raises ValueError."""
    return [health.history_line(step, row) for step, row in metrics_by_step(run_dir, torn_end=True).items()]


def is_locked(lock: Path) -> bool:
    """Whether a process works in the run's folder."""
    if not lock.is_file():
        return False
    with open(lock, "rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def warning_lines(log: Path) -> list[str]:
    """The newest lines of log.txt that warn, with their time."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    return [line for line in lines if is_warning(line)][-WARNINGS:]


def is_warning(line: str) -> bool:
    """Whether a rule of health fired in this line: `2026-01-31 12:00:00 health, kl_high: ...`, or has ended the run."""
    return re.match(r"\S+ \S+ (health, |ended by )", line) is not None


def newest_samples(root: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """The newest step whose samples are there, and its rows; the run may be deleting older ones."""
    from grpo_fn.shell.logging import rollout_store  # it loads torch

    for step in reversed(rollout_store.rollout_steps(root) if root.is_dir() else []):
        try:
            return step, rollout_store.load_rollouts(root / f"step_{step:06d}.jsonl.gz")
        except FileNotFoundError:
            continue
    return None, []


def extreme_samples(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The rows with the largest and the smallest advantages, half and half."""
    ranked = sorted(rows, key=lambda row: math.inf if row["advantage"] is None else -row["advantage"])
    low = min(count // 2, len(ranked) // 2)
    return ranked[: count - low] + ranked[len(ranked) - low :] if len(ranked) > count else ranked


def series(run: Run, metric: str) -> list[tuple[float, float]]:
    """(step, value) of the finite values."""
    return [(row["step"], row[metric]) for row in run.rows if math.isfinite(row.get(metric, math.nan))]
