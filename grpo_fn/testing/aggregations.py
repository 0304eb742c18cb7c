"""Properties of a weighting that the objective expects, `(batch, totals) -> [B, T]`: one invariant, one function."""

from collections.abc import Callable

import hypothesis.strategies as st
import torch
from torch import Tensor

from grpo_fn.core.batch import count, tokens_of_group
from grpo_fn.core.types import Batch, Totals
from grpo_fn.testing.harness import assert_same, check_claim, holds_for
from grpo_fn.testing.strategies import masks, one_row, pad

Weigh = Callable[[Batch, Totals], Tensor]
MASKS = st.tuples(st.integers(1, 6), st.integers(1, 6)).flatmap(masks)


def check_weights(weigh: Weigh) -> None:
    """Check that every invariant of INVARIANTS holds for a loss aggregation.

    Args:
        weigh: (batch, totals) -> [B, T], its knobs bound.

    Raises:
        AssertionError: an invariant does not hold, on the example that is shown.
    """
    for invariant in INVARIANTS:
        invariant(weigh)


def masked_rows(mask: Tensor, groups: int) -> Batch:
    """Rows of as many groups, [B, T], of which nothing but the mask is known: everything else is 0."""
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    found = tokens_of_group(mask, groups)
    return Batch(mask.long(), mask, *(nothing,) * 5, torch.zeros_like(mask), found)


@st.composite
def grouped_rows(draw: Callable, some: st.SearchStrategy[Tensor] = MASKS) -> Batch:
    """A step, its rows in groups of one size."""
    mask = draw(some)
    return masked_rows(mask, draw(st.sampled_from([n for n in range(1, len(mask) + 1) if len(mask) % n == 0])))


@holds_for(st.one_of(grouped_rows(), grouped_rows(MASKS.map(torch.zeros_like))))
def only_sampled_tokens_weigh(f: Weigh, batch: Batch) -> None:
    """And each of them more than nothing, finitely, in the dtype of the totals. An empty batch weighs 0."""
    weight = f(batch, count(batch))
    check_claim(weight.dtype == torch.float64, f"got weights in {weight.dtype}, expected torch.float64 as the totals")
    check_claim(bool(weight.isfinite().all()), f"got {weight}, expected finite weights")
    positive_there = bool(((weight > 0) == batch.mask).all() and (weight >= 0).all())
    check_claim(positive_there, f"got {weight}, expected > 0 where {batch.mask} only")


@holds_for(grouped_rows().flatmap(lambda batch: st.tuples(st.just(batch), st.integers(0, len(batch.mask)))))
def parts_of_a_step_weigh_what_they_weigh_in_the_whole(f: Weigh, example: tuple[Batch, int]) -> None:
    """Given the whole's totals: micro-batches and ranks add up to the same loss, wherever they cut a group."""
    batch, cut = example
    whole = count(batch)
    parts = torch.cat([f(one_row(batch, slice(0, cut)), whole), f(one_row(batch, slice(cut, None)), whole)])
    assert_same(parts, f(batch, whole), f"cut before row {cut}", tolerance=0.0)


@holds_for(st.tuples(grouped_rows(), st.integers(1, 3)))
def padding_changes_no_weight(f: Weigh, example: tuple[Batch, int]) -> None:
    """Columns on the right that nothing was sampled in."""
    batch, extra = example
    wide = Batch(*(pad(x, extra, 0) for x in batch))
    weight = f(wide, count(wide))
    assert_same(weight[:, :-extra], f(batch, count(batch)), f"with {extra} columns of padding", tolerance=0.0)
    check_claim(bool((weight[:, -extra:] == 0).all()), f"got {weight}, expected exactly 0 in the last {extra}")


@holds_for(st.tuples(grouped_rows(), grouped_rows()))
def totals_of_more_ranks_weigh_less(f: Weigh, example: tuple[Batch, Batch]) -> None:
    """The denominators are the step's, not this rank's: summed over ranks they are one set of weights."""
    batch, elsewhere = example
    mine = count(batch)
    both = Totals(*(x + y for x, y in zip(mine, count(elsewhere), strict=True)))
    less, alone = f(batch, both), f(batch, mine)
    check_claim(bool((less <= alone).all()), f"got {less} with another rank's rows, expected at most {alone}")


INVARIANTS = (
    only_sampled_tokens_weigh,
    parts_of_a_step_weigh_what_they_weigh_in_the_whole,
    padding_changes_no_weight,
    totals_of_more_ranks_weigh_less,
)
