"""From hidden states to log-probability and entropy, without ever holding a `[B, T, V]` tensor."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx


def _chunks(n: int, vocabulary: int, elements: int) -> list[slice]:
    size = max(1, elements // vocabulary)
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    # The product runs in the weights' dtype (bf16 matmuls accumulate in float32), everything after it in float32 or
    # better: a bf16 log-softmax over 150k entries is off by 1e-2.
    logits = hidden @ weight.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


class LinearScores(torch.autograd.Function):
    """Log-probability and entropy of tokens under softmax(hidden W^T / temperature), chunk by chunk.

    The backward pass recomputes each chunk's logits instead of storing them. With p = softmax(z), z = h W^T / tau:
    d logp / dz = onehot - p and d entropy / dz_j = -p_j (log p_j + entropy).
    """

    @staticmethod
    def forward(
        hidden: Float[Tensor, "N D"],
        weight: Float[Tensor, "V D"],
        target: Int[Tensor, "N"],
        temperature: float,
        elements: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logp, entropy = (torch.empty(len(target), dtype=dtype, device=hidden.device) for _ in range(2))
        for part in _chunks(len(target), len(weight), elements):
            logprobs = _logits(hidden[part], weight, temperature).log_softmax(-1)
            logp[part] = logprobs.gather(-1, target[part, None])[:, 0]
            entropy[part] = -(logprobs.exp() * logprobs).sum(-1)
        return logp, entropy

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        hidden, weight, target, ctx.temperature, ctx.elements = inputs
        ctx.save_for_backward(hidden, weight, target, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: FunctionCtx, dlogp: Tensor | None, dentropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, target, entropy = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        trained = ctx.needs_input_grad[1]  # a head under adapters is not
        dweight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) if trained else None
        for part in _chunks(len(target), len(weight), ctx.elements):
            logprobs = _logits(hidden[part], weight, ctx.temperature).log_softmax(-1)
            p = logprobs.exp()
            dz = torch.zeros_like(p)
            if dlogp is not None:
                dz -= dlogp[part, None] * p
                dz.scatter_add_(-1, target[part, None], dlogp[part, None].to(dz.dtype))
            if dentropy is not None:
                dz -= dentropy[part, None] * p * (logprobs + entropy[part, None])
            dz = (dz / ctx.temperature).to(weight.dtype)
            dhidden[part] = (dz @ weight).to(hidden.dtype)
            if trained:
                dweight += dz.T @ hidden[part]
        return dhidden, dweight.to(weight.dtype) if trained else None, None, None, None


def linear_scores(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "N"],
    *,
    temperature: float,
    elements: int,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """log p(target) and H(p) in nats, p = softmax(hidden W^T / temperature); about `elements` logits live at once."""
    return LinearScores.apply(hidden, weight, target, temperature, elements)


def dense_scores(
    logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], *, temperature: float
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """The same from materialised logits: for heads that are not a plain matrix product, and for the oracle."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = (wide / temperature).log_softmax(-1)
    logp = logprobs.gather(-1, target[:, None])[:, 0]
    return logp, -(logprobs.exp() * logprobs).sum(-1)
