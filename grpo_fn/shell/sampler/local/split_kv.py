"""Attention of a decoding step as one operator, for CUDA: where it is used, and why not where it is not.

`split_kv_triton.py` has the kernel. `kv_cache.attend` computes the same from matrix products, on any device.
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from jaxtyping import Float
from torch import Tensor, nn

OPERATOR = "grpo_fn::split_kv_attention"
SPLIT = 512  # columns that one program reads, at most
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = 256  # size of a head
MOST_GROUPED = 64  # query heads that share a head of keys
ARCHITECTURE = (8, 0)  # of a card, at least: the first with products of bfloat16

# query [n H D], prompt_key [P K L D], prompt_value [P K L E], key [n K C D], value [n K C E], row [P wide], lane [n],
# start [n], length [n] -> [n H E], in the dtype of the values. Rows and lanes are those of `kv_cache.RowSlots`; a row
# sees the first `start` columns of its prompt and its own up to `length - start`, the last `window` of all these.
torch.library.define(
    OPERATOR,
    "(Tensor query, Tensor prompt_key, Tensor prompt_value, Tensor key, Tensor value, Tensor row, Tensor lane, "
    "Tensor start, Tensor length, int wide, float scale, float? cap, int? window) -> Tensor",
)

# The operator, called by position.
SplitKV = Callable[..., Float[Tensor, "n H E"]]


def split_kv_attention(*args: Tensor | float | int | None) -> Float[Tensor, "n H E"]:
    """Attention of a step's rows: scores in float32, softmax(cap tanh(q k^T scale / cap)) v."""
    return torch.ops.grpo_fn.split_kv_attention(*args)


def split_kv_unsupported_reason(device: torch.device) -> str | None:
    """Why decoding steps on the device cannot have the kernel; None where they can."""
    if device.type != "cuda":
        return f"it is for CUDA, and the device is {device.type}"
    if (capability := torch.cuda.get_device_capability(device)) < ARCHITECTURE:
        return "compute capability {}.{} of the card, wanted {}.{}".format(*capability, *ARCHITECTURE)
    return kernel_import_problem()


@cache
def kernel_import_problem() -> str | None:
    """Why the kernel cannot be imported; None where it has been."""
    try:
        import_module("grpo_fn.shell.sampler.local.split_kv_triton")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # no Triton, or one of another time
        return f"{type(error).__name__}, {next(iter(str(error).splitlines()), 'without a word')}"
    return None


def split_kv_uncovered_reason(model: nn.Module) -> str | None:
    """Why the kernel does not cover what the model asks of it; None where it does."""
    config, weight = model.config.get_text_config(), model.get_input_embeddings().weight
    heads = config.num_attention_heads
    grouped = heads // (getattr(config, "num_key_value_heads", None) or heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if weight.dtype not in DTYPES:
        return f"got {weight.dtype}, wanted one of {', '.join(map(str, DTYPES))}"
    if size > LARGEST:
        return f"got heads of {size}, wanted at most {LARGEST}"
    if grouped > MOST_GROUPED:
        return f"got {grouped} query heads to a head of keys, wanted at most {MOST_GROUPED}"
    return None


def warn_of_plain_attention(reason: str) -> None:
    """Say that steps do without the kernel, and why."""
    warnings.warn(f"decoding attends in plain products, not in the split-KV kernel: {reason}", RuntimeWarning, 2)
