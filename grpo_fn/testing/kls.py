"""What the objective expects of a KL estimator, `(logp [T], row) -> [T]`: one invariant, one function.

Most of it is what it expects of a token loss: the loss of an estimator is its value, without diagnostics.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_fn.core.types import Batch
from grpo_fn.testing import losses
from grpo_fn.testing.harness import check_claim, for_all
from grpo_fn.testing.losses import Row, TokenLoss
from grpo_fn.testing.strategies import loss_rows

Estimator = Callable[[Tensor, Batch], Tensor]


def check_kl(kl: Estimator) -> None:
    """Raises unless every invariant of INVARIANTS holds for `kl`, its knobs bound.

    Whether its value and its gradient estimate the KL without bias is not found out here: see docs/catalogue.md.
    """
    for invariant in INVARIANTS:
        invariant(kl)


def agreeing_policies_cost_exactly_nothing(f: Estimator) -> None:
    """logp = logp_old = logp_ref gives 0 at every token."""

    def holds(drawn: Row) -> None:
        cost = f(*drawn)
        check_claim(bool((cost == 0).all()), f"got {cost} between equal policies, wanted exactly 0")

    for_all(loss_rows(drift=0.0), holds)


def what_is_behind_the_mask_has_no_say(f: Estimator) -> None:
    """nan, infinities and large numbers there change nothing; there is no cost there and no gradient."""
    losses.what_is_behind_the_mask_has_no_say(as_loss(f))


def padding_changes_nothing(f: Estimator) -> None:
    """Columns on the right that nothing was sampled in."""
    losses.padding_changes_nothing(as_loss(f))


def rows_do_not_leak(f: Estimator) -> None:
    """vmapped over rows, as the objective calls it, it gives each row what it gets alone, also when B == T."""
    losses.rows_do_not_leak(as_loss(f))


def reverse_and_forward_gradient_agree(f: Estimator) -> None:
    """grad against jvp, along a random direction."""
    losses.reverse_and_forward_gradient_agree(as_loss(f))


def policies_worlds_apart_stay_finite(f: Estimator) -> None:
    """A thousand nats to the old policy or to the reference, or to both, in both dtypes."""
    for dtype in (torch.float32, torch.float64):
        zero, mask = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=torch.bool)
        for gap in (-1e3, 1e3):
            there = torch.tensor([0.0, gap], dtype=dtype)
            for old, ref in ((zero, there), (there, zero), (there, there)):
                row = Batch(zero.long(), mask, zero, old, ref, zero, ~mask)
                both = torch.stack([f(zero, row), losses.loss_gradient(as_loss(f), zero, row)])
                check_claim(bool(both.isfinite().all()), f"got value and gradient {both}, {gap:g} nats away")


def as_loss(f: Estimator) -> TokenLoss:
    """The estimator as a token loss that reports nothing."""
    return lambda logp, row: (f(logp, row), {})


INVARIANTS = (
    agreeing_policies_cost_exactly_nothing,
    what_is_behind_the_mask_has_no_say,
    padding_changes_nothing,
    rows_do_not_leak,
    reverse_and_forward_gradient_agree,
    policies_worlds_apart_stay_finite,
)
