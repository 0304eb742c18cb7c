"""Probability ratios between two policies on the same tokens, safe to differentiate behind the mask."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def log_ratio(
    logp: Float[Tensor, "*B T"], base: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """logp - base where `mask`, 0 elsewhere; in nats.

    Whatever stands behind the mask, infinities and nan included, changes neither the value nor a gradient: the choice
    is made before anything multiplies, so no 0 * inf arises on the way back.
    """
    return torch.where(mask, logp - base, 0.0)


def capped(log_r: Float[Tensor, "*B T"]) -> Float[Tensor, "*B T"]:
    """Log-ratios of at most half the largest exponent of their dtype (44 in float32, 354 in float64).

    Beyond, `exp` overflows, and inf * 0 in a product with a zero advantage would be nan. Half of the range leaves room
    for a product of two ratios. The gradient there is zero: one such token would outweigh all others together.
    """
    return log_r.clamp(max=math.log(torch.finfo(log_r.dtype).max) / 2 - 1)


def ratio(
    logp: Float[Tensor, "*B T"], base: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]
) -> Float[Tensor, "*B T"]:
    """r = exp(logp - base) where `mask`, 1 elsewhere; always finite for finite inputs."""
    return capped(log_ratio(logp, base, mask)).exp()
