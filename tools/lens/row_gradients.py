"""Whose rows weigh in a step: the gradient of each row, its share of the whole, and how noisy the direction is."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import grad, vmap

from grpo_fn.core.types import Batch


def row_gradients(
    logp: Callable[[Mapping[str, Tensor], Tensor, Tensor], Float[Tensor, "T"]],
    params: Mapping[str, Tensor],
    batch: Batch,
    signal: Float[Tensor, "B T"],
) -> Float[Tensor, "B D"]:
    """The gradient that each row alone sends to `params`, flattened: vmap of grad over rows. They add up to the step's.

        g_b = grad_theta sum_t signal_bt logp_bt(theta)

    `logp(params, tokens [T], mask [T])` is the log-prob of one row, 0 where ~mask.
    """

    def pulled(params: Mapping[str, Tensor], tokens: Tensor, mask: Tensor, signal: Tensor) -> Tensor:
        return (logp(params, tokens, mask) * signal).sum()

    grads = vmap(grad(pulled), in_dims=(None, 0, 0, 0))(dict(params), batch.tokens, batch.mask, signal)
    return torch.cat([g.flatten(1) for g in grads.values()], dim=1)


def influence(gradients: Float[Tensor, "B D"]) -> Float[Tensor, "B"]:
    """g_b . G / |G|^2 with G = sum_b g_b: each row's share of the step along its direction. They add up to 1.

    Negative rows were outvoted. All zero when the step goes nowhere.
    """
    g = gradients.double()
    whole = g.sum(0)
    size = whole @ whole
    return g @ whole / size if size > 0 else torch.zeros(len(g), dtype=g.dtype)


class Noise(NamedTuple):
    """How much a step's direction would change with other prompts."""

    variance: float  # tr Sigma, of the gradient that one group estimates
    signal: float  # |G|^2, unbiased; can come out negative when noise drowns it
    scale: float  # tr Sigma / |G|^2, in groups; inf when the signal is not above 0


def noise_scale(gradients: Float[Tensor, "B D"], group: Int[Tensor, "B"]) -> Noise:
    """The simple gradient noise scale B = tr Sigma / |G|^2 (McCandlish et al. 2018, arXiv:1812.06162, eq. 2.9).

    In groups: the number of prompts at which noise and signal of a step are equally large. Rows of a group share a
    baseline and are no independent samples, so groups are what is counted. With n groups of summed gradients h_p,
    each n h_p estimates G; both figures are the unbiased ones. Raises ValueError for fewer than two groups.
    """
    sums = torch.zeros(int(group.max()) + 1, gradients.shape[1], dtype=torch.float64)
    sums = sums.index_add(0, group, gradients.double())
    n = len(sums)
    if n < 2:
        raise ValueError(f"got {n} group, wanted at least two to compare")
    estimates = n * sums
    mean = estimates.mean(0)
    variance = ((estimates - mean) ** 2).sum() / (n - 1)
    signal = mean @ mean - variance / n
    scale = float(variance / signal) if signal > 0 else float("inf")
    return Noise(float(variance), float(signal), scale)
