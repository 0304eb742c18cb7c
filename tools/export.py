"""A checkpoint as an ordinary model folder: config, weights and tokenizer, as transformers and vLLM open them.

python tools/export.py RUN OUT                      of a run's newest checkpoint
python tools/export.py RUN/checkpoints/step_20 OUT  of a checkpoint, whatever number of ranks wrote it and how
python tools/export.py RUN OUT --adapter            of a run with LoRA: the adapters alone, as a PEFT folder

Adapters are merged into the weights of the model that the run began with, in that model's dtype; weights that were
trained whole are written as they were trained, in float32. Everything happens in one process on the CPU, in memory.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo_fn.shell.atomic_io import check_space
from grpo_fn.shell.checkpoint import store
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


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="run folder, or checkpoint in one")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; it must not exist yet")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapters alone, not merged")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Find, check, write; returns the exit code."""
    args = flags().parse_args(argv)
    disable_progress_bar()
    try:
        found = of_a_run(args.source)
        if args.out.exists():
            raise ValueError(f"got {args.out}, which exists; wanted a free name")
        (export_adapter if args.adapter else export)(found, args.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{found.path} written to {args.out}")
    return 0


def of_a_run(name: str) -> LocatedModel:
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


def export(found: LocatedModel, out: Path) -> None:
    """Write the whole model, adapters merged."""
    config, folder = found.source.config(), found.source.folder()
    check_fits(found.checkpoint, config)
    model = hf.empty_model(config)
    model.generation_config = hf.generation_config(folder, config)
    weights = whole(found.checkpoint, folder)
    check_space(out, sum(x.nbytes for x in weights.values()) + 2**20)
    hf.export_model_folder(model, weights, hf.load_tokenizer(folder), out)


def whole(saved: Path, folder: str) -> Mapping[str, Tensor]:
    """Every weight under its plain name."""
    trained, how = store.read_tensors(saved, WEIGHTS), adapters(saved)
    return (
        trained if how is None else dict(lora.merge_adapters(with_adapters(weights_of(opened(folder)), trained), how))
    )


def opened(folder: str) -> nn.Module:
    """The model in the dtype of its files."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").requires_grad_(False)


def export_adapter(found: LocatedModel, out: Path) -> None:
    """Write the adapters alone. Raises ValueError where there are none."""
    if (how := adapters(found.checkpoint)) is None:
        raise ValueError(f"got --adapter for {found.path}, wanted a checkpoint of a run with LoRA")
    check_fits(found.checkpoint, found.source.config())
    tensors = store.read_tensors(found.checkpoint, WEIGHTS)
    building = out.with_name(f".{out.name}-new")
    lora.adapter_folder(tensors, how, found.source.folder(), building)
    building.rename(out)


if __name__ == "__main__":
    sys.exit(main())
