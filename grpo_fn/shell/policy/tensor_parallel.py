"""Tensor parallelism: the matrix products of every block divided over ranks, as the model's own plan says.

A layer divided by columns gives each rank some of its output features, one divided by rows takes them in and sums the
ranks' parts of the output. Between the two every rank has its own attention heads and its own part of the MLP; outside
them all ranks of one tensor group hold the same numbers. (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053,
section 3.)

Transformers names a style for each layer (`model.tp_plan`); torch.distributed.tensor.parallel carries it out, so that
parameters become DTensors over which `fully_shard` may be applied. What the plan says of embedding and head is left
out: log-probs come from `hidden @ W.T` chunk by chunk, with the whole of W.
"""

import logging
import re
from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from grpo_fn.shell.model.blocks import blocks
from grpo_fn.shell.model.lora import ADAPTER, is_layer

Plan = dict[str, str]  # name of a module, or of a parameter, in the model -> style

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

    Raises ValueError, nothing changed, for a model that cannot be divided (see `check_tp_plan`).
    """
    if mesh.size() == 1:
        return model
    plan = check_tp_plan(model, mesh.size())
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_worth_saying)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parallelize_module(model, mesh, _styles(model, plan), src_data_rank=None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # SequenceParallel makes parameters that train
    return model


def check_tp_plan(model: nn.Module, ranks: int) -> Plan:
    """What the model's own plan says of its blocks, once it is sure that `ranks` ranks can share them.

    Raises ValueError for a model without a plan, for styles that are not among `KNOWN`, for heads and features that
    `ranks` does not divide, and for parameters beside divided layers of which the plan says nothing: they would see
    the features of one rank only, and so would their gradients.
    """
    plan = plan_of(model)
    if not plan.keys() - _with_style(plan, WHOLE):
        raise ValueError(
            f"scale: got tensor {ranks} for {type(model).__name__}, whose blocks have no tensor-parallel plan; "
            "wanted tensor 1"
        )
    for name, style in plan.items():
        if odd := _odd(model, name, style, ranks):
            raise ValueError(f"scale: got tensor {ranks} and {name} ({style}) {odd}")
    if forgotten := sorted(_beside_divided(model, plan)):
        raise ValueError(
            f"scale: got tensor {ranks} and {forgotten[0]} beside divided layers, without a word of it in the plan of "
            f"{type(model).__name__}; wanted a style for it, or tensor 1"
        )
    return plan


def plan_of(model: nn.Module) -> Plan:
    """The model's tensor-parallel plan for what is inside its blocks, every wildcard replaced by the names it fits."""
    patterns: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    inside = {id(part) for block in blocks(model) for part in (*block.modules(), *block.parameters())}
    parts = (*model.named_modules(), *model.named_parameters())
    styles = {name: patterns.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name, part in parts if id(part) in inside}
    return {name: style for name, style in styles.items() if style is not None}


# -- what can be divided


def _odd(model: nn.Module, name: str, style: str, ranks: int) -> str | None:
    """What is wrong with that entry of the plan, as the end of a sentence; None when nothing is."""
    if style not in KNOWN:
        return f"in the plan of {type(model).__name__}, wanted styles among {', '.join(KNOWN)}; or tensor 1"
    if style == WHOLE:
        return None
    part = dict(model.named_modules()).get(name)
    if part is None:
        return "that is a parameter, not a module; wanted tensor 1"
    width = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if style in PER_HEAD:
        shapes = {tuple(parameter.shape) for parameter in part.parameters()}
        return f"of shapes {shapes}, wanted one head's features alone, {width}" if shapes - {(width,)} else None
    linear = part.get_base_layer() if is_layer(part) else part
    if not isinstance(linear, nn.Linear):
        return f"that is a {type(linear).__name__}, wanted a linear layer; or tensor 1"
    count, of_what = linear.out_features if style in COLUMNS else linear.in_features, "features"
    if style in (APART, "rowwise") and width and not count % width:
        count, of_what = count // width, "heads"
    return f"with {count} {of_what}, wanted a multiple of {ranks}" if count % ranks else None


def _beside_divided(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Parameters of modules that lie beside a layer whose outputs stay apart, and of which the plan is silent."""
    parents = {name.rpartition(".")[0] for name in _with_style(plan, APART)}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if parents.intersection(above) and not plan.keys() & set(above):
            yield name


def _with_style(plan: Plan, style: str) -> set[str]:
    return {name for name, other in plan.items() if other == style}


# -- what divides it


def _is_worth_saying(record: logging.LogRecord) -> bool:
    # Every rank would say once that what is divided twice (weights, norms of gradients) takes two collectives to become
    # whole, perhaps not the same on all ranks. All take the two in the same order, so it is the same.
    return "operations will be performed" not in str(record.msg)


def _styles(model: nn.Module, plan: Plan) -> dict[str, ParallelStyle]:
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
