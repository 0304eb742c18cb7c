"""Hugging Face folders in and out: config, tokenizer, chat template (prompts as token ids), weights, export."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from grpo_fn.core.problem import Conversation
from grpo_fn.shell.atomic_io import flush_file, flush_tree

# A prompt to the token ids that the completion follows: encode_prompt, with_system, bare_prompt.
Encode = Callable[[PreTrainedTokenizerBase, str], list[int]]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@runtime_checkable
class ModelSource(Protocol):
    """Where a model comes from: its shape without its weights, and a folder that holds both."""

    def config(self) -> PretrainedConfig: ...

    def folder(self) -> str: ...


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face folder on disk, or a name on a hub."""

    name: str

    def config(self) -> PretrainedConfig:
        """The model's config; ValueError when the folder is not a model folder."""
        self._check()
        try:
            return AutoConfig.from_pretrained(self.name)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"got model {self.name!r}, expected a causal language model's folder or hub name: {error}"
            ) from error

    def folder(self) -> str:
        """The name itself, once it is known to hold weights and a tokenizer."""
        self._check()
        path = Path(self.name)
        if path.is_dir() and not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
            raise ValueError(f"got model folder {self.name} without weights (*.safetensors); it holds {_listing(path)}")
        return self.name

    def _check(self) -> None:
        path = Path(self.name)
        looks_local = path.is_absolute() or self.name.startswith((".", "~")) or self.name.count("/") != 1
        if not path.exists():
            if looks_local:
                raise ValueError(
                    f"got model {self.name!r}, which does not exist; expected a Hugging Face model folder or a hub "
                    "name, owner/model"
                )
            return
        if not path.is_dir():
            raise ValueError(
                f"got model {self.name!r}, a file; expected a folder with config.json, weights and tokenizer"
            )
        if not (path / "config.json").is_file():
            raise ValueError(
                f"got folder {self.name} without config.json; expected a Hugging Face model; it holds {_listing(path)}"
            )


def _listing(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir())
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "") if names else "nothing"


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; ValueError when there is none, or no EOS token that the model could stop at."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        vocab_size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"got no usable tokenizer in {folder}; expected tokenizer.json or its like: {error}"
        ) from error
    # For known model types transformers makes up a tokenizer of special tokens alone where the files are missing.
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise ValueError(f"got no tokenizer in {folder}; expected tokenizer.json or its like")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"got a tokenizer without an EOS token in {folder}; expected one, or no completion could ever end"
        )
    if tokenizer.eos_token_id >= vocab_size:
        raise ValueError(
            f"got EOS {tokenizer.eos_token!r} in {folder}, which is not in the vocabulary: its id "
            f"{tokenizer.eos_token_id} was added; expected one of the model's {vocab_size} ids"
        )
    return tokenizer


def find_dtype(name: str) -> torch.dtype:
    """float32, bfloat16 or float16; ValueError for anything else."""
    if name not in DTYPES:
        raise ValueError(f"got dtype {name!r}, expected one of {sorted(DTYPES)}")
    return DTYPES[name]


def load_model(folder: str, *, dtype: torch.dtype, device: torch.device, attention: str) -> nn.Module:
    """The model in evaluation mode (no dropout anywhere: log-probs must be a function of the weights)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.to(device).eval()


def empty_model(config: PretrainedConfig) -> nn.Module:
    """The model's shape on the meta device: parameters to count, none to hold."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt in the tokenizer's chat template, as one user turn; without a template, of the bare text.

    Args:
        tokenizer: the policy's.
        prompt: text, or a Conversation, whose messages are the turns.

    Returns:
        The ids which the completion follows.

    Raises:
        ValueError: for a Conversation where the tokenizer has no chat template.
    """
    if isinstance(prompt, Conversation):
        return _apply_chat_template(tokenizer, prompt.messages)
    if tokenizer.chat_template is None:
        return bare_prompt(tokenizer, prompt)
    return _apply_chat_template(tokenizer, [{"role": "user", "content": prompt}])


def bare_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of the text alone, whatever template there is: for base models, and prompts that hold a whole chat.

    Args:
        tokenizer: the policy's.
        prompt: text.

    Returns:
        The ids which the completion follows.

    Raises:
        ValueError: for a Conversation, whose messages need a chat template.
    """
    if isinstance(prompt, Conversation):
        raise ValueError("encode_prompt: got chat messages for hf.bare_prompt, expected text, or hf.encode_prompt")
    return tokenizer(prompt, add_special_tokens=True)["input_ids"]


def with_system(tokenizer: PreTrainedTokenizerBase, prompt: str, *, system: str) -> list[int]:
    """Token ids of a prompt in the tokenizer's chat template, after a system turn.

    Args:
        tokenizer: the policy's.
        prompt: text, one user turn, or a Conversation without a system message, whose messages are the turns.
        system: the text of the system turn.

    Returns:
        The ids which the completion follows.

    Raises:
        ValueError: for a tokenizer without a chat template, and for a Conversation that has a system message.
    """
    turns = prompt.messages if isinstance(prompt, Conversation) else [{"role": "user", "content": prompt}]
    if turns[0]["role"] == "system":
        raise ValueError(
            "with_system: got messages that begin with a system message, expected hf.encode_prompt for them"
        )
    return _apply_chat_template(tokenizer, [{"role": "system", "content": system}, *turns])


def _apply_chat_template(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> list[int]:
    if tokenizer.chat_template is None:
        roles = " and ".join(turn["role"] for turn in turns)
        raise ValueError(
            f"encode_prompt: got {roles} messages for a tokenizer without a chat template, expected one that has it"
        )
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
    return chat["input_ids"]


def check_ids(ids: Sequence[int], vocabulary: int, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Raise ValueError for a token that the model has no embedding for."""
    if (largest := max(ids, default=0)) >= vocabulary:
        raise ValueError(
            f"got token {largest}, {tokenizer.convert_ids_to_tokens(largest)!r}, in {what}, expected one below "
            f"{vocabulary}, the rows of the model's embedding: the tokenizer has tokens that the model was not given"
        )


def stop_ids(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> list[int]:
    """Every token that ends a completion: the tokenizer's EOS and those of the model's generation config."""
    named = model.generation_config.eos_token_id
    named = named if isinstance(named, list) else [] if named is None else [named]
    return sorted({tokenizer.eos_token_id, *named})


def export(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model that is whole as an ordinary Hugging Face folder."""
    export_model_folder(model, model.state_dict(), tokenizer, folder)


def export_model_folder(
    model: nn.Module, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write an ordinary Hugging Face folder that transformers and vLLM open; complete, or not there under its name.

    The model gives its config alone: `weights` are what is written, a tied one under either name.
    """
    scratch, gone = (folder.with_name(f".{folder.name}-{kind}-{os.getpid()}") for kind in ("new", "old"))
    for path in (scratch, gone):
        shutil.rmtree(path, ignore_errors=True)
    scratch.mkdir(parents=True)
    empty = empty_model(model.config)
    empty.generation_config = model.generation_config
    empty.save_pretrained(scratch, state_dict=dict(weights))
    tokenizer.save_pretrained(scratch)
    flush_tree(scratch)
    if folder.exists():
        folder.rename(gone)
    scratch.rename(folder)
    flush_file(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def generation_config(folder: str, config: PretrainedConfig) -> GenerationConfig:
    """The folder's generation config, which may name further tokens that end a completion."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none: not every model has one
        return GenerationConfig.from_model_config(config)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer once (a tied one under its first name), under the model's own names."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: x for name, x in state.items() if first.setdefault(id(x), name) == name}


def parameter_count(model: nn.Module) -> int:
    """Distinct parameters (a tied one once)."""
    return sum(p.numel() for p in model.parameters())


# -- weights from a folder into a module, shard by shard: no rank ever holds the whole model
#
# `meta_causal_lm` builds the shape, `fully_shard` may divide it, `load_shards` gives every parameter storage and reads
# this rank's part. Not torch's HuggingFaceStorageReader: it reads every file beside those of the index, and takes
# tensors that are left over or quantised without a word.

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
        raise ValueError(f"got model {name!r}, expected a folder or a hub name, owner/model: {error}") from error


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


@torch.no_grad()
def load_shards(model: nn.Module, folder: Path, *, device: torch.device) -> None:
    """Give every parameter storage on `device` and read this rank's part of it from the folder's safetensors.

    Parameters are plain tensors or DTensors (after `fully_shard`). Those on the meta device are replaced, so call this
    before there is an optimizer; those with storage keep it. Values are converted to the parameter's dtype. Layers with
    LoRA adapters read their plain weight; the adapters are left to `lora.reset`. Buffers move to `device`, persistent
    ones are read.

    Raises ValueError, nothing allocated, for a folder without safetensors, for truncated files, and for tensors that
    are missing, left over, of another shape or quantised; and for tied tensors that differ, once they are read.
    """
    stored = entries(folder)
    places = _places(model)
    _check(model, places, stored, folder)
    for name, buffer in list(model.named_buffers()):
        _hang(model, name, buffer.to(device))
    for names in places:
        first, *others = [name for name in names.values() if name in stored]
        set_tensor(model, list(names), partial(_read, stored, first), device=device)
        own = part(attrgetter(next(iter(names)))(model))
        for other in others:
            if not torch.equal(_read(stored, first, own), _read(stored, other, own)):
                raise ValueError(f"got {first} and {other} with different values in {folder}, expected them tied")


def set_tensor(
    module: nn.Module, names: Sequence[str], read: Callable[[Part], Tensor], *, device: torch.device
) -> None:
    """Set the tensor that hangs in the module under all `names` to what `read` returns for this rank's part of it.

    One on the meta device gets storage on `device` first, which makes it a new parameter.
    """
    old = attrgetter(names[0])(module)
    meta = old.device.type == "meta"
    new = torch.empty_like(old, device=device) if meta else old.detach()
    local = local_part(new)
    if local.numel():
        local.copy_(read(part(old)))
    if not meta:
        return
    parameter = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    for name in names:
        _hang(module, name, parameter)


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank; of a plain one all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_as(tensor: Tensor, local: Tensor) -> Tensor:
    """The tensor of which this rank's part is `local`, spread over the ranks as `tensor` is; of a plain one `local`."""
    if not isinstance(tensor, DTensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


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


def _places(model: nn.Module) -> list[Place]:
    places: dict[int, Place] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not is_adapter(name):
            places.setdefault(id(tensor), {})[name] = name_without_lora(name)
    return list(places.values())


def _check(model: nn.Module, places: list[Place], stored: Mapping[str, "Entry"], folder: Path) -> None:
    known = {name for place in places for name in place.values()}
    # What files may hold besides, by the models' own word; and frequencies, which old files kept for every layer.
    named = {p for m in model.modules() for p in getattr(m, "_keys_to_ignore_on_load_unexpected", None) or ()}
    ignored = [re.compile(pattern) for pattern in (r"rotary_emb\.inv_freq$", *named)]
    extra = [name for name in stored if name not in known and not any(p.search(name) for p in ignored)]
    missing = [next(iter(place.values())) for place in places if not stored.keys() & set(place.values())]
    if missing or extra:
        odd = [f"{what} {_few(names)}" for what, names in (("without", missing), ("with", extra)) if names]
        raise ValueError(f"got weights {' and '.join(odd)} in {folder}, expected those of {type(model).__name__} alone")
    for place in places:
        tensor = attrgetter(next(iter(place)))(model)
        for name in [name for name in place.values() if name in stored]:
            file, dtype, shape = stored[name]
            if shape != tuple(tensor.shape):
                raise ValueError(f"got {name} of shape {shape} in {file}, expected {tuple(tensor.shape)}")
            if tensor.is_floating_point() and dtype not in FLOATS:
                raise ValueError(f"got {name} as {dtype} in {file}, expected one of {', '.join(FLOATS)}")


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
        raise ValueError(f"got {folder}, expected {single.name} or {index.name} in it{convert}")
    try:
        shards = json.loads(index.read_text())["weight_map"]
        files = sorted({folder / Path(name).name for name in shards.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"got {index}, expected a JSON object with a weight_map from tensor to file: {error!r}"
        ) from error
    if gone := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"got {folder} without {_few(gone)}, expected every file that {index.name} names")
    return {name: entry for file in files for name, entry in _header(file).items()}


def _header(file: Path) -> dict[str, Entry]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise ValueError(f"got {file}, expected a whole safetensors file: {error}") from error
    return {name: Entry(file, stored.get_dtype(), tuple(stored.get_shape())) for name, stored in slices.items()}


def _read(stored: Mapping[str, Entry], name: str, where: Part) -> Tensor:
    with safe_open(stored[name].file, framework="pt", device="cpu") as opened:
        return opened.get_slice(name)[where] if where else opened.get_tensor(name)  # a scalar has no parts
