"""Invariants of sampling, against definitions written out in float64 for one row at a time."""

import math
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, reject
from torch.func import vmap

from grpo_fn.core import sampling
from grpo_fn.testing.strategies import tensors

SAMPLERS = {
    "greedy": sampling.greedy,
    "categorical": partial(sampling.categorical, temperature=0.7),
    "top_k": partial(sampling.nucleus, temperature=1.3, top_k=3, top_p=1.0),
    "top_p": partial(sampling.nucleus, temperature=1.0, top_k=0, top_p=0.8),
    "both": partial(sampling.nucleus, temperature=0.5, top_k=4, top_p=0.6),
    "gumbel": partial(sampling.gumbel_max, temperature=0.7),
    "gumbel_both": partial(sampling.gumbel_max_nucleus, temperature=0.5, top_k=4, top_p=0.6),
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)
BELOW_ONE = 1 - 2**-24

# Logits on a coarse grid, so that equal ones are common; -inf among them, but never alone.
entry = st.one_of(st.integers(-12, 12).map(lambda i: i / 2), st.just(-math.inf))
unit = st.one_of(st.sampled_from([0.0, 2**-24, 0.5, BELOW_ONE]), st.integers(0, 2**24 - 1).map(lambda i: i / 2**24))
temperatures = st.floats(0.05, 5.0)


@st.composite
def tables(draw, rows: int | None = None):
    """Logits [B, V] and u [B] in float32; every row has a possible token."""
    b, v = rows or draw(st.integers(1, 5)), draw(st.integers(1, 10))
    logits = draw(tensors((b, v), entry)).float()
    assume((logits > -math.inf).any(-1).all())
    return logits, draw(tensors(b, unit)).float()


def clear_cut(so: bool) -> None:
    """Pass over a case in which float32 does not decide on which side of top_p a mass lies."""
    if not so:
        reject()


def law(logits, *, temperature=1.0, top_k=0, top_p=1.0) -> list[float]:
    """Probabilities of one row by definition: temper, keep the top k, keep the nucleus, renormalise."""
    x = [v / temperature for v in logits.tolist()]
    if 0 < top_k < len(x):
        x = [v if v >= sorted(x)[-top_k] else -math.inf for v in x]
    p = _softmax(x)
    if top_p < 1:
        ahead = [math.fsum(q for q, w in zip(p, x, strict=True) if w > v) for v in x]
        clear_cut(all(abs(a - top_p) > 1e-5 for a in ahead))
        p = _softmax([v if a < top_p else -math.inf for v, a in zip(x, ahead, strict=True)])
    return p


def _softmax(x: list[float]) -> list[float]:
    weight = [math.exp(v - max(x)) for v in x]
    return [w / math.fsum(weight) for w in weight]


def check_inverts(draw, logits, p):
    """Aimed at the middle of a token's interval of the distribution function, u must hit it, with its logp."""
    likely = [i for i, q in enumerate(p) if q > 1e-5]
    middle = torch.tensor([math.fsum(p[:i]) + p[i] / 2 for i in likely], dtype=torch.float32)
    token, logp = draw(logits.expand(len(likely), -1), middle)
    assert token.tolist() == likely
    expected = torch.tensor([math.log(p[i]) for i in likely])
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)


@given(tables(rows=1), temperatures)
def test_categorical_inverts_the_distribution_function(table, temperature):
    (logits,), _ = table
    check_inverts(partial(sampling.categorical, temperature=temperature), logits, law(logits, temperature=temperature))


@given(tables(rows=1), temperatures, st.integers(0, 12), st.one_of(st.just(1.0), st.floats(0.01, 1.0)))
def test_nucleus_inverts_the_truncated_distribution_function(table, temperature, top_k, top_p):
    (logits,), _ = table
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    check_inverts(partial(sampling.nucleus, **knobs), logits, law(logits, **knobs))


@given(tables())
def test_greedy_is_the_first_mode_with_the_plain_logp(table):
    logits, u = table
    token, logp = sampling.greedy(logits, u)
    assert token.tolist() == [row.index(max(row)) for row in logits.tolist()]
    expected = [math.log(max(law(row))) for row in logits]
    torch.testing.assert_close(logp, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@every_sampler
@pytest.mark.parametrize(
    "dead", [slice(0, 70_000), slice(70_000, None), slice(1, None), slice(0, -1), slice(0, None, 2)]
)
def test_an_impossible_token_is_never_drawn_from_a_large_vocabulary(name, dead):
    logits = torch.linspace(-20, 3, 151_936).sin() * 8
    logits[dead] = -math.inf
    u = torch.tensor([0.0, 2**-24, 0.25, 0.5, 0.75, 1 - 2**-20, 1 - 2**-23, BELOW_ONE])
    token, logp = SAMPLERS[name](logits.expand(len(u), -1), u)
    assert logits[token].isfinite().all()
    assert logp.isfinite().all()


@pytest.mark.parametrize("u", [1 - 2**-53, 1 - 2**-24, 1 - 2**-23])
def test_u_next_to_one_draws_the_last_possible_token(u):
    logits = torch.tensor([2.0, 3.0, -math.inf, 1.0, -math.inf])
    token, _ = sampling.categorical(logits, torch.tensor(u, dtype=torch.float64), temperature=1.0)
    assert token == 3


@pytest.mark.parametrize("index", [0, 2, 4, 5])
def test_a_search_led_astray_falls_back_on_the_likeliest_token(index, monkeypatch):
    # What a scan on a GPU might do to the running sum: the search ends on a token of probability zero, or past the end.
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 3.0, -math.inf])
    monkeypatch.setattr(torch, "searchsorted", lambda cdf, goal, right: torch.full(goal.shape, index))
    token, logp = sampling.categorical(logits, torch.tensor(0.5), temperature=1.0)
    assert token == 3
    torch.testing.assert_close(logp, torch.log_softmax(logits, -1)[3])


@every_sampler
@given(tables(), st.permutations(range(5)))
def test_a_row_depends_on_its_own_logits_and_u_alone(name, table, order):
    draw, (logits, u) = SAMPLERS[name], table
    token, logp = draw(logits, u)
    for b in range(len(u)):
        alone = draw(logits[b], u[b])
        assert alone[0].shape == alone[1].shape == ()
        assert (alone[0], alone[1]) == (token[b], logp[b])
    order = [b for b in order if b < len(u)]
    moved = draw(logits[order], u[order])
    assert torch.equal(moved[0], token[order])
    assert torch.equal(moved[1], logp[order])


@every_sampler
@given(tables())
def test_vmap_and_extra_axes_equal_the_batched_call(name, table):
    draw, (logits, u) = SAMPLERS[name], table
    token, logp = draw(logits, u)
    for mapped in (vmap(draw)(logits, u), tuple(x[0] for x in draw(logits[None], u[None]))):
        assert torch.equal(mapped[0], token)
        assert torch.equal(mapped[1], logp)


@every_sampler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@given(tables())
def test_logits_of_any_precision_are_worked_on_in_float32(name, dtype, table):
    logits, u = table
    token, logp = SAMPLERS[name](logits.to(dtype), u)
    expected = SAMPLERS[name](logits.to(dtype).float(), u)
    assert token.dtype == torch.int64
    assert logp.dtype == torch.float32
    assert torch.equal(token, expected[0])
    assert torch.equal(logp, expected[1])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_without_a_distribution_is_refused_and_greedy_named(temperature):
    row = (torch.zeros(3), torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"temperature: got .*, expected .*greedy"):
        sampling.categorical(*row, temperature=temperature)
    with pytest.raises(ValueError, match=r"temperature: got .*, expected .*greedy"):
        sampling.gumbel_max(*row, temperature=temperature)
    for cut in (sampling.nucleus, sampling.gumbel_max_nucleus):
        with pytest.raises(ValueError, match=r"temperature: got .*, expected .*greedy"):
            cut(*row, temperature=temperature, top_k=0, top_p=1.0)


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (0, 0.0), (0, -0.1), (0, 1.5), (0, math.nan)])
def test_cuts_outside_their_range_are_refused(top_k, top_p):
    for cut in (sampling.nucleus, sampling.gumbel_max_nucleus):
        with pytest.raises(ValueError, match=r"top_[kp]: got .*, expected"):
            cut(torch.zeros(3), torch.tensor(0.5), temperature=1.0, top_k=top_k, top_p=top_p)
