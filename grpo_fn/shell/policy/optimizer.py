"""Optimizers, learning-rate schedules and the loss scale of float16, named from gin.

AdamW (Loshchilov and Hutter, arXiv:1711.05101, Algorithm 2), g the gradient at step t, p a weight:

    m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
    p = p - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)

Decay applies to matrices only, not to norms and biases. Parameters are plain tensors or DTensors, whose moments lie
where they lie.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_fn.shell.model.hf import local_part, part, spread_as

SMALLEST = 1e-12  # scale of a block of zeros, as torchao has it


IMPLEMENTATIONS = ("fused", "8bit")  # of AdamW
NEWTON_SCHULZ = 5  # iterations of Muon, as torch has them
# Of the loss scale, as torch.amp.GradScaler has them. Powers of two change no bit of a gradient that neither overflows
# nor vanishes.
GROWTH, BACKOFF = 2.0, 0.5
LOWEST_SCALE, HIGHEST_SCALE = 1.0, 2.0**24


def adamw(
    params: Iterable[nn.Parameter],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    implementation: str = "fused",
) -> torch.optim.Optimizer:
    """AdamW: in one fused kernel, or with moments of 8 bits.

    "fused" keeps two moments of the weight's dtype, 8 bytes a float32 weight. "8bit" keeps both in 8 bits between
    steps, 2 bytes a weight: torchao's, which knows DTensors. A block of 256 numbers is kept as codes of a dynamic map
    and one scale, its largest magnitude (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization",
    arXiv:2110.02861, section 2). A rank's part of a weight with fewer than 4096 numbers, or not a multiple of 256,
    keeps its moments in float32. Compiled on CUDA, one kernel for each shape; run as written on the CPU.

    Args:
        params: parameters that train.
        lr: learning rate; the schedule multiplies it.
        beta1: decay of the first moment, per step.
        beta2: decay of the second moment, per step.
        eps: added to the root of the second moment.
        weight_decay: coefficient of the decay of matrices: p -= lr weight_decay p in each step.
        implementation: "fused" or "8bit".

    Returns:
        The optimizer.

    Raises:
        ValueError: for another implementation, and for "8bit" where torchao is not installed.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"optimizer.adamw.implementation: got {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}"
        )
    groups = _groups(params, weight_decay)
    if implementation != "8bit":
        return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, fused=True)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            f"optimizer.adamw.implementation: got '8bit' without torchao ({error}), expected it installed: "
            "pip install 'grpo-fn[adamw8bit]'; or 'fused'"
        ) from error
    optimizer = AdamW8bit(groups, lr=lr, betas=(beta1, beta2), eps=eps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step = _between(optimizer.step, optimizer.param_groups)
    return optimizer


def muon(
    params: Iterable[nn.Parameter],
    *,
    lr: float,
    momentum: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Muon for the matrices of the blocks, AdamW for the rest: embedding, head, norms and biases.

    torch's own (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"), its steps as long as
    AdamW's: m = momentum m + (1 - momentum) g, p = p - lr (0.2 sqrt(max(p.shape)) NS(g + momentum (m - g)) +
    weight_decay p), NS a few Newton-Schulz iterations in bfloat16 (arXiv:2502.16982, section 2.2). One moment for a
    matrix, 4 bytes a float32 weight. A sharded matrix is gathered, one at a time, and each rank iterates on the whole
    of it, so that a sharded step is the whole one; its moment lies as it lies.

    Args:
        params: parameters that train; those with a true `of_vocabulary` are embedding and head.
        lr: learning rate of both; the schedule multiplies it.
        momentum: decay of a matrix's moment, per step.
        beta1: decay of AdamW's first moment, per step.
        beta2: decay of AdamW's second moment, per step.
        eps: added to the root of AdamW's second moment.
        weight_decay: coefficient of the decay of matrices, embedding and head included, in each step.

    Returns:
        The optimizer.

    Raises:
        ValueError: there are no parameters.
    """
    rest, matrices = [], []
    for p in params:
        (matrices if p.ndim == 2 and not getattr(p, "of_vocabulary", False) else rest).append(p)
    adam = _groups(rest, weight_decay)
    others = torch.optim.AdamW(adam, lr=lr, betas=(beta1, beta2), eps=eps, fused=True) if adam else None
    if not matrices:
        if others is None:
            raise ValueError("optimizer.muon: got no parameters, expected some that train")
        return others
    return MuonWithAdamW(matrices, others, lr=lr, momentum=momentum, weight_decay=weight_decay)


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon on whole matrices, wherever their parts lie, and an AdamW, with one state and one list of groups."""

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: torch.optim.AdamW | None,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self.momentum, self.others = momentum, others
        if others is not None:
            self.param_groups += others.param_groups
            others.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step on every parameter that has a gradient."""
        (group, *_) = self.param_groups
        for p in (p for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            buffer = state["momentum_buffer"].lerp_(p.grad, 1 - self.momentum)
            step = self._orthogonal(p.grad.lerp(buffer, self.momentum), group["lr"])
            p.mul_(1 - group["lr"] * group["weight_decay"])
            local_part(p).add_(step[part(p)].to(local_part(p).device))
        if self.others is not None:
            self.others.step()

    def _orthogonal(self, update: Tensor, lr: float) -> Tensor:
        """The update of torch's Muon for a whole matrix: its step from zero, without momentum or decay."""
        if isinstance(update, DTensor):  # what is offloaded is gathered on the mesh's devices
            update = update.to(update.device_mesh.device_type).full_tensor()
        zero = nn.Parameter(torch.zeros_like(update))
        zero.grad = update
        knobs = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        torch.optim.Muon([zero], lr=lr, ns_steps=NEWTON_SCHULZ, **knobs).step()
        return zero.detach()


def _groups(params: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    params = list(params)
    decayed = {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay}
    free = {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}
    return [group for group in (decayed, free) if group["params"]]


def _between(step: Callable[[], Any], groups: list[dict[str, Any]]) -> Callable[[], Any]:
    """`step` for torchao: its learning rates are tensors while it steps, so that another rate compiles nothing anew."""
    on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])

    def stepping() -> Any:
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        try:
            # With TORCH_COMPILE_DISABLE=1 torchao's fullgraph compilation would find no frame, and raise.
            eager = on_cpu or torch._dynamo.config.disable
            with torch.compiler.set_stance("force_eager" if eager else "default"):
                return step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    return stepping


# -- moments in a checkpoint


def moment_value(moment: Tensor) -> Tensor:
    """The moment as a checkpoint holds it: itself, or its values in float32 where it lies in 8 bits.

    Values, not codes: a block of codes belongs to one way of dividing a weight, values can be divided anew.
    """
    local = local_part(moment)
    # What is offloaded is moved to the mesh's device on the way, and back.
    return spread_as(moment, local.dequantize()).to(moment.device) if _in_codes(local) else moment


@torch.no_grad()
def load_moment(moment: Tensor, value: Tensor) -> None:
    """Write back what `moment_value` gave, loaded anew; nothing to do where that was the moment itself.

    Values that were the same blocks of codes before come back exactly; others (another world size cuts the weights
    elsewhere) go to the nearest code.
    """
    local, values = local_part(moment), local_part(value)
    if not _in_codes(local):
        return
    local.copy_(values)
    if local.signed:
        _exactly(local, values.reshape(-1, local.block_size))


def _exactly(state: Tensor, blocks: Tensor) -> None:
    """Codes and scales that give the blocks `[n, block_size]` exactly, for every block that has such.

    The signed map ends at 1 and at -0.993, so the largest magnitude of the values is not always the scale they had.
    Any scale that gives all of a block exactly will do; division rounds, so the nearest few are tried.
    """
    between = (state.qmap[1:] + state.qmap[:-1]) / 2
    nearby = (blocks.abs().amax(-1) / state.qmap[0].abs()).view(torch.int32)
    codes, scale = state.codes.view_as(blocks), state.scale
    for ulps in range(-2, 3):
        tried = (nearby + ulps).clamp(min=0).view(torch.float32).clamp(min=SMALLEST)[:, None]
        code = torch.bucketize(blocks / tried, between, out_int32=True)
        exact = (state.qmap[code] * tried == blocks).all(-1, keepdim=True)
        codes.copy_(torch.where(exact, code, codes))
        scale.copy_(torch.where(exact, tried, scale[:, None])[:, 0])


def _in_codes(local: Tensor) -> bool:
    return hasattr(local, "codes")  # torchao's tensor class, without importing torchao


# -- the loss scale of float16


def dynamic_loss_scale(scale: float, good_steps: int, finite: bool, *, interval: int) -> tuple[float, int]:
    """Half after an overflow, twice as much after `interval` finite steps in a row, within 1 .. 2^24.

    Micikevicius et al., Mixed Precision Training (arXiv:1710.03740), section 3.2, dynamic form. A scale that does not
    shrink after a step that was not finite says that scaling is not what broke it.

    Args:
        scale: the factor on the loss at this step.
        good_steps: finite steps in a row before this one, since the scale last changed.
        finite: whether the gradient of this step was finite.
        interval: finite steps in a row before the scale grows.

    Returns:
        The scale of the next step, and the finite steps in a row since it last changed.
    """
    if not finite:
        return max(LOWEST_SCALE, scale * BACKOFF), 0
    if good_steps + 1 < interval:
        return scale, good_steps + 1
    return min(HIGHEST_SCALE, scale * GROWTH), 0


# -- schedules


def constant(step: int, *, warmup: int) -> float:
    """Multiplier of the learning rate: linear from 1/(warmup+1) to 1, then 1.

    Args:
        step: optimizer step, from 0.
        warmup: steps with a smaller rate.

    Returns:
        The multiplier, in (0, 1].
    """
    return min(1.0, (step + 1) / (warmup + 1))


def linear_decay(step: int, *, warmup: int, total: int, final: float) -> float:
    """Multiplier of the learning rate: warm-up as in `constant`, then linear from 1 to `final` at step `total`.

    Args:
        step: optimizer step, from 0.
        warmup: steps with a smaller rate before the decay.
        total: step from which the multiplier is `final`.
        final: multiplier at the end.

    Returns:
        The multiplier.
    """
    return constant(step, warmup=warmup) * (1.0 - (1.0 - final) * _decayed(step, warmup, total))


def cosine_decay(step: int, *, warmup: int, total: int, final: float) -> float:
    """Multiplier of the learning rate: warm-up as in `constant`, then half a cosine from 1 to `final` at step `total`.

    Loshchilov and Hutter, "SGDR", arXiv:1608.03983, without restarts.

    Args:
        step: optimizer step, from 0.
        warmup: steps with a smaller rate before the decay.
        total: step from which the multiplier is `final`.
        final: multiplier at the end; 0 for a cosine without a floor.

    Returns:
        The multiplier.
    """
    fallen = (1.0 - math.cos(math.pi * _decayed(step, warmup, total))) / 2.0
    return constant(step, warmup=warmup) * (1.0 - (1.0 - final) * fallen)


def _decayed(step: int, warmup: int, total: int) -> float:
    """The share of the decay that is over, from 0 to 1."""
    return min(1.0, max(0, step - warmup) / max(1, total - warmup))
