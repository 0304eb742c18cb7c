"""Differences over shared seeds: Student's interval against a table, the worth of a pair against what it is made of."""

import math
from statistics import fmean, variance

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo_fn.core import prng
from grpo_fn.lab.paired import paired_difference, student_quantile

values = st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=2, max_size=14).map(
    lambda pairs: tuple([x / 8 for x in column] for column in zip(*pairs, strict=True))
)


@pytest.mark.parametrize(
    ("degrees", "t"),  # Abramowitz and Stegun 1964, table 26.10, P = 0.975 one-sided
    [(1, 12.706), (2, 4.303), (5, 2.571), (11, 2.201), (120, 1.980)],
)
def test_the_quantiles_are_those_of_the_table(degrees, t):
    assert student_quantile(degrees) == pytest.approx(t, abs=6e-4)


@given(values)
def test_a_difference_is_that_of_the_pairs_and_turned_around_its_negative(pair):
    first, second = pair
    found, apart = paired_difference(first, second), [b - a for a, b in zip(first, second, strict=True)]
    assert found.difference == pytest.approx(found.second - found.first) == fmean(apart)
    half = student_quantile(len(apart) - 1) * math.sqrt(variance(apart) / len(apart))
    assert (found.low, found.high) == pytest.approx((found.difference - half, found.difference + half))
    alone = variance(first) + variance(second)
    if variance(apart) > 0:
        assert found.worth == pytest.approx(alone / variance(apart))
        assert found.worth_low <= found.worth * (1 + 1e-12)
        assert found.worth_high >= found.worth * (1 - 1e-12)
    else:
        assert found.worth == math.inf if alone else math.isnan(found.worth)
    back = paired_difference(second, first)
    assert (found.difference, found.low, found.high) == pytest.approx((-back.difference, -back.high, -back.low))
    assert found[6:] == pytest.approx(back[6:], nan_ok=True)


def test_equal_settings_differ_by_nothing_and_opposite_ones_are_worth_half():
    same = paired_difference([1.0, 2.0, 4.0], [1.0, 2.0, 4.0])
    assert same == (3, pytest.approx(7 / 3), pytest.approx(7 / 3), 0.0, 0.0, 0.0, math.inf, math.inf, math.inf)
    assert paired_difference([1.0, -1.0], [-1.0, 1.0]).worth == 0.5
    assert math.isnan(paired_difference([2.0, 2.0], [3.0, 3.0]).worth)


def test_one_seed_has_a_difference_and_no_interval_and_what_is_not_paired_is_refused():
    single = paired_difference([1.0], [3.0])
    assert single[:4] == (1, 1.0, 3.0, 2.0)
    assert all(map(math.isnan, single[4:]))
    for pair in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match=r"got \d and \d values, expected as many of each, one or more"):
            paired_difference(*pair)


def test_the_intervals_hold_what_they_are_for_in_19_of_20_experiments():
    """Normal values of equal variance and correlation 0.8, 500 times 6 pairs; the true worth is 1 / (1 - 0.8) = 5."""
    times, n, shared = 500, 6, math.sqrt(0.8)
    u = prng.uniform(prng.key(1, device="cpu"), 6 * times * n, low=0.0, high=1.0, dtype=torch.float64)
    radius, turn = (-2 * torch.log1p(-u[::2])).sqrt(), 2 * math.pi * u[1::2]  # Box and Muller
    common, a, b = (radius * turn.cos()).view(3, times, n)
    first, second = (shared * common + math.sqrt(0.2) * own for own in (a, b))
    pairs = [paired_difference(*pair) for pair in zip(first.tolist(), (second + 1).tolist(), strict=True)]
    off = 4 * math.sqrt(0.05 * 0.95 / times)
    assert fmean(x.low <= 1 <= x.high for x in pairs) == pytest.approx(0.95, abs=off)
    assert fmean(x.worth_low <= 5 <= x.worth_high for x in pairs) == pytest.approx(0.95, abs=off)
