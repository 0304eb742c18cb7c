"""Draws by Gumbel-max: their law by enumeration and within exact bounds of chance, their logp, and what they share."""

import math
from functools import partial
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from test_sampling import law, tables, temperatures

from grpo_fn.core import prng, sampling

KEY = prng.key(11, device="cpu")
MANY = 2**15
UNLIKELY = 1e-9  # how often a bound below may be broken by chance, over all keys; the key here is fixed


def uniform(count: int) -> torch.Tensor:
    return prng.uniform(KEY, count, low=0.0, high=1.0, dtype=torch.float64)


def far(values: int) -> float:
    """How far a share of MANY draws may be from its probability, by Hoeffding's inequality, for each of `values`."""
    return math.sqrt(math.log(2 * values / UNLIKELY) / (2 * MANY))


@pytest.mark.parametrize("logits", [[0.0, 1.0, -2.0], [0.0, 0.0, 0.0], [3.0, -math.inf, 2.5]])
def test_the_share_of_all_noise_that_a_token_wins_is_its_probability(logits, monkeypatch):
    """Every triple of the middles of 64 slices of the exponential distribution, each as likely as every other."""
    slices = 64
    middles = -torch.log1p(-(torch.arange(slices) + 0.5) / slices)
    noise = torch.tensor([*product(middles.tolist(), repeat=3)])
    monkeypatch.setattr(sampling.prng, "exponential", lambda keys, size: noise)
    rows = torch.tensor(logits).expand(len(noise), -1)
    token, _ = sampling.gumbel_max(rows, torch.zeros(len(noise)), temperature=1.0)
    share = torch.bincount(token, minlength=3) / len(noise)
    # What the middle of a slice stands for is off by at most a slice on either side, in each of two comparisons; two
    # equal tokens tie in one slice of each, which the first of them has.
    expected = torch.tensor(law(torch.tensor(logits)))
    torch.testing.assert_close(share, expected, rtol=0, atol=2 / slices)


def test_exponential_draws_are_minus_log_of_a_uniform_draw_of_32_bits():
    bits = [prng._bits32(KEY, (4096,)), torch.tensor([0, 1, 2**31, 2**32 - 1])]
    for those in bits:
        expected = -torch.log1p(-(those.double() + 0.5) * 2.0**-32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prng, "_bits32", lambda key, shape, those=those: those)
            got = prng.exponential(KEY, len(those))
        assert got.dtype == torch.float32
        expected = expected.clamp(max=24 * math.log(2))
        coarse = 2**-24 * expected.exp()  # u has 24 bits, and 1 - u is exp(-e)
        assert ((got - expected).abs() <= coarse + 2**-22 * expected).all()
        small = those < 2**24
        torch.testing.assert_close(got[small].double(), expected[small], rtol=2**-22, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.7), (4, 0.7)])
def test_every_token_is_drawn_with_its_probability(temperature, top_k, top_p):
    logits = torch.tensor([0.3, -1.0, 2.0, -math.inf, 1.1, 0.9, -3.0])
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    token, logp = sampling.gumbel_max_nucleus(logits.expand(MANY, -1), uniform(MANY), **knobs)
    p = torch.tensor(law(logits, **knobs))
    share = torch.bincount(token, minlength=len(p)) / MANY
    assert float((share - p).abs().max()) < far(len(p))
    assert (share[p == 0] == 0).all()
    torch.testing.assert_close(logp.exp(), p[token], rtol=1e-5, atol=0)


@given(tables(rows=1), temperatures, st.integers(0, 12), st.one_of(st.just(1.0), st.floats(0.01, 1.0)))
def test_a_token_has_the_logp_that_inversion_gives_it_to_the_last_bit(table, temperature, top_k, top_p):
    (logits,), _ = table
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    u = uniform(256)
    rows = logits.expand(len(u), -1)
    mine, inverted = (dict(zip(*(x.tolist() for x in f(rows, u, **knobs)), strict=True)) for f in CUT)
    shared = mine.keys() & inverted.keys()
    assert max(mine, key=mine.__getitem__) in shared
    assert all(mine[token] == inverted[token] for token in shared)


CUT = (sampling.gumbel_max_nucleus, sampling.nucleus)


@given(tables(rows=1), st.integers(0, 2**53 - 1), st.data())
def test_a_token_that_gains_while_others_lose_stays_drawn(table, bits, data):
    """What inversion does not promise: the drawn token goes on being drawn when its own logit alone rises."""
    (logits,), _ = table
    u = torch.tensor(bits / 2**53, dtype=torch.float64)
    draw = partial(sampling.gumbel_max, temperature=1.0)
    token, _ = draw(logits, u)
    others = torch.arange(len(logits)) != token
    fallen = data.draw(st.lists(st.floats(0, 5), min_size=len(logits), max_size=len(logits)))
    assert draw(torch.where(others, logits - torch.tensor(fallen), logits + 0.01), u)[0] == token


def test_the_53_bits_of_u_all_count():
    logits = torch.zeros(64).expand(54, -1)
    u = torch.tensor([0.5, *(0.5 + 2.0**-k for k in range(2, 54)), 0.0], dtype=torch.float64)
    token, _ = sampling.gumbel_max(logits, u, temperature=1.0)
    assert len(set(token.tolist())) > 20  # 54 draws from 64 tokens; one for each bit that is looked at
