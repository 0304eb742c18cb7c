"""What other algorithms would have made of the same step: their learning signals side by side, and whose rows weigh.

A view is one algorithm's opinion of a step: its objective, with the batch and the totals that its own credit, filters
and marks make of the same rollout. All views look at the same rows, `[B, T]`, and the same scores.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import grad, vmap

from grpo_fn.algo.step import Stages, compute_advantages
from grpo_fn.core.batch import count
from grpo_fn.core.types import Batch, Gains, Groups, Scores, Totals


class View(NamedTuple):
    """One algorithm's opinion of a step."""

    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    batch: Batch
    totals: Totals


def view(
    stages: Stages,
    groups: Groups,
    logp_old: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"],
    gains: Gains,
    key: Tensor,
) -> View:
    """The algorithm's opinion of a scored rollout, as `grpo_step` forms it with one minibatch."""
    _, batch = compute_advantages(groups, logp_old, logp_ref, gains, key=key, stages=stages)
    return View(stages.objective, batch, count(batch))


def signals(scores: Scores, views: Mapping[str, View], gains: Gains) -> Float[Tensor, "K B T"]:
    """d objective_k / d logp of every view k, in one vmapped call: the k-th is the gradient of the k-th unit mixture.

    f(w) = sum_k w_k objective_k,   signal_k = grad_logp f(e_k)
    """
    losses = [partial(v.objective, batch=v.batch, totals=v.totals, gains=gains) for v in views.values()]

    def mixture(scores: Scores, w: Tensor) -> Tensor:
        return sum(share * loss(scores)[0] for share, loss in zip(w, losses, strict=True))

    return vmap(grad(mixture), in_dims=(None, 0))(scores, torch.eye(len(losses)).to(scores.logp)).logp


def cosines(signal: Float[Tensor, "K B T"]) -> Float[Tensor, "K K"]:
    """Cosine similarity of each pair of signals; 0 where one of them is all zero."""
    unit = of_norm_one(signal).flatten(1)
    return unit @ unit.T


def nonzero_share(signal: Float[Tensor, "K B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "K"]:
    """The share of the sampled tokens on which each signal is not zero."""
    return ((signal != 0) & mask).sum((1, 2)).double() / mask.sum().clamp(min=1)


def disagreement(signal: Float[Tensor, "K B T"]) -> Float[Tensor, "B T"]:
    """How far apart the views are on each token: the standard deviation over the views of their signals.

    Each is scaled to norm 1 over the step first: a view that is louder everywhere does not disagree.
    """
    return of_norm_one(signal).std(0, correction=0)


def of_norm_one(signal: Float[Tensor, "K B T"]) -> Float[Tensor, "K B T"]:
    """Each signal divided by its norm over the step, in float64; one that is all zero stays so."""
    flat = signal.flatten(1).double()
    largest = flat.abs().amax(1, keepdim=True)  # first: the squares of small numbers vanish
    flat = flat / torch.where(largest > 0, largest, 1.0)
    norm = flat.norm(dim=1, keepdim=True)
    return (flat / torch.where(norm > 0, norm, 1.0)).reshape(signal.shape)


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
