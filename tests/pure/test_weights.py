"""Invariants of every weighting, and the formulas of the papers."""

import hypothesis.strategies as st
import torch
from catalogue import bound, each
from hypothesis import given
from strategies import masks

from grpo_fn import weights
from grpo_fn.types import Totals

ALL = bound(weights, "mask", "totals")
MASKS = st.tuples(st.integers(1, 6), st.integers(1, 6)).flatmap(masks)


def totals(mask: torch.Tensor) -> Totals:
    return Totals(tokens=mask.sum().double(), rows=mask.any(-1).sum().double())


@each(ALL)
@given(MASKS)
def test_only_sampled_tokens_weigh_and_none_weighs_less_than_zero(f, mask):
    w = f(mask, totals(mask))
    assert w.dtype == torch.float64
    assert w.isfinite().all()
    assert ((w > 0) == mask).all()


@each(ALL)
@given(st.integers(1, 4), st.integers(1, 4))
def test_an_empty_batch_weighs_zero(f, b, t):
    mask = torch.zeros(b, t, dtype=torch.bool)
    assert (f(mask, totals(mask)) == 0).all()


@each(ALL)
@given(MASKS, st.data())
def test_parts_of_a_step_weigh_what_they_weigh_in_the_whole(f, mask, data):
    cut = data.draw(st.integers(0, len(mask)))
    whole = totals(mask)
    assert torch.equal(torch.cat([f(mask[:cut], whole), f(mask[cut:], whole)]), f(mask, whole))


@each(ALL)
@given(MASKS, st.integers(1, 3))
def test_padding_columns_change_nothing(f, mask, extra):
    padded = torch.nn.functional.pad(mask, (0, extra))
    w = f(padded, totals(padded))
    assert torch.equal(w[:, :-extra], f(mask, totals(mask)))
    assert (w[:, -extra:] == 0).all()


@each(ALL)
@given(MASKS, MASKS)
def test_totals_of_more_ranks_weigh_less(f, mine, theirs):
    """The denominators are the step's, not this rank's: summed over ranks they are one set of weights."""
    a, b = totals(mine), totals(theirs)
    both = Totals(*(x + y for x, y in zip(a, b, strict=True)))
    assert (f(mine, both) <= f(mine, a)).all()


@given(MASKS)
def test_token_mean_sums_to_one_and_treats_tokens_alike(mask):
    w = weights.token_mean(mask, totals(mask))
    if mask.any():
        torch.testing.assert_close(w.sum().item(), 1.0)
        assert w[mask].unique().numel() == 1


@given(MASKS)
def test_sequence_mean_gives_every_row_the_same_weight(mask):
    w = weights.sequence_mean(mask, totals(mask))
    rows = mask.any(-1)
    torch.testing.assert_close(w.sum(-1), rows / rows.sum().clamp(min=1).double())


@given(MASKS, st.integers(1, 9))
def test_constant_length_does_not_look_at_lengths(mask, length):
    w = weights.constant_length(mask, totals(mask), max_length=length)
    rows = int(mask.any(-1).sum())
    torch.testing.assert_close(w, mask.double() / max(1, rows * length))


def test_golden_weights():
    """Two rows of 1 and 3 tokens; at most 4 are allowed."""
    mask = torch.tensor([[False, True, False, False], [False, True, True, True]])
    t = totals(mask)
    assert weights.token_mean(mask, t)[mask].tolist() == [1 / 4] * 4
    torch.testing.assert_close(weights.sequence_mean(mask, t)[mask].tolist(), [1 / 2] + [1 / 6] * 3)
    assert weights.constant_length(mask, t, max_length=4)[mask].tolist() == [1 / 8] * 4
