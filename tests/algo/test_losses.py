"""Token losses: what they say of their clips, and the formulas of the papers. Invariants are in test_invariants.py."""

import math
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from batches import loss_rows
from catalogue import each, token_losses
from hypothesis import given, settings
from profiles import profile, quarter

from grpo_fn.algo import losses
from grpo_fn.core.types import Batch
from grpo_fn.testing import losses as generic
from grpo_fn.testing.losses import loss_gradient

ALL = token_losses()
# A penalty on the distance from the old policy or the sampler: there is something to learn without an advantage.
# One ratio for the whole row: a token's loss moves with every logp of the row.
COSTLY = settings(max_examples=quarter())  # of each loss at each setting
FUTURE = partial(partial, losses.future_weighted, clip_low=0.2, clip_high=0.28, cap=None, weight_high=1.2, safety=4.0)


def exactly(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def one_advantage(row: Batch, adv: float) -> Batch:
    return row._replace(adv=torch.full_like(row.adv, adv))


def example(log_r, adv, mask=None, logp=-2.0, selected=None) -> tuple[torch.Tensor, Batch]:
    """A row at logp = `logp` whose old policy and sampler are `log_r` behind."""
    log_r = torch.tensor(log_r, dtype=torch.float64)
    here = torch.full_like(log_r, logp)
    old = here - log_r
    everything = torch.ones(len(log_r), dtype=torch.bool)
    mask = everything if mask is None else torch.tensor(mask)
    selected = ~everything if selected is None else torch.tensor(selected)
    adv = torch.tensor(adv, dtype=torch.float64).expand(len(log_r))
    return here, Batch(torch.zeros(len(log_r)).long(), mask, old, old, old, old, adv, selected, mask.long())


# -- what holds for each of them


@each(ALL, only={"clip_cov", "masked_ratio"})
@COSTLY
@given(loss_rows(drift=0.0))
def test_on_policy_the_gradient_is_that_of_reinforce_where_not_marked(f, row):
    exactly(loss_gradient(f, *row), -row[1].adv * (row[1].mask & ~row[1].selected))


@each({name: f for name, f in ALL.items() if f.func not in (losses.clip_cov, losses.kl_cov, losses.masked_ratio)})
@COSTLY
@given(loss_rows(), st.data())
def test_only_losses_made_for_it_look_at_the_marks(f, row, data):
    other = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(row[0]), max_size=len(row[0]))))
    logp, row = row
    assert torch.equal(f(logp, row)[0], f(logp, row._replace(selected=other))[0])


@each(ALL, only={"gmpo", "dppo_tv"})
def test_a_token_without_advantage_is_not_reported_as_clipped(f):
    _, said = f(*example([1.0, -1.0], 0.0, logp=-1.0))
    assert not said["clip_high"].any()
    assert not said["clip_low"].any()


# -- formulas


@given(loss_rows(drift=2.0), st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.1, 5.0)]))
def test_clipped_ratio_as_a_scalar_loop(row, knobs):
    logp, row = row
    low, high = knobs
    got, aux = losses.clipped_ratio(logp, row, clip_low=low, clip_high=high)
    capped, _ = losses.dual_clip(logp, row, clip_low=low, clip_high=high, cap=3.0)
    for t in range(len(logp)):
        r, a = math.exp(logp[t].item() - row.logp_old[t].item()), row.adv[t].item()
        expected = -min(r * a, min(max(r, 1 - low), 1 + high) * a) if row.mask[t] else 0.0
        assert got[t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert capped[t].item() == pytest.approx(min(expected, -3 * a) if a < 0 else expected, rel=1e-9, abs=1e-12)
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
    logp, row = example([math.log(r)], adv)
    f = partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.28)
    got, aux = f(logp, row)
    exactly(got.item(), loss)
    exactly(loss_gradient(f, logp, row).item(), gradient)
    assert [name for name in ("clip_low", "clip_high") if aux[name].item()] == ([side] if side else [])


@given(loss_rows(), st.floats(-3, 3))
def test_the_token_form_is_the_sequence_form_for_one_advantage_a_row(row, adv):
    logp, row = row[0], one_advantage(row[1], adv)
    both = [partial(f, clip_low=0.2, clip_high=0.28) for f in (losses.sequence_ratio, losses.sequence_ratio_token)]
    exactly(*(f(logp, row)[0] for f in both))
    exactly(*(loss_gradient(f, logp, row) for f in both))


def test_the_token_form_differs_from_the_sequence_form_for_one_advantage_a_token():
    logp, row = example([0.1, 0.0], 1.0)
    row = row._replace(adv=torch.tensor([1.0, -2.0], dtype=torch.float64))
    s = math.exp(0.05)
    exactly(
        loss_gradient(partial(losses.sequence_ratio, clip_low=0.2, clip_high=0.2), logp, row).tolist(), [s / 2, s / 2]
    )
    exactly(
        loss_gradient(partial(losses.sequence_ratio_token, clip_low=0.2, clip_high=0.2), logp, row).tolist(),
        [-s, 2 * s],
    )


# -- weighted losses


@pytest.mark.parametrize("log_r", [[30.0, -25.0], [-30.0, -30.0]])
def test_golden_vespo_of_policies_far_apart(log_r):
    """W is the product of the row's ratios, each of -20 to 20 nats, and itself at least 1e-8 and at most e^20."""
    logp, row = example(log_r, 2.0)
    f = partial(losses.vespo, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)
    w = max(1e-8, math.exp(sum(max(-20.0, min(20.0, x)) for x in log_r)))
    exactly(loss_gradient(f, logp, row).tolist(), [-2.0 * math.exp(3.0) * w**2.0 * math.exp(-3.0 * w)] * 2)


def test_the_future_leaves_out_ratios_above_the_cap():
    logp, row = example([0.1, 2.0], 1.0)
    knobs = {"clip_low": 0.2, "clip_high": 0.28, "half_life": 1.0, "weight_low": 0.0, "weight_high": 9.0}
    for cap, future in ((None, 0.1 + 1.0), (3.0, 0.1)):
        f = partial(losses.future_weighted, **knobs, cap=cap, safety=4.0)
        exactly(f(logp, row)[0][0].item(), -math.exp(0.1) * math.exp(future))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 400])
@pytest.mark.parametrize("decay", [1.0, 0.9, 2 ** (-1 / 32), 0.0])
def test_discounted_sums_equal_a_loop(length, decay):
    x = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    expected, behind = torch.zeros_like(x), 0.0
    for t in reversed(range(length)):
        expected[t] = behind = x[t].item() + decay * behind
    got = losses.discounted_to_go(x, decay=decay)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("f", "complaint"),
    [
        (
            partial(losses.vespo, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=0.0),
            "lambda: got 3.0 and 0.0, expected more than 0",
        ),
        (partial(losses.dro, beta=0.0), "beta: got 0.0, expected more than 0"),
        (FUTURE(half_life=0.0, weight_low=1.0), "half_life: got 0.0, expected more than 0 tokens"),
        (FUTURE(half_life=1.0, weight_low=1.1), "weight_low, weight_high: got 1.1 and 1.2, expected 0 <= low <= 1"),
        (partial(losses.dual_clip, clip_low=0.2, clip_high=0.2, cap=1.0), "cap: got 1.0, expected more than 1"),
        (partial(losses.sapo, tau_positive=0.0, tau_negative=1.0), "tau: got 0.0 and 1.0, expected more than 0"),
    ],
)
def test_knobs_that_break_the_formula_are_refused(f, complaint):
    with pytest.raises(ValueError, match=complaint):
        f(*example([0.0], 1.0))


def test_a_loss_without_diagnostics_is_checked_as_one_with_them():
    """The invariants of a user's own loss, that of `dro`: the loss alone, and with a leak from behind the mask."""

    def alone(logp, row):
        return losses.dro(logp, row, beta=3.0)[0]

    with profile(max_examples=quarter()):
        generic.check_token_loss(alone)
        with pytest.raises(AssertionError):
            generic.check_token_loss(lambda logp, row: alone(logp, row) + logp.sum())
        with pytest.raises(AssertionError, match="got a loss of shape"):
            generic.check_token_loss(lambda logp, row: alone(logp, row).sum())
