"""The memory of a run on each device, before anything is allocated.

Counted are the weights of the empty model, an optimizer's moments and a micro-batch's activations; sums over them are
what a device holds. Nothing of the model's size is allocated: shapes stand on the meta device, and the forward and
backward pass that is watched for its activations is one of tensors without data.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from grpo_fn.shell.model import hf, lora
from grpo_fn.shell.model.attention import AUTO, EAGER, model_attention
from grpo_fn.shell.model.blocks import blocks
from grpo_fn.shell.policy.mesh import COLUMNS, PREFETCH, ROWS, Parallelism, TensorPlan, tensor_plan

GB = 1e9
WIDE = 4  # bytes of what trains, of its gradients, and of what is reduced over ranks: float32
# Of a chunk of logits, in float32, on the way back with an entropy bonus: the last chunk's, kept, this one's, and the
# probabilities of one of them. On the way there it is two.
LOGITS_WIDE = 3
# With an entropy relative to a teacher: the last chunk's, kept, and of this one the policy's log-probabilities, its
# probabilities, and two gradients, in float32; beside them the teacher's log-probabilities. Both have their products in
# the dtype that is computed in, too.
TAUGHT_WIDE, TEACHER_WIDE = 5, 1


class Weight(NamedTuple):
    """One weight of the model, in numbers, as its devices have it."""

    part: int  # kept by the device that keeps most of it
    whole: int  # of it while its module computes, gathered
    trained: bool
    block: int | None  # which block gathers it; None: the root, with embedding, last norm and head
    matrix: bool


class Arrangement(NamedTuple):
    """The handling of weights on a device."""

    width: int  # bytes of a number in the dtype that is computed in
    gathers: bool  # weights are gathered to compute: FSDP2; else they lie whole, in that dtype, where they train
    reshard_after_forward: bool
    offload: bool
    offload_reference: bool
    reference: bool  # there is a second, frozen copy
    teachers: int = 0  # bytes of frozen teachers on the device that has most of them
    teacher_roots: int = 0  # bytes of what of them stays gathered
    offload_teachers: bool = False
    average: bool = False  # there is a moving average of what trains
    local_sampler: bool = True  # which needs whole weights in this process; an engine has its own
    alone: bool = False  # one device: weights that lie there are cast and gradients added up in place


class Passing(NamedTuple):
    """Bytes that live within a step only."""

    activations: int  # of one micro-batch, at their most
    logits: int
    cache: int


class Part(NamedTuple):
    """So many bytes of one kind."""

    name: str
    bytes: int
    host: bool = False


class Memory(NamedTuple):
    """The memory of one device: always, in training, in sampling."""

    standing: tuple[Part, ...]
    training: tuple[Part, ...]
    sampling: tuple[Part, ...]

    def peak(self) -> int:
        """Bytes on the device at the fuller of the two times."""
        standing, training, sampling = (sum(part.bytes for part in phase if not part.host) for phase in self)
        return standing + max(training, sampling)

    def host(self) -> int:
        """Bytes in the host's memory for each of its devices."""
        return sum(part.bytes for phase in self for part in phase if part.host)

    def lines(self) -> list[str]:
        """One line for each part, and the sums."""
        phases = (("", self.standing), (", training", self.training), (", sampling", self.sampling))
        shown = [
            f"  {part.name + when:<38}{part.bytes / GB:9.3f} GB" + (" on the host" if part.host else "")
            for when, phase in phases
            for part in phase
            if part.bytes
        ]
        host = f", and {self.host() / GB:.3f} GB on the host" if self.host() else ""
        return [
            *shown,
            f"  {'at most at once':<38}{self.peak() / GB:9.3f} GB{host}",
            "  not counted: prompts in the KV cache, buffers of gathers and reductions, the allocator's gaps, kernels; "
            "on the host a checkpoint's copy of what trains and its moments",
        ]


def per_device(weights: Sequence[Weight], moments: int, passing: Passing, how: Arrangement) -> Memory:
    """The parts that add up, for the device that holds most.

    Kept: weights that train in float32, frozen ones in the dtype of the computation, each device its part; of what
    trains the gradients in float32 and the `moments`, in bytes as the optimizer has them. Gathered: the root, which
    stays, and the blocks: all of them unless they are given back after the forward pass, else the largest and
    PREFETCH more like it. Gathered gradients are those of a block or the root, also in float32; on one device those
    of one weight, which are added up where they arise. A local sampler beside gathered weights has a whole copy of its
    own.
    """
    trained = sum(w.part for w in weights if w.trained)
    frozen = sum(w.part for w in weights if not w.trained)
    root, whole = sizes_by_block(weights)[None], sum(w.whole for w in weights)
    gathers_frozen = how.gathers and (how.offload_reference or not how.alone)
    largest_trained = max(sizes_by_block(w for w in weights if w.trained).values(), default=0)
    at_once = (how.width + WIDE) * largest_trained
    if how.alone and not how.offload:
        at_once = how.width * max((w.whole for w in weights if w.trained), default=0)
    standing = (
        Part("weights", WIDE * trained + how.width * frozen, how.offload),
        Part("optimizer state", moments, how.offload),
        Part("reference copy", how.reference * how.width * (trained + frozen), how.offload_reference),
        Part("reference, gathered root", how.reference * gathers_frozen * how.width * root),
        Part("teachers", how.teachers, how.offload_teachers),
        Part("teachers, gathered roots", how.teacher_roots),
        Part("moving average", how.average * WIDE * trained, how.offload),
        Part("sampler's own copy", how.local_sampler * how.gathers * how.width * whole),
    )
    training = (
        Part("gradients", WIDE * trained, how.offload),
        Part("gathered weights", how.gathers * how.width * peak_gathered(weights, how)),
        Part("gathered gradients", how.gathers * at_once),
        Part("activations", passing.activations),
        Part("logits", passing.logits),
    )
    return Memory(standing, training, (Part("KV cache", passing.cache),))


def peak_gathered(weights: Sequence[Weight], how: Arrangement) -> int:
    """Numbers that lie gathered at once, at their most."""
    blocks = sizes_by_block(weights)
    root = blocks.pop(None, 0)
    at_once = 1 + PREFETCH if how.reshard_after_forward else len(blocks)
    return root + sum(sorted(blocks.values(), reverse=True)[:at_once])


def sizes_by_block(weights: Iterable[Weight]) -> Counter[int | None]:
    """Numbers that each block gathers; the root under None."""
    sizes: Counter[int | None] = Counter()
    for weight in weights:
        sizes[weight.block] += weight.whole
    return sizes


def logit_bytes(
    elements: int,
    vocabulary: int,
    hidden: int,
    tokens: int,
    width: int,
    *,
    trained: bool,
    teacher: tuple[int, int] | None,
) -> int:
    """Of the head's backward pass: a chunk of logits several times over, and the gradient of a head that trains."""
    rows = min(max(1, elements // vocabulary), tokens)
    gradient = trained * vocabulary * hidden * (WIDE + width)
    if teacher is None:
        return rows * vocabulary * (width + LOGITS_WIDE * WIDE) + gradient
    theirs, columns = teacher
    chunk = vocabulary * (width + TAUGHT_WIDE * WIDE) + theirs * (width + TEACHER_WIDE * WIDE)
    return rows * chunk + gradient + width * columns * (theirs + tokens)


# -- what there is to count: weights of the empty model, moments, activations


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
    """The memory of one device of the `mesh` (replicate, shard, tensor), for rows of about `width` tokens.

    `relative_to` is a teacher that entropies are relative to. `cache` is the sampler's, in bytes; a `local_sampler` has
    weights in this process. Under tensor parallelism activations are counted as without it: too many.
    """
    replicate, shard, tensor = mesh
    parts = weights(meta_model(config, adapters, attention), shard, tensor)
    teacher_weights = [weights(meta_model(one, None, attention), shard, tensor) for one in teachers]
    roots = dtype.itemsize * sum(sizes_by_block(one)[None] for one in teacher_weights)
    alone = replicate * shard * tensor == 1
    gathers = not alone or scale.offload or (adapters is None and dtype is not torch.float32)
    how = Arrangement(
        width=dtype.itemsize,
        gathers=gathers,
        reshard_after_forward=scale.reshard_after_forward,
        offload=scale.offload,
        offload_reference=scale.offload_reference,
        reference=reference and adapters is None,
        teachers=dtype.itemsize * sum(w.part for one in teacher_weights for w in one),
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
    return per_device(parts, moment_bytes(optimizer, parts), passing, how)


def head_dimensions(config: PretrainedConfig) -> tuple[int, int]:
    """Rows and columns of a model's head."""
    text = config.get_text_config()
    return text.vocab_size, text.hidden_size


def meta_model(config: PretrainedConfig, adapters: lora.LoRA | None, attention: str) -> nn.Module:
    """The model's shape, adapters included, on the meta device. Attention is as it is written out, or else fused."""
    counted = EAGER if attention == EAGER else model_attention(AUTO, config)  # on any machine
    model = hf.meta_causal_lm(config, dtype=torch.float32, attention=counted)
    return model if adapters is None else lora.attach(model, adapters)


def trained_parameters(config: PretrainedConfig, adapters: lora.LoRA | None) -> int:
    """Numbers that train: all of the model, or its adapters alone."""
    return sum(p.numel() for p in meta_model(config, adapters, "eager").parameters() if p.requires_grad)


def weights(model: nn.Module, shard: int, tensor: int) -> list[Weight]:
    """Every weight, divided over `tensor` and then over `shard` devices.

    FSDP2 divides the first dimension, the first device has the most: ceil(rows / shard) of them.
    """
    plan = tensor_plan(model) if tensor > 1 else {}
    block = {id(p): i for i, layer in enumerate(blocks(model)) for p in layer.parameters()}
    parts = []
    for name, p in model.named_parameters():
        first, *rest = _divided(name, p.shape, plan, tensor)
        part, whole = -(-first // shard) * prod(rest), first * prod(rest)
        parts.append(Weight(part, whole, p.requires_grad, block.get(id(p)), p.ndim >= 2))
    return parts


def _divided(name: str, shape: Sequence[int], plan: TensorPlan, ranks: int) -> list[int]:
    """The shape of one rank's part: of a layer by columns the rows of W, B and bias; by rows the columns of W and A."""
    layer = max((module for module in plan if name.startswith(f"{module}.")), key=len, default=None)
    shape = list(shape)
    if plan.get(layer) in COLUMNS and ".lora_A." not in name:
        shape[0] //= ranks
    elif plan.get(layer) in ROWS and ".lora_B." not in name and len(shape) > 1:
        shape[1] //= ranks
    return shape


# -- the optimizer


def moment_bytes(optimizer: Callable[..., torch.optim.Optimizer], parts: Sequence[Weight]) -> int:
    """Bytes of the optimizer's state for what trains of `parts`, found by letting it step on small weights.

    A weight of n numbers is asked for at two sizes that agree with n modulo SAMPLE, and extrapolated from them. Raises
    what the optimizer raises, ValueError for a library that is not installed.
    """
    sizes = [(w.part, (w.matrix, w.block is None)) for w in parts if w.trained and w.part]
    samples = {(n, kind) for part, kind in sizes for n in _samples(part)}
    cost = dict(zip(samples, _stepped(optimizer, list(samples)), strict=True)) if samples else {}
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
    stepped = optimizer(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    stepped.step()
    return [tensor_bytes(stepped.state[p].values()) for p in params]


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
    if attention != EAGER:
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
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)]
        fresh = [s for s in fresh if s._cdata not in inputs and s._cdata not in self._live()]
        for storage in fresh:
            self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self._live().values()))
        return out

    def _live(self) -> dict[int, tuple[StorageWeakRef, int]]:
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        return self._made
