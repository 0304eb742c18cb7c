"""Properties of a KL estimator that the objective expects, `(logp [T], row) -> [T]`: one invariant, one function.

Most of it is what it expects of a token loss, which may have no diagnostics either.
"""

from collections.abc import Callable

from torch import Tensor

from grpo_fn.core.types import Batch
from grpo_fn.testing import losses
from grpo_fn.testing.harness import check_claim, holds_for
from grpo_fn.testing.losses import Row
from grpo_fn.testing.strategies import loss_rows

Estimator = Callable[[Tensor, Batch], Tensor]


def check_kl(kl: Estimator) -> None:
    """Check that every invariant of INVARIANTS holds for a KL estimator.

    Whether its value and its gradient estimate the KL without bias is not checked: see docs/algorithms/catalogue.md.

    Args:
        kl: (logp [T], row) -> [T], its knobs bound.

    Raises:
        AssertionError: an invariant does not hold, on the example that is shown.
    """
    for invariant in INVARIANTS:
        invariant(kl)


@holds_for(loss_rows(drift=0.0))
def agreeing_policies_cost_exactly_nothing(f: Estimator, drawn: Row) -> None:
    """logp = logp_old = logp_ref gives 0 at every token."""
    cost = f(*drawn)
    check_claim(bool((cost == 0).all()), f"got {cost} between equal policies, expected exactly 0")


INVARIANTS = (
    agreeing_policies_cost_exactly_nothing,
    losses.what_is_behind_the_mask_has_no_say,
    losses.padding_changes_nothing,
    losses.rows_do_not_leak,
    losses.reverse_and_forward_gradient_agree,
    losses.policies_worlds_apart_stay_finite,
)
