"""Hugging Face folders in and out: config, tokenizer, chat template (prompts as token ids), model, export."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from grpo_fn.core.conversation import Conversation
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
                f"got model {self.name!r}, wanted a causal language model's folder or hub name: {error}"
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
                    f"got model {self.name!r}, which does not exist; wanted a Hugging Face model folder or a hub name, "
                    "owner/model"
                )
            return
        if not path.is_dir():
            raise ValueError(
                f"got model {self.name!r}, a file; wanted a folder with config.json, weights and tokenizer"
            )
        if not (path / "config.json").is_file():
            raise ValueError(
                f"got folder {self.name} without config.json; wanted a Hugging Face model; it holds {_listing(path)}"
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
        raise ValueError(f"got no usable tokenizer in {folder}; wanted tokenizer.json or its like: {error}") from error
    # For known model types transformers makes up a tokenizer of special tokens alone where the files are missing.
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise ValueError(f"got no tokenizer in {folder}; wanted tokenizer.json or its like")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"got a tokenizer without an EOS token in {folder}; wanted one, or no completion could ever end"
        )
    if tokenizer.eos_token_id >= vocab_size:
        raise ValueError(
            f"got EOS {tokenizer.eos_token!r} in {folder}, which is not in the vocabulary: its id "
            f"{tokenizer.eos_token_id} was added; wanted one of the model's {vocab_size} ids"
        )
    return tokenizer


def find_dtype(name: str) -> torch.dtype:
    """float32, bfloat16 or float16; ValueError for anything else."""
    if name not in DTYPES:
        raise ValueError(f"got dtype {name!r}, wanted one of {sorted(DTYPES)}")
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
        raise ValueError("encode_prompt: got chat messages for hf.bare_prompt, wanted text, or hf.encode_prompt")
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
        raise ValueError("with_system: got messages that begin with a system message, wanted hf.encode_prompt for them")
    return _apply_chat_template(tokenizer, [{"role": "system", "content": system}, *turns])


def _apply_chat_template(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> list[int]:
    if tokenizer.chat_template is None:
        roles = " and ".join(turn["role"] for turn in turns)
        raise ValueError(
            f"encode_prompt: got {roles} messages for a tokenizer without a chat template, wanted one that has it"
        )
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
    return chat["input_ids"]


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
