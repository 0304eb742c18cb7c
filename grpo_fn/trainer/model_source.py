"""The weights behind a name on the command line: a model folder, a hub name, a run or a checkpoint."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from grpo_fn.config import freeze, load_config
from grpo_fn.shell.atomic_io import check_space
from grpo_fn.shell.checkpoint import store, tensor_shards
from grpo_fn.shell.checkpoint.run_dir import MARKER
from grpo_fn.shell.checkpoint.store import MANIFEST, Broken, verify
from grpo_fn.shell.model import hf, lora
from grpo_fn.shell.model.hf import is_adapter
from grpo_fn.trainer.sections import model_source

WEIGHTS = "weights."  # what the names of the model's tensors begin with in a checkpoint


@dataclass(frozen=True)
class LocatedModel:
    """The model of `source`, with the weights of the checkpoint, if any, or its adapters merged."""

    source: hf.ModelSource
    checkpoint: Path | None
    path: str  # what holds the weights, for people


def locate(name: str, *, warn: Callable[[str], None], exported: bool = True) -> LocatedModel:
    """The source of a name: DIR/checkpoints/step_N of a run, a run folder DIR, else a Hugging Face folder or hub name.

    Of a run folder the newest weights: a checkpoint that verifies or, if `exported` may be, `model/` once the run is
    over. Nothing in it is changed, so the run may be at work; checkpoints found broken on the way go to `warn`. Raises
    ValueError for a checkpoint that is broken or in no run folder, and for a run that has saved nothing.
    """
    path, run = Path(name).absolute(), run_of(name)
    if run is None:
        if (path / MANIFEST).is_file():
            raise ValueError(f"got checkpoint {name} in no run folder, expected DIR/checkpoints/{path.name} of one")
        return LocatedModel(hf.named_model(name), None, name)
    model = run / "model"
    saved = verified_checkpoint(path) if path != run else newest_verified(run, warn, exported and model.is_dir())
    if saved is None:
        return LocatedModel(hf.Pretrained(str(model)), None, str(model))
    if adapters(saved) is None and model.is_dir():  # shape, tokenizer and stop tokens are those of all checkpoints
        return LocatedModel(hf.Pretrained(str(model)), saved, str(saved))
    # The model that the configuration names: adapters need its weights, and `model/` has them merged already.
    named = freeze(load_config([str(run / "config.gin")], []).root.knobs["model"], {})
    return LocatedModel(model_source(named, "train.train.model"), saved, str(saved))


def run_of(name: str) -> Path | None:
    """The run folder that the name is, or is a checkpoint of; None for anything else."""
    path = Path(name).absolute()
    runs = [path, path.parent.parent] if path.parent.name == "checkpoints" else [path]
    return next((run for run in runs if (run / MARKER).is_file()), None)


def newest_verified(run: Path, warn: Callable[[str], None], exported: bool) -> Path | None:
    """The newest checkpoint of a run that verifies; None when what it `exported` is as new."""
    root, summary = run / "checkpoints", run / "summary.json"
    done = json.loads(summary.read_bytes())["steps"] if exported and summary.exists() else -1
    for step in reversed(store.steps(root)):
        if step <= done:
            return None
        try:
            return verified_checkpoint(root / f"step_{step}")
        except ValueError as error:
            warn(f"skipped: {error}")
    if exported:
        return None
    raise ValueError(f"got run folder {run} without a whole checkpoint, expected one that has saved")


def verified_checkpoint(path: Path) -> Path:
    """The checkpoint, once its hashes verify. Raises ValueError with the reason when they do not."""
    try:
        verify(path)
    except (Broken, OSError) as error:  # a run at work may delete it while it is looked at
        raise ValueError(f"got checkpoint {path}, which is broken: {error}; expected a whole one") from error
    return path


def adapters(saved: Path) -> lora.LoRA | None:
    """The LoRA configuration of the checkpoint's adapters; None if it holds all weights."""
    how = store.meta(saved).get("lora")
    return None if how is None else lora.LoRA(**how)


def check_fits(saved: Path, config: PretrainedConfig) -> None:
    """Raise ValueError unless the checkpoint holds every weight of the model and no other, each of its shape.

    Of adapters: unless each belongs to a weight of the model and fits it.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(hf.empty_model(config)).items()}
    how, stored = adapters(saved), tensor_shards.folder_tensors(saved)
    stored_shapes = {
        name.removeprefix(WEIGHTS): shape for name, (shape, _) in stored.items() if name.startswith(WEIGHTS)
    }
    expected = shapes if how is None else {name: _adapter_shape(name, shapes, how) for name in stored_shapes}
    differing = sorted(
        name for name in expected.keys() | stored_shapes.keys() if expected.get(name) != stored_shapes.get(name)
    )
    if differing:
        name = differing[0]
        raise ValueError(
            f"got checkpoint {saved} of another model: {name} {stored_shapes.get(name, 'is not in it')}, expected "
            f"{expected.get(name) or 'nothing of that name'} ({len(differing)} weights differ)"
        )


def _adapter_shape(name: str, shapes: Mapping[str, tuple[int, ...]], how: lora.LoRA) -> tuple[int, ...] | None:
    """A [rank, in] and B [out, rank] of a weight [out, in]; None where there is no such weight."""
    layer = name.removesuffix(lora.A).removesuffix(lora.B)
    weight = shapes.get(f"{layer}.weight") if is_adapter(name) else None
    if weight is None:
        return None
    return (how.rank, weight[1]) if name.endswith(lora.A) else (weight[0], how.rank)


@torch.no_grad()
def copy_checkpoint_weights(model: nn.Module, saved: Path) -> None:
    """Copy the checkpoint's weights into the model, which `check_fits` has found to be the right one.

    Adapters are merged into what the model has: the weights that its source gave it.
    """
    own, how = weights_of(model), adapters(saved)
    if how is None:
        tensor_shards.load_into_tensors(saved, {f"{WEIGHTS}{name}": weight for name, weight in own.items()})
        return
    for name, weight in lora.merge_adapters(with_adapters(own, store.read_tensors(saved, WEIGHTS)), how):
        if weight is not own[name]:
            own[name].copy_(weight)


def load_located_model(located: LocatedModel, load: Callable[[], nn.Module]) -> nn.Module:
    """The model of the folder, with the checkpoint's weights in it where there is one."""
    module = load()
    if located.checkpoint is not None:
        copy_checkpoint_weights(module, located.checkpoint)
    return module


def with_adapters(weights: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model and the adapters of a checkpoint, under the names that they have in a run."""
    layers = {name.removesuffix(lora.A) for name in trained if name.endswith(lora.A)}
    device = next(iter(weights.values())).device
    base = {}
    for name, tensor in weights.items():
        layer, _, leaf = name.rpartition(".")
        base[f"{layer}.base_layer.{leaf}" if layer in layers else name] = tensor
    return {**base, **{name: tensor.to(device) for name, tensor in trained.items()}}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer once, a tied one under its first name: what a checkpoint holds."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


# -- as an ordinary model folder


def export_whole(located: LocatedModel, out: Path) -> None:
    """Write the whole model, adapters merged."""
    config, folder = located.source.config(), located.source.folder()
    check_fits(located.checkpoint, config)
    model = hf.empty_model(config)
    model.generation_config = hf.generation_config(folder, config)
    weights: Mapping[str, Tensor] = store.read_tensors(located.checkpoint, WEIGHTS)
    if (how := adapters(located.checkpoint)) is not None:
        dtype = config.dtype or torch.float32  # of its files
        base = hf.load_model(folder, dtype=dtype, device=torch.device("cpu"), attention="eager").requires_grad_(False)
        weights = dict(lora.merge_adapters(with_adapters(weights_of(base), weights), how))
    check_space(out, sum(x.nbytes for x in weights.values()) + 2**20)
    hf.export_model_folder(model, weights, hf.load_tokenizer(folder), out)


def export_adapter(located: LocatedModel, out: Path) -> None:
    """Write the adapters alone. Raises ValueError where there are none."""
    if (how := adapters(located.checkpoint)) is None:
        raise ValueError(f"got --adapter for {located.path}, expected a checkpoint of a run with LoRA")
    check_fits(located.checkpoint, located.source.config())
    tensors = store.read_tensors(located.checkpoint, WEIGHTS)
    building = out.with_name(f".{out.name}-new")
    lora.adapter_folder(tensors, how, located.source.folder(), building)
    building.rename(out)
