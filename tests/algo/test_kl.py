"""The formulas of the KL estimators; test_invariants.py has their invariants, test_unbiased.py more of their slopes."""

import math

import pytest
from batches import loss_rows
from hypothesis import given

from grpo_fn.algo import objective


@given(loss_rows())
def test_every_kl_equals_its_scalar_loop(row):
    logp, row = row
    for t in range(len(logp)):
        p, old, ref = logp[t].item(), row.logp_old[t].item(), row.logp_ref[t].item()
        x, r = ref - p, math.exp(p - old)
        expected = {
            "k2": x * x / 2,
            "k3": math.exp(x) - x - 1,
            "k1_ratio": -r * x,
            "k3_ratio": r * (math.exp(x) - x - 1),
        }
        for name, value in expected.items():
            got = getattr(objective, name)(logp, row)[t].item()
            assert got == pytest.approx(value if row.mask[t] else 0.0, rel=1e-9, abs=1e-12)
