"""Invariants of every weighting, and the formulas of the papers."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from catalogue import bound, each
from hypothesis import given

from grpo_fn.algo import aggregation
from grpo_fn.testing import aggregations
from grpo_fn.testing.aggregations import MASKS, totals

ALL = bound(aggregation, "mask", "totals")


@each(ALL)
@pytest.mark.parametrize("invariant", aggregations.INVARIANTS, ids=lambda invariant: invariant.__name__)
def test_holds_what_every_weighting_holds(f, invariant):
    invariant(f)


@given(MASKS)
def test_token_mean_sums_to_one_and_treats_tokens_alike(mask):
    w = aggregation.token_mean(mask, totals(mask))
    if mask.any():
        torch.testing.assert_close(w.sum().item(), 1.0)
        assert w[mask].unique().numel() == 1


@given(MASKS)
def test_sequence_mean_gives_every_row_the_same_weight(mask):
    w = aggregation.sequence_mean(mask, totals(mask))
    rows = mask.any(-1)
    torch.testing.assert_close(w.sum(-1), rows / rows.sum().clamp(min=1).double())


@given(MASKS, st.integers(1, 9))
def test_constant_length_does_not_look_at_lengths(mask, length):
    w = aggregation.constant_length(mask, totals(mask), max_length=length)
    rows = int(mask.any(-1).sum())
    torch.testing.assert_close(w, mask.double() / max(1, rows * length))


def test_golden_weights():
    """Two rows of 1 and 3 tokens; at most 4 are allowed."""
    mask = torch.tensor([[False, True, False, False], [False, True, True, True]])
    t = totals(mask)
    assert aggregation.token_mean(mask, t)[mask].tolist() == [1 / 4] * 4
    torch.testing.assert_close(aggregation.sequence_mean(mask, t)[mask].tolist(), [1 / 2] + [1 / 6] * 3)
    assert aggregation.constant_length(mask, t, max_length=4)[mask].tolist() == [1 / 8] * 4


def test_over_samples_a_row_that_is_left_out_still_counts():
    """Two rows of 1 and 3 tokens and two of which nothing is left: 4 samples."""
    rows = torch.tensor([[False, True, False, False], [False, True, True, True]])
    mask = torch.cat([rows, torch.zeros_like(rows)])
    t = totals(mask)
    over = aggregation.sequence_mean_over_samples(mask, t)
    torch.testing.assert_close(over[mask].tolist(), [1 / 4] + [1 / 12] * 3)
    assert aggregation.constant_length_over_samples(mask, t, max_length=4)[mask].tolist() == [1 / 16] * 4
    torch.testing.assert_close(2 * over, aggregation.sequence_mean(mask, t))


@given(MASKS)
def test_where_every_row_has_tokens_samples_are_rows(mask):
    mask = torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
    t = totals(mask)
    pairs = [
        (aggregation.sequence_mean, aggregation.sequence_mean_over_samples),
        [partial(f, max_length=7) for f in (aggregation.constant_length, aggregation.constant_length_over_samples)],
    ]
    for plain, over in pairs:
        assert torch.equal(plain(mask, t), over(mask, t))
