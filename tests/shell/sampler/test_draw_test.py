"""The exact test of draws: its p-value is that of all outcomes, and holds its level whatever the distribution."""

from itertools import product
from math import prod

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo_fn.shell.sampler.probe import Outside, count_outside, p_value

chances = st.floats(0.0, 1.0)


@given(st.lists(st.tuples(st.integers(1, 3), chances), min_size=1, max_size=3), st.data())
def test_it_is_the_probability_of_all_outcomes_that_are_as_far_out(counts, data) -> None:
    found = [Outside(n, data.draw(st.integers(0, n)), chance) for n, chance in counts]
    each = [chance for n, chance in counts for _ in range(n)]
    total, below, above = sum(one.seen for one in found), 0.0, 0.0
    for outcome in product((0, 1), repeat=len(each)):
        mass = prod(q if hit else 1 - q for hit, q in zip(outcome, each, strict=True))
        below += mass * (sum(outcome) <= total)
        above += mass * (sum(outcome) >= total)
    assert p_value(found) == pytest.approx(min(1.0, 2 * min(below, above)), abs=1e-12)


def test_a_count_is_of_the_second_half_beside_the_tokens_of_the_first() -> None:
    tokens = torch.tensor([3, 3, 5, 5, 7, 9])
    logp = torch.tensor([0.25, 0.25, 0.5, 0.5, 0.125, 0.125]).log()
    found = count_outside(tokens, logp)
    assert found[:2] == (3, 2)
    assert found.chance == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("flat", [0.0, 0.05, 1.0])
def test_draws_from_the_distribution_are_refused_as_seldom_as_the_level_says(flat: float) -> None:
    """Of 400 tests at the level of 5 %, 20 are expected; 45 or more have a chance below 1e-6."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, generator=generator) * 4 * (1 - flat)
    logp = logits.log_softmax(-1)
    low = 0
    for _ in range(400):
        token = torch.multinomial(logp.exp(), 64, replacement=True, generator=generator)
        low += p_value([count_outside(token, logp[token])]) < 0.05
    assert low < 45


def test_a_cut_tail_is_seen_and_a_peak_is_no_reason() -> None:
    generator = torch.Generator().manual_seed(0)
    logp = (torch.randn(300, generator=generator)).log_softmax(-1)
    top = logp.topk(20).indices
    drawn = top[torch.multinomial(logp[top].exp(), 256, replacement=True, generator=generator)]
    assert p_value([count_outside(drawn, logp[drawn])]) < 1e-9
    sure = torch.zeros(256, dtype=torch.long)
    assert p_value([count_outside(sure, torch.zeros(256))]) == 1.0
