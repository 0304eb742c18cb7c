"""What the objective expects of a weighting, `(mask [B, T], totals) -> [B, T]`: one invariant, one function."""

from collections.abc import Callable

import hypothesis.strategies as st
import torch
from torch import Tensor

from grpo_fn.core.types import Totals
from grpo_fn.testing.harness import assert_same, check_claim, for_all
from grpo_fn.testing.strategies import masks, pad

Weigh = Callable[[Tensor, Totals], Tensor]
MASKS = st.tuples(st.integers(1, 6), st.integers(1, 6)).flatmap(masks)


def check_weights(weigh: Weigh) -> None:
    """Check that every invariant of INVARIANTS holds for a loss aggregation.

    Args:
        weigh: (mask [B, T], totals) -> [B, T], its knobs bound.

    Raises:
        AssertionError: an invariant does not hold, on the example that is shown.
    """
    for invariant in INVARIANTS:
        invariant(weigh)


def totals(mask: Tensor) -> Totals:
    """The totals of a step that holds these rows alone."""
    return Totals(mask.sum().double(), mask.any(-1).sum().double(), torch.tensor(len(mask)).double())


def only_sampled_tokens_weigh(f: Weigh) -> None:
    """And each of them more than nothing, finitely, in the dtype of the totals. An empty batch weighs 0."""

    def holds(mask: Tensor) -> None:
        weight = f(mask, totals(mask))
        check_claim(weight.dtype == torch.float64, f"got weights in {weight.dtype}, wanted torch.float64 as the totals")
        check_claim(bool(weight.isfinite().all()), f"got {weight}, wanted finite weights")
        positive_there = bool(((weight > 0) == mask).all() and (weight >= 0).all())
        check_claim(positive_there, f"got {weight}, wanted > 0 where {mask} only")

    for_all(st.one_of(MASKS, MASKS.map(torch.zeros_like)), holds)


def parts_of_a_step_weigh_what_they_weigh_in_the_whole(f: Weigh) -> None:
    """Given the whole's totals: micro-batches and ranks add up to the same loss."""

    def holds(example: tuple[Tensor, int]) -> None:
        mask, cut = example
        whole = totals(mask)
        parts = torch.cat([f(mask[:cut], whole), f(mask[cut:], whole)])
        assert_same(parts, f(mask, whole), f"cut before row {cut}", tolerance=0.0)

    for_all(MASKS.flatmap(lambda mask: st.tuples(st.just(mask), st.integers(0, len(mask)))), holds)


def padding_changes_no_weight(f: Weigh) -> None:
    """Columns on the right that nothing was sampled in."""

    def holds(example: tuple[Tensor, int]) -> None:
        mask, extra = example
        wide = pad(mask, extra, False)
        weight = f(wide, totals(wide))
        assert_same(weight[:, :-extra], f(mask, totals(mask)), f"with {extra} columns of padding", tolerance=0.0)
        check_claim(bool((weight[:, -extra:] == 0).all()), f"got {weight}, wanted exactly 0 in the last {extra}")

    for_all(st.tuples(MASKS, st.integers(1, 3)), holds)


def totals_of_more_ranks_weigh_less(f: Weigh) -> None:
    """The denominators are the step's, not this rank's: summed over ranks they are one set of weights."""

    def holds(example: tuple[Tensor, Tensor]) -> None:
        mask, elsewhere = example
        mine = totals(mask)
        both = Totals(*(x + y for x, y in zip(mine, totals(elsewhere), strict=True)))
        less, alone = f(mask, both), f(mask, mine)
        check_claim(bool((less <= alone).all()), f"got {less} with another rank's rows, wanted at most {alone}")

    for_all(st.tuples(MASKS, MASKS), holds)


INVARIANTS = (
    only_sampled_tokens_weigh,
    parts_of_a_step_weigh_what_they_weigh_in_the_whole,
    padding_changes_no_weight,
    totals_of_more_ranks_weigh_less,
)
