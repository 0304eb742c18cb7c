"""FSDPPolicy: a module on one device or many, trained in place behind the `Policy` protocol; and its oracle."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from grpo_fn.core.batch import lengths
from grpo_fn.core.checksums import block_digest, combine_digests, hex_digest, seed_of, total_digest
from grpo_fn.core.types import Batch, Pullback, Rollout, Scores
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.blocks import blocks
from grpo_fn.shell.model.logprob_model import (
    HeadInput,
    LogprobModel,
    check_rows,
    dense_energy,
    dense_scores,
    predicting_states,
    scatter_to_rows,
)
from grpo_fn.shell.policy.optimizer import load_moment, moment_value
from grpo_fn.shell.world import World

Optimizer = Callable[..., torch.optim.Optimizer]
Schedule = Callable[[int], float]
LossScale = Callable[[float, int, bool], tuple[float, int]]
ReferenceModel = Callable[[], AbstractContextManager[LogprobModel]]  # the reference policy, while entered

WEIGHTS, OPTIMIZER, AVERAGE = "weights.", "optimizer.", "average."


# -- digests of tensors that are spread over the ranks: every rank digests the pieces that lie with it, and all of them
# together give the digest of the whole, which does not depend on where they lie


class TensorBlock(NamedTuple):
    """The place of a part of a tensor in the whole, and its share of the digest. Copies of a part are equal."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    share: int


Shares = dict[str, tuple[int, list[TensorBlock]]]  # of every tensor by name: its seed, and the pieces that are here


@dataclass
class StepChecksums:
    """The record of a policy's updates: the learning signals, and the digest shares of the gradients."""

    signals: list[tuple[Batch, Scores]] = field(default_factory=list)
    gradients: list[Shares] = field(default_factory=list)


def block_digests(tensors: Mapping[str, Tensor]) -> Shares:
    """This rank's shares of the tensors' digests. Raises RuntimeError for a DTensor that is not summed up yet."""
    shares: Shares = {}
    for name, tensor in tensors.items():
        seed = seed_of(name, tensor.shape, tensor.dtype)
        here = local_blocks(tensor)
        shares[name] = seed, [TensorBlock(*where, block_digest(x, where[0], tensor.shape, seed)) for where, x in here]
    return shares


def local_blocks(tensor: Tensor) -> list[tuple[tuple[tuple[int, ...], tuple[int, ...]], Tensor]]:
    """The part of the tensor on this rank: ((offset, size), values)."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return [(((0,) * tensor.ndim, tuple(tensor.shape)), tensor)]
    chunks = tensor.__create_chunk_list__()  # what checkpoints go by
    return [((tuple(chunk.offsets), tuple(chunk.sizes)), tensor.to_local()) for chunk in chunks if 0 not in chunk.sizes]


def combine_ranks(ranks: Iterable[Shares]) -> int:
    """The digest of all tensors, from the shares of all ranks. Copies that are not equal all count."""
    tensors: dict[str, tuple[int, set[TensorBlock]]] = {}
    for here in ranks:
        for name, (seed, parts) in here.items():
            tensors.setdefault(name, (seed, set()))[1].update(parts)
    return combine_digests(
        total_digest(seed, (part.share for part in parts)) for _, (seed, parts) in sorted(tensors.items())
    )


# -- the policy


class FSDPPolicy:
    """A causal language model with its optimizer, on one device or spread over the ranks of `data`.

    Every rank is shown the same batch and sees the same scores; which rank computes which row makes no
    difference. Gradients of any objective of the scores reach the parameters through `vjp`'s pullback, micro-batch by
    micro-batch, summed over ranks; `update` clips their global norm and steps.

    What trains is what `requires_grad` says, plain parameters or DTensors. `reference_model` gives the reference;
    None without one.
    """

    def __init__(
        self,
        logprob_model: LogprobModel,
        *,
        world: World,
        data: dist.ProcessGroup | None,  # ranks that have their own rows; None: this one has all
        reference_model: ReferenceModel | None,
        dropout_modules: list[nn.Module],  # of adapters: on while training, off whenever log-probs are asked for
        seed: int,
        micro_tokens: int,
        min_micro_batches: int,
        optimizer: Optimizer,
        schedule: Schedule,
        loss_scale: LossScale | None,
        initial_scale: float,
        max_grad_norm: float,
    ) -> None:
        self.logprob_model = logprob_model
        self.world = world
        self.reference_model = reference_model
        self.dropout_modules = [module for module in dropout_modules if getattr(module, "p", 0.0) > 0]
        self.dropout = bool(self.dropout_modules)
        self.seed = seed
        mark_vocabulary(logprob_model)
        self.optimizer = optimizer(p for p in logprob_model.parameters() if p.requires_grad)
        self.base_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = schedule
        self.loss_scale = loss_scale
        self.max_grad_norm = max_grad_norm
        self.micro_tokens = micro_tokens
        self.min_micro_batches = min_micro_batches
        self.updates = self.skipped = self.good_steps = self.passes = 0
        self.scale = initial_scale
        self._noted: StepChecksums | None = None
        self._average: WeightAverage | None = None
        self.entropy_teacher: ReferenceModel | None = None  # entropies of vjp are -KL(policy || its distribution)
        self._expected = 0  # pullbacks before the next update
        self._unreduced = False  # whether replicas hold gradients that are not all-reduced yet
        self._data = data
        self._rank, self.devices = (0, 1) if data is None else (dist.get_rank(data), dist.get_world_size(data))

    @property
    def model(self) -> nn.Module:
        """The Hugging Face model inside."""
        return self.logprob_model.model

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        """Scores of the batch's sampled tokens and the map `dscores -> theta.grad += J^T dscores`."""
        check_rows(batch.mask)
        tokens, mask = self._local_rows(batch.tokens), self._local_rows(batch.mask)
        with self.world.talking("forward"), self._seeded_dropout():
            local = self.logprob_model(tokens, mask, *self._teacher_head(tokens, mask))
            scores = Scores(*(self._all_rows(x.detach(), len(batch.mask)) for x in local))

        def pullback(dscores: Scores) -> None:
            if self._noted is not None:
                self._noted.signals.append((batch, dscores))
            # An all-zero cotangent is skipped, so that the head need not differentiate the entropy; all ranks see the
            # same signal, and so skip alike.
            both = zip(local, dscores, strict=True)
            pairs = [(y, self._local_rows(d) * self.scale) for y, d in both if bool(d.any())]
            last = self._is_last_pullback()
            if last and self._unreduced and not pairs:
                pairs = [(local[0], torch.zeros_like(local[0]))]
            if pairs:
                self._unreduced = not last
                with self.world.talking("backward"), self._dropout_on():
                    torch.autograd.backward([y for y, _ in pairs], [d for _, d in pairs])

        return scores, pullback

    def split_rows(self, batch: Batch) -> list[Int[Tensor, "b"]]:
        """The rows of micro-batches of `micro_tokens` tokens a device at most, counted as the model reads them.

        Smaller ones where that makes fewer than `min_micro_batches` and there are rows enough for more. -1 is a row
        that reads nothing.
        """
        tokens = self.micro_tokens
        parts = self._parts(self.logprob_model, batch.tokens, batch.mask, tokens)
        least = min(self.min_micro_batches, -(-int(batch.mask.any(-1).sum()) // self.devices))
        while len(parts) < least and tokens > 1:
            tokens = max(1, tokens * len(parts) // least)
            parts = self._parts(self.logprob_model, batch.tokens, batch.mask, tokens)
        return parts

    def set_accumulation_steps(self, parts: int) -> None:
        """Announce how many pullbacks come before the next update: replicas all-reduce gradients in the last."""
        self._expected = parts

    def _is_last_pullback(self) -> bool:
        """Whether this pullback is the last before the update, by `set_accumulation_steps`; sets FSDP2 accordingly."""
        self._expected -= 1
        last = self._expected <= 0
        if isinstance(self.logprob_model, FSDPModule):
            self.logprob_model.set_requires_all_reduce(last)
        return last

    def logp(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """log pi_theta of the rollout's tokens under the weights as they stand."""
        return self._logp(self.logprob_model, rollout)

    def energy(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """|d logp / d logits|^2 of the rollout's tokens under the weights as they stand: 1 - 2 pi + sum_v pi_v^2."""
        return self._read(self.logprob_model, rollout, lambda *rows: self.logprob_model.energy(*rows))

    def reference(self, rollout: Rollout) -> Float[Tensor, "B T"] | None:
        """log pi_ref of the rollout's tokens; None when no reference is kept."""
        return None if self.reference_model is None else self.logp_under(self.reference_model, rollout)

    def logp_under(self, frozen: ReferenceModel, rollout: Rollout) -> Float[Tensor, "B T"]:
        """Log-probs of the rollout's tokens under a frozen model that is sharded like the policy."""
        with frozen() as logprob_model:
            return self._logp(logprob_model, rollout)

    def _logp(self, logprob_model: LogprobModel, rollout: Rollout) -> Float[Tensor, "B T"]:
        return self._read(logprob_model, rollout, lambda *rows: logprob_model.logp(*rows))

    @torch.no_grad()
    def _read(
        self, logprob_model: LogprobModel, rollout: Rollout, score: Callable[[Tensor, Tensor], Tensor]
    ) -> Float[Tensor, "B T"]:
        """One number a token without gradients, of `score` on (tokens, mask), in micro-batches over all devices."""
        check_rows(rollout.mask)
        out = torch.zeros_like(rollout.logp_sampled)
        for rows in self._parts(logprob_model, rollout.tokens, rollout.mask, self.micro_tokens):
            some = rows.clamp(min=0)
            mask = rollout.mask[some] & (rows >= 0)[:, None]
            width = int(lengths(mask).max())
            with self.world.talking("log-probs"):
                values = score(self._local_rows(rollout.tokens[some, :width]), self._local_rows(mask[:, :width]))
                out[:, :width].index_add_(0, some, self._all_rows(values, len(rows)))
        return out

    def _parts(
        self, logprob_model: LogprobModel, tokens: Tensor, mask: Tensor, micro_tokens: int
    ) -> list[Int[Tensor, "b"]]:
        with self.world.talking("asking how the model reads rows"):
            return logprob_model.parts(tokens, mask, micro_tokens, self.devices)

    def update(self) -> dict[str, float]:
        """Clip the global gradient norm, step, clear; without any gradient, weights and moments stay as they are.

        A norm of NaN or inf changes nothing but the loss scale, and raises FloatingPointError when that cannot shrink.
        """
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        with self.world.talking("gradient norm"):
            norm = float(gradient_norm([p.grad for p in params])) / self.scale
        scale, finite = self.scale, isfinite(norm)
        if self.loss_scale is None:
            self.good_steps = self.good_steps + 1 if finite else 0
        else:
            self.scale, self.good_steps = self.loss_scale(scale, self.good_steps, finite)
        if finite:
            # 1e-6 as torch's clip_grad_norm_ has it; one pass over the gradients for the clip and the loss scale.
            if (factor := min(1.0, self.max_grad_norm / (norm + 1e-6)) / scale) != 1.0:
                for p in params:
                    hf.local_part(p.grad).mul_(factor)
            if self._noted is not None:
                grads = {name: x.grad for name, x in self.named_tensors().items() if x.grad is not None}
                self._noted.gradients.append(block_digests(grads))
            rate = self.schedule(self.updates)
            for group, lr in zip(self.optimizer.param_groups, self.base_lr, strict=True):
                group["lr"] = lr * rate
            self.optimizer.step()
            self.updates += 1
            if self._average is not None:
                self._average.follow(self._trained())
        self.optimizer.zero_grad(set_to_none=True)
        self.passes = 0
        if not finite and self.scale >= scale:
            raise FloatingPointError(
                f"got a gradient norm of {norm} at optimizer step {self.updates}, expected a finite one; the weights "
                "are those before this step"
            )
        self.skipped += not finite
        return {
            "loss/grad_norm": norm,
            "optimizer/lr": self.optimizer.param_groups[0]["lr"],
            "optimizer/step": float(self.updates),
            "optimizer/loss_scale": scale,
            "optimizer/overflows": float(self.skipped),
        }

    def _teacher_head(self, tokens: Tensor, mask: Tensor) -> list[HeadInput]:
        if self.entropy_teacher is None:
            return []
        with self.entropy_teacher() as teacher:
            return [teacher.teacher_head(tokens, mask)]

    def keep_average(self, rate: float) -> ReferenceModel:
        """From here on keep an exponential moving average of what trains: the model under it, while entered.

        It is part of the checkpoints. Raises ValueError for a rate that is not above 0 and up to 1.
        """
        average = self._average = WeightAverage(self._trained(), rate=rate)

        @contextmanager
        def averaged() -> Iterator[LogprobModel]:
            with average.swap_in(self._trained()):
                try:
                    yield self.logprob_model
                finally:
                    self.named_tensors()  # reshards: copies that are still gathered hold the average

        return averaged

    def _trained(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.named_tensors().items() if x.requires_grad}

    def weights(self, *, trained: bool) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer once (a tied one under its first name), whole, one at a time.

        Every rank has to take part. With `trained` only those that train.
        """
        for name, tensor in self.named_tensors().items():
            if tensor.requires_grad or not trained:
                with self.world.talking(f"gathering {name}"):
                    gathered = full_tensor(tensor)
                yield name, gathered

    def note(self) -> StepChecksums:
        """From here to `digests`, keep learning signals and digests of the gradients that the optimizer is given."""
        self._noted = StepChecksums()
        return self._noted

    def digests(self) -> dict[str, str]:
        """Checksums of what trains, as it stands, and of the gradients since `note`, clipped and of scale 1.

        The same however the model is spread over the ranks, all of which have to take part.
        """
        noted, self._noted = self._noted or StepChecksums(), None
        shares = [*noted.gradients, block_digests(self._trained())]
        *gradients, weights = map(combine_ranks, zip(*self.world.exchange(shares, what="digests"), strict=True))
        return {"gradients": hex_digest(combine_digests(gradients)), "weights": hex_digest(weights)}

    def named_tensors(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer once, as it lies on this rank, under the model's own names."""
        for module in self.logprob_model.modules():
            if isinstance(module, FSDPModule):  # a pass without gradient leaves weights gathered: copies, soon old ones
                module.reshard()
        return hf.named_tensors(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors of a checkpoint: trainable weights (of a whole model also buffers), moments, average."""
        named = self.named_tensors()
        partial = any(isinstance(x, nn.Parameter) and not x.requires_grad for x in named.values())
        kept = {name: x for name, x in named.items() if x.requires_grad or not partial}
        moments = {
            f"{OPTIMIZER}{name}.{key}": moment_value(value)
            for name, x in kept.items()
            for key, value in self.optimizer.state.get(x, {}).items()
        }
        average = {} if self._average is None else {f"{AVERAGE}{name}": x for name, x in self._average.kept.items()}
        return {**{f"{WEIGHTS}{name}": x.detach() for name, x in kept.items()}, **moments, **average}

    def counters(self) -> dict[str, Any]:
        """The parts of a checkpoint that are not tensors."""
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            "loss_scale": self.scale,
            "good_steps": self.good_steps,
            # A parameter has no moments before its first gradient; a step without any signal gives none.
            "moments": [name for name, x in self.named_tensors().items() if self.optimizer.state.get(x)],
        }

    def restore(self, load: Callable[[dict[str, Tensor]], None], counters: Mapping[str, Any]) -> None:
        """Have `load` fill in what `tensors` names, and take over the counters."""
        self.optimizer.state.clear()
        self.make_moments({*counters["moments"]})
        kept = self.tensors()
        load(kept)
        for name, x in self.named_tensors().items():
            for key, moment in self.optimizer.state.get(x, {}).items():
                load_moment(moment, kept[f"{OPTIMIZER}{name}.{key}"])
        self.updates, self.skipped = counters["updates"], counters["skipped"]
        self.scale, self.good_steps = counters["loss_scale"], counters["good_steps"]

    def make_moments(self, names: set[str]) -> None:
        """Allocate the optimizer's state by a step with zero gradients at a learning rate of zero."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for name, x in self.named_tensors().items():
            x.grad = torch.zeros_like(x) if name in names else None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _local_rows(self, rows: Tensor) -> Tensor:
        """This rank's rows, as many on every rank; rows that are missing are empty ones."""
        missing = -len(rows) % self.devices
        return pad(rows, (0, 0, 0, missing))[self._rank :: self.devices] if self.devices > 1 else rows

    def _all_rows(self, local: Tensor, rows: int) -> Tensor:
        """The inverse of `_local_rows`: the rows of all ranks, in their order."""
        if self.devices == 1:
            return local
        everyone = [torch.empty_like(local) for _ in range(self.devices)]
        dist.all_gather(everyone, local.contiguous(), group=self._data)
        return rearrange(everyone, "r k t -> (k r) t")[:rows]

    @contextmanager
    def _seeded_dropout(self) -> Iterator[None]:
        """Adapter dropout on, drawn from (seed, pass, rank) and from nothing else, so that a resumed run repeats it."""
        self.passes += 1
        if not self.dropout_modules:
            yield
            return
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(hash((self.seed, self.updates, self.skipped, self.passes, self._rank)) % 2**63)
            with self._dropout_on():
                yield

    @contextmanager
    def _dropout_on(self) -> Iterator[None]:
        """Adapter dropout on. In the backward pass, too: a block that is computed again there draws what it drew."""
        for module in self.dropout_modules:
            module.train()
        try:
            yield
        finally:
            for module in self.dropout_modules:
                module.eval()


def mark_vocabulary(logprob_model: LogprobModel) -> None:
    """Mark embedding and head, the matrices outside of the blocks, for optimizers that treat them apart."""
    inside = {id(p) for layer in blocks(logprob_model.model) for p in layer.parameters()}
    for p in logprob_model.parameters():
        p.of_vocabulary = p.ndim >= 2 and id(p) not in inside


def gradient_norm(grads: list[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together, the same number on every rank; 0 of none."""
    if not grads:
        return torch.zeros(())
    by_mesh: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [full_tensor(nn.utils.get_total_norm(part)) for part in by_mesh.values()]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered from all ranks where it is spread over them; detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- the exponential moving average of the weights that train


class WeightAverage:
    """e <- e + rate (theta - e) of tensors that are changed in place; each rank has the average of its own part."""

    def __init__(self, live: Mapping[str, Tensor], *, rate: float) -> None:
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"teachers.moving_average.rate: got {rate}, expected above 0 and up to 1")
        self.rate = rate
        self.kept = {name: x.detach().clone() for name, x in live.items()}

    @torch.no_grad()
    def follow(self, live: Mapping[str, Tensor]) -> None:
        """Come nearer to the tensors as they are now."""
        for name, x in live.items():
            hf.local_part(self.kept[name]).lerp_(hf.local_part(x.detach()), self.rate)

    @contextmanager
    def swap_in(self, live: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it the tensors hold the average, and it holds them; after it each is what it was, bit for bit."""
        self._swap(live)
        try:
            yield
        finally:
            self._swap(live)

    @torch.no_grad()
    def _swap(self, live: Mapping[str, Tensor]) -> None:
        for name, x in live.items():
            average, weight = hf.local_part(self.kept[name]), hf.local_part(x.detach())
            copy = weight.clone()
            weight.copy_(average)
            average.copy_(copy)


# -- the oracle that the sharded policy is held against: a pure function of its parameters, on one device


class FunctionalPolicy:
    """Dense log-softmax through `functional_call` and `torch.func.vjp`.

    One device, no hooks, no fused anything; it shares nothing with `FSDPPolicy` but the shift. Its weights are a value,
    `params`, and its accumulated gradient another, `grads`. Parameters that do not train stay the model's own.
    """

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.params = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self.grads = {name: torch.zeros_like(p) for name, p in self.params.items()}

    def scores(self, params: dict[str, Tensor], tokens: Tensor, mask: Tensor) -> Scores:
        """Scores as a pure function of the parameters."""
        out = torch.func.functional_call(self.model, params, (), {"input_ids": tokens, "use_cache": False})
        logits, target = predicting_states(out.logits, tokens, mask)
        return Scores(*(scatter_to_rows(x, mask) for x in dense_scores(logits, target, temperature=self.temperature)))

    @torch.no_grad()
    def energy(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """|d logp / d logits|^2 of each sampled token, `[B T]`; zero where ~mask."""
        out = torch.func.functional_call(self.model, self.params, (), {"input_ids": tokens, "use_cache": False})
        logits, target = predicting_states(out.logits, tokens, mask)
        return scatter_to_rows(dense_energy(logits, target, temperature=self.temperature), mask)

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        """As `FSDPPolicy.vjp`, with `torch.func.vjp` doing the work."""
        check_rows(batch.mask)
        scores, vjp_fn = torch.func.vjp(lambda params: self.scores(params, batch.tokens, batch.mask), self.params)

        def pullback(dscores: Scores) -> None:
            (grads,) = vjp_fn(dscores)
            self.grads = {name: self.grads[name] + g for name, g in grads.items()}

        return scores, pullback
