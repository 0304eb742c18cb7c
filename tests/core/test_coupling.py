"""How often draws with shared random numbers meet: bounds, known cases, and what the samplers do."""

import math
from functools import partial

import pytest
import tiny_worlds as tiny
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_fn.core import prng, sampling

Chances = Float[Tensor, "V"]  # of every token; they add up to 1


def inversion_meetings(p: Chances, q: Chances) -> Chances:
    """Meetings of `sampling.categorical`: the length that token i's intervals of both distribution functions share."""
    ends = torch.minimum(p.cumsum(0), q.cumsum(0))
    starts = torch.maximum(p.cumsum(0) - p, q.cumsum(0) - q)
    return (ends - starts).clamp(min=0)


def gumbel_meetings(p: Chances, q: Chances) -> Chances:
    """Meetings of `sampling.gumbel_max`: 1 / sum_j max(p_j / p_i, q_j / q_i), 0 where p_i or q_i is.

    Both draws are i when e_j >= e_i max(p_j / p_i, q_j / q_i) for every j. Given e_i that has the chance
    exp(-e_i sum_{j != i} max(...)); its mean over the exponential e_i is the formula, the collision probability of
    Moulton and Jiang 2018, "Maximally consistent sampling and the Jaccard index of probability distributions",
    arXiv:1809.04052. Its sum is at least (1 - TV) / (1 + TV), than which no coupling is better for all p and q whose
    draws know only one of both (Daliri, Musco and Suresh 2024, arXiv:2408.07978).
    """
    ratio = torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)
    return torch.where((p > 0) & (q > 0), 1 / ratio, 0.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("draw", "meet"),
    [
        (partial(sampling.categorical, temperature=1.0), inversion_meetings),
        (partial(sampling.gumbel_max, temperature=1.0), gumbel_meetings),
    ],
)
def test_the_samplers_meet_as_often_as_is_said(draw, meet, seed):
    """On a tiny world, with fixed random numbers, within Hoeffding's bound that chance breaks once in 1e9."""
    count, w = 2**14, tiny.world(seed, 1.0)
    u = prng.uniform(prng.key(seed, device="cpu"), count, low=0.0, high=1.0, dtype=torch.float64)
    tokens = [draw(x[0, 0].expand(count, -1), u)[0] for x in (w.theta, w.old)]
    share = torch.bincount(tokens[0][tokens[0] == tokens[1]], minlength=tiny.V) / count
    expected = meet(*(x[0, 0].softmax(-1) for x in (w.theta, w.old)))
    assert float((share - expected).abs().max()) < math.sqrt(math.log(2 * tiny.V * 1e9) / (2 * count))
