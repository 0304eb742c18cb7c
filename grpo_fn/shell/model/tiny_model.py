"""A small Qwen2 with its own tokenizer, made here: random, or warm-started on a task's demonstrations.

The result is an ordinary Hugging Face folder. It is cached under a hash of everything that went into it, so a
folder found in the cache is the folder the recipe would make.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol, TypeVar, runtime_checkable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2TokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from grpo_fn.core import prng
from grpo_fn.shell import warm_start
from grpo_fn.shell.model import hf
from grpo_fn.shell.source_hash import hash_of_sources
from grpo_fn.tasks import arithmetic

EOS = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen2 with tied embeddings."""

    vocabulary: int  # entries of the embedding
    hidden: int  # width
    layers: int  # blocks of attention and MLP
    heads: int  # of attention
    kv_heads: int  # of keys and values; divides `heads`
    intermediate: int  # width of the MLP
    positions: int  # longest sequence, in tokens

    def config(self, eos: int) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            max_position_embeddings=self.positions,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos,
            pad_token_id=eos,
        )


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps on a task's training demonstrations: cross-entropy of the completion and EOS, AdamW."""

    steps: int  # optimizer updates
    rows: int  # demonstrations a step
    lr: float  # peak of a warm-up and a decay
    worked_share: float  # of the demonstrations, the share that shows its working


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The recipe of a tiny model, which decides its every byte: arithmetic task, shape, warm start and seed."""

    max_value: int  # largest number of a word problem
    operations: int  # steps of a word problem
    test_size: int  # held-out problems, which no demonstration shows
    shape: Shape  # of the model
    warm_start: WarmStart  # supervised steps before the run
    seed: int  # of weights and demonstrations
    cache: str  # folder that models are kept in; ~ is the home

    def _task(self) -> arithmetic.Task:
        return arithmetic.task(max_value=self.max_value, operations=self.operations, test_size=self.test_size)

    def config(self) -> Qwen2Config:
        """The shape, without making the model."""
        return self.shape.config(eos=self.shape.vocabulary - 1)

    def folder(self) -> str:
        """The cached folder, made now when it is not there."""
        return cached_folder("arithmetic", self, [__name__], make_tiny_model)


@runtime_checkable
class CachedRecipe(Protocol):
    """A dataclass that decides every byte of a model; `cache` is the folder that models are kept in."""

    cache: str


R = TypeVar("R", bound=CachedRecipe)


def cached_folder(name: str, recipe: R, code: Sequence[str], make: Callable[[R, Path], None]) -> str:
    """The folder of the recipe's model, made now when it is not there.

    Its name is a hash of the recipe, of the modules `code` and all that they import from their own packages, and of the
    libraries' versions.
    """
    fields = {k: v for k, v in asdict(recipe).items() if k != "cache"}
    made_with = {"torch": version("torch"), "transformers": version("transformers")}
    described = json.dumps([fields, made_with, hash_of_sources(code)], sort_keys=True)
    number = hashlib.sha256(described.encode()).hexdigest()[:16]
    path = Path(recipe.cache).expanduser() / f"{name}-{number}"
    if path.is_dir():
        check_cached(path)
    else:
        check_cache(path.parent)
        make(recipe, path)
    return str(path)


def check_cached(path: Path) -> None:
    """Raise ValueError for a model made earlier whose files are no longer whole."""
    try:
        hf.entries(path)
        hf.load_tokenizer(str(path))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"got the model {path}, which an earlier run made and which is broken: {error}; wanted it whole: delete "
            "the folder, and it is made anew"
        ) from error


def check_cache(cache: Path) -> None:
    """Make the folder that models are kept in. Raises ValueError when it cannot be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise ValueError(
            f"tiny_model.Recipe.cache: got {cache} ({error}), wanted a folder to write models to"
        ) from error


def make_tiny_model(recipe: Recipe, path: Path, *, report: Callable[[str], None] = print) -> None:
    """Build, warm-start and write the model."""
    task = recipe._task()
    key = prng.key(recipe.seed, device="cpu")
    tokenizer = train_tokenizer(arithmetic.corpus(task, prng.fold_in(key, 0), 4000), vocabulary=recipe.shape.vocabulary)
    model = random_model(recipe.shape, seed=recipe.seed, eos=tokenizer.eos_token_id)
    shown = arithmetic.worked_solutions(task, prng.fold_in(key, 1), worked_share=recipe.warm_start.worked_share)
    pairs = (((prompt, False), (completion, True)) for prompt, completion in shown)
    warm_start.train_supervised(model, tokenizer, pairs, recipe.warm_start, report=report)
    hf.export(model, tokenizer, path)


def train_tokenizer(texts: list[str], *, vocabulary: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE in Qwen2's own form (its pre-tokenizer splits digits), `vocabulary` entries, EOS the last.

    Qwen2's form because AutoTokenizer rebuilds a Qwen2 folder's tokenizer from vocabulary and merges alone and would
    drop any other pre-tokenizer. Raises ValueError when the texts do not yield that many entries.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary - 1, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    vocab = {**learned["vocab"], EOS: vocabulary - 1}
    if len(vocab) != vocabulary:
        raise ValueError(
            f"got {len(vocab)} tokens from the texts, wanted {vocabulary}: lower the vocabulary or give more text"
        )
    return Qwen2TokenizerFast(vocab=vocab, merges=[tuple(m) for m in learned["merges"]])


def random_model(shape: Shape, *, seed: int, eos: int) -> Qwen2ForCausalLM:
    """A model of this shape with random weights under `seed`, of the standard deviation 0.02 as Qwen2 has it."""
    return random_weights(shape.config(eos), seed=seed)


def initial_config(shape: Shape, initializer_range: float, *, eos: int) -> Qwen2Config:
    """The config of a model whose first weights have this standard deviation.

    Qwen2's 0.02 is for wide models: at a width of 128 the attention of such a model is flat at first, and it takes more
    than a thousand steps to learn to copy. 1 / sqrt(width) is a good choice.
    """
    config = shape.config(eos)
    config.initializer_range = initializer_range
    return config


def random_weights(config: Qwen2Config, *, seed: int) -> Qwen2ForCausalLM:
    """A model with random weights under `seed`; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, chat: bool) -> PreTrainedTokenizerBase:
    """Every byte a token, in Qwen2's own form, with its three special tokens; with `chat`, its turn format as well.

    As in Qwen2's families, a turn ends with <|im_end|> where there is a chat template, a text with <|endoftext|>.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, EOS, "<|im_start|>", "<|im_end|>"])}
    tokenizer = Qwen2TokenizerFast(
        vocab=vocab,
        merges=[],
        eos_token="<|im_end|>" if chat else EOS,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_random(shape: Shape, path: Path, *, seed: int, chat: bool) -> None:
    """Write a model that knows nothing, with a tokenizer that can spell anything: to try a pipeline on real data.

    Raises ValueError when the shape's vocabulary cannot hold the 256 bytes and the special tokens.
    """
    tokenizer = byte_tokenizer(chat=chat)
    if shape.vocabulary < len(tokenizer):
        raise ValueError(f"vocabulary: got {shape.vocabulary}, wanted at least {len(tokenizer)}")
    hf.export(random_model(shape, seed=seed, eos=tokenizer.eos_token_id), tokenizer, path)
