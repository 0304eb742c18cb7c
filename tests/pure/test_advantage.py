"""Invariants of every advantage function, and the formulas of the papers."""

import math
import statistics

import hypothesis.strategies as st
import pytest
import torch
from catalogue import bound, each
from hypothesis import assume, given
from torch import Tensor
from torch.func import vmap

from grpo_fn import advantage

ALL = bound(advantage, "reward", "valid")
ZERO_SUM = {"group_normalized", "centered", "leave_one_out"}
SHIFT_INVARIANT = {"group_normalized", "centered", "leave_one_out"}
SCALE_INVARIANT = {"group_normalized"}  # as eps -> 0
SCALE_EQUIVARIANT = {"centered", "leave_one_out"}

number = st.floats(-100, 100, width=32)
anything = st.one_of(number, st.sampled_from([math.nan, math.inf, -math.inf, 3e38]))


def group(rewards, valid=None) -> tuple[Tensor, Tensor]:
    value = torch.tensor(rewards, dtype=torch.float64)
    return value, torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)


@st.composite
def groups(draw, least=1, most=8):
    """Rewards [G] with anything at all where invalid, and who is valid."""
    valid = draw(st.lists(st.booleans(), min_size=least, max_size=most))
    return group([draw(number if v else anything) for v in valid], valid)


@st.composite
def spread_out(draw):
    """A fully valid group whose rewards differ by enough to speak of a scale."""
    rewards = draw(st.lists(number, min_size=2, max_size=8))
    assume(max(rewards) - min(rewards) > 1)
    return group(rewards)


def close(got: Tensor, wanted: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(got, wanted, rtol=tol, atol=tol)


@each(ALL)
@given(groups())
def test_is_finite_and_invalid_samples_get_exactly_zero(f, g):
    reward, valid = g
    out = f(reward, valid)
    assert out.shape == reward.shape
    assert out.dtype == reward.dtype
    assert out.isfinite().all()
    assert (out[~valid] == 0).all()


@each(ALL)
@given(groups())
def test_invalid_samples_move_nobody(f, g):
    reward, valid = g
    if not valid.any():
        return
    close(f(reward, valid)[valid], f(reward[valid], valid[valid]))


@each(ALL)
@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.lists(st.booleans(), min_size=1, max_size=64),
    anything,
)
def test_constant_group_is_exactly_zero_in_float32(f, value, valid, garbage):
    """The ulp between sum/G and R, divided by a tiny std, is a fault peers have."""
    reward = torch.tensor([value if v else garbage for v in valid], dtype=torch.float32)
    assert (f(reward, torch.tensor(valid)) == 0).all()


def test_the_naive_formula_fails_on_a_constant_group():
    """Why the test above is worth having: 0.1 in float32, by the formula as written."""
    faults = [(r - r.mean()) / (r.std() + 1e-9) for n in range(2, 65) if (r := torch.full((n,), 0.1)).shape]
    assert any((a != 0).any() for a in faults)


@each(ALL)
@pytest.mark.parametrize("valid", [[True], [False], [False, True, False], [False] * 4])
def test_one_sample_or_none_has_nothing_to_compare_with(f, valid):
    reward = torch.full((len(valid),), math.nan)
    reward[torch.tensor(valid)] = 0.7
    assert (f(reward, torch.tensor(valid)) == 0).all()


@each(ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_valid_reward_that_is_not_finite_shows(f, bad):
    """No silent zero: the seam to the batch refuses what is not finite."""
    assert not f(*group([0.0, bad, 1.0])).isfinite().all()


@each(ALL)
@given(groups(least=2), st.randoms(use_true_random=False))
def test_permuting_the_group_permutes_the_advantages(f, g, random):
    reward, valid = g
    order = list(range(len(reward)))
    random.shuffle(order)
    close(f(reward[order], valid[order]), f(reward, valid)[order])


@each(ALL)
@given(st.data())
def test_groups_do_not_leak_under_vmap(f, data):
    size = data.draw(st.integers(1, 6))
    rows = data.draw(st.lists(groups(least=size, most=size), min_size=1, max_size=5))
    reward, valid = (torch.stack(x) for x in zip(*rows, strict=True))
    together = vmap(f)(reward, valid)
    for row, (r, v) in zip(together, rows, strict=True):
        close(row, f(r, v), 1e-12)


@each(ALL, only=ZERO_SUM)
@given(groups())
def test_sums_to_zero(f, g):
    out = f(*g)
    assert abs(out.sum().item()) <= 1e-9 * (1 + out.abs().max().item())


@each(ALL, only=SHIFT_INVARIANT)
@given(spread_out(), number)
def test_shifting_every_reward_changes_nothing(f, g, shift):
    reward, valid = g
    close(f(reward + shift, valid), f(reward, valid))


@each(ALL, only=SCALE_EQUIVARIANT)
@given(groups(), st.floats(1e-3, 1e3))
def test_scaling_every_reward_scales_the_advantages(f, g, scale):
    reward, valid = g
    close(f(reward * scale, valid), f(reward, valid) * scale)


@each(ALL, only=SCALE_INVARIANT)
@given(spread_out(), st.floats(1, 1e6))
def test_scaling_every_reward_changes_nothing_but_eps(f, g, scale):
    """std is at least 0.3 here, so eps may move an advantage by its ratio to that and no more."""
    reward, valid = g
    before = f(reward, valid)
    assert ((f(reward * scale, valid) - before).abs() <= before.abs() * f.keywords["eps"] / 0.25 + 1e-9).all()


@each(ALL, only=SCALE_INVARIANT)
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_squares_neither_overflow_nor_vanish_in_float32(f, scale):
    """eps is taken along with the unit, so only the arithmetic is on trial."""
    base = torch.tensor([0.0, 1.0, 1.0, 3.0])
    valid = torch.ones(4, dtype=torch.bool)
    knobs = {**f.keywords, "eps": f.keywords["eps"] * scale}
    close(f.func(base * scale, valid, **knobs), f(base, valid), 1e-5)


@each(ALL, only=SCALE_INVARIANT)
@given(spread_out())
def test_has_unit_std(f, g):
    ddof = f.keywords["ddof"]
    assert abs(f(*g).std(correction=ddof).item() - 1) < 1e-3


@given(groups())
def test_leave_one_out_is_n_over_n_minus_one_times_centered(g):
    n = int(g[1].sum())
    close(advantage.leave_one_out(*g), advantage.centered(*g) * (n / (n - 1) if n > 1 else 0.0))


@given(st.lists(number, min_size=2, max_size=8))
def test_formulas_as_scalar_loops(rewards):
    r, v = group(rewards)
    n, mean = len(rewards), statistics.fmean(rewards)
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(n)]
    close(advantage.centered(r, v), group([x - mean for x in rewards])[0])
    close(advantage.leave_one_out(r, v), group([x - o for x, o in zip(rewards, others, strict=True)])[0])
    for ddof, std in ((0, statistics.pstdev(rewards)), (1, statistics.stdev(rewards))):
        got = advantage.group_normalized(r, v, eps=1e-4, ddof=ddof)
        close(got, group([(x - mean) / (std + 1e-4) for x in rewards])[0], 1e-7)


def test_golden_group():
    """Rewards 1, 0, 0, 1, 0: mean 0.4, sample std sqrt(0.3)."""
    r, v = group([1.0, 0.0, 0.0, 1.0, 0.0])
    s = math.sqrt(0.3)
    wanted = group([0.6 / s, -0.4 / s, -0.4 / s, 0.6 / s, -0.4 / s])[0]
    close(advantage.group_normalized(r, v, eps=0.0, ddof=1), wanted, 1e-12)
    close(advantage.leave_one_out(r, v), group([0.75, -0.5, -0.5, 0.75, -0.5])[0], 1e-12)
