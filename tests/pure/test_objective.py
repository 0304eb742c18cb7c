"""Invariants of every token loss, of every objective composed from the catalogue, and the formulas of the papers."""

import math
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from batches import GARBAGE, batches, padded, row_of, rows, scores, spoiled, totals
from catalogue import bound, each
from hypothesis import given
from torch.func import grad, grad_and_value, jvp, vmap

from grpo_fn import kl, objective, weights
from grpo_fn.types import Batch

LOSSES = bound(objective, "logp", "row")
KLS = bound(kl, "logp", "row")
WEIGHTS = bound(weights, "mask", "totals")
REINFORCE_ON_POLICY = {"clipped_ratio", "reinforce"}
DIAGNOSTICS = {"ratio", "clip_low", "clip_high"}

betas = st.sampled_from([0.0, 0.04, 1.0])
objectives = st.builds(
    lambda loss, k, w, beta: partial(
        objective.policy_objective, token_loss=LOSSES[loss], kl=KLS[k], weigh=WEIGHTS[w], beta=beta
    ),
    *(st.sampled_from(sorted(x)) for x in (LOSSES, KLS, WEIGHTS)),
    betas,
)


def slope(f, logp, row):
    """The gradient of a row's summed loss."""
    return grad(lambda x: f(x, row)[0].sum())(logp)


def learn(f, logp, batch, denominators=None):
    """The learning signal on logp, the objective's value, the diagnostics."""
    bound_to = partial(f, batch=batch, totals=denominators or totals(batch))
    signal, (value, aux) = grad_and_value(bound_to, has_aux=True)(scores(logp))
    return signal.logp, value, aux


def exactly(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


# -- token losses, one row


@each(LOSSES)
@given(rows(), st.sampled_from(GARBAGE))
def test_what_is_behind_the_mask_has_no_say(f, row, garbage):
    (loss, aux), dirty, mask = f(*row), spoiled(*row, garbage), row[1].mask
    assert (loss[~mask] == 0).all()
    assert (slope(f, *row)[~mask] == 0).all()
    assert torch.equal(f(*dirty)[0], loss)
    assert torch.equal(slope(f, *dirty), slope(f, *row))
    assert all(torch.equal(f(*dirty)[1][name], aux[name]) for name in DIAGNOSTICS)


@each(LOSSES)
@given(rows())
def test_every_loss_reports_the_same_diagnostics(f, row):
    aux = f(*row)[1]
    assert set(aux) == DIAGNOSTICS
    assert all(x.shape == row[0].shape and x.isfinite().all() for x in aux.values())
    assert all(set(aux[side].tolist()) <= {0.0, 1.0} for side in ("clip_low", "clip_high"))


@each(LOSSES)
@given(rows())
def test_a_token_reported_as_clipped_has_no_gradient(f, row):
    aux = f(*row)[1]
    clipped = (aux["clip_low"] + aux["clip_high"]) > 0
    assert (slope(f, *row)[clipped] == 0).all()


@each(LOSSES, only={"clipped_ratio"})
@given(rows())
def test_and_a_token_without_gradient_is_reported_as_clipped(f, row):
    aux = f(*row)[1]
    learns = row[1].mask & (row[1].adv != 0) & (aux["clip_low"] + aux["clip_high"] == 0)
    wanted = torch.where(learns, -row[1].adv * aux["ratio"], 0.0)
    exactly(slope(f, *row), wanted)


@each(LOSSES)
@given(rows())
def test_without_advantage_there_is_nothing_to_learn(f, row):
    row = (row[0], row[1]._replace(adv=torch.zeros((), dtype=torch.float64)))
    assert (f(*row)[0] == 0).all()
    assert (slope(f, *row) == 0).all()


@each(LOSSES, only=REINFORCE_ON_POLICY)
@given(rows(drift=0.0))
def test_on_policy_the_gradient_is_that_of_reinforce(f, row):
    assert torch.equal(slope(f, *row), -row[1].adv * row[1].mask)


@each(LOSSES)
@given(rows(), st.integers(0, 2**31))
def test_grad_matches_jvp(f, row, seed):
    logp, row = row
    direction = torch.randn(len(logp), generator=torch.manual_seed(seed), dtype=torch.float64)
    _, forward = jvp(lambda x: f(x, row)[0].sum(), (logp,), (direction,))
    torch.testing.assert_close((slope(f, logp, row) * direction).sum(), forward, rtol=1e-10, atol=1e-10)


@each(LOSSES)
@given(batches())
def test_vmap_equals_a_loop(f, data):
    logp, batch = data
    loop = [f(x, row_of(batch, b)) for b, x in enumerate(logp)]
    loss, aux = vmap(f)(logp, batch)
    exactly(loss, torch.stack([x for x, _ in loop]))
    for name in DIAGNOSTICS:
        exactly(aux[name], torch.stack([seen[name] for _, seen in loop]))


@each(LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [-1e3, 1e3])
@pytest.mark.parametrize("adv", [-1.0, 0.0, 1.0])
def test_policies_worlds_apart_stay_finite(f, dtype, gap, adv):
    zero, there = torch.zeros(2, dtype=dtype), torch.tensor([0.0, gap], dtype=dtype)
    row = Batch(zero.long(), torch.ones(2, dtype=torch.bool), zero, there, zero, zero[0] + adv)
    assert f(zero, row)[0].isfinite().all()
    assert slope(f, zero, row).isfinite().all()


@given(rows(), st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.1, 5.0)]))
def test_clipped_ratio_as_a_scalar_loop(row, knobs):
    logp, row = row
    low, high = knobs
    got, aux = objective.clipped_ratio(logp, row, clip_low=low, clip_high=high)
    for t in range(len(logp)):
        r, a = math.exp(logp[t].item() - row.logp_old[t].item()), row.adv.item()
        wanted = -min(r * a, min(max(r, 1 - low), 1 + high) * a) if row.mask[t] else 0.0
        assert got[t].item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        assert aux["ratio"][t].item() == pytest.approx(r if row.mask[t] else 1.0, rel=1e-9)


@pytest.mark.parametrize(
    ("r", "adv", "loss", "gradient", "side"),
    [
        (1.5, 1.0, -1.28, 0.0, "clip_high"),  # already more likely than the clip allows
        (1.5, -1.0, 1.5, 1.5, None),  # more likely although it is bad: always pushed back
        (0.5, 1.0, -0.5, -0.5, None),  # less likely although it is good: always pulled up
        (0.5, -1.0, 0.8, 0.0, "clip_low"),  # already less likely than the clip allows
        (1.1, 1.0, -1.1, -1.1, None),
    ],
)
def test_the_four_corners_of_clipped_ratio(r, adv, loss, gradient, side):
    logp = torch.tensor([math.log(r) - 2], dtype=torch.float64)
    old = torch.tensor([-2.0], dtype=torch.float64)
    row = Batch(torch.zeros(1).long(), torch.ones(1, dtype=torch.bool), old, old, old, torch.tensor(adv).double())
    f = partial(objective.clipped_ratio, clip_low=0.2, clip_high=0.28)
    got, aux = f(logp, row)
    exactly(got.item(), loss)
    exactly(slope(f, logp, row).item(), gradient)
    assert [name for name in ("clip_low", "clip_high") if aux[name].item()] == ([side] if side else [])


# -- the objective, composed from everything in the catalogue


@given(objectives, batches())
def test_the_objective_is_a_sum_over_rows_also_when_b_equals_t(f, data):
    """By a loop over rows and tokens: no row's advantage may touch another row."""
    logp, batch = data
    weight = f.keywords["weigh"](batch.mask, totals(batch))
    wanted = 0.0
    for b, x in enumerate(logp):
        row = row_of(batch, b)
        token = f.keywords["token_loss"](x, row)[0] + f.keywords["beta"] * f.keywords["kl"](x, row)
        wanted += sum((w * t).item() for w, t in zip(weight[b], token, strict=True))
    assert learn(f, logp, batch)[1].item() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@given(objectives, batches(), st.data())
def test_splitting_into_micro_batches_changes_neither_loss_nor_gradient(f, data, draw):
    logp, batch = data
    cuts = sorted({0, len(logp), *draw.draw(st.lists(st.integers(0, len(logp)), max_size=3))})
    parts = [slice(a, b) for a, b in pairwise(cuts)]
    whole, value, aux = learn(f, logp, batch)
    micro = [learn(f, logp[s], Batch(*(x[s] for x in batch)), totals(batch)) for s in parts]
    exactly(torch.cat([signal for signal, _, _ in micro]), whole)
    exactly(sum(v for _, v, _ in micro), value)
    for name, x in aux.items():
        exactly(torch.cat([seen[name] for _, _, seen in micro]), x)


@given(objectives, batches(), st.integers(1, 3))
def test_padding_columns_change_nothing(f, data, extra):
    signal, value, _ = learn(f, *data)
    wide, same, _ = learn(f, *padded(*data, extra))
    exactly(wide[:, :-extra], signal)
    exactly(same, value)
    assert (wide[:, -extra:] == 0).all()


@given(objectives, batches(), st.sampled_from(GARBAGE))
def test_garbage_behind_the_mask_reaches_neither_loss_nor_gradient(f, data, garbage):
    signal, value, _ = learn(f, *data)
    dirty, same, _ = learn(f, *spoiled(*data, garbage))
    assert torch.equal(dirty, signal)
    assert torch.equal(same, value)
    assert (signal[~data[1].mask] == 0).all()


@given(objectives, batches(), st.sampled_from(GARBAGE))
def test_without_beta_the_reference_may_hold_anything(f, data, garbage):
    f = partial(f, beta=0.0)
    logp, batch = data
    signal, value, _ = learn(f, logp, batch)
    blind, same, _ = learn(f, logp, batch._replace(logp_ref=torch.full_like(logp, garbage)))
    assert torch.equal(blind, signal)
    assert torch.equal(same, value)


@given(objectives, batches())
def test_entropy_is_read_and_not_optimised(f, data):
    logp, batch = data
    given_scores = scores(logp)
    signal, (_, aux) = grad_and_value(partial(f, batch=batch, totals=totals(batch)), has_aux=True)(given_scores)
    assert (signal.entropy == 0).all()
    assert torch.equal(aux["entropy"], given_scores.entropy)


@given(objectives, batches())
def test_diagnostics_are_per_token_and_detached(f, data):
    logp, batch = data
    leaf = logp.clone().requires_grad_()
    _, aux = f(scores(leaf), batch=batch, totals=totals(batch))
    assert set(aux) == {*DIAGNOSTICS, "kl", "entropy"}
    assert all(x.shape == logp.shape and not x.requires_grad for x in aux.values())
    exactly(aux["kl"], vmap(kl.k3)(logp, batch))


@given(objectives, batches())
def test_beta_weighs_the_penalty_linearly(f, data):
    """signal(beta) = signal(0) + beta (signal(1) - signal(0))."""
    zero, one = (learn(partial(f, beta=b), *data)[0] for b in (0.0, 1.0))
    torch.testing.assert_close(learn(partial(f, beta=0.3), *data)[0], zero + 0.3 * (one - zero), rtol=1e-9, atol=1e-9)


@given(objectives, batches())
def test_a_batch_without_a_sampled_token_teaches_nothing(f, data):
    logp, batch = data
    signal, value, _ = learn(f, logp, batch._replace(mask=torch.zeros_like(batch.mask)))
    assert value == 0
    assert (signal == 0).all()


@given(objectives, batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(f, data, random):
    logp, batch = data
    order = list(range(len(logp)))
    random.shuffle(order)
    signal, value, _ = learn(f, logp, batch)
    shuffled, same, _ = learn(f, logp[order], Batch(*(x[order] for x in batch)))
    exactly(shuffled, signal[order])
    exactly(same, value)


def test_grpo_golden_step():
    """Two rows of 2 and 1 tokens, A = +1 and -1, eps 0.2, beta 0.04: eq. 3 of arXiv:2402.03300 by hand."""
    r = torch.tensor([[1.5, 0.9], [0.5, 1.0]], dtype=torch.float64)
    logp = torch.full((2, 2), math.log(0.5), dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    batch = Batch(mask.long(), mask, *(logp - r.log(),) * 2, logp - math.log(2), torch.tensor([1.0, -1.0]).double())
    f = partial(
        objective.policy_objective,
        token_loss=partial(objective.clipped_ratio, clip_low=0.2, clip_high=0.2),
        kl=kl.k3,
        weigh=weights.sequence_mean,
        beta=0.04,
    )
    signal, value, aux = learn(f, logp, batch)
    penalty = 0.5 - math.log(0.5) - 1
    exactly(value.item(), (((-1.2 - 0.9) / 2) + 0.8) / 2 + 0.04 * penalty)
    exactly(signal, torch.tensor([[0.0 + 0.02, -0.9 + 0.02], [2 * 0.02, 0.0]], dtype=torch.float64) / 4)
    exactly(aux["clip_high"].tolist(), [[1.0, 0.0], [0.0, 0.0]])
    exactly(aux["clip_low"].tolist(), [[0.0, 0.0], [1.0, 0.0]])
