"""Invariants of the dynamic loss scale of float16, and its steps against a plain loop."""

from functools import partial, reduce

import hypothesis.strategies as st
from hypothesis import given

from grpo_fn.shell.policy import optimizer

LOW, HIGH = optimizer.LOWEST_SCALE, optimizer.HIGHEST_SCALE
dynamic = optimizer.dynamic_loss_scale
powers = st.integers(0, 24).map((2.0).__pow__)


def run(f, scale: float, steps: list[bool]) -> tuple[float, int]:
    """The state after so many steps, each finite or not."""
    return reduce(lambda state, finite: f(*state, finite), steps, (scale, 0))


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
