"""How a model is spread over the devices of a run: a device mesh, and FSDP2 applied to the model from outside."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PretrainedConfig

from grpo_fn.core.partials import function_and_knobs
from grpo_fn.shell.model import blocks, hf
from grpo_fn.shell.world import World, backend_timeout

REST, HOST = "rest", "host"
DATA = ("replicate", "shard")
PREFETCH = 1  # blocks whose weights are gathered ahead of the one that computes: its time hides the gather of one


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The mesh and what is done to save memory on each device.

    dp_replicate, dp_shard and tp multiply to the number of ranks. A number may be "rest", what is left of all ranks, or
    "host", what is left of this host's. With dp_replicate 1 and dp_shard "rest" this is FULL_SHARD (ZeRO-3); without
    `reshard_after_forward` SHARD_GRAD_OP (ZeRO-2); with dp_shard 1 and dp_replicate "rest" NO_SHARD (DDP); with
    dp_shard "host" and dp_replicate "rest" HYBRID_SHARD. (ZeRO: arXiv:1910.02054; FSDP: arXiv:2304.11277.)
    """

    dp_replicate: int | str  # copies of the model
    dp_shard: int | str  # devices that hold a copy in parts
    tp: int  # devices that share every matrix product
    reshard_after_forward: bool  # False keeps gathered weights from forward to backward: faster, more memory
    offload: bool  # parameters, gradients and optimizer state on the host, moved to the device when needed
    offload_reference: bool  # the frozen copy, where there is one, on the host
    activation_checkpointing: Callable[[nn.Module], None]  # what of a block's forward is kept for its backward
    compile: Callable[[nn.Module], None]  # how a block is run: eager, compiled, or by device
    collective_timeout: float  # seconds that a rank waits for the others

    def __post_init__(self) -> None:
        """Raise ValueError for what does not go together, and for a mode that torch.compile has not."""
        compile_block, knobs = function_and_knobs(self.compile)
        if compile_block is blocks.torch_compile and "mode" in knobs:
            blocks.check_compile_mode(knobs["mode"])
        if self.tp > 1 and compile_block is blocks.torch_compile:
            raise ValueError(  # torch.compile runs into a recursion over DTensors of open sizes (2.13)
                f"parallelism: got tp {self.tp} with compiled blocks, wanted eager ones (blocks.eager) or tp 1"
            )

    def shape(self, ranks: int, on_host: int) -> tuple[int, int, int]:
        """(replicate, shard, tensor) for so many ranks. Raises ValueError when they cannot be arranged like that."""
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        if odd := {k: v for k, v in sizes.items() if not (v in (REST, HOST) if isinstance(v, str) else v >= 1)}:
            raise ValueError(f"parallelism: got {odd}, wanted numbers from 1, {REST!r} or {HOST!r}")
        if self.dp_replicate == self.dp_shard == REST:
            raise ValueError(f"parallelism: got dp_replicate and dp_shard both {REST!r}, wanted one of them at most")
        fixed = {k: max(1, on_host // self.tp) if v == HOST else v for k, v in sizes.items() if v != REST}
        shape = tuple(fixed.get(k, ranks // prod(fixed.values())) for k in sizes)
        if prod(shape) != ranks:
            raise ValueError(
                f"parallelism: got dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} x tp {self.tp} for "
                f"{ranks} ranks ({on_host} on this host), wanted a product of {ranks}"
            )
        return shape

    def mesh(self, world: World) -> DeviceMesh:
        """The device mesh ("replicate", "shard", "tensor") of this world."""
        shape = self.shape(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
        if not dist.is_initialized():  # a world of one that wants mixed precision or offload, which FSDP2 provides
            backend = "cuda:nccl,cpu:gloo" if world.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=(*DATA, "tensor"))
        for name in mesh.mesh_dim_names:
            set_group_timeout(mesh.get_group(name), world)
        return mesh


def set_group_timeout(group: dist.ProcessGroup, world: World) -> None:
    """Give a group of some ranks the deadline of the world: torch makes those of a mesh with 30 minutes."""
    if world.size > 1:
        dist.distributed_c10d._set_pg_timeout(backend_timeout(world.device, world.deadline), group)


def check_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for bfloat16 on a card that has none (before Ampere), naming what it has."""
    if dtype is torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        card = torch.cuda.get_device_name(device)
        raise ValueError(
            f"dtype: got bfloat16 on {card}, which computes it in software; wanted float16 with loss scaling "
            "(--gin_file scale/fp16.gin) or float32"
        )


def shard(root: nn.Module, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, how: Parallelism) -> nn.Module:
    """Apply FSDP2 to every block and to what is left of `root`, which holds `model`; weights are computed in `dtype`.

    Gradients are summed over ranks, in float32, and never averaged: every weight in the objective has a denominator
    that counts all ranks.
    """
    data = mesh[DATA] if mesh["replicate"].size() > 1 else mesh["shard"]
    knobs = {
        "mesh": data,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if how.offload else OffloadPolicy(),
    }
    layers = blocks.blocks(model)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=how.reshard_after_forward, **knobs)
    # The root has embedding, last norm and head, which end the forward pass and begin the backward pass: they stay.
    fully_shard(root, reshard_after_forward=False, **knobs)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    for i, layer in enumerate(layers):  # the next blocks' weights are gathered while one computes
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + PREFETCH])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - PREFETCH) : i][::-1])
    return root


class BlockPlan(NamedTuple):
    """How the blocks of a run are executed, and what a plan says of it."""

    parallelism: Parallelism  # with a `compile` that no longer depends on the device
    notes: tuple[str, ...]


def plan_blocks(
    parallelism: Parallelism, device: torch.device | None, *, config: PretrainedConfig, deterministic: bool
) -> BlockPlan:
    """`blocks.compiled_on_cuda` made `torch_compile` or `eager`; any other choice stays as it is."""
    if function_and_knobs(parallelism.compile)[0] is not blocks.compiled_on_cuda:
        return BlockPlan(parallelism, ())
    if device is not None and device.type != "cuda":
        return BlockPlan(replace(parallelism, compile=blocks.eager), ())
    reason = compile_refusal(parallelism, deterministic=deterministic)
    if reason is None:
        reason = blocks.small_block_reason(blocks.largest_block(hf.empty_model(config)))
    if reason is None and device is not None:
        reason = blocks.compile_unsupported_reason(device)
    if reason is None:
        compiled = partial(blocks.torch_compile, mode="default")
        return BlockPlan(replace(parallelism, compile=compiled), ("blocks are compiled, the default on CUDA",))
    note = f"blocks run as written, not compiled as is the default on CUDA: {reason}"
    return BlockPlan(replace(parallelism, compile=blocks.eager), (note,))


def compile_refusal(parallelism: Parallelism, *, deterministic: bool) -> str | None:
    """What in a configuration rules compiled blocks out by default; None where nothing does."""
    if deterministic:
        return "sections.Compute.deterministic is True"
    if parallelism.tp > 1:
        return f"mesh.Parallelism.tp is {parallelism.tp}"
    return None
