"""A policy on this process alone, as `load_and_shard` puts it together, around whatever module a test has."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.optimizer import adamw
from grpo_fn.shell.world import alone

DEFAULTS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
CPU = torch.device("cpu")


def local(
    model: nn.Module,
    *,
    temperature: float = 0.7,
    logits_chunk_elements: int = 36,
    reference: bool = False,
    packed: bool = False,
    **knobs,
) -> FSDPPolicy:
    """Its passes without gradient take some thirty tokens.

    Rows are padded, as the oracle's are: gradients agree to the last digits, in whatever dtype a model has its norms.
    """
    logprob_model = partial(
        LogprobModel, temperature=temperature, logits_chunk_elements=logits_chunk_elements, packed=packed
    )
    chosen = {
        "world": alone(CPU),
        "data": None,
        "reference_model": partial(nullcontext, logprob_model(deepcopy(model).requires_grad_(False)))
        if reference
        else None,
        "dropout_modules": [],
        "seed": 0,
        "micro_tokens": 30,
        "min_micro_batches": 1,
        "optimizer": partial(adamw, **DEFAULTS),
        "schedule": constantly,
        "loss_scale": None,
        "initial_scale": 1.0,
        "max_grad_norm": 1e9,
    }
    return FSDPPolicy(logprob_model(model), **{**chosen, **knobs})


def constantly(step: int) -> float:
    return 1.0


def mesh_of_one() -> DeviceMesh:
    """A mesh of this process alone; its group stays for the tests that come after."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def handed_over(saved: dict[str, Tensor]):
    """A `load` of `FSDPPolicy.restore` that fills in tensors from memory."""

    def load(into: dict[str, Tensor]) -> None:
        for name, tensor in into.items():
            tensor.copy_(saved[name])

    return load
