"""Models with random weights in published shapes, made here."""

from pathlib import Path
from typing import NamedTuple

import torch
from device_runner import Setting
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # transformers' bars, one a file

EOS = 0


class Shape(NamedTuple):
    """Sizes of a Qwen2 with tied embeddings."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int

    def config(self) -> Qwen2Config:
        """What transformers makes it from."""
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )

    def matrices(self) -> int:
        """Weights of the blocks' matrix products: attention's four and the three of the gated layer."""
        key_value = self.hidden * self.hidden // self.heads * self.kv_heads
        return self.layers * (2 * self.hidden**2 + 2 * key_value + 3 * self.hidden * self.intermediate)

    def parameters(self) -> int:
        """Weights of all matrices; the embedding, which is the head, counts once."""
        return self.matrices() + self.vocabulary * self.hidden

    def kv_bytes(self, width: int) -> int:
        """Of one token's keys and values, numbers of `width` bytes."""
        return 2 * self.layers * self.hidden // self.heads * self.kv_heads * width


class Work(NamedTuple):
    """Rows to sample or to train on: so many of each prompt, `prompt` tokens of one and `new` of a completion."""

    prompts: int
    size: int
    prompt: int
    new: int

    @property
    def rows(self) -> int:
        """Of all prompts."""
        return self.prompts * self.size

    @property
    def tokens(self) -> int:
        """That the model reads: a prompt once for its group."""
        return self.prompts * (self.prompt + self.size * self.new)

    def flops(self, shape: Shape) -> float:
        """Of forward and backward pass, a multiplication and an addition being two.

            6 W tokens + 6 V D sampled + 12 L H pairs

        W weights of the blocks' matrices, each of which is used twice forward and four times backward for every token
        read (6 N per token, the head's part of N only where a token is predicted); V D of the head; pairs of a query
        and a key it sees, for each of which a layer's H = heads x head size costs 4 H forward and 8 H backward. What
        is computed again to save memory is not counted.
        """
        sampled = self.prompts * self.size * self.new
        pairs = self.prompts * (
            self.prompt * (self.prompt + 1) / 2 + self.size * self.new * (self.prompt + (self.new + 1) / 2)
        )
        head = shape.vocabulary * shape.hidden
        return 6 * shape.matrices() * self.tokens + 6 * head * sampled + 12 * shape.layers * shape.hidden * pairs


QWEN = {  # Qwen2.5, and Qwen2.5-Math of the same sizes
    "0.5b": Shape(151_936, 896, 24, 14, 2, 4864),
    "1.5b": Shape(151_936, 1536, 28, 12, 2, 8960),
}
MIDDLE = Shape(4096, 256, 4, 4, 2, 768)  # large enough for every kernel, small enough for the oracle on a CPU
TOY = Shape(96, 64, 2, 2, 1, 96)


def sized(setting: Setting, shape: Shape) -> Shape:
    """The shape, or the toy in its place."""
    return TOY if setting.tiny else shape


def folder(setting: Setting, shape: Shape, *, spread: float = 0.02, dtype: torch.dtype = torch.bfloat16) -> str:
    """A model folder of this shape with random weights, made once. `spread` is their standard deviation.

    With 0.02, transformers' own, a fresh model draws almost uniformly, and so almost never the token that ends a row.
    """
    path = Path(setting.scratch) / f"{shape.hidden}x{shape.layers}-{shape.vocabulary}-{spread:g}-{dtype}"
    if not path.is_dir():
        config = shape.config()
        config.initializer_range = spread
        cards = [torch.cuda.current_device()] if setting.device == "cuda" else []  # without it, all that there are
        with torch.random.fork_rng(cards), torch.device(setting.device):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            if spread > 0.02:
                enlivened(model, spread)
        unfinished = path.with_name(f".{path.name}")
        model.save_pretrained(unfinished)
        unfinished.rename(path)
    return str(path)


@torch.no_grad()
def enlivened(model: nn.Module, spread: float) -> None:
    """Biases and norms away from 0 and 1, so that a mistake in them shows."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(spread * torch.randn_like(parameter))
