"""From token ids to log-probabilities and entropies of the sampled tokens: the module that is sharded and trained.

The head comes first, with its kernels by torch's operations, the choice between them and Triton's, and the entropy
relative to a teacher; `LogprobModel` is last.
"""

import os
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint

from grpo_fn.core.batch import by_reading, by_width
from grpo_fn.shell.model.attention import (
    ModelInput,
    end_to_end,
    gather_tokens,
    packing_unsupported_reason,
    padded_rows,
    probe,
    states,
    without_dropout,
)

# -- the reductions of a chunk of logits and its gradient by torch's operations: on any device, in any dtype


class ChunkStats(NamedTuple):
    """Of every row of logits, divided by the temperature: with `top` their largest, `total` = sum exp(z - top)."""

    logp: Float[Tensor, "n"]  # of the row's target
    entropy: Float[Tensor, "n"]
    top: Float[Tensor, "n"]
    total: Float[Tensor, "n"]

    def rows(self, part: slice) -> "ChunkStats":
        """Those of some rows."""
        return ChunkStats(*(x[part] for x in self))


class PlainKernels:
    """The head's passes as torch's operations. Between `reduce` and `slope` z holds z / temperature - top.

    Other kernels override all of them. What their `reduce` leaves in z is what their `slope` takes where not fresh.
    """

    def spare(self, buffer: Float[Tensor, "n V"]) -> Float[Tensor, "m V"]:
        """Memory that `reduce` and `logp` write over, for chunks of at most that buffer's size: as much again."""
        return torch.empty_like(buffer)

    def reduce(
        self, z: Float[Tensor, "n V"], target: Int[Tensor, "n"], *, temperature: float, spare: Tensor
    ) -> ChunkStats:
        """Statistics of softmax(z / temperature), in four passes over z, in place."""
        z = tempered_(z, temperature)
        top = z.amax(-1)
        p = torch.exp(z.sub_(top[:, None]), out=spare[: len(z)])
        total = p.sum(-1)  # pairwise; a CPU's log_softmax adds 150k of them up in turn and is off by 2e-5
        logs = total.log()
        logp = z.gather(-1, target[:, None])[:, 0] - logs
        return ChunkStats(logp, logs - p.mul_(z).sum(-1) / total, top, total)

    def logp(
        self, z: Float[Tensor, "n V"], target: Int[Tensor, "n"], *, temperature: float, spare: Tensor
    ) -> Float[Tensor, "n"]:
        """The log-probabilities of `reduce`, bit for bit, without the passes that the entropy takes."""
        z = tempered_(z, temperature)
        total = torch.exp(z.sub_(z.amax(-1, keepdim=True)), out=spare[: len(z)]).sum(-1)
        return z.gather(-1, target[:, None])[:, 0] - total.log()

    def slope(
        self,
        z: Float[Tensor, "n V"],
        target: Int[Tensor, "n"],
        dlogp: Float[Tensor, "n"],
        dentropy: Float[Tensor, "n"] | None,
        stats: ChunkStats,
        *,
        temperature: float,
        fresh: bool,
        dtype: torch.dtype,
    ) -> Float[Tensor, "n V"]:
        """d(logp dlogp + entropy dentropy) / d(z / temperature) in that dtype; a fresh z may be written over.

        dlogp onehot - p (dlogp + dentropy (log p + entropy)), p = exp(z) / total.
        """
        if fresh:
            z = tempered_(z, temperature).sub_(stats.top[:, None])
        dlogp, entropy, total = dlogp[:, None], stats.entropy[:, None], stats.total[:, None]
        if dentropy is None:
            slope = (z.exp_() if fresh else z.exp()).mul_(-dlogp / total)
        else:
            dentropy = dentropy[:, None]
            p = z.exp()
            slope = (z.mul_(dentropy) if fresh else z * dentropy).add_(dentropy * (entropy - total.log()) + dlogp)
            slope = p.mul_(slope).div_(-total)
        return slope.scatter_add_(-1, target[:, None], dlogp).to(dtype)


def tempered_(z: Tensor, temperature: float) -> Tensor:
    """z / temperature, in place; by 1 that would be a pass for nothing."""
    return z if temperature == 1.0 else z.div_(temperature)


# -- which kernels the head computes with on a device, and why: Triton's where a trial is right, torch's elsewhere


TRIAL = (3, 8211)  # rows and logits: two blocks and a part of a third
TRIAL_ERROR = 1e-4  # nats, and of a signal of 1: three hundred times the rounding of float32


class KernelChoice(NamedTuple):
    """The head's kernels on a device, and in words which they are and why."""

    kernels: PlainKernels
    text: str


def kernels_for(hidden: Tensor) -> PlainKernels:
    """Those of the states' device; torch's for float64, for parts of a mesh, and under functorch, whose tensors have
    no memory of their own.
    """
    plain = type(hidden) is Tensor and torch._C._functorch.peek_interpreter_stack() is None
    fits = plain and hidden.dtype is not torch.float64
    return choose_head_kernels(hidden.device).kernels if fits else PlainKernels()


@cache
def choose_head_kernels(device: torch.device) -> KernelChoice:
    """Triton's kernels on a CUDA device on which they give what torch's operations do; otherwise those.

    Warns once (RuntimeWarning) where a CUDA device has to do without Triton's.
    """
    if device.type != "cuda":
        return KernelChoice(PlainKernels(), f"torch's operations (Triton has no kernels for {device.type})")
    reason = why_no_triton(device)
    if reason is None:
        from grpo_fn.shell.model.head_triton import TritonKernels

        return KernelChoice(TritonKernels(), "Triton's kernels")
    warnings.warn(f"the head runs on torch's operations, not Triton's kernels: {reason}", RuntimeWarning, stacklevel=2)
    return KernelChoice(PlainKernels(), f"torch's operations ({reason})")


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels are not used on that device; None where they are, after a trial."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE is 1"
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from grpo_fn.shell.model.head_triton import TritonKernels

        error = trial_error(TritonKernels(), device)
    except Exception as error:  # a driver, a compiler or a version that it cannot work with: many kinds
        lines = str(error).splitlines()
        return f"{type(error).__name__}, {lines[0] if lines else 'without a word'}"
    return None if error <= TRIAL_ERROR else f"in a trial they were {error:.1g} off"


@torch.no_grad()
def trial_error(kernels: PlainKernels, device: torch.device) -> float:
    """The largest difference from torch's operations over a few rows, of statistics and gradients; inf for a NaN."""
    n, vocabulary = TRIAL
    at = torch.arange(n * vocabulary, device=device, dtype=torch.float32)
    logits = 4 * torch.sin(at * at).view(TRIAL)  # numbers without a generator, whose state a run depends on
    target = torch.arange(n, device=device) * (vocabulary // n)
    signals = (torch.linspace(-1, 1, n, device=device), torch.linspace(1, 0.5, n, device=device))
    results = []
    for one in (kernels, PlainKernels()):
        z = logits.clone()
        stats = one.reduce(z, target, temperature=0.7, spare=one.spare(z))
        slope = one.slope(z, target, *signals, stats, temperature=0.7, fresh=False, dtype=torch.float32)
        results.append((stats.logp, stats.entropy, slope))
    return max(float((x - y).abs().max().nan_to_num(torch.inf)) for x, y in zip(*results, strict=True))


# -- from hidden states to log-probability and entropy, without ever holding a `[B, T, V]` tensor


CPU_CHUNK = 2**24  # logits: larger chunks leave its caches
CARD_SHARE = 64  # of a card's memory a chunk in float32 takes one part in so many; there are three at once


def chunk_elements(bound: int, device: torch.device) -> int:
    """How many logits a chunk has on a device: as its memory allows, at most `bound`.

    With few rows of a large vocabulary in a chunk a card spends its time on reading the weight and on adding its
    gradient up, anew for each.
    """
    if device.type != "cuda":
        return min(bound, CPU_CHUNK)
    return min(bound, torch.cuda.get_device_properties(device).total_memory // (CARD_SHARE * torch.float32.itemsize))


def token_chunks(n: int, vocabulary: int, elements: int) -> list[slice]:
    """The tokens that go through the head together: as few chunks as the elements allow, about equal."""
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


def logit_chunks(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], temperature: float, elements: int
) -> Iterator[tuple[slice, Float[Tensor, "n V"]]]:
    """Rows, and their logits (see `_product`) in one buffer: the next chunk is written over them."""
    parts = token_chunks(len(hidden), len(weight), elements)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    buffer = hidden.new_empty(parts[0].stop, len(weight), dtype=dtype)
    for part in parts:
        yield part, _product(buffer[: part.stop - part.start], hidden[part], weight, temperature)


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
        kernels: PlainKernels,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        stats = ChunkStats(*(hidden.new_empty(len(target), dtype=dtype) for _ in ChunkStats._fields))
        left, spare = _left(hidden, dtype, temperature), None
        for part, z in logit_chunks(hidden, weight, temperature, elements):
            spare = kernels.spare(z) if spare is None else spare  # the first chunk is the largest
            for every, value in zip(stats, kernels.reduce(z, target[part], temperature=left, spare=spare), strict=True):
                every[part] = value
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
    left, spare = _left(hidden, logp.dtype, temperature), None
    for part, z in logit_chunks(hidden, weight, temperature, elements):
        spare = kernels.spare(z) if spare is None else spare
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
    left = _left(hidden, dtype, temperature)
    for part, z in logit_chunks(hidden, weight, temperature, elements):
        z = tempered_(z, left)
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


# -- the entropy of a policy relative to a teacher, -KL(policy || teacher), over the whole vocabulary at every token


class HeadInput(NamedTuple):
    """What a model says at N places before it is multiplied out: logits are `states @ weight.T`, or `states`."""

    states: Float[Tensor, "N D"]
    weight: Float[Tensor, "V D"] | None

    def logits(self, part: slice) -> Float[Tensor, "n V"]:
        """The logits of some of the places."""
        return self.states[part] if self.weight is None else self.states[part] @ self.weight.T


def relative_entropies(
    policy: HeadInput, teacher: HeadInput, *, temperature: float, elements: int
) -> Float[Tensor, "N"]:
    """-KL(p || q) in nats, p and q softmax(logits / temperature) of policy and teacher.

    Of a policy whose head is a matrix product in the chunks of `linear_scores`, whose logits are computed again in the
    backward pass.
    """
    places, weight = len(policy.states), policy.weight
    if weight is None:
        every = slice(0, places)
        return relative_entropy(policy.states, teacher.logits(every), temperature)

    def of_chunk(part: slice, states: Tensor, weight: Tensor) -> Tensor:
        return relative_entropy(states @ weight.T, teacher.logits(part), temperature)

    parts = token_chunks(places, len(weight), elements)
    return torch.cat([checkpoint(of_chunk, part, policy.states[part], weight, use_reentrant=False) for part in parts])


def relative_entropy(
    logits: Float[Tensor, "n V"], teacher: Float[Tensor, "n W"], temperature: float
) -> Float[Tensor, "n"]:
    """-sum_v p_v (log p_v - log q_v), p and q softmax(logits / temperature); W >= V: rows that only a teacher has.

    In float32 at least, whatever the logits are in.
    """
    logp, logq = (
        (x.to(torch.promote_types(x.dtype, torch.float32)) / temperature).log_softmax(-1) for x in (logits, teacher)
    )
    return (logp.exp() * (logq[:, : logp.shape[1]] - logp)).sum(-1)


def predicting_states(
    state: Shaped[Tensor, "B T ..."], tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Shaped[Tensor, "N ..."], Int[Tensor, "N"]]:
    """The states (or where they are) that predict the masked tokens, and those: state[b, t-1] predicts tokens[b, t].

    This is the only place where the shift by one happens. Only sampled tokens are looked at: prompts and padding
    never reach the head.
    """
    chosen = mask[:, 1:]
    return state[:, :-1][chosen], tokens[:, 1:][chosen]


def scatter_to_rows(values: Float[Tensor, "N"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Values of the masked tokens back at their `[b, t]`; zero elsewhere. The inverse of `predicting_states`."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def check_rows(mask: Bool[Tensor, "B T"]) -> None:
    """Raise ValueError when a row's first token claims to be sampled: nothing precedes it that could predict it."""
    if mask[:, 0].any():
        raise ValueError(
            "got a row whose first token is marked as sampled; expected at least one prompt token before it"
        )


class LogprobModel(nn.Module):
    """A causal language model that is asked for scores, not for logits.

    It is the root of whatever shards the model: embedding, last norm and head belong to it, and are whole while its
    forward runs.

    Rows are shown to it end to end, a prompt that several begin with once, if the model computes then what it computes
    from padded rows; if not, or not `packed`, they are padded to one width. About `logits_chunk_elements` logits live
    at once in the head.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float, logits_chunk_elements: int, packed: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.logits_chunk_elements = logits_chunk_elements
        # Both are tried in the first forward pass: only there are weights whole that are spread over ranks.
        self.packs: bool | None = None if packed else False
        self._linear: bool | None = None

    def forward(
        self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], teacher: HeadInput | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy in nats, `[B T]` each; zero where ~mask. The entropy relative to a teacher's."""
        head, target = self._head_input(tokens, mask)
        if head.weight is None:
            logp, entropy = dense_scores(head.states, target, temperature=self.temperature)
        else:
            logp, entropy = linear_scores(*head, target, **self._chunked)
        if teacher is not None:  # log p stays as it is, so that it is what `logp` has, bit for bit
            entropy = relative_entropies(head, teacher, **self._chunked)
        return scatter_to_rows(logp, mask), scatter_to_rows(entropy, mask)

    @torch.no_grad()
    def teacher_head(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> HeadInput:
        """What this model says at each sampled token, in their order; with a copy of the weight, which a sharded model
        takes back after its pass.
        """
        head, _ = self._head_input(tokens, mask)
        return head if head.weight is None else head._replace(weight=head.weight.clone())

    @torch.no_grad()
    def logp(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The log-probabilities of `forward`, bit for bit, without entropies and without gradients."""
        head, target = self._head_input(tokens, mask)
        if head.weight is None:
            return scatter_to_rows(dense_scores(head.states, target, temperature=self.temperature)[0], mask)
        return scatter_to_rows(linear_logp(*head, target, **self._chunked), mask)

    @torch.no_grad()
    def energy(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """|d logp / d logits|^2 of each sampled token, `[B T]`, at the temperature; zero where ~mask.

        One reduction in place of the two of `forward`; what shards the model has to know it as a forward method.
        """
        head, target = self._head_input(tokens, mask)
        if head.weight is None:
            return scatter_to_rows(dense_energy(head.states, target, temperature=self.temperature), mask)
        return scatter_to_rows(linear_energy(*head, target, **self._chunked), mask)

    @property
    def _chunked(self) -> dict[str, float]:
        return {"temperature": self.temperature, "elements": self.logits_chunk_elements}

    def _head_input(self, tokens: Tensor, mask: Tensor) -> tuple[HeadInput, Int[Tensor, "N"]]:
        """What the head is given for the sampled tokens (of another than a plain product its logits), and those."""
        if self._linear is None:
            self._linear = has_linear_head(self.model)
        stream = self._model_input(tokens, mask)
        before, target = predicting_states(stream.at, tokens, mask)
        seen = states(self.model, stream, linear=self._linear)
        weight = self.model.get_output_embeddings().weight if self._linear else None
        return HeadInput(gather_tokens(seen, before), weight), target

    def _model_input(self, tokens: Tensor, mask: Tensor) -> ModelInput:
        """The rows as the model takes them. A model that does not take them end to end is reported once, with why."""
        if self.packs is None:
            reason = packing_unsupported_reason(self.model, tokens.device, linear=self._linear)
            self.packs = reason is None
            if reason is not None:
                name = type(self.model).__name__
                warnings.warn(
                    f"{name} is trained on padded rows, not on packed ones: {reason}", RuntimeWarning, stacklevel=2
                )
        return end_to_end(tokens, mask) if self.packs else padded_rows(tokens, mask)

    @torch.no_grad()
    def settle(self, device: torch.device) -> None:
        """Find out how the model reads rows, and what its head is, unless that is known; on all ranks."""
        if self.packs is None or self._linear is None:
            self(*probe(self.model.config.get_text_config().vocab_size, device))

    @torch.no_grad()
    def parts(
        self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], micro_tokens: int, devices: int
    ) -> list[Int[Tensor, "b"]]:
        """The rows of micro-batches in which each of `devices` devices has at most `micro_tokens` tokens.

        Tokens are counted as the model reads them: packed or padded, which may have to be tried first, on all ranks.
        -1 is a row without a sampled token.
        """
        self.settle(tokens.device)
        return (by_reading if self.packs else by_width)(tokens, mask, micro_tokens, devices)


@torch.no_grad()
def has_linear_head(model: nn.Module) -> bool:
    """Whether the model's logits are `hidden @ W.T`, by a forward pass: capped, scaled and biased ones are not.

    What enters the head has to be the decoder's output, and what leaves it the logits. The latter is asked with numbers
    far apart put in the head's place: a fresh model's logits are so small that a soft cap leaves no trace on them.
    """
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    if not isinstance(head, nn.Linear) or head.bias is not None or decoder is model:
        return False
    ids = torch.arange(4, device=head.weight.device)[None]
    probe = torch.linspace(-1e3, 1e3, len(head.weight)).to(head.weight)
    inputs = []

    def instead(_: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        inputs.append(args[0])
        return probe.expand_as(logits)

    with without_dropout(model):  # some may be training: the dropout of adapters
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
        with head.register_forward_hook(instead, prepend=True):
            left = model(input_ids=ids, use_cache=False).logits
    untouched = torch.equal(left.float(), probe.float().expand_as(left))
    return untouched and torch.allclose(inputs[0].float(), hidden.float(), rtol=1e-3, atol=1e-3)
