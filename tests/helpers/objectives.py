"""Objectives composed of every loss, correction, KL and weight of the catalogue, and the signal that each gives."""

from functools import partial

import hypothesis.strategies as st
from batches import UNMOVED, scores, totals
from catalogue import all_corrections, bound, token_losses
from torch.func import grad_and_value

from grpo_fn.algo import objective
from grpo_fn.core.types import Scores

LOSSES = token_losses()
CORRECTIONS = {"None": None, **all_corrections()}
KLS = bound(objective, "logp", "row")
WEIGHTS = bound(objective, "batch", "totals")


def composed(loss: str, correction: str, kl: str, weight: str, beta: float, bonus: float) -> partial:
    """A policy_objective of these functions, each by its name."""
    return partial(
        objective.policy_objective,
        token_loss=LOSSES[loss],
        importance_correction=CORRECTIONS[correction],
        kl=KLS[kl],
        loss_aggregation=WEIGHTS[weight],
        beta=beta,
        entropy_bonus=bonus,
    )


coefficients = st.sampled_from([0.0, 0.04, 1.0])
objectives = st.builds(
    composed, *(st.sampled_from(sorted(x)) for x in (LOSSES, CORRECTIONS, KLS, WEIGHTS)), coefficients, coefficients
)


def signals(f, logp, batch, denominators=None, gains=UNMOVED) -> tuple[Scores, tuple]:
    """The learning signal; the objective's value and the diagnostics."""
    bound_to = partial(f, batch=batch, totals=denominators or totals(batch), gains=gains)
    return grad_and_value(bound_to, has_aux=True)(scores(logp))


def signal_of(f, logp, batch, denominators=None):
    """The learning signal on logp, the objective's value, the diagnostics."""
    signal, (value, aux) = signals(f, logp, batch, denominators)
    return signal.logp, value, aux
