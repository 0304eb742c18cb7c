"""How often draws with shared random numbers meet: bounds, known cases, and what the samplers do."""

import math
from functools import partial
from itertools import product

import hypothesis.strategies as st
import pytest
import tiny_worlds as tiny
import torch
from hypothesis import given
from jaxtyping import Float
from torch import Tensor

from grpo_fn.core import prng, sampling

Chances = Float[Tensor, "V"]  # of every token; they add up to 1


def maximal_meetings(p: Chances, q: Chances) -> Chances:
    """min(p_i, q_i): what the best coupling reaches, which has to know both distributions."""
    return torch.minimum(p, q)


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


COUPLINGS = [maximal_meetings, inversion_meetings, gumbel_meetings]
weights = st.lists(st.one_of(st.floats(1e-3, 1.0), st.just(0.0)), min_size=2, max_size=8).filter(any)


@st.composite
def pairs(draw):
    """Two distributions over as many tokens."""
    p = draw(weights)
    q = draw(st.lists(st.one_of(st.floats(1e-3, 1.0), st.just(0.0)), min_size=len(p), max_size=len(p)).filter(any))
    return tuple(torch.tensor(x, dtype=torch.float64) / math.fsum(x) for x in (p, q))


@given(pairs())
def test_no_coupling_beats_the_best_and_gumbel_keeps_its_bound(pair):
    p, q = pair
    best, inverted, gumbel = (meet(p, q) for meet in COUPLINGS)
    apart = 1 - float(best.sum())
    assert (inverted <= best + 1e-12).all()
    assert (gumbel <= best + 1e-12).all()
    assert float(gumbel.sum()) >= (1 - apart) / (1 + apart) - 1e-12


@pytest.mark.parametrize("meet", COUPLINGS)
@given(pair=pairs())
def test_a_coupling_is_symmetric_and_equal_distributions_always_meet(meet, pair):
    p, q = pair
    torch.testing.assert_close(meet(p, q), meet(q, p))
    torch.testing.assert_close(meet(p, p), p)


@given(pairs(), st.randoms(use_true_random=False))
def test_the_order_of_the_vocabulary_is_nothing_to_gumbel(pair, random):
    p, q = pair
    order = random.sample(range(len(p)), len(p))
    torch.testing.assert_close(gumbel_meetings(p[order], q[order]), gumbel_meetings(p, q)[order])


def test_a_shift_in_front_moves_every_token_of_inversion_and_few_of_gumbel():
    size, moved = 100, 0.02
    p = torch.full((size,), 1 / size, dtype=torch.float64)
    q = torch.cat([p[:1] + moved, p[1:] - moved / (size - 1)])
    apart = {meet: 1 - float(meet(p, q).sum()) for meet in COUPLINGS}
    assert apart[maximal_meetings] == pytest.approx(moved)
    assert apart[gumbel_meetings] < 2 * moved / (1 + moved) + 1e-12
    assert apart[inversion_meetings] > 0.5


@given(pairs().filter(lambda pair: len(pair[0]) == 3))
def test_gumbel_meetings_are_those_of_all_noise(pair):
    """Every triple of the middles of 24 slices of the exponential distribution."""
    p, q = pair
    slices = 24
    middles = -torch.log1p(-(torch.arange(slices) + 0.5) / slices)
    noise = torch.tensor([*product(middles.tolist(), repeat=3)], dtype=torch.float64)
    a, b = ((noise / x).argmin(-1) for x in (p, q))
    share = torch.bincount(a[a == b], minlength=3) / len(noise)
    torch.testing.assert_close(share.double(), gumbel_meetings(p, q), rtol=0, atol=3 / slices)


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
