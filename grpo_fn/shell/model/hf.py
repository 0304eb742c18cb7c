"""Hugging Face folders in and out: config, tokenizer, chat template (prompts as token ids), weights, export."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

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
    GgufConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from grpo_fn.core.problem import Conversation
from grpo_fn.shell.atomic_io import flush_file, flush_tree

# A prompt to the token ids that the completion follows: encode_prompt, with_system, bare_prompt.
Encode = Callable[[PreTrainedTokenizerBase, str], list[int]]

T = TypeVar("T")
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
        """The name itself, once its files are known to hold weights: by their headers, of a folder on disk."""
        self._check()
        if Path(self.name).is_dir():
            entries(Path(self.name))
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


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file. Its weights, in float32, and its tokenizer are written once as an ordinary folder in a cache."""

    name: str
    cache: str = "~/.cache/grpo_fn"  # folder that models are kept in

    def config(self) -> PretrainedConfig:
        """The model's config; ValueError for a file that is none, of an unknown model, or without the package gguf."""
        path = self._path()
        if path.is_dir():
            return AutoConfig.from_pretrained(path)
        config = self._read(AutoConfig.from_pretrained)
        config._name_or_path = str(path)
        return config

    def folder(self) -> str:
        """The folder in the cache, written now when it is not there."""
        path = self._path()
        if path.is_dir():
            entries(path)
            return str(path)
        plain = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
        model = self._read(partial(AutoModelForCausalLM.from_pretrained, **plain))
        export_model_folder(model, model.state_dict(), self._read(AutoTokenizer.from_pretrained), path)
        return str(path)

    def _path(self) -> Path:
        try:
            file, seen = Path(self.name).resolve(), Path(self.name).stat()
        except OSError as error:
            raise ValueError(f"got model {self.name!r} ({error.strerror}), expected a GGUF file") from error
        number = sha256(f"{file} {seen.st_size} {seen.st_mtime_ns} {version('transformers')}".encode()).hexdigest()[:16]
        return Path(self.cache).expanduser() / f"gguf-{number}"

    def _read(self, read: Callable[..., T]) -> T:
        self._path()
        file = Path(self.name)
        if find_spec("gguf") is None:
            raise ValueError(f"got model {self.name!r} without the package gguf: pip install 'grpo-fn[gguf]'")
        try:
            return read(file.parent, gguf_file=file.name)
        except (OSError, ValueError, LookupError, TypeError, RuntimeError, struct.error) as error:
            raise ValueError(
                f"got model {self.name!r}, expected a whole GGUF file of a model that transformers knows: {error}"
            ) from error


def named_model(name: str) -> ModelSource:
    """What a name on the command line or of a knob means: a GGUF file, a folder or a hub name."""
    return GgufFile(name) if name.endswith(".gguf") else Pretrained(name)


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
    """The whole model in evaluation mode (no dropout anywhere: log-probs must be a function of the weights).

    Raises ValueError as `meta_causal_lm` and `load_shards` do.
    """
    files = folder_of(folder)
    config = AutoConfig.from_pretrained(files)
    model = meta_causal_lm(config, attention=attention, dtype=dtype)
    model.generation_config = generation_config(folder, config)
    load_shards(model, files, device=device)
    return model


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
# this rank's part. Names and layouts of files are those that transformers converts from: experts that files hold one by
# one are one tensor in the model. Not its own loader: it takes what is missing, left over or of another shape with a
# warning, and divides before it converts, which is another tensor where a conversion works along the first dimension.
# Not torch's HuggingFaceStorageReader: it reads every file beside those of the index, and takes tensors that are left
# over or quantised without a word.

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

    What the model keeps in float32 whatever else is computed in (routers, in some families) is in float32.

    Raises ValueError when there is a buffer that stands in no file and that the model does not compute by itself, and
    for a model whose files are quantised.
    """
    if (quantised := getattr(config.get_text_config(), "quantization_config", None)) is not None:
        kind = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise ValueError(f"got a model whose weights are quantised ({kind}), expected weights of floating point")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    for name, buffer in list(model.named_buffers()):
        _hang(model, name, _unset(buffer))
    # Rotary frequencies and the like are computed as from_pretrained has them computed. Parameters stay on meta, where
    # initialising does nothing.
    model.initialize_weights()
    in_files = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name not in in_files and buffer.numel() and torch.equal(buffer, _unset(buffer)):
            raise ValueError(
                f"got buffer {name}, which is in no file and which {type(model).__name__} does not compute"
            )
    for pattern, kept in model._get_dtype_plan(dtype).items():
        for name, tensor in in_files.items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)
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
    sources, places = weight_sources(model, folder)
    for name, buffer in list(model.named_buffers()):
        _hang(model, name, buffer.to(device))
    for names in places:
        first, *others = [name for name in names.values() if name in sources]
        set_tensor(model, list(names), partial(sources[first].read, first), device=device)
        own = part(attrgetter(next(iter(names)))(model))
        for other in others:
            if not torch.equal(sources[first].read(first, own), sources[other].read(other, own)):
                raise ValueError(f"got {first} and {other} with different values in {folder}, expected them tied")


def set_tensor(
    module: nn.Module, names: Sequence[str], read: Callable[[Part], Tensor], *, device: torch.device
) -> None:
    """Set the tensor that hangs in the module under all `names` to what `read` returns for this rank's part of it.

    One on the meta device gets storage on `device` first, which makes it a new parameter.
    """
    old = attrgetter(names[0])(module)
    meta = old.device.type == "meta"
    if meta and not isinstance(old, DTensor):
        new = read(part(old)).to(device, old.dtype)  # of a file on this device it is the mapped file, not a copy
    else:
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


def weight_sources(model: nn.Module, folder: Path) -> tuple[dict[str, "Source"], list[Place]]:
    """What each tensor of the model is read from, and its names; from the files' headers alone.

    Raises ValueError as `load_shards` does.
    """
    stored = entries(folder)
    places = _places(model)
    sources, extra = _sources(model, stored, {name for place in places for name in place.values()})
    missing = [next(iter(place.values())) for place in places if not sources.keys() & set(place.values())]
    if missing or extra:
        odd = [f"{what} {_few(names)}" for what, names in (("without", missing), ("with", extra)) if names]
        raise ValueError(f"got weights {' and '.join(odd)} in {folder}, expected those of {type(model).__name__} alone")
    for place in places:
        tensor = attrgetter(next(iter(place)))(model)
        for name in [name for name in place.values() if name in sources]:
            source = sources[name]
            if source.shapes[name] != tuple(tensor.shape):
                raise ValueError(
                    f"got {name} of shape {source.shapes[name]} in {source.file}, expected {tuple(tensor.shape)}"
                )
            if not tensor.is_floating_point():
                continue
            for entry in source.entries.values():
                if entry.dtype not in FLOATS:
                    raise ValueError(
                        f"got {name} as {entry.dtype} in {entry.file}, expected one of {', '.join(FLOATS)}"
                    )
    return sources, places


def _sources(model: nn.Module, stored: Mapping[str, "Entry"], known: set[str]) -> tuple[dict[str, "Source"], list[str]]:
    """By name in the model what each tensor is read from; and the names in the files that belong to none.

    Names are converted as transformers' `convert_and_load_state_dict_in_model` does it.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = dict.fromkeys(known, True)  # rename_source_key looks up what is not None
    # What files may hold besides, by the models' own word; and frequencies and positions, which old files kept.
    named = {p for m in model.modules() for p in getattr(m, "_keys_to_ignore_on_load_unexpected", None) or ()}
    ignored = [re.compile(pattern) for pattern in (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *named)]
    found: dict[str, Source] = {}
    extra: list[str] = []
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in known and key in known:
            name, pattern = key, None
        if name not in known:
            if not any(p.search(text) for p in ignored for text in (key, name)):
                extra.append(key)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        source = found.setdefault(name, Source(model, name, converter))
        if pattern is None and source.entries:  # two names for one tensor: neither is the model's alone
            extra.append(key)
            continue
        source.add(pattern or key, key, stored[key])
    sources: dict[str, Source] = {}
    for source in found.values():
        source.shapes = source.converted_shapes()
        sources.update(dict.fromkeys(source.shapes.keys() & known, source))
    return sources, extra


@dataclass
class Source:
    """The tensors in files that one tensor of the model is made of, or several are, and how."""

    model: nn.Module
    first: str  # name in the model: of the one tensor, or the first of several
    converter: WeightConverter | None  # None where it is stored as it is
    names: dict[str, list[str]] = field(default_factory=dict)  # by the converter's pattern, in the order of experts
    entries: dict[str, "Entry"] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of all that is made, by name in the model

    @property
    def file(self) -> Path:
        """A file that it stands in."""
        return next(iter(self.entries.values())).file

    def add(self, pattern: str, name: str, entry: "Entry") -> None:
        """One more tensor in a file."""
        self.names.setdefault(pattern, []).append(name)
        self.entries[name] = entry

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is made of these of its tensors."""
        converter = deepcopy(self.converter)
        for pattern, names in self.names.items():
            for name in names:
                if name in tensors:
                    converter.add_tensor(self.first, name, pattern, tensors[name])
        made = converter.convert(self.first, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    def converted_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what is made, nothing read. Raises ValueError for tensors that do not fit together."""
        if self.converter is None:
            return {self.first: next(iter(self.entries.values())).shape}
        try:
            made = self.convert({name: torch.empty(x.shape, device="meta") for name, x in self.entries.items()})
        except (ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"got {_few([*self.entries])} in {self.file}, which do not make {self.first} together: {error}"
            ) from error
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    def read(self, name: str, where: Part) -> Tensor:
        """This part of the tensor of this name in the model."""
        if self.converter is None:
            return _read(self.entries, where)[next(iter(self.entries))]
        if not self._stacked(self.shapes[name][0]):
            return self.convert(_read(self.entries, None))[name][where]
        rows, *rest = where
        few = {key: self.entries[key] for names in self.names.values() for key in names[rows]}
        return self.convert(_read(few, None))[name][(slice(None), *rest)]

    def _stacked(self, rows: int) -> bool:
        """Whether row i of what is made is made of the i-th tensor of every list, as experts are: few are read."""
        first, *rest = self.converter.operations
        apart = isinstance(first, MergeModulelist) and first.dim == 0
        apart = apart and all(isinstance(step, Concatenate) and step.dim > 0 for step in rest)
        return apart and all(len(names) == rows for names in self.names.values())


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
        with file.open("rb") as opened:
            begin = opened.read(64).lstrip().lower()
        if begin.startswith(b"version https://git-lfs"):
            raise ValueError(f"got {file}, a pointer of Git LFS, expected the file itself: git lfs pull") from error
        if begin.startswith(b"<"):
            raise ValueError(f"got {file}, a page of HTML, expected a safetensors file: load it again") from error
        raise ValueError(f"got {file}, expected a whole safetensors file: {error}") from error
    return {name: Entry(file, stored.get_dtype(), tuple(stored.get_shape())) for name, stored in slices.items()}


def _read(stored: Mapping[str, Entry], where: Part | None) -> dict[str, Tensor]:
    """This part of each of the tensors; None is all of it, as () is of a scalar."""
    tensors = {}
    for file in {entry.file for entry in stored.values()}:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in [name for name, entry in stored.items() if entry.file == file]:
                tensors[name] = opened.get_slice(name)[where or ...]
    return tensors
