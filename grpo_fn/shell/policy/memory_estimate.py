"""What there is to count before a run: weights of the empty model, an optimizer's moments, a micro-batch's activations.

Nothing of the model's size is allocated: shapes stand on the meta device, and the forward and backward pass that is
watched for its activations is one of tensors without data.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from grpo_fn.shell.model import load_weights, lora
from grpo_fn.shell.model.attention import SCORES_IN_MEMORY, counted_attention
from grpo_fn.shell.model.blocks import blocks
from grpo_fn.shell.policy import tensor_parallel
from grpo_fn.shell.policy.memory import (
    Arrangement,
    Memory,
    Passing,
    Weight,
    logit_bytes,
    per_device,
    sizes_by_block,
)
from grpo_fn.shell.policy.mesh import Parallelism

SAMPLE = 2**14  # numbers of a weight that an optimizer is asked about in a larger one's place
SHORT = 8


def device_memory(
    config: PretrainedConfig,
    adapters: lora.LoRA | None,
    scale: Parallelism,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    mesh: tuple[int, int, int],
    dtype: torch.dtype,
    attention: str,
    reference: bool,
    teachers: Sequence[PretrainedConfig],
    offload_teachers: bool,
    relative_to: PretrainedConfig | None,
    average: bool,
    micro_tokens: int,
    width: int,
    logits_chunk_elements: int,
    cache: int,
    local_sampler: bool,
) -> Memory:
    """What one device of the `mesh` (replicate, shard, tensor) holds, rows being about `width` tokens wide.

    `relative_to` is a teacher that entropies are relative to. `cache` is the sampler's, in bytes; a `local_sampler` has
    weights in this process. Under tensor parallelism activations are counted as without it: too many.
    """
    replicate, shard, tensor = mesh
    parts = weights(meta_model(config, adapters, attention), shard, tensor)
    theirs = [[w for w, _ in weights(meta_model(one, None, attention), shard, tensor)] for one in teachers]
    roots = dtype.itemsize * sum(sizes_by_block(one)[None] for one in theirs)
    alone = replicate * shard * tensor == 1
    gathers = not alone or scale.offload or (adapters is None and dtype is not torch.float32)
    how = Arrangement(
        width=dtype.itemsize,
        gathers=gathers,
        reshard_after_forward=scale.reshard_after_forward,
        prefetch=scale.prefetch,
        offload=scale.offload,
        offload_reference=scale.offload_reference,
        reference=reference and adapters is None,
        teachers=dtype.itemsize * sum(w.part for one in theirs for w in one),
        teacher_roots=roots * (not alone or offload_teachers),
        offload_teachers=offload_teachers,
        average=average,
        local_sampler=local_sampler,
        alone=alone,
    )
    rows, keeps = max(1, micro_tokens // width), scale.activation_checkpointing
    passing = Passing(
        activation_bytes(config, adapters, keeps, dtype=dtype, attention=attention, rows=rows, width=width),
        logit_bytes(
            logits_chunk_elements,
            *head_dimensions(config),
            rows * width,
            dtype.itemsize,
            trained=adapters is None,
            teacher=None if relative_to is None else head_dimensions(relative_to),
        ),
        cache,
    )
    return per_device([weight for weight, _ in parts], moment_bytes(optimizer, parts), passing, how)


def head_dimensions(config: PretrainedConfig) -> tuple[int, int]:
    """Rows and columns of a model's head.

    Args:
        config: of the model.
    """
    text = config.get_text_config()
    return text.vocab_size, text.hidden_size


def meta_model(config: PretrainedConfig, adapters: lora.LoRA | None, attention: str) -> nn.Module:
    """The model's shape, adapters included, on the meta device. Attention is as it is written out, or else fused."""
    model = load_weights.meta_causal_lm(config, dtype=torch.float32, attention=counted_attention(attention))
    return model if adapters is None else lora.attach(model, adapters)


def trained_parameters(config: PretrainedConfig, adapters: lora.LoRA | None) -> int:
    """Numbers that train: all of the model, or its adapters alone."""
    return sum(p.numel() for p in meta_model(config, adapters, "eager").parameters() if p.requires_grad)


def weights(model: nn.Module, shard: int, tensor: int) -> list[tuple[Weight, bool]]:
    """Every weight, divided over `tensor` and then over `shard` devices, and whether it is a matrix.

    FSDP2 divides the first dimension, the first device has the most: ceil(rows / shard) of them.
    """
    plan = tensor_parallel.plan_of(model) if tensor > 1 else {}
    block = {id(p): i for i, layer in enumerate(blocks(model)) for p in layer.parameters()}
    found = []
    for name, p in model.named_parameters():
        first, *rest = _divided(name, p.shape, plan, tensor)
        part, whole = -(-first // shard) * prod(rest), first * prod(rest)
        found.append((Weight(part, whole, p.requires_grad, block.get(id(p))), p.ndim >= 2))
    return found


def _divided(name: str, shape: Sequence[int], plan: tensor_parallel.Plan, ranks: int) -> list[int]:
    """The shape of one rank's part: of a layer by columns the rows of W, B and bias; by rows the columns of W and A."""
    layer = max((module for module in plan if name.startswith(f"{module}.")), key=len, default=None)
    shape = list(shape)
    if plan.get(layer) in tensor_parallel.COLUMNS and ".lora_A." not in name:
        shape[0] //= ranks
    elif plan.get(layer) in tensor_parallel.ROWS and ".lora_B." not in name and len(shape) > 1:
        shape[1] //= ranks
    return shape


# -- the optimizer


def moment_bytes(optimizer: Callable[..., torch.optim.Optimizer], parts: Sequence[tuple[Weight, bool]]) -> int:
    """Bytes of the optimizer's state for what trains of `parts`, found by letting it step on small weights.

    A weight of n numbers is asked for at two sizes that agree with n modulo SAMPLE, and extrapolated from them. Raises
    what the optimizer raises, ValueError for a library that is not installed.
    """
    sizes = [(w.part, (matrix, w.block is None)) for w, matrix in parts if w.trained and w.part]
    asked = {(n, kind) for part, kind in sizes for n in _samples(part)}
    cost = dict(zip(asked, _stepped(optimizer, list(asked)), strict=True)) if asked else {}
    return sum(_extrapolated(part, [cost[n, kind] for n in _samples(part)]) for part, kind in sizes)


def _samples(n: int) -> list[int]:
    return [n] if n < 2 * SAMPLE else [SAMPLE + n % SAMPLE, 2 * SAMPLE + n % SAMPLE]


def _extrapolated(n: int, costs: list[int]) -> int:
    low, high = costs[0], costs[-1]
    return low + (high - low) * (n // SAMPLE - 1)


def _stepped(optimizer: Callable[..., torch.optim.Optimizer], sizes: list[tuple[int, tuple[bool, bool]]]) -> list[int]:
    """Bytes of the state of each weight, by its numbers, whether it is a matrix, and whether it is of no block."""
    params = [nn.Parameter(torch.zeros((1, n) if matrix else (n,))) for n, (matrix, _) in sizes]
    for p, (_, (matrix, of_no_block)) in zip(params, sizes, strict=True):
        p.of_vocabulary = matrix and of_no_block
    made = optimizer(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    made.step()
    return [tensor_bytes(made.state[p].values()) for p in params]


def tensor_bytes(values: Iterable[Any]) -> int:
    """Bytes of all tensors among the values, those inside of a quantised one included."""
    return sum(_bytes(x) for x in values if isinstance(x, Tensor))


def _bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "to_local"):
        return _bytes(tensor.to_local())
    if inner := getattr(tensor, "tensor_attrs", None):
        return sum(_bytes(getattr(tensor, name)) for name in inner)
    return tensor.numel() * tensor.itemsize


# -- activations


def activation_bytes(
    config: PretrainedConfig,
    adapters: lora.LoRA | None,
    activations: Callable[[nn.Module], None],
    *,
    dtype: torch.dtype,
    attention: str,
    rows: int,
    width: int,
) -> int:
    """Most bytes alive at once in forward and backward of a `[rows, width]` batch, weights and gradients apart.

    The passes run without data, through every block as `activations` changes it; the head is left to `logit_bytes`.
    Fused attention counts as the CPU's kernel, which keeps what those of other devices keep: a number of bytes a token,
    however long the rows are. So its rows are made short, which leaves little of the mask that only this pass has;
    with it, keys and values count as repeated for every query head, a few per cent too many.
    """
    if attention not in SCORES_IN_MEMORY:
        rows, width = -(-rows * width // SHORT), SHORT
    model = meta_model(config, adapters, attention)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _without_data(model, dtype)
        for block in blocks(model):
            activations(block)
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(_forget)
        tokens = torch.zeros(rows, width, dtype=torch.long)
        with Alive() as alive:
            hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
            torch.autograd.backward(hidden, torch.ones_like(hidden))
    return alive.most


def _without_data(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters of the fake mode in which it is called; all in `dtype`, as what is gathered."""
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=dtype), requires_grad=p.requires_grad))


def _forget(parameter: nn.Parameter) -> None:
    parameter.grad = None


class Alive(TorchDispatchMode):
    """Within it, the bytes of all storages made by operators are followed: `most` is the largest sum at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        held = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)]
        fresh = [s for s in fresh if s._cdata not in held and s._cdata not in self._live()]
        for storage in fresh:
            self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self._live().values()))
        return out

    def _live(self) -> dict[int, tuple[StorageWeakRef, int]]:
        self._made = {key: found for key, found in self._made.items() if not found[0].expired()}
        return self._made
