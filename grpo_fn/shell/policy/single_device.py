"""FSDP2 on one device without its copies: a weight is cast where it computes, a gradient added up where it arises.

Float32 weights that are computed in 16 bits are held by FSDP2 on one device, too: it makes the 16-bit weights of a
block before the block computes and frees them behind it. On one rank torch 2.11 to 2.13 gather nothing, but write every
weight twice (the cast, and a copy of it), and every gradient three times (into the buffer that would be reduced,
divided by 1, into what would be this rank's part) before it is added. Here both are one kernel a weight, with the same
bits: FSDP2's extension of the gather casts straight into the weight that computes, and a hook takes the 16-bit gradient
from autograd before FSDP2 looks for it.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class WeightPlace(NamedTuple):
    """A weight that trains, and the module attribute that is the weight, or its cast while the module computes."""

    owner: nn.Module
    name: str
    weight: nn.Parameter


def skip_copies(root: nn.Module) -> None:
    """Have each weight cast in one kernel, and each gradient added to the weight's in one.

    Args:
        root: FSDP2 is applied to it on a mesh of one rank, without offload; its weights have storage. Nothing of it has
            computed yet. Changed in place: parameters keep their names and objects.
    """
    for parameter in root.parameters():
        _cast_when_gathered(parameter._local_tensor)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Behind FSDP2's own hook, which puts the casts in their places.
            module.register_forward_pre_hook(partial(_take_gradients, trained_places(module), {}))


def trained_places(module: nn.Module) -> list[WeightPlace]:
    """The weights that FSDP2 gathers with `module` and that train, a tied one once.

    Args:
        module: FSDP2 is applied to it; modules in it to which FSDP2 is applied have weights of their own.
    """
    found: dict[int, WeightPlace] = {}

    def visit(owner: nn.Module) -> None:
        for name, weight in owner.named_parameters(recurse=False):
            if weight.requires_grad:
                found.setdefault(id(weight), WeightPlace(owner, name, weight))
        for child in owner.children():
            if not isinstance(child, FSDPModule):
                visit(child)

    visit(module)
    return list(found.values())


def _cast_when_gathered(kept: Tensor) -> None:
    """Give the tensor that a weight is kept in the two methods that FSDP2 calls in place of its own copies."""
    itself = weakref.ref(kept)  # no cycle: memory is freed when the weight is let go of

    def pre_all_gather(mesh: Any) -> tuple[tuple[Tensor], Tensor]:
        return (kept_tensor(itself).new_empty(0),), kept_tensor(itself)  # nothing is gathered

    kept.fsdp_pre_all_gather = pre_all_gather
    kept.fsdp_post_all_gather = cast_weight


def kept_tensor(itself: "weakref.ref[Tensor]") -> Tensor:
    """The tensor that is referred to. Raises RuntimeError where it is gone, as its weight was replaced meanwhile."""
    found = itself()
    if found is None:
        raise RuntimeError("got a weight that was replaced after skip_copies, wanted the one that it was given")
    return found


@torch.no_grad()
def cast_weight(
    gathered: tuple[Tensor, ...], kept: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The weight in the dtype that is computed in, as FSDP2 asks its extensions for it.

    Args:
        gathered: of nothing.
        kept: the weight, in float32.
        dtype: of the computation.
        out: what computes, from the second time on; its storage has bytes again.

    Returns:
        The first time, the cast, and the tensors whose storage FSDP2 frees after use.
    """
    if out is None:
        made = torch.empty(kept.shape, dtype=dtype, device=kept.device).copy_(kept)
        return made, (made,)
    with torch.autograd._unsafe_preserve_version_counter(out):  # autograd kept it when it was as it is now
        out.copy_(kept)
    return None


def _take_gradients(places: list[WeightPlace], hooked: dict[int, Tensor], module: nn.Module, given: Any) -> None:
    """From now on gradients of the casts, which are in the weights' places, go to the weights."""
    for i, (owner, name, weight) in enumerate(places):
        cast = getattr(owner, name)
        if hooked.get(i) is not cast:
            hooked[i] = cast
            cast.register_post_accumulate_grad_hook(partial(add_gradient, weight))


def add_gradient(weight: nn.Parameter, cast: Tensor) -> None:
    """Add the gradient of a weight's cast to that of the weight, in the weight's dtype; the cast has none any more.

    Args:
        weight: a DTensor over one rank.
        cast: of that weight.
    """
    gradient, cast.grad = cast.grad, None
    if weight.grad is None:
        found = gradient.to(weight.dtype)
        weight.grad = DTensor.from_local(
            found, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    else:
        weight.grad.to_local().add_(gradient)
    hooks: dict[int, Callable[[Tensor], None]] = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():  # as FSDP2 does
        hook(weight)
