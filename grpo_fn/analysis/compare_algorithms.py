"""What other algorithms would have made of the same step: their learning signals side by side.

A view is one algorithm's opinion of a step: its objective, with the batch and the totals that its own credit, filters
and marks make of the same rollout. All views look at the same rows, `[B, T]`, and the same scores.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.func import grad, vmap

from grpo_fn.algo.needs import ScoredStep, token_advantages
from grpo_fn.algo.objective import Objective, objective_value
from grpo_fn.algo.step import Algorithm, learning_rows
from grpo_fn.core.batch import count
from grpo_fn.core.types import Batch, Gains, Groups, Scores, Totals


class View(NamedTuple):
    """One algorithm's opinion of a step."""

    objective: Objective
    batch: Batch
    totals: Totals


def view(
    algo: Algorithm,
    groups: Groups,
    logp_old: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"],
    logp_teacher: Float[Tensor, "B T"],
    energy: Float[Tensor, "B T"] | None,
    gains: Gains,
    key: Tensor,
    *,
    steps: int,
) -> View:
    """The algorithm's opinion of a scored rollout, as `grpo_step` forms it with one minibatch after `steps` others."""
    rows = {"logp_old": logp_old, "logp_ref": logp_ref, "logp_teacher": logp_teacher, "energy": energy}
    scored = ScoredStep(groups, {}, algo.needs, gains, steps, results=rows)
    batch = learning_rows(scored, token_advantages(scored, algo.credit), algo, own_pass=False, key=key)
    return View(algo.objective, batch, count(batch))


def signals(scores: Scores, views: Mapping[str, View], gains: Gains) -> Float[Tensor, "K B T"]:
    """d objective_k / d logp of every view k, in one vmapped call: the k-th is the gradient of the k-th unit mixture.

    f(w) = sum_k w_k objective_k,   signal_k = grad_logp f(e_k)
    """
    losses = [
        partial(objective_value, v.objective, batch=v.batch, totals=v.totals, gains=gains) for v in views.values()
    ]

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
