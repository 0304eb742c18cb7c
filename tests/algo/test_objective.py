"""Invariants of every objective composed from the catalogue, and the step of the GRPO paper by hand."""

import math
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from batches import UNMOVED, batches, one_row, policy_objective, scores, totals
from hypothesis import given
from objectives import KLS, LOSSES, WEIGHTS, composed, objectives, signal_of, signals
from torch.func import vmap

from grpo_fn.algo import losses, objective
from grpo_fn.core.batch import tokens_of_group
from grpo_fn.core.types import Batch, Gains

DIAGNOSTICS = {"ratio", "clip_low", "clip_high"}


def exactly(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@given(objectives, batches())
def test_the_objective_is_a_sum_over_rows_also_when_b_equals_t(f, data):
    """By a loop over rows and tokens: no row's advantage may touch another row."""
    logp, batch = data
    weight = f.keywords["loss_aggregation"](batch, totals(batch))
    expected = 0.0
    for b, x in enumerate(logp):
        row = one_row(batch, b)
        correction = f.keywords["importance_correction"]
        token = f.keywords["token_loss"](x, row)[0] * (1.0 if correction is None else correction(x, row))
        token = token + f.keywords["beta"] * f.keywords["kl"](x, row)
        token = token - f.keywords["entropy_bonus"] * torch.where(row.mask, scores(x).entropy, 0.0)
        expected += sum((w * t).item() for w, t in zip(weight[b], token, strict=True))
    assert signal_of(f, logp, batch)[1].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(objectives, batches(), st.floats(0.01, 2), st.floats(0.01, 3))
def test_a_bonus_pays_for_entropy_at_every_sampled_token(f, data, bonus, gain):
    """-w bonus gain is the whole gradient on the entropy; that on logp does not notice."""
    with_bonus, _ = signals(partial(f, entropy_bonus=bonus), *data, gains=Gains(kl=1.0, entropy=gain))
    without, _ = signals(partial(f, entropy_bonus=0.0), *data)
    exactly(with_bonus.entropy, -bonus * gain * f.keywords["loss_aggregation"](data[1], totals(data[1])))
    assert torch.equal(with_bonus.logp, without.logp)


@given(objectives, batches(), st.floats(0.01, 3), st.floats(0.01, 3))
def test_gains_multiply_the_coefficients(f, data, on_kl, on_entropy):
    moved = partial(f, beta=on_kl * f.keywords["beta"], entropy_bonus=on_entropy * f.keywords["entropy_bonus"])
    expected, (value, _) = signals(moved, *data)
    got, (same, _) = signals(f, *data, gains=Gains(on_kl, on_entropy))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(same, value, rtol=1e-9, atol=1e-12)


@given(objectives, batches())
def test_diagnostics_are_per_token_and_detached(f, data):
    logp, batch = data
    leaf = logp.clone().requires_grad_()
    _, aux = f(scores(leaf), batch=batch, totals=totals(batch), gains=UNMOVED)
    weighed = f.keywords["importance_correction"] is not None
    assert set(aux) == DIAGNOSTICS | ({"correction"} if weighed else set())
    assert all(x.shape == logp.shape and not x.requires_grad for x in aux.values())


@given(objectives, batches(drift=3.0))
def test_a_correction_weighs_the_token_loss_and_nothing_else(f, data):
    """signal = c signal of the token loss + signal of the rest; the denominators do not notice."""
    whole, (_, seen) = signals(f, *data)
    rest, _ = signals(partial(f, token_loss=silent), *data)
    exactly(whole.entropy, rest.entropy)
    if f.keywords["importance_correction"] is None:
        assert "correction" not in seen
        return
    c = vmap(f.keywords["importance_correction"])(*data)
    assert torch.equal(seen["correction"], c)
    if f.keywords["token_loss"].func in (losses.sequence_ratio, losses.gmpo):
        return  # there a token's loss is moved by the whole row
    own, _ = signals(partial(f, beta=0.0, entropy_bonus=0.0, importance_correction=None), *data)
    exactly(whole.logp, c * own.logp + rest.logp)


@given(objectives, batches())
def test_a_correction_that_moves_with_the_policy_is_a_constant_to_the_gradient(f, data):
    def moving(logp, row):
        return torch.where(row.mask, logp.exp(), 0.0)

    constant = vmap(moving)(*data)
    own, _ = signals(partial(f, beta=0.0, entropy_bonus=0.0, importance_correction=None), *data)
    signal, _ = signals(partial(f, beta=0.0, entropy_bonus=0.0, importance_correction=moving), *data)
    if f.keywords["token_loss"].func not in (losses.sequence_ratio, losses.gmpo):  # a token's loss moves with its row
        exactly(signal.logp, constant * own.logp)


def silent(logp, row):
    """A token loss that teaches nothing."""
    nothing = torch.zeros_like(logp)
    return nothing, dict.fromkeys(("ratio", "clip_low", "clip_high"), nothing)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logp, row: logp.sum(), r"got shape \[2\], expected floating-point numbers of shape \[2, 3\]"),
        (lambda logp, row: row.mask, r"got bool, expected floating-point numbers of shape \[2, 3\]"),
    ],
)
def test_a_token_loss_of_another_shape_or_kind_is_refused_by_name(loss, message):
    logp, mask = -torch.ones(2, 3).double(), torch.ones(2, 3, dtype=torch.bool)
    batch = Batch(mask.long(), mask, *(logp,) * 5, ~mask, tokens_of_group(mask, 2))
    f = composed(next(iter(LOSSES)), "None", next(iter(KLS)), next(iter(WEIGHTS)), 0.0, 0.0)
    with pytest.raises(ValueError, match=r"objective\.policy_objective\.token_loss: " + message):
        f(scores(logp), batch, totals(batch), UNMOVED, token_loss=loss)


def test_a_step_of_grpo_has_the_values_computed_by_hand():
    """Two rows of 2 and 1 tokens, A = +1 and -1, eps 0.2, beta 0.04: eq. 3 of arXiv:2402.03300 by hand."""
    r = torch.tensor([[1.5, 0.9], [0.5, 1.0]], dtype=torch.float64)
    logp = torch.full((2, 2), math.log(0.5), dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    adv = torch.tensor([[1.0], [-1.0]]).double().expand(2, 2)
    batch = Batch(
        mask.long(),
        mask,
        *(logp - r.log(),) * 2,
        *(logp - math.log(2),) * 2,
        adv,
        ~mask,
        tokens_of_group(mask, len(mask)),
    )
    f = policy_objective(loss_aggregation=objective.sequence_mean, beta=0.04)
    signal, value, aux = signal_of(f, logp, batch)
    penalty = 0.5 - math.log(0.5) - 1
    exactly(value.item(), (((-1.2 - 0.9) / 2) + 0.8) / 2 + 0.04 * penalty)
    exactly(signal, torch.tensor([[0.0 + 0.02, -0.9 + 0.02], [2 * 0.02, 0.0]], dtype=torch.float64) / 4)
    exactly(aux["clip_high"].tolist(), [[1.0, 0.0], [0.0, 0.0]])
    exactly(aux["clip_low"].tolist(), [[0.0, 0.0], [1.0, 0.0]])
