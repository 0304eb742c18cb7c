"""Small Qwen2 models with random weights, to try a pipeline on real data."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2TokenizerFast

from grpo_fn.shell.model import hf

EOS = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Qwen2Sizes:
    """Qwen2Sizes of a Qwen2 with tied embeddings."""

    vocabulary: int  # entries of the embedding
    positions: int  # longest sequence, in tokens
    hidden: int = 128  # width
    layers: int = 2  # blocks of attention and MLP
    heads: int = 4  # of attention
    kv_heads: int = 4  # of keys and values; divides `heads`
    intermediate: int = 384  # width of the MLP
    # Standard deviation of the first weights. Qwen2's 0.02 is for wide models: at a width of 128 the attention of such
    # a model is flat at first, and it learns to copy in more than a thousand steps. 1 / sqrt(width) is a good choice.
    initializer_range: float = 0.02

    def config(self) -> Qwen2Config:
        """The configuration; the last entry of the vocabulary is EOS."""
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
            eos_token_id=self.vocabulary - 1,
            pad_token_id=self.vocabulary - 1,
            initializer_range=self.initializer_range,
        )


def random_model(config: Qwen2Config, *, seed: int) -> Qwen2ForCausalLM:
    """A model with random weights under `seed`; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def byte_tokenizer(*, chat: bool) -> PreTrainedTokenizerBase:
    """Every byte a token, in Qwen2's own form, with its three special tokens; with `chat`, its turn format as well.

    As in Qwen2's families, a turn ends with <|im_end|> if there is a chat template, a text with <|endoftext|>.
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


def make_random(sizes: Qwen2Sizes, path: Path, *, seed: int, chat: bool) -> None:
    """Write a model that knows nothing, with a tokenizer that can spell anything."""
    tokenizer = byte_tokenizer(chat=chat)
    if sizes.vocabulary < len(tokenizer):
        raise ValueError(f"vocabulary: got {sizes.vocabulary}, expected at least {len(tokenizer)}")
    config = sizes.config()
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    hf.export(random_model(config, seed=seed), tokenizer, path)
