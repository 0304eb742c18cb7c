"""Invariants of masked statistics: they are those of the unmasked values, and what is behind the mask has no say."""

import math
import statistics
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.func import grad

from grpo_fn.core import masked
from grpo_fn.testing.strategies import finite_floats, masks, tensors

STATISTICS = {
    "sum": masked.sum,
    "mean": masked.mean,
    "var0": partial(masked.var, ddof=0),
    "var1": partial(masked.var, ddof=1),
    "std0": partial(masked.std, ddof=0),
    "std1": partial(masked.std, ddof=1),
    "min": masked.min,
}
ORACLE = {
    "sum": (math.fsum, 0.0),
    "mean": (statistics.mean, 0.0),
    "var0": (statistics.pvariance, 0.0),
    "var1": (lambda v: statistics.variance(v) if len(v) > 1 else 0.0, 0.0),
    "std0": (statistics.pstdev, 0.0),
    "std1": (lambda v: statistics.stdev(v) if len(v) > 1 else 0.0, 0.0),
    "min": (min, math.inf),
}
GARBAGE = (math.nan, math.inf, -math.inf, 3e38)
every_statistic = pytest.mark.parametrize("name", STATISTICS)


@st.composite
def tables(draw):
    """Values and a mask of one shape [rows, columns]."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 6)))
    return draw(tensors(shape)), draw(masks(shape))


def slope(f, x, mask):
    """The gradient of the sum of all finite statistics of the table."""
    return grad(lambda x: torch.nan_to_num(f(x, mask, dim=-1), neginf=0, posinf=0).sum())(x)


@every_statistic
@given(tables(), st.sampled_from([0, 1, -1, -2]))
def test_is_the_statistic_of_the_unmasked_values(name, table, dim):
    x, mask = table
    compute, empty = ORACLE[name]
    rows = [(a[m].tolist()) for a, m in zip(x.movedim(dim, -1), mask.movedim(dim, -1), strict=True)]
    expected = torch.tensor([compute(row) if row else empty for row in rows], dtype=torch.float64)
    torch.testing.assert_close(STATISTICS[name](x, mask, dim=dim), expected, rtol=1e-9, atol=1e-9)


@every_statistic
@given(tables(), st.sampled_from(GARBAGE))
def test_a_masked_mean_ignores_values_behind_the_mask(name, table, garbage):
    f, (x, mask) = STATISTICS[name], table
    dirty = torch.where(mask, x, garbage)
    assert torch.equal(f(dirty, mask, dim=-1), f(x, mask, dim=-1))
    assert torch.equal(slope(f, dirty, mask), slope(f, x, mask))


@every_statistic
@given(tables())
def test_gradient_is_that_of_the_unmasked_values(name, table):
    x, mask = table
    plain = {
        "sum": torch.sum,
        "mean": torch.mean,
        "var0": partial(torch.var, correction=0),
        "var1": partial(torch.var, correction=1),
        "std0": partial(torch.std, correction=0),
        "std1": partial(torch.std, correction=1),
        "min": torch.amin,
    }[name]
    for row, m, got in zip(x, mask, slope(STATISTICS[name], x, mask), strict=True):
        values = row[m]
        if values.numel() > 1 and values.max() - values.min() > 1e-3:
            torch.testing.assert_close(got[m], grad(plain)(values), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(finite_floats(1e6), masks(7))
def test_equal_values_have_exactly_no_spread(ddof, dtype, value, mask):
    x = torch.full((7,), value, dtype=dtype) * 0.1
    assert masked.var(x, mask, dim=-1, ddof=ddof) == 0
    assert masked.std(x, mask, dim=-1, ddof=ddof) == 0
