"""The sharding of a model: a mesh, FSDP2 and tensor parallelism applied from outside."""

import logging
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PretrainedConfig

from grpo_fn.core.partials import function_and_knobs
from grpo_fn.shell.model import blocks, hf
from grpo_fn.shell.model.lora import ADAPTER, is_layer
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
                f"parallelism: got tp {self.tp} with compiled blocks, expected eager ones (blocks.eager) or tp 1"
            )

    def shape(self, ranks: int, on_host: int) -> tuple[int, int, int]:
        """(replicate, shard, tensor) for so many ranks. Raises ValueError when they cannot be arranged like that."""
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        if odd := {k: v for k, v in sizes.items() if not (v in (REST, HOST) if isinstance(v, str) else v >= 1)}:
            raise ValueError(f"parallelism: got {odd}, expected numbers from 1, {REST!r} or {HOST!r}")
        if self.dp_replicate == self.dp_shard == REST:
            raise ValueError(f"parallelism: got dp_replicate and dp_shard both {REST!r}, expected one of them at most")
        fixed = {k: max(1, on_host // self.tp) if v == HOST else v for k, v in sizes.items() if v != REST}
        shape = tuple(fixed.get(k, ranks // prod(fixed.values())) for k in sizes)
        if prod(shape) != ranks:
            raise ValueError(
                f"parallelism: got dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} x tp {self.tp} for "
                f"{ranks} ranks ({on_host} on this host), expected a product of {ranks}"
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
            f"dtype: got bfloat16 on {card}, which computes it in software; expected float16 with loss scaling "
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


# -- FSDP2 on one device without its copies


class WeightPlace(NamedTuple):
    """A weight that trains, and the module attribute that is the weight, or its cast while the module computes."""

    owner: nn.Module
    name: str
    weight: nn.Parameter


def skip_copies(root: nn.Module) -> None:
    """Have each weight cast in one kernel, and each gradient added to the weight's in one; in place.

    FSDP2 is applied to `root` on a mesh of one rank, without offload, its weights have storage, and it has not computed
    yet. Parameters keep their names and objects.
    """
    for parameter in root.parameters():
        _cast_when_gathered(parameter._local_tensor)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Behind FSDP2's own hook, which puts the casts in their places.
            module.register_forward_pre_hook(partial(_take_gradients, trained_places(module), {}))


def trained_places(module: nn.Module) -> list[WeightPlace]:
    """The weights that FSDP2 gathers with `module` and that train, a tied one once."""
    places: dict[int, WeightPlace] = {}

    def visit(owner: nn.Module) -> None:
        for name, weight in owner.named_parameters(recurse=False):
            if weight.requires_grad:
                places.setdefault(id(weight), WeightPlace(owner, name, weight))
        for child in owner.children():
            if not isinstance(child, FSDPModule):
                visit(child)

    visit(module)
    return list(places.values())


def _cast_when_gathered(kept: Tensor) -> None:
    """Give the tensor that a weight is kept in the two methods that FSDP2 calls in place of its own copies."""
    itself = weakref.ref(kept)  # no cycle: memory is freed when the weight is let go of

    def pre_all_gather(mesh: Any) -> tuple[tuple[Tensor], Tensor]:
        if (tensor := itself()) is None:
            raise RuntimeError("got a weight that was replaced after skip_copies, expected the one that it was given")
        return (tensor.new_empty(0),), tensor  # nothing is gathered

    kept.fsdp_pre_all_gather = pre_all_gather
    kept.fsdp_post_all_gather = cast_weight


@torch.no_grad()
def cast_weight(
    gathered: tuple[Tensor, ...], kept: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The weight in the dtype that is computed in, as FSDP2 asks its extensions for it."""
    if out is None:
        cast = torch.empty(kept.shape, dtype=dtype, device=kept.device).copy_(kept)
        return cast, (cast,)
    with torch.autograd._unsafe_preserve_version_counter(out):  # autograd kept it when it was as it is now
        out.copy_(kept)
    return None


def _take_gradients(places: list[WeightPlace], hooked: dict[int, Tensor], module: nn.Module, args: Any) -> None:
    """From now on gradients of the casts, which are in the weights' places, go to the weights."""
    for i, (owner, name, weight) in enumerate(places):
        cast = getattr(owner, name)
        if hooked.get(i) is not cast:
            hooked[i] = cast
            cast.register_post_accumulate_grad_hook(partial(add_gradient, weight))


def add_gradient(weight: nn.Parameter, cast: Tensor) -> None:
    """Add the gradient of a weight's cast to that of the weight, in the weight's dtype; the cast has none any more."""
    gradient, cast.grad = cast.grad, None
    if weight.grad is None:
        weight.grad = hf.spread_as(weight, gradient.to(weight.dtype))
    else:
        weight.grad.to_local().add_(gradient)
    hooks: dict[int, Callable[[Tensor], None]] = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():  # as FSDP2 does
        hook(weight)


# -- tensor parallelism: the matrix products of every block divided over ranks, as the model's own plan says
#
# A layer divided by columns gives each rank some of its output features, one divided by rows takes them in and sums the
# ranks' parts of the output. Between the two every rank has its own attention heads and its own part of the MLP;
# outside them all ranks of one tensor group hold the same numbers. (Shoeybi et al. 2019, "Megatron-LM",
# arXiv:1909.08053, section 3.)
#
# Transformers names a style for each layer (`model.tp_plan`); torch.distributed.tensor.parallel carries it out, so that
# parameters become DTensors over which `fully_shard` may be applied. What the plan says of embedding and head is left
# out: log-probs come from `hidden @ W.T` chunk by chunk, with the whole of W.
#

TensorPlan = dict[str, str]  # name of a module, or of a parameter, in the model -> style

APART = "colwise"  # what follows it computes on this rank's features alone
COLUMNS = {
    APART: ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),  # its name before
}
ROWS = {
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),  # its name before
}
# A norm over each head by itself: whole on every rank, which applies it to its own heads, so the gradient is to be
# summed over ranks. Its input counts as divided in some dimension that is not normalised; which one does not matter.
PER_HEAD = {"replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True)}
WHOLE = "replicate"
KNOWN = (*COLUMNS, *ROWS, *PER_HEAD, WHOLE)


def divide(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide the linear layers of the model's blocks over the 1-D `mesh`, in place; on a mesh of one change nothing.

    Call it on the meta device, after adapters are attached and before `fully_shard`. Parameters that are divided are
    replaced, by DTensors over `mesh`; those with storage have to hold the same values on every rank. An adapter is
    divided with its layer: B where the layer gives out features, A where it takes them in.

    Raises ValueError, nothing changed, for a model that cannot be divided (see `check_tensor_plan`).
    """
    if mesh.size() == 1:
        return model
    plan = check_tensor_plan(model, mesh.size())
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_worth_saying)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parallelize_module(model, mesh, _styles(model, plan), src_data_rank=None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # SequenceParallel makes parameters that train
    return model


def check_tensor_plan(model: nn.Module, ranks: int) -> TensorPlan:
    """The model's own tensor-parallel plan for its blocks, checked for `ranks` ranks.

    Raises ValueError for a model without a plan, for styles that are not among `KNOWN`, for heads and features that
    `ranks` does not divide, and for parameters beside divided layers of which the plan says nothing: they would see
    the features of one rank only, and so would their gradients.
    """
    plan = tensor_plan(model)
    if not plan.keys() - _with_style(plan, WHOLE):
        raise ValueError(
            f"scale: got tensor {ranks} for {type(model).__name__}, whose blocks have no tensor-parallel plan; "
            "expected tensor 1"
        )
    for name, style in plan.items():
        if odd := _odd(model, name, style, ranks):
            raise ValueError(f"scale: got tensor {ranks} and {name} ({style}) {odd}")
    if forgotten := sorted(_beside_divided(model, plan)):
        raise ValueError(
            f"scale: got tensor {ranks} and {forgotten[0]} beside divided layers, without a word of it in the plan of "
            f"{type(model).__name__}; expected a style for it, or tensor 1"
        )
    return plan


def tensor_plan(model: nn.Module) -> TensorPlan:
    """The model's tensor-parallel plan for what is inside its blocks, every wildcard replaced by the names it fits."""
    patterns: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    inside = {id(part) for block in blocks.blocks(model) for part in (*block.modules(), *block.parameters())}
    parts = (*model.named_modules(), *model.named_parameters())
    styles = {name: patterns.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name, part in parts if id(part) in inside}
    return {name: style for name, style in styles.items() if style is not None}


# -- what can be divided


def _odd(model: nn.Module, name: str, style: str, ranks: int) -> str | None:
    """The error of that entry of the plan, as the end of a sentence; None if it has none."""
    if style not in KNOWN:
        return f"in the plan of {type(model).__name__}, expected styles among {', '.join(KNOWN)}; or tensor 1"
    if style == WHOLE:
        return None
    part = dict(model.named_modules()).get(name)
    if part is None:
        return "that is a parameter, not a module; expected tensor 1"
    width = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if style in PER_HEAD:
        shapes = {tuple(parameter.shape) for parameter in part.parameters()}
        return f"of shapes {shapes}, expected one head's features alone, {width}" if shapes - {(width,)} else None
    linear = part.get_base_layer() if is_layer(part) else part
    if not isinstance(linear, nn.Linear):
        return f"that is a {type(linear).__name__}, expected a linear layer; or tensor 1"
    count, of_what = linear.out_features if style in COLUMNS else linear.in_features, "features"
    if style in (APART, "rowwise") and width and not count % width:
        count, of_what = count // width, "heads"
    return f"with {count} {of_what}, expected a multiple of {ranks}" if count % ranks else None


def _beside_divided(model: nn.Module, plan: TensorPlan) -> Iterator[str]:
    """Parameters of modules that lie beside a layer whose outputs stay apart, and of which the plan is silent."""
    parents = {name.rpartition(".")[0] for name in _with_style(plan, APART)}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if parents.intersection(above) and not plan.keys() & set(above):
            yield name


def _with_style(plan: TensorPlan, style: str) -> set[str]:
    return {name for name, other in plan.items() if other == style}


# -- what divides it


def _is_worth_saying(record: logging.LogRecord) -> bool:
    # Every rank would say once that what is divided twice (weights, norms of gradients) takes two collectives to become
    # whole, perhaps not the same on all ranks. All take the two in the same order, so it is the same.
    return "operations will be performed" not in str(record.msg)


def _styles(model: nn.Module, plan: TensorPlan) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        if style == WHOLE:
            continue
        how = {**COLUMNS, **ROWS, **PER_HEAD}[style]
        if is_layer(model.get_submodule(name)):
            adapter = "lora_B" if style in COLUMNS else "lora_A"
            styles |= {f"{name}.base_layer": how, f"{name}.{adapter}.{ADAPTER}": how}
        else:
            styles[name] = how
    return styles


# -- how blocks are executed


class BlockPlan(NamedTuple):
    """The execution of a run's blocks, and its line in a plan."""

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
    if deterministic:
        reason = "sections.Compute.deterministic is True"
    elif parallelism.tp > 1:
        reason = f"mesh.Parallelism.tp is {parallelism.tp}"
    else:
        reason = blocks.small_block_reason(blocks.largest_block(hf.empty_model(config)))
    if reason is None and device is not None:
        reason = blocks.compile_unsupported_reason(device)
    if reason is None:
        compiled = partial(blocks.torch_compile, mode="default")
        return BlockPlan(replace(parallelism, compile=compiled), ("blocks are compiled, the default on CUDA",))
    note = f"blocks run as written, not compiled as is the default on CUDA: {reason}"
    return BlockPlan(replace(parallelism, compile=blocks.eager), (note,))
