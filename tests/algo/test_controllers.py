"""Invariants of every controller of a coefficient, and the two published rules."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo_fn.algo import objective
from grpo_fn.core.types import Gains

gains = st.floats(0.0, 2.0)  # what the example of `highest` allows
positive = st.floats(1e-3, 10.0)


@given(positive, positive, st.floats(0.0, 1e3), st.floats(0.0, 1.0), st.floats(0.0, 0.9))
def test_the_kl_controller_follows_the_published_rule(gain, target, measured, rate, limit):
    error = max(-limit, min(limit, (measured - target) / target))
    expected = gain * (1 + rate * error)
    assert objective.adaptive_kl(gain, measured, target=target, rate=rate, limit=limit) == pytest.approx(expected)


@given(gains, positive, positive)
def test_an_entropy_below_the_target_raises_the_bonus_and_one_above_lowers_it(gain, target, measured):
    after = objective.adaptive_entropy(gain, measured, target=target, step=0.05, highest=2.0)
    expected = min(2.0, gain + 0.05) if measured < target else max(0.0, gain - 0.05)
    assert after == pytest.approx(expected)


@pytest.mark.parametrize("knobs", [{"target": 0.0}, {"target": -1.0}, {"rate": -0.1}, {"rate": 5.0}])
def test_a_kl_controller_that_cannot_work_is_refused(knobs):
    with pytest.raises(ValueError, match=r"target, rate, limit: got .*, expected target > 0"):
        objective.adaptive_kl(1.0, 0.1, **{"target": 0.1, "rate": 0.1, "limit": 0.2, **knobs})


@pytest.mark.parametrize("knobs", [{"step": 0.0}, {"highest": -1.0}])
def test_an_entropy_controller_that_cannot_work_is_refused(knobs):
    with pytest.raises(ValueError, match="step, highest: got"):
        objective.adaptive_entropy(1.0, 0.1, **{"target": 0.1, "step": 0.1, "highest": 1.0, **knobs})


# -- for step.Algorithm.control


@pytest.mark.parametrize(("name", "factor"), [("loss/kl", 3.0), ("loss/approx_kl", 3.0)])
@given(gains, gains, positive, positive)
def test_the_gains_of_the_next_step_come_from_what_this_one_measured(name, factor, kl, entropy, measured, seen):
    figures = {name: measured, "loss/entropy": seen}
    both = {"kl_control": lambda gain, kl: gain + factor * kl, "entropy_control": lambda gain, h: gain + h}
    found = objective.next_gains(Gains(kl, entropy), figures, **both)
    assert found == Gains(kl + factor * measured, entropy + seen)


@given(gains, gains, positive)
def test_a_gain_without_a_controller_stays(kl, entropy, measured):
    figures = {"loss/kl": measured, "loss/entropy": measured}
    none = {"kl_control": None, "entropy_control": None}
    assert objective.next_gains(Gains(kl, entropy), figures, **none) == Gains(kl, entropy)
    one = {**none, "entropy_control": lambda gain, h: 0.0}
    assert objective.next_gains(Gains(kl, entropy), figures, **one) == Gains(kl, 0.0)


@given(gains, gains)
def test_the_gains_of_a_step_that_learned_nothing_stay(kl, entropy):
    both = {"kl_control": lambda gain, kl: gain / 2, "entropy_control": lambda gain, h: gain / 2}
    assert objective.next_gains(Gains(kl, entropy), {"loss/objective": 0.0}, **both) == Gains(kl, entropy)
