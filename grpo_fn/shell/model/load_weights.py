"""Weights from a Hugging Face folder into a module, shard by shard: no rank ever holds the whole model.

`meta_causal_lm` builds the shape, `fully_shard` may divide it, `load_shards` gives every parameter storage and reads
this rank's part. Not torch's HuggingFaceStorageReader: it reads every file beside those of the index, and takes tensors
that are left over or quantised without a word.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PretrainedConfig

WANTED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja"]
UNWANTED = ["*/*", "consolidated*"]  # the same weights in other formats
FLOATS = ("F64", "F32", "F16", "BF16")
SHOWN = 3  # names in an error

Part = tuple[slice, ...]  # one for each dimension


def folder_of(name: str) -> Path:
    """The local folder of a model: the folder itself, or a hub name's files, downloaded where they are not yet here.

    Raises ValueError when there is no such model.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except (OSError, ValueError) as error:  # no such repository; no network and nothing kept; a malformed name
        raise ValueError(f"got model {name!r}, wanted a folder or a hub name, owner/model: {error}") from error


# -- the shape


def meta_causal_lm(config: PretrainedConfig, *, attention: str, dtype: torch.dtype) -> nn.Module:
    """The causal language model in evaluation mode, parameters on the meta device, buffers real and right.

    Raises ValueError when there is a buffer that stands in no file and that the model does not compute by itself.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    # Rotary frequencies and the like are computed by _init_weights, on which from_pretrained, too, relies for them.
    # Parameters stay on meta, where initialising does nothing.
    for module in model.modules():
        if own := dict(module.named_buffers(recurse=False)):
            for name, buffer in own.items():
                setattr(module, name, _unset(buffer))
            model._init_weights(module)
    in_files = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in in_files and buffer.numel() and torch.equal(buffer, _unset(buffer)):
            raise ValueError(
                f"got buffer {name}, which is in no file and which {type(model).__name__} does not compute"
            )
    return model.eval()


def _unset(like: Tensor) -> Tensor:
    limits = torch.finfo(like.dtype) if like.dtype.is_floating_point else torch.iinfo(like.dtype)
    return torch.full(like.shape, limits.min, dtype=like.dtype, device="cpu")


# -- the weights


@torch.no_grad()
def load_shards(module: nn.Module, folder: Path, *, device: torch.device, prefix: str) -> None:
    """Give every parameter storage on `device` and read this rank's part of it from the folder's safetensors.

    Parameters are plain tensors or DTensors (after `fully_shard`). Those on the meta device are replaced, so call this
    before there is an optimizer; those with storage keep it. Values are converted to the parameter's dtype. `prefix` is
    what the module's names have before those in the files. Layers with LoRA adapters read their plain weight; the
    adapters are left to `lora.reset`. Buffers move to `device`, persistent ones are read.

    Raises ValueError, nothing allocated, for a folder without safetensors, for truncated files, and for tensors that
    are missing, left over, of another shape or quantised; and for tied tensors that differ, once they are read.
    """
    stored = entries(folder)
    places = _places(module, prefix)
    _check(module, places, stored, folder)
    for name, buffer in list(module.named_buffers()):
        _hang(module, name, buffer.to(device))
    for names in places:
        first, *others = [name for name in names.values() if name in stored]
        set_tensor(module, list(names), partial(_read, stored, first), device=device)
        own = part(attrgetter(next(iter(names)))(module))
        for other in others:
            if not torch.equal(_read(stored, first, own), _read(stored, other, own)):
                raise ValueError(f"got {first} and {other} with different values in {folder}, wanted them tied")


def set_tensor(
    module: nn.Module, names: Sequence[str], read: Callable[[Part], Tensor], *, device: torch.device
) -> None:
    """Set the tensor that hangs in the module under all `names` to what `read` returns for this rank's part of it.

    One on the meta device gets storage on `device` first, which makes it a new parameter.
    """
    old = attrgetter(names[0])(module)
    meta = old.device.type == "meta"
    new = torch.empty_like(old, device=device) if meta else old.detach()
    local = new.to_local() if isinstance(new, DTensor) else new
    if local.numel():
        local.copy_(read(part(old)))
    if not meta:
        return
    parameter = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    for name in names:
        _hang(module, name, parameter)


def part(tensor: Tensor) -> Part:
    """Where this rank's part lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _hang(module: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, tensor)


# -- which tensor is which

Place = dict[str, str]  # of one tensor, its names in the module (several when it is tied), each to that in the files


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to a LoRA adapter."""
    return ".lora_A." in name or ".lora_B." in name


def name_without_lora(name: str) -> str:
    """The name without the LoRA layer around it, as in a Hugging Face file."""
    return name.replace(".base_layer.", ".")


def _places(module: nn.Module, prefix: str) -> list[Place]:
    places: dict[int, Place] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if is_adapter(name):
            continue
        if not name.startswith(prefix):
            raise ValueError(f"got a module with {name}, wanted every name to begin with {prefix!r}")
        places.setdefault(id(tensor), {})[name] = name_without_lora(name.removeprefix(prefix))
    return list(places.values())


def _check(module: nn.Module, places: list[Place], stored: Mapping[str, "Entry"], folder: Path) -> None:
    known = {name for place in places for name in place.values()}
    # What files may hold besides, by the models' own word; and frequencies, which old files kept for every layer.
    named = {p for m in module.modules() for p in getattr(m, "_keys_to_ignore_on_load_unexpected", None) or ()}
    ignored = [re.compile(pattern) for pattern in (r"rotary_emb\.inv_freq$", *named)]
    extra = [name for name in stored if name not in known and not any(p.search(name) for p in ignored)]
    missing = [next(iter(place.values())) for place in places if not stored.keys() & set(place.values())]
    if missing or extra:
        odd = [f"{what} {_few(names)}" for what, names in (("without", missing), ("with", extra)) if names]
        raise ValueError(f"got weights {' and '.join(odd)} in {folder}, wanted those of {type(module).__name__} alone")
    for place in places:
        tensor = attrgetter(next(iter(place)))(module)
        for name in [name for name in place.values() if name in stored]:
            file, dtype, shape = stored[name]
            if shape != tuple(tensor.shape):
                raise ValueError(f"got {name} of shape {shape} in {file}, wanted {tuple(tensor.shape)}")
            if tensor.is_floating_point() and dtype not in FLOATS:
                raise ValueError(f"got {name} as {dtype} in {file}, wanted one of {', '.join(FLOATS)}")


def _few(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# -- files


class Entry(NamedTuple):
    """Where a tensor is stored, and as what."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def entries(folder: Path) -> dict[str, Entry]:
    """Every tensor in the folder's safetensors, from the files' headers alone: one file, or an index and its shards.

    Raises ValueError for a folder without them, for missing shards, and for files that are none, or truncated.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _header(single)
    if not index.is_file():
        others = sorted(path.name for path in folder.glob("pytorch_model*.bin")) if folder.is_dir() else []
        convert = f"; convert {_few(others)} to safetensors" if others else ""
        raise ValueError(f"got {folder}, wanted {single.name} or {index.name} in it{convert}")
    try:
        shards = json.loads(index.read_text())["weight_map"]
        files = sorted({folder / Path(name).name for name in shards.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"got {index}, wanted a JSON object with a weight_map from tensor to file: {error!r}"
        ) from error
    if gone := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"got {folder} without {_few(gone)}, wanted every file that {index.name} names")
    return {name: entry for file in files for name, entry in _header(file).items()}


def _header(file: Path) -> dict[str, Entry]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise ValueError(f"got {file}, wanted a whole safetensors file: {error}") from error
    return {name: Entry(file, stored.get_dtype(), tuple(stored.get_shape())) for name, stored in slices.items()}


def _read(stored: Mapping[str, Entry], name: str, where: Part) -> Tensor:
    with safe_open(stored[name].file, framework="pt", device="cpu") as opened:
        return opened.get_slice(name)[where] if where else opened.get_tensor(name)  # a scalar has no parts
