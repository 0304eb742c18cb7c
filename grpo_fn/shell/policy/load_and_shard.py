"""Putting a model where it trains: loaded, given adapters, arranged over the devices; and where it is sampled from."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PretrainedConfig

from grpo_fn.shell.model import hf, lora
from grpo_fn.shell.model.blocks import blocks
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.policy.fsdp import ReferenceModel
from grpo_fn.shell.policy.mesh import (
    DATA,
    Parallelism,
    check_precision,
    divide,
    set_group_timeout,
    shard,
    skip_copies,
)
from grpo_fn.shell.world import World


@dataclass(frozen=True)
class LoadedModel:
    """A model in place. What trains is kept in float32, what is frozen in the dtype that all is computed in."""

    logprob_model: LogprobModel
    data: dist.ProcessGroup | None  # the ranks that have their own rows
    reference_model: ReferenceModel | None  # the reference policy
    teachers: Mapping[str, ReferenceModel]  # of distillation, by key
    dropout_modules: list[nn.Module]
    decoding: Callable[[], nn.Module]  # a whole module to sample from: the trained one itself where it is whole


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The facts about a model before it is loaded."""

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

        One whose weights are to lie on the host gets its own mesh: FSDP2 moves them.
        """
        if mesh is None and self.parallelism.offload_reference:
            mesh = self.parallelism.mesh(world)
        if mesh is not None:
            return self.load_sharded(world, mesh, trained=False)
        model = self.read_whole(world.device, self.dtype)
        self.prepare(model.requires_grad_(False))
        return self.logprob_model(model)

    def load_sharded(self, world: World, mesh: DeviceMesh, *, trained: bool) -> LogprobModel:
        """The model over the mesh: no rank ever holds all of it."""
        model = hf.meta_causal_lm(self.config, dtype=self.kept_in(trained), attention=self.attention)
        model.generation_config = hf.generation_config(self.folder, self.config)
        adapted = trained and self.adapters is not None
        if adapted:
            lora.attach(model, self.adapters)
        elif not trained:
            model.requires_grad_(False)
        divide(model, mesh["tensor"])
        self.prepare(model)
        logprob_model = self.logprob_model(model)
        how = self.parallelism if trained else replace(self.parallelism, offload=self.parallelism.offload_reference)
        shard(logprob_model, model, mesh, self.dtype, how)
        for method in ("logp", "energy", "teacher_head"):
            register_fsdp_forward_method(logprob_model, method)
        device = torch.device("cpu") if how.offload else world.device
        hf.load_shards(model, hf.folder_of(self.folder), device=device)
        if adapted:
            lora.reset(model, key=self.key, device=device)
        if mesh.size() == 1 and not how.offload:
            skip_copies(logprob_model)
        return logprob_model.eval()

    def prepare(self, model: nn.Module) -> None:
        """The treatment of every block before it is sharded."""
        for block in blocks(model):
            self.parallelism.compile(block)
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
        placing.prepare(model)
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
