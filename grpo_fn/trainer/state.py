"""The state of a run besides its policy, and its restoration after a stop or a crash."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fn.core.batch import pack_rollout, unpack_reward, unpack_rollout
from grpo_fn.core.json_lines import DIGESTS, metrics_by_step, step_lines
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Carry, CurriculumState, Gains, Groups, RunState
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.world import World
from grpo_fn.trainer import health

BEST = "eval/accuracy"  # what keep_best goes by


@dataclass
class Progress:
    """The state that the loop carries between steps, besides the policy; every checkpoint contains it."""

    state: RunState
    carried: Carry
    accuracy_before: float
    accuracy: float  # of the newest evaluation
    evaluated: int  # the step after which that was
    seconds: float  # of work so far, over all starts
    ahead: list[dict[str, Any]] = field(default_factory=list)  # batches that are sampled and not yet learned from
    pending: list[int] = field(default_factory=list)  # evaluations beside the training that have not come in yet
    scores: dict[int, float] = field(default_factory=dict)  # of those that came in, by step: what keep_best goes by
    saved: int = -1  # the step of the newest checkpoint; -1: none


def read_history(run_dir: Path) -> list[health.Line]:
    """The history that health rules read, from the run's metrics.jsonl."""
    rows = metrics_by_step(run_dir, torn_end=False)
    return health.trim_history([health.history_line(step, row) for step, row in rows.items()])


def figures_of(run_dir: Path, step: int) -> dict[str, float]:
    """The figures of a step in metrics.jsonl; none where it has no line."""
    row = metrics_by_step(run_dir, torn_end=False).get(step)
    return {} if row is None else health.history_line(step, row)


def line_gaps(run_dir: Path, step: int, checksums_every: int) -> list[str]:
    """The steps up to a checkpoint's that metrics.jsonl and digests.jsonl lack or repeat, in words."""
    gaps = []
    for name, first, every in (("metrics.jsonl", 0, 1), (DIGESTS, checksums_every, checksums_every)):
        lines_of = Counter(line.step for line in step_lines(run_dir / name, torn_end=True))
        due = range(first, step + 1, every) if every else ()
        wrong_counts = {n: lines_of[n] for n in sorted({*due, *lines_of}) if n <= step and lines_of[n] != 1}
        if wrong_counts:
            first_wrong = [f"{lines} of step {n}" for n, lines in [*wrong_counts.items()][:8]]
            shown = ", ".join([*first_wrong, "..."] if len(wrong_counts) > 8 else first_wrong)
            gaps.append(
                f"{run_dir / name}: got {shown}, expected one line each up to the checkpoint of step {step}: the "
                "weights are whole, this record of them is not"
            )
    return gaps


def check_steps(run_dir: Path, steps: int) -> None:
    """Raise ValueError for a run folder that has gone further than `expected` steps."""
    done = max(store.steps(run_dir / "checkpoints"), default=0)
    if done > steps:
        raise ValueError(
            f"steps: got {steps} for {run_dir}, expected {done} or more, which it has made, or another folder"
        )


def has_progress(run_dir: Path) -> bool:
    """Whether a run folder holds anything that a run has found out."""
    metrics = run_dir / "metrics.jsonl"
    return bool(store.steps(run_dir / "checkpoints")) or (metrics.exists() and metrics.stat().st_size > 0)


def packed_progress(progress: Progress, policy: FSDPPolicy, adapters: LoRA | None) -> tuple[dict[str, Any], dict]:
    """The parts of a checkpoint that are not tensors: (blobs, meta)."""
    measured_now = progress.evaluated == progress.state.step  # a score counts for the weights that earned it
    meta = {
        **progress.state._asdict(),
        "accuracy_before": progress.accuracy_before,
        "accuracy": progress.accuracy,
        "evaluated": progress.evaluated,
        "seconds": progress.seconds,
        "metrics": {BEST: progress.accuracy} if measured_now else {},
        "pending": [*progress.pending],
        "scores": {str(step): score for step, score in progress.scores.items()},
        "lora": None if adapters is None else asdict(adapters),
    }
    return {"policy": policy.counters(), "carried": pack_carried(progress.carried), "ahead": progress.ahead}, meta


def reload_policy(run_dir: Path, step: int, policy: FSDPPolicy, world: World) -> None:
    """The policy as the checkpoint of a step holds it; every rank takes part."""
    path = run_dir / "checkpoints" / f"step_{step}"
    blobs = world.agree(partial(store.blobs, path), what=f"reading the checkpoint of step {step}")
    policy.restore(partial(store.load_into, path, world=world), blobs["policy"])


def newest_checkpoint(
    root: Path, *, start_over: bool, every: int
) -> tuple[Path | None, dict[str, Any], dict[str, Any], list[str]]:
    """(path, blobs, meta, what was skipped) of the newest checkpoint that verifies."""
    notes: list[str] = []
    newest = store.latest_verified(root, warn=notes.append)
    broken = sorted(path.name for path in root.glob("broken-step_*"))
    if newest is None and broken and not start_over:
        problem = (
            f"got {root} with nothing but broken checkpoints ({', '.join(broken)}), expected one to resume from: "
            "choose another --run_dir, or pass --force to start over in this one"
        )
        raise ValueError("\n  ".join([problem, *notes]))
    last = 0 if newest or start_over else max(metrics_by_step(root.parent, torn_end=True), default=0)
    # The second save waits for the first: one step later there was a checkpoint.
    if last and (not root.is_dir() or 0 < 2 * every < last):
        raise ValueError(
            f"got no checkpoint in {root}, expected one to resume from, as metrics.jsonl goes to step {last}: "
            "put it back, choose another --run_dir, or pass --force to start over in this one"
        )
    if newest is None:
        return None, {}, {}, notes
    return newest.path, store.blobs(newest.path), newest.meta, notes


def pack_carried(carried: Carry) -> dict[str, Any]:
    """The carried state as containers of numbers, strings and tensors."""
    waiting = carried.waiting and {
        "uids": [problem.uid for problem in carried.waiting.problems],
        "rollout": pack_rollout(carried.waiting.rollout),
        "reward": [*carried.waiting.reward],
    }
    chosen = carried.curriculum and {"turns": carried.curriculum.turns, "arrays": {**carried.curriculum.arrays}}
    gains = [*carried.gains]
    blob = {"drawn": carried.drawn, "gains": gains, "waiting": waiting, "steps": carried.steps}
    return blob if chosen is None else {**blob, "curriculum": chosen}


def unpack_carried(blob: Mapping[str, Any], problem: Callable[[int], Problem]) -> Carry:
    """The inverse of `pack_carried`."""
    waiting = blob["waiting"] and Groups(
        tuple(problem(uid) for uid in blob["waiting"]["uids"]),
        unpack_rollout(blob["waiting"]["rollout"]),
        unpack_reward(blob["waiting"]["reward"]),
    )
    chosen = blob.get("curriculum") and CurriculumState(**blob["curriculum"])
    return Carry(blob["drawn"], waiting, Gains(*blob["gains"]), blob.get("steps", 0), chosen)


def null_to_nan(value: float | None) -> float:
    """JSON's null back to the NaN that it stands for."""
    return float("nan") if value is None else value
