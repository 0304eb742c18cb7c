"""From hidden states to log-probability and entropy, without ever holding a `[B, T, V]` tensor.

Every pass is over a chunk of tokens in buffers that are used again for the next. The products are torch's; what becomes
of a chunk's logits is done by Triton's kernels on CUDA, and by torch's operations elsewhere (`head_chunk`).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from grpo_fn.shell.model.head_chunk.kernel_choice import kernels_for
from grpo_fn.shell.model.head_chunk.plain_kernels import ChunkKernels, ChunkStats, tempered_

CPU_CHUNK = 2**24  # logits: larger chunks leave its caches
CARD_SHARE = 64  # of a card's memory a chunk in float32 takes one part in so many; there are three at once


def chunk_elements(bound: int, device: torch.device) -> int:
    """How many logits a chunk has on a device: as its memory allows, at most `bound`.

    With few rows of a large vocabulary in a chunk a card spends its time on reading the weight and on adding its
    gradient up, anew for each.

    Args:
        bound: most logits.
        device: where the head computes.

    Returns:
        The number: a sixty-fourth of a card's memory in float32, 2^24 on a CPU, unless `bound` is less.
    """
    if device.type != "cuda":
        return min(bound, CPU_CHUNK)
    return min(bound, torch.cuda.get_device_properties(device).total_memory // (CARD_SHARE * torch.float32.itemsize))


def token_chunks(n: int, vocabulary: int, elements: int) -> list[slice]:
    """The tokens that go through the head together: as few chunks as the elements allow, about equal.

    Args:
        n: tokens.
        vocabulary: logits of each.
        elements: most logits in a chunk; one token at least.

    Returns:
        The chunks in order; without tokens an empty one.
    """
    most = max(1, elements // vocabulary)
    rows = -(-n // -(-n // most)) if n else 1
    return [slice(i, min(i + rows, n)) for i in range(0, max(n, 1), rows)]


def _wide_products(halves: Tensor) -> bool:
    """Whether there are products of such halves whose result is float32: on CUDA, where they round nothing."""
    return halves.is_cuda and type(halves) is Tensor


def _product(out: Float[Tensor, "n V"], hidden: Tensor, weight: Tensor, temperature: float) -> Float[Tensor, "n V"]:
    """The chunk's logits, which `_left` is still to divide."""
    # Everything after the product is in float32 or better: a bf16 log-softmax over 150k entries is off by 1e-2. So is
    # the product's result where it can be (it is added up in float32 anyway): a logit of 20 in bf16 is off by 0.04.
    if hidden.dtype == out.dtype:
        return out.addmm_(hidden, weight.T, beta=0, alpha=1 / temperature)
    if _wide_products(hidden):
        return torch.ops.aten.mm.dtype_out(hidden, weight.T, out.dtype, out=out)
    return out.copy_(hidden @ weight.T)


def _left(hidden: Tensor, dtype: torch.dtype, temperature: float) -> float:
    """What logits of that dtype are to be divided by: a product in the states' own dtype has done it."""
    return 1.0 if hidden.dtype == dtype else temperature


class LinearScores(torch.autograd.Function):
    """Log-probability and entropy of tokens under softmax(hidden W^T / temperature), chunk by chunk.

    With z = h W^T / tau - max, s = sum exp z and p = exp(z) / s: log p = z - log s, entropy = log s - sum p z,
    d logp / dz = onehot - p, d entropy / dz_j = -p_j (log p_j + entropy).

    The backward pass computes a chunk's logits again, except the last chunk's, which are kept: all there are when they
    are few. Of `elements` float32 numbers there are two lots in the forward pass (one with Triton's kernels), one
    between the passes, and in the backward pass two (the kept, and a chunk's), or three where the entropy has a
    gradient, too. Halves add a chunk in their own dtype. Differentiable once.
    """

    @staticmethod
    def forward(
        hidden: Float[Tensor, "N D"],
        weight: Float[Tensor, "V D"],
        target: Int[Tensor, "N"],
        temperature: float,
        elements: int,
        kernels: ChunkKernels,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        stats = ChunkStats(*(hidden.new_empty(len(target), dtype=dtype) for _ in ChunkStats._fields))
        parts, left = token_chunks(len(target), len(weight), elements), _left(hidden, dtype, temperature)
        buffer = hidden.new_empty(parts[0].stop, len(weight), dtype=dtype)
        spare = kernels.spare(buffer)
        for part in parts:
            z = _product(buffer[: part.stop - part.start], hidden[part], weight, temperature)
            for every, found in zip(stats, kernels.reduce(z, target[part], temperature=left, spare=spare), strict=True):
                every[part] = found
        return *stats, z

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, target, ctx.temperature, ctx.elements, ctx.kernels = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(hidden, weight, target, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, dlogp: Tensor | None, dentropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, target, *saved, kept = ctx.saved_tensors
        stats, left = ChunkStats(*saved), _left(hidden, kept.dtype, ctx.temperature)
        dlogp = torch.zeros_like(stats.logp) if dlogp is None else dlogp / ctx.temperature
        dentropy = None if dentropy is None else dentropy / ctx.temperature
        dhidden = torch.empty_like(hidden)
        trained = ctx.needs_input_grad[1]  # a head under adapters is not
        dweight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) if trained else None

        def pull(part: slice, z: Tensor, *, fresh: bool) -> None:
            at = (target[part], dlogp[part], None if dentropy is None else dentropy[part], stats.rows(part))
            dz = ctx.kernels.slope(z, *at, temperature=left, fresh=fresh, dtype=weight.dtype)
            dhidden[part] = (dz @ weight).to(hidden.dtype)
            if dweight is not None and dweight.dtype == dz.dtype:
                dweight.addmm_(dz.T, hidden[part])
            elif dweight is not None and _wide_products(dz):  # added up in the product, not in a pass over [V, D] more
                torch.ops.aten.addmm.dtype_out(dweight, dz.T, hidden[part], dweight.dtype, out=dweight)
            elif dweight is not None:
                dweight.add_(dz.T @ hidden[part])

        *again, last = token_chunks(len(target), len(weight), ctx.elements)
        pull(last, kept, fresh=False)
        buffer = kept.new_empty(again[0].stop, len(weight)) if again else kept
        for part in again:
            pull(part, _product(buffer, hidden[part], weight, ctx.temperature), fresh=True)
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None, None, None


def linear_scores(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "N"],
    *,
    temperature: float,
    elements: int,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """log p(target) and H(p) in nats, p = softmax(hidden W^T / temperature); about `elements` logits in a chunk."""
    logp, entropy, *_ = LinearScores.apply(hidden, weight, target, temperature, elements, kernels_for(hidden))
    return logp, entropy


@torch.no_grad()
def linear_logp(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "N"],
    *,
    temperature: float,
    elements: int,
) -> Float[Tensor, "N"]:
    """The first of `linear_scores`, bit for bit, without the passes over the logits that the entropy takes."""
    kernels = kernels_for(hidden)
    logp = hidden.new_empty(len(target), dtype=torch.promote_types(hidden.dtype, torch.float32))
    parts, left = token_chunks(len(target), len(weight), elements), _left(hidden, logp.dtype, temperature)
    buffer = hidden.new_empty(parts[0].stop, len(weight), dtype=logp.dtype)
    spare = kernels.spare(buffer)
    for part in parts:
        z = _product(buffer[: part.stop - part.start], hidden[part], weight, temperature)
        logp[part] = kernels.logp(z, target[part], temperature=left, spare=spare)
    return logp


def dense_scores(
    logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], *, temperature: float
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """The same from materialised logits: for heads that are not a plain matrix product, and for the oracle."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = (wide / temperature).log_softmax(-1)
    logp = logprobs.gather(-1, target[:, None])[:, 0]
    return logp, -(logprobs.exp() * logprobs).sum(-1)


def dense_logp(logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], *, temperature: float) -> Float[Tensor, "N"]:
    """The first of `dense_scores`."""
    return dense_scores(logits, target, temperature=temperature)[0]


@torch.no_grad()
def linear_energy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "N"],
    *,
    temperature: float,
    elements: int,
) -> Float[Tensor, "N"]:
    """|d log p(target) / d logits|^2 = 1 - 2 p(target) + sum_v p_v^2, the logits divided by `temperature`; chunked.

    It is added up as (1 - p(target))^2 and the squares of the others, neither a difference of nearly equal numbers.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    energy = hidden.new_empty(len(target), dtype=dtype)
    parts, left = token_chunks(len(target), len(weight), elements), _left(hidden, dtype, temperature)
    buffer = hidden.new_empty(parts[0].stop, len(weight), dtype=dtype)
    for part in parts:
        z = tempered_(_product(buffer[: part.stop - part.start], hidden[part], weight, temperature), left)
        energy[part] = _energy_of(z.sub_(z.amax(-1, keepdim=True)).exp_(), target[part])
    return energy


@torch.no_grad()
def dense_energy(logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], *, temperature: float) -> Float[Tensor, "N"]:
    """The same from materialised logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return _energy_of((wide - wide.amax(-1, keepdim=True)).exp_(), target)


def _energy_of(weights: Float[Tensor, "n V"], target: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Of tokens drawn in proportion to `weights`, which are written over."""
    total = weights.sum(-1)
    others = weights.scatter_(-1, target[:, None], 0.0)
    return (others.sum(-1) / total).square() + others.div_(total[:, None]).square_().sum(-1)
