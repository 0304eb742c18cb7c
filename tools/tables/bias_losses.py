"""Token losses and corrections of docs/algorithms/bias.md, by the name of their line; `bias_table.py` measures them."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product

from torch import Tensor

from grpo_fn.algo import importance, losses, rejection, weighted_losses
from grpo_fn.core.types import Batch

# With the numbers of the presets; those of `sequence_ratio` are made for long rows, so it is here with others too.
LOSSES: dict[str, Callable] = {
    "`reinforce`": losses.reinforce,
    "`clipped_ratio` without a clip": partial(losses.clipped_ratio, clip_low=1e9, clip_high=1e9),
    "`clipped_ratio` 0.2, 0.28": partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.28),
    "`dual_clip` 0.2, 0.28, 3": partial(losses.dual_clip, clip_low=0.2, clip_high=0.28, cap=3.0),
    "`sequence_ratio` 3e-4, 4e-4": partial(losses.sequence_ratio, clip_low=3e-4, clip_high=4e-4),
    "`sequence_ratio` 0.2, 0.28": partial(losses.sequence_ratio, clip_low=0.2, clip_high=0.28),
    "`sequence_ratio_token` 0.2, 0.28": partial(losses.sequence_ratio_token, clip_low=0.2, clip_high=0.28),
    "`cispo` 4": partial(losses.cispo, clip_high=4.0),
    "`cispo` 0.28": partial(losses.cispo, clip_high=0.28),
    "`sapo` 1, 1.05": partial(losses.sapo, tau_positive=1.0, tau_negative=1.05),
    "`gmpo` 0.4, 0.4": partial(losses.gmpo, log_low=0.4, log_high=0.4),
    "`dppo_tv` 0.2, no penalty": partial(losses.dppo_tv, delta=0.2, kappa=0.0),
    "`dppo_tv` 0.2, 1e-3": partial(losses.dppo_tv, delta=0.2, kappa=1e-3),
    "`clip_cov` 0.2, 0.2, nothing selected": partial(losses.clip_cov, clip_low=0.2, clip_high=0.2),
    "`kl_cov` nothing selected": partial(losses.kl_cov, coef=1.0),
    "`masked_ratio` nothing selected": losses.masked_ratio,
    "`vespo` 2, 3 and 3, 2": partial(
        weighted_losses.vespo, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0
    ),
    "`dppo_kl` 0.05, 20": partial(weighted_losses.dppo_kl, delta=0.05, cap=20.0),
    "`masked_reinforce` 0.2, 0.28": partial(weighted_losses.masked_reinforce, low=0.2, high=0.28),
    "`dro` 0.1": partial(weighted_losses.dro, beta=0.1),
    "`future_weighted` 0.2, 0.28, 10, 32, 1 to 1.2, 4": partial(
        weighted_losses.future_weighted,
        **{"clip_low": 0.2, "clip_high": 0.28, "cap": 10.0, "half_life": 32.0},
        **{"weight_low": 1.0, "weight_high": 1.2, "safety": 4.0},
    ),
}

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
