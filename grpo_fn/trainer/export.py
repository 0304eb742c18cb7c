"""The end of a run: the model as a folder for others, and what came of it."""

from functools import partial
from typing import Any

from torch import Tensor

from grpo_fn.shell.atomic_io import write_json
from grpo_fn.shell.checkpoint.store import prune
from grpo_fn.shell.logging.console import Console
from grpo_fn.shell.logging.metrics_writer import NullLogger
from grpo_fn.shell.model import hf, lora
from grpo_fn.trainer.state import BEST, Progress


def export_run(built: Any, progress: Progress, console: Console | NullLogger) -> None:
    """Export the model and say what came of the run."""
    weights = {name: x.cpu() for name, x in built.policy.weights(trained=False) if built.world.main}
    built.world.agree(partial(write_export, built, progress, weights, console), what="exporting the model")


def write_export(built: Any, progress: Progress, weights: dict[str, Tensor], console: Console | NullLogger) -> None:
    """What the main rank does of it."""
    # A process killed after its last checkpoint may not have come to it.
    cadence = built.cadence
    prune(
        built.run_dir / "checkpoints",
        keep_last=cadence.keep_last,
        keep_best=cadence.keep_best,
        metric=BEST,
        scores=progress.scores,
    )
    model = built.policy.model
    if built.adapters is not None:
        lora.adapter_folder(weights, built.adapters, model.name_or_path, built.run_dir / "adapter")
        weights = dict(lora.merged(weights, built.adapters))
    hf.export_weights(model, weights, built.tokenizer, built.run_dir / "model")
    summary = {
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy,
        "held_out_problems": len(built.held_out),
        "steps": progress.state.step,
        "seed": built.seed,
        "ranks": built.world.size,
        "wall_seconds": round(progress.seconds, 2),
    }
    write_json(built.run_dir / "summary.json", summary)
    console.line(
        f"held-out accuracy {progress.accuracy_before:.3f} before, {progress.accuracy:.3f} after "
        f"{progress.state.step} steps, {progress.seconds:.0f} s; model in {built.run_dir / 'model'}"
    )
