"""Putting a model where it trains: loaded, given adapters, arranged over the devices; and where it is sampled from."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from grpo_fn.shell.model import hf, load_weights, lora
from grpo_fn.shell.model.blocks import blocks, execution_on, largest_block
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.policy import tensor_parallel
from grpo_fn.shell.policy.fsdp import ReferenceModel
from grpo_fn.shell.policy.mesh import DATA, Parallelism, check_precision, set_group_timeout, shard
from grpo_fn.shell.world import World


@dataclass(frozen=True)
class LoadedModel:
    """A model in place. What trains is kept in float32, what is frozen in the dtype that all is computed in."""

    logprob_model: LogprobModel
    data: dist.ProcessGroup | None  # the ranks that have rows of their own
    reference_model: ReferenceModel | None  # the reference policy
    teachers: Mapping[str, ReferenceModel]  # of distillation, by key
    dropout_modules: list[nn.Module]
    decoding: Callable[[], nn.Module]  # a whole module to sample from: the trained one itself where it is whole


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What there is to know of a model before it is put in place."""

    folder: str
    config: PretrainedConfig
    dtype: torch.dtype  # of the computation
    attention: str
    adapters: lora.LoRA | None
    logprob_model: Callable[[nn.Module], LogprobModel]
    parallelism: Parallelism
    key: Tensor  # of the adapters' first values

    def kept_in(self, trained: bool) -> torch.dtype:
        """The dtype of the weights that come from the folder."""
        return torch.float32 if trained and self.adapters is None else self.dtype

    def full_model(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model with its adapters, all of it on one device."""
        model = self.read_whole(device, dtype)
        if self.adapters is not None:
            lora.reset(lora.attach(model, self.adapters), key=self.key, device=device)
        return model

    def read_whole(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The folder's model, without adapters."""
        return hf.load_model(self.folder, dtype=dtype, device=device, attention=self.attention)

    def load_frozen(self, world: World, mesh: DeviceMesh | None) -> LogprobModel:
        """The model without adapters, with nothing that trains: over the mesh, or on this device where there is none.

        One whose weights are to lie on the host gets a mesh of its own: FSDP2 moves them.
        """
        if mesh is None and self.parallelism.offload_reference:
            mesh = self.parallelism.mesh(world)
        if mesh is not None:
            return self.load_sharded(world, mesh, trained=False)
        model = self.read_whole(world.device, self.dtype)
        self.prepare(model.requires_grad_(False), world.device)
        return self.logprob_model(model)

    def load_sharded(self, world: World, mesh: DeviceMesh, *, trained: bool) -> LogprobModel:
        """The model over the mesh: no rank ever holds all of it."""
        model = load_weights.meta_causal_lm(self.config, dtype=self.kept_in(trained), attention=self.attention)
        model.generation_config = hf.generation_config(self.folder, self.config)
        adapted = trained and self.adapters is not None
        if adapted:
            lora.attach(model, self.adapters)
        elif not trained:
            model.requires_grad_(False)
        tensor_parallel.divide(model, mesh["tensor"])
        self.prepare(model, world.device)
        logprob_model = self.logprob_model(model)
        how = self.parallelism if trained else replace(self.parallelism, offload=self.parallelism.offload_reference)
        shard(logprob_model, model, mesh, self.dtype, how)
        for method in ("logp", "energy", "teacher_head"):
            register_fsdp_forward_method(logprob_model, method)
        device = torch.device("cpu") if how.offload else world.device
        load_weights.load_shards(logprob_model, load_weights.folder_of(self.folder), device=device, prefix="model.")
        if adapted:
            lora.reset(model, key=self.key, device=device)
        if mesh.size() == 1 and not how.offload:
            skip_copies(logprob_model)
        return logprob_model.eval()

    def prepare(self, model: nn.Module, device: torch.device) -> None:
        """What becomes of every block before it is sharded, of a model that will compute on that device."""
        execute = execution_on(device, self.parallelism.compile, weights=largest_block(model))
        for block in blocks(model):
            execute(block)
            self.parallelism.activation_checkpointing(block)


def load_and_shard(
    world: World, placing: ModelSpec, *, reference: bool, teachers: Mapping[str, ModelSpec]
) -> LoadedModel:
    """Load and arrange the model, a frozen copy of it when a `reference` is asked for, and frozen teachers.

    With adapters the reference is the same model with the adapters off, and there is no copy. Teachers are spread over
    the devices as the model is. Raises ValueError for a precision that the device has not, for ranks that do not fit
    the mesh, and for a folder that does not fit the model.
    """
    check_precision(placing.dtype, world.device)
    parallelism, adapters = placing.parallelism, placing.adapters
    plain = world.size == 1 and not parallelism.offload and placing.kept_in(True) == placing.dtype
    copied = reference and adapters is None
    if plain:
        model = placing.full_model(world.device, placing.dtype)
        placing.prepare(model, world.device)
        logprob_model, data = placing.logprob_model(model), None
        beside = placing.logprob_model(copy.deepcopy(model).requires_grad_(False)) if copied else None
        mesh = None
    else:
        mesh = parallelism.mesh(world)
        logprob_model = placing.load_sharded(world, mesh, trained=True)
        data = None
        if world.size > 1:
            data = mesh[DATA]._flatten("data").get_group()
            set_group_timeout(data, world)
        else:
            mesh = None  # what is frozen lies on the device in the dtype of the computation: there is nothing to cast
        beside = placing.load_frozen(world, mesh) if copied else None
    reference_model = partial(nullcontext, beside) if copied else partial(without_adapters, logprob_model)
    return LoadedModel(
        logprob_model=logprob_model,
        data=data,
        reference_model=reference_model if reference else None,
        teachers={name: partial(nullcontext, spec.load_frozen(world, mesh)) for name, spec in teachers.items()},
        dropout_modules=[] if adapters is None else lora.dropouts(logprob_model.model),
        decoding=(lambda: logprob_model.model) if plain else partial(placing.full_model, world.device, placing.dtype),
    )


@contextmanager
def without_adapters(logprob_model: LogprobModel) -> Iterator[LogprobModel]:
    """Within it the model itself is the reference policy: its adapters are off."""
    with lora.switched_off(logprob_model.model):
        yield logprob_model


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
        return (kept_tensor(itself).new_empty(0),), kept_tensor(itself)  # nothing is gathered

    kept.fsdp_pre_all_gather = pre_all_gather
    kept.fsdp_post_all_gather = cast_weight


def kept_tensor(itself: "weakref.ref[Tensor]") -> Tensor:
    """The tensor that is referred to. Raises RuntimeError where it is gone, as its weight was replaced meanwhile."""
    tensor = itself()
    if tensor is None:
        raise RuntimeError("got a weight that was replaced after skip_copies, wanted the one that it was given")
    return tensor


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
        local = gradient.to(weight.dtype)
        weight.grad = DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    else:
        weight.grad.to_local().add_(gradient)
    hooks: dict[int, Callable[[Tensor], None]] = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():  # as FSDP2 does
        hook(weight)
