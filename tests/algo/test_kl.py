"""Invariants of every KL estimator, and their formulas. Their gradients are on trial in test_unbiased.py."""

import math

import hypothesis.strategies as st
import pytest
import torch
from batches import loss_rows
from catalogue import bound, each
from hypothesis import given
from profiles import profile
from profiles import quarter as few

from grpo_fn.algo import objective
from grpo_fn.core.types import Batch
from grpo_fn.testing import kls

ALL = bound(objective, "logp", "row")
NEVER_NEGATIVE = {"k2", "k3", "k3_ratio"}


@each(ALL)
@pytest.mark.parametrize("invariant", kls.INVARIANTS, ids=lambda invariant: invariant.__name__)
def test_holds_what_every_estimator_holds(f, invariant):
    with profile(max_examples=few()):
        invariant(f)


@each(ALL, only=NEVER_NEGATIVE)
@given(loss_rows(drift=20.0), st.sampled_from([torch.float32, torch.float64]))
def test_is_never_negative(f, row, dtype):
    logp, row = row
    row = row._replace(logp_old=row.logp_old.to(dtype), logp_ref=row.logp_ref.to(dtype))
    assert (f(logp.to(dtype), row) >= 0).all()


@each(ALL, only=NEVER_NEGATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_not_negative_by_rounding_close_to_the_reference(f, dtype):
    """exp(x) - x - 1 is, in 7 % of these cases in float32: its three terms cancel."""
    x = torch.logspace(-9, 0, 500, dtype=dtype)
    ref = torch.cat([-x, x])
    zero = torch.zeros_like(ref)
    row = Batch(
        zero.long(), torch.ones_like(ref, dtype=torch.bool), zero, zero, ref, ref, zero, zero.bool(), zero.long()
    )
    assert (f(zero, row) >= 0).all()
    assert (ref.exp() - ref - 1 < 0).any()


@each(ALL, only=NEVER_NEGATIVE)
@given(loss_rows())
def test_is_zero_only_where_the_policies_agree(f, row):
    apart = row[1].mask & ((row[1].logp_ref - row[0]).abs() > 1e-6)
    assert (f(*row)[apart] > 0).all()


@given(loss_rows())
def test_formulas_as_scalar_loops(row):
    logp, row = row
    for t in range(len(logp)):
        p, old, ref = logp[t].item(), row.logp_old[t].item(), row.logp_ref[t].item()
        x, r = ref - p, math.exp(p - old)
        wanted = {"k2": x * x / 2, "k3": math.exp(x) - x - 1, "k1_ratio": -r * x, "k3_ratio": r * (math.exp(x) - x - 1)}
        for name, value in wanted.items():
            got = getattr(objective, name)(logp, row)[t].item()
            assert got == pytest.approx(value if row.mask[t] else 0.0, rel=1e-9, abs=1e-12)


def test_golden_k3():
    """pi = 1/2 and pi_ref = 1/4: 1/2 - log(1/2) - 1 = 0.19314718."""
    half, quarter = torch.tensor([[0.5], [0.25]], dtype=torch.float64).log()
    row = Batch(
        torch.zeros(1).long(),
        torch.ones(1, dtype=torch.bool),
        half,
        half,
        quarter,
        quarter,
        half,
        half.bool(),
        half.long(),
    )
    torch.testing.assert_close(objective.k3(half, row).item(), 0.1931471805599453)
