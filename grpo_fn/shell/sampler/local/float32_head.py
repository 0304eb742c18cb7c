"""A head of halves whose logits come in float32 while tokens are drawn."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_fn.shell.sampler.local.kv_cache import products_in_float32


def keep_logits_in_float32(model: nn.Module) -> None:
    """Make a head of halves give its product in float32, as the trainer's: rounded, a logit of 20 is off by 0.04."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.bias is None and products_in_float32(head.weight):
        head.forward = partial(linear_in_float32, head.weight)


def linear_in_float32(weight: Float[Tensor, "V D"], hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
    """hidden weight^T with a result in float32; in the dtype of both where a gradient may be asked for."""
    if torch.is_grad_enabled():
        return linear(hidden, weight)
    return torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=torch.float32).unflatten(0, hidden.shape[:-1])
