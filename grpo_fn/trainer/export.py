"""Export: the model of a run at its end, or of any checkpoint, as an ordinary model folder; summary.json."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_fn.analysis.evaluation import grader_names
from grpo_fn.shell.atomic_io import check_space, write_json
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.checkpoint.store import prune
from grpo_fn.shell.logging.console import Console
from grpo_fn.shell.logging.metrics_writer import NullLogger
from grpo_fn.shell.model import hf, lora
from grpo_fn.trainer.model_source import (
    WEIGHTS,
    LocatedModel,
    adapters,
    check_fits,
    locate,
    run_of,
    weights_of,
    with_adapters,
)
from grpo_fn.trainer.run import TrainingRun
from grpo_fn.trainer.state import BEST, Progress


def export_run(run: TrainingRun, progress: Progress, console: Console | NullLogger) -> None:
    """Export the model and write the summary of the run."""
    weights = {name: x.cpu() for name, x in run.policy.weights(trained=False) if run.world.main}
    run.world.agree(partial(write_export, run, progress, weights, console), what="exporting the model")


def write_export(
    run: TrainingRun, progress: Progress, weights: dict[str, Tensor], console: Console | NullLogger
) -> None:
    """Write model, adapters and summary.json; on the main rank."""
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


def find_run_checkpoint(name: str) -> LocatedModel:
    """The checkpoint, or the newest whole one of a run. Raises ValueError where there is none."""
    warn, run = partial(print, file=sys.stderr), run_of(name)
    if run is None:
        raise ValueError(f"got {name}, wanted a run folder or a checkpoint in one")
    if Path(name).absolute() != run:
        return locate(name, warn=warn)
    root = run / "checkpoints"
    for step in reversed(store.steps(root)):
        try:
            return locate(str(root / f"step_{step}"), warn=warn)
        except ValueError as error:
            warn(f"skipped: {error}")
    raise ValueError(f"got run folder {run} without a whole checkpoint, wanted one that has saved")


def export_whole(found: LocatedModel, out: Path) -> None:
    """Write the whole model, adapters merged."""
    config, folder = found.source.config(), found.source.folder()
    check_fits(found.checkpoint, config)
    model = hf.empty_model(config)
    model.generation_config = hf.generation_config(folder, config)
    weights: Mapping[str, Tensor] = store.read_tensors(found.checkpoint, WEIGHTS)
    if (how := adapters(found.checkpoint)) is not None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").requires_grad_(False)  # dtype of its files
        weights = dict(lora.merge_adapters(with_adapters(weights_of(base), weights), how))
    check_space(out, sum(x.nbytes for x in weights.values()) + 2**20)
    hf.export_model_folder(model, weights, hf.load_tokenizer(folder), out)


def export_adapter(found: LocatedModel, out: Path) -> None:
    """Write the adapters alone. Raises ValueError where there are none."""
    if (how := adapters(found.checkpoint)) is None:
        raise ValueError(f"got --adapter for {found.path}, wanted a checkpoint of a run with LoRA")
    check_fits(found.checkpoint, found.source.config())
    tensors = store.read_tensors(found.checkpoint, WEIGHTS)
    building = out.with_name(f".{out.name}-new")
    lora.adapter_folder(tensors, how, found.source.folder(), building)
    building.rename(out)
