"""Invariants of the dynamic loss scale of float16, and its steps against a plain loop."""

from functools import partial, reduce

import hypothesis.strategies as st
import torch
from hypothesis import given

from grpo_fn.shell.policy import optimizer

LOW, HIGH = optimizer.LOWEST_SCALE, optimizer.HIGHEST_SCALE
dynamic = optimizer.dynamic_loss_scale
powers = st.integers(0, 24).map((2.0).__pow__)
good = st.integers(0, 2)
every_third = partial(dynamic, interval=3)


def run(f, scale: float, steps: list[bool]) -> tuple[float, int]:
    """The state after so many steps, each finite or not."""
    return reduce(lambda state, finite: f(*state, finite), steps, (scale, 0))


@given(powers, good, st.booleans())
def test_an_overflow_never_raises_the_scale_and_a_finite_step_never_lowers_it(scale, steps, finite):
    after, _ = every_third(scale, steps, finite)
    assert after >= scale if finite else after <= scale


@given(powers, good)
def test_good_steps_count_what_was_finite_since_the_last_overflow(scale, steps):
    assert every_third(scale, steps, False)[1] == 0
    assert every_third(scale, steps, True)[1] in (steps + 1, 0)


@given(powers, st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_dynamic_scale_stays_a_power_of_two_within_its_bounds(scale, steps, interval):
    after, count = run(partial(dynamic, interval=interval), scale, steps)
    assert LOW <= after <= HIGH
    assert torch.frexp(torch.tensor(after))[0] == 0.5
    assert 0 <= count < interval


@given(powers, st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_dynamic_scale_is_a_plain_loops(scale, steps, interval):
    expected, since = scale, 0
    for finite in steps:
        since = since + 1 if finite else 0
        if not finite:
            expected = max(LOW, expected / 2)
        elif since == interval:
            expected, since = min(HIGH, expected * 2), 0
    assert run(partial(dynamic, interval=interval), scale, steps) == (expected, since)


@given(powers, st.integers(1, 6), st.integers(0, 30))
def test_it_grows_once_in_every_interval(scale, interval, steps):
    after, count = run(partial(dynamic, interval=interval), scale, [True] * steps)
    assert after == min(HIGH, scale * 2.0 ** (steps // interval))
    assert count == steps % interval


@given(st.tuples(powers, powers).map(sorted), st.lists(st.booleans(), max_size=30))
def test_what_was_larger_stays_at_least_as_large(scales, steps):
    small, large = (run(partial(dynamic, interval=3), scale, steps)[0] for scale in scales)
    assert small <= large


@given(powers)
def test_at_the_lowest_an_overflow_no_longer_shrinks_it_and_so_says_that_scaling_is_not_what_is_wrong(scale):
    after, _ = dynamic(scale, 0, False, interval=3)
    assert (after < scale) == (scale > LOW)


@given(powers, st.lists(st.floats(-1e3, 1e3, width=32, allow_subnormal=False), min_size=1, max_size=8))
def test_a_power_of_two_changes_no_bit_of_what_neither_overflows_nor_vanishes(scale, values):
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(x * scale / scale, x)


def test_a_signal_too_small_for_float16_survives_when_it_is_scaled():
    tiny = torch.tensor(2.0**-27)
    assert tiny.half() == 0
    assert (tiny * 2.0**16).half().float() / 2.0**16 == tiny
