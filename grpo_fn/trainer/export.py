"""The end of a run: the model as a folder for others, and what came of it."""

from functools import partial

from torch import Tensor

from grpo_fn.analysis.evaluation import grader_names
from grpo_fn.shell.atomic_io import write_json
from grpo_fn.shell.checkpoint.store import prune
from grpo_fn.shell.logging.console import Console
from grpo_fn.shell.logging.metrics_writer import NullLogger
from grpo_fn.shell.model import hf, lora
from grpo_fn.trainer.run import TrainingRun
from grpo_fn.trainer.state import BEST, Progress


def export_run(run: TrainingRun, progress: Progress, console: Console | NullLogger) -> None:
    """Export the model and say what came of the run."""
    weights = {name: x.cpu() for name, x in run.policy.weights(trained=False) if run.world.main}
    run.world.agree(partial(write_export, run, progress, weights, console), what="exporting the model")


def write_export(
    run: TrainingRun, progress: Progress, weights: dict[str, Tensor], console: Console | NullLogger
) -> None:
    """What the main rank does of it."""
    # A process killed after its last checkpoint may not have come to it.
    root, how = run.run_dir / "checkpoints", run.settings.checkpoints
    prune(root, keep_last=how.keep_last, keep_best=how.keep_best, metric=BEST, scores=progress.scores)
    model = run.policy.model
    if run.settings.lora is not None:
        lora.adapter_folder(weights, run.settings.lora, model.name_or_path, run.run_dir / "adapter")
        weights = dict(lora.merge_adapters(weights, run.settings.lora))
    hf.export_model_folder(model, weights, run.tokenizer, run.run_dir / "model")
    summary = {
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy,
        "held_out_problems": len(run.held_out),
        "steps": progress.state.step,
        "seed": run.settings.seed,
        "ranks": run.world.size,
        "wall_seconds": round(progress.seconds, 2),
    }
    write_json(run.run_dir / "summary.json", summary)
    signal = run.run_dir / "signal" / f"step_{progress.state.step}.html"
    grader = grader_names(run.settings.evaluation.graders)[0]
    shown = f"; its last step token by token in {signal}" if signal.exists() else ""
    console.line(
        f"held-out accuracy by {grader} {progress.accuracy_before:.3f} before, {progress.accuracy:.3f} after "
        f"{progress.state.step} steps, {progress.seconds:.0f} s; model in {run.run_dir / 'model'}{shown}"
    )
