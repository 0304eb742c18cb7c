"""A divergence to the teacher beside an objective: weights of its own, and micro-batches that add up."""

import math
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from batches import UNMOVED, batches, policy_objective, scores, totals
from hypothesis import given
from torch import Tensor
from torch.func import grad_and_value

from grpo_fn.algo import losses, objective
from grpo_fn.core.types import Batch

POLICY = policy_objective(token_loss=losses.reinforce, kl=objective.k3_ratio, loss_aggregation=objective.sequence_mean)


def composed(coef: float) -> partial:
    return partial(
        objective.with_teacher_divergence,
        objective=POLICY,
        divergence=objective.k3,
        loss_aggregation=objective.token_mean,
        coef=coef,
    )


def learn(f, logp: Tensor, batch: Batch, denominators=None) -> tuple[Tensor, Tensor]:
    loss = partial(f, batch=batch, totals=denominators or totals(batch), gains=UNMOVED)
    signal, (value, _) = grad_and_value(loss, has_aux=True)(scores(logp))
    return signal.logp, value


@given(batches(), st.floats(0.1, 2.0))
def test_the_divergence_is_a_mean_over_tokens_while_the_objective_is_one_over_rows(data, coef):
    """k3 = exp(x) - x - 1, x = logp_teacher - logp, by a loop over the tokens of the step."""
    logp, batch = data
    found, value = learn(composed(coef), logp, batch)
    alone, before = learn(POLICY, logp, batch)
    learned = batch.mask.nonzero().tolist()
    slope, extra = torch.zeros_like(logp), 0.0
    for b, t in learned:
        x = (batch.logp_teacher[b, t] - logp[b, t]).item()
        extra += (math.exp(x) - x - 1) / len(learned)
        slope[b, t] = (1 - math.exp(x)) / len(learned)
    assert value.item() == pytest.approx(before.item() + coef * extra, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(found - alone, coef * slope, rtol=1e-9, atol=1e-9)


@given(batches(), st.data())
def test_micro_batches_of_a_teacher_divergence_add_up(data, draw):
    logp, batch = data
    cuts = sorted({0, len(logp), *draw.draw(st.lists(st.integers(0, len(logp)), max_size=3))})
    whole, value = learn(composed(0.7), logp, batch)
    parts = [learn(composed(0.7), logp[a:b], Batch(*(x[a:b] for x in batch)), totals(batch)) for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat([signal for signal, _ in parts]), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(v for _, v in parts), value, rtol=1e-12, atol=1e-12)
