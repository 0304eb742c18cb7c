"""The corrections of docs/algorithms/bias.md, by the name of their line: weights of another policy's rows."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product

from torch import Tensor

from grpo_fn.algo import importance, losses, rejection
from grpo_fn.core.types import Batch

DIVERGENCES = {
    "k1": (rejection.k1_divergence, -0.5, 0.5),
    "k2": (rejection.k2_divergence, 0.0, 0.1),
    "k3": (rejection.k3_divergence, 0.0, 0.1),
}
REDUCTIONS = {"sum": rejection.row_sum, "mean": rejection.row_mean, "max": rejection.row_max}
ratio = partial(importance.truncated_weight, cap=math.inf)
rejected = {
    f"`rejected_row` {name} {how} {low:g} to {high:g}": partial(
        rejection.rejected_row, weight=ratio, divergence=divergence, reduction=reduction, low=low, high=high
    )
    for (name, (divergence, low, high)), (how, reduction) in product(DIVERGENCES.items(), REDUCTIONS.items())
}
near = partial(importance.sequence_masked_weight, low=0.5, high=2.0)
# Bounds that leave out some of this world's rows; published ones are wider.
CORRECTIONS: dict[str, Callable | None] = {
    "`None`": None,
    "`truncated_weight` without a cap": ratio,
    "`truncated_weight` 2": partial(importance.truncated_weight, cap=2.0),
    "`masked_weight` 0.5, 2": partial(importance.masked_weight, low=0.5, high=2.0),
    "`sequence_truncated_weight` 2": partial(importance.sequence_truncated_weight, cap=2.0),
    "`sequence_masked_weight` 0.5, 2": near,
    "`off_policy_sequence_mask` 0.1": partial(importance.off_policy_sequence_mask, delta=0.1),
    "`weight_and_mask` of `truncated_weight` and `sequence_masked_weight` 0.5, 2": partial(
        importance.weight_and_mask, weight=ratio, mask=near
    ),
    **rejected,
    "`outlier_row` 0.5, 2": partial(rejection.outlier_row, weight=ratio, low=0.5, high=2.0),
}


def corrected(correction: Callable | None) -> Callable:
    """REINFORCE whose tokens weigh as a correction says, where the old log-probs are the policy's own."""

    if correction is None:
        return losses.reinforce

    def loss(logp: Tensor, row: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        found, diagnostics = losses.reinforce(logp, row)
        return correction(logp, row._replace(logp_old=logp.detach())) * found, diagnostics

    return loss
