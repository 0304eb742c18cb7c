"""Optimizers and learning-rate schedules, named from gin."""

from collections.abc import Iterable

import torch
from torch import nn


def adamw(
    params: Iterable[nn.Parameter],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101, Algorithm 2), fused; decay applies to matrices only, not to norms and biases."""
    params = list(params)
    matrices = [p for p in params if p.ndim >= 2]
    vectors = [p for p in params if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(beta1, beta2), eps=eps, fused=True)


def constant(step: int, *, warmup: int) -> float:
    """Multiplier of the learning rate at `step` (from 0): linear from 1/(warmup+1) to 1, then 1."""
    return min(1.0, (step + 1) / (warmup + 1))


def linear_decay(step: int, *, warmup: int, total: int, final: float) -> float:
    """Linear warm-up as in `constant`, then linear from 1 to `final` at step `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - (1.0 - final) * done
