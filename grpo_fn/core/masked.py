"""Sum, mean, variance, standard deviation and minimum over the entries where a mask is True.

What stands behind the mask is replaced before any arithmetic touches it, so an inf or nan there shows neither in the
value nor in the gradient. Masking a result instead would leave 0 * inf = nan in the backward pass.

Over an empty mask sum, mean, var and std are 0 and min is +inf, the neutral elements of `+` and `min`, so that parts
combine. Gradients are finite everywhere. `mask` has the shape of `x`; every function is vmappable.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def sum(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], *, dim: int) -> Float[Tensor, "..."]:
    """sum_i m_i x_i along `dim`; 0 where nothing is unmasked."""
    return torch.where(mask, x, 0).sum(dim)


def mean(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], *, dim: int) -> Float[Tensor, "..."]:
    """sum_i m_i x_i / sum_i m_i along `dim`; 0 where nothing is unmasked."""
    return sum(x, mask, dim=dim) / mask.sum(dim).clamp(min=1)


def var(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], *, dim: int, ddof: int) -> Float[Tensor, "..."]:
    """sum_i m_i (x_i - mean)^2 / (n - ddof) along `dim`, with n = sum_i m_i; 0 where n <= ddof.

    Two passes, over values shifted by their minimum: the variance of equal values is exactly 0, which rounding of the
    mean would spoil, and a large common offset costs no digits.
    """
    lowest = min(x.detach(), mask, dim=dim).unsqueeze(dim)  # a shift has no gradient of its own
    shifted = torch.where(mask, x, lowest) - lowest
    centered = torch.where(mask, shifted - mean(shifted, mask, dim=dim).unsqueeze(dim), 0)
    freedom = mask.sum(dim) - ddof
    return torch.where(freedom > 0, centered.square().sum(dim), 0) / freedom.clamp(min=1)


def std(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], *, dim: int, ddof: int) -> Float[Tensor, "..."]:
    """sqrt(var) along `dim`, with a gradient of 0 where var is 0 (the square root has none there)."""
    variance = var(x, mask, dim=dim, ddof=ddof)
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1).sqrt(), 0)


def min(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], *, dim: int) -> Float[Tensor, "..."]:
    """The smallest unmasked x_i along `dim`; +inf where there is none. Equal smallest values share the gradient."""
    return torch.where(mask, x, math.inf).amin(dim)
