"""Invariants of every distillation function: what a teacher's log-probs change about a step's advantages."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from batches import GARBAGE
from catalogue import bound, each
from hypothesis import given
from torch import Tensor

from grpo_fn.algo import advantage, credit, distillation
from grpo_fn.core.batch import outcome_reward
from grpo_fn.testing.steps import scored_step
from grpo_fn.testing.strategies import masks, tensors

ALL = {name: f for name, f in bound(distillation, "scored").items() if f.keywords["credit"] is None}
numbers = st.integers(-64, 64).map(lambda n: n / 32)

Step = tuple[Tensor, Tensor, Tensor]  # advantage, gap, mask, [P G T] each


def run(f, adv: Tensor, gap: Tensor, mask: Tensor, steps: int = 0) -> Tensor:
    """The function around a credit that gives these advantages."""
    everyone = torch.ones(adv.shape[:2], dtype=torch.bool)
    reward = outcome_reward(torch.zeros(adv.shape[:2], dtype=adv.dtype), everyone, {})
    return partial(f, credit=lambda scored: adv)(scored_step(reward, mask, teacher_gap=gap, steps=steps))


@st.composite
def steps(draw) -> Step:
    """Advantages, 0 where nothing was sampled, gaps and masks of P prompts with G samples of T tokens."""
    shape = tuple(draw(st.integers(1, 3)) for _ in range(3))
    mask = draw(masks(shape))
    return torch.where(mask, draw(tensors(shape, numbers)), 0.0), draw(tensors(shape, numbers)), mask


@each(ALL)
@given(steps())
def test_a_teacher_that_agrees_changes_nothing(f, step):
    adv, gap, mask = step
    torch.testing.assert_close(run(f, adv, 0.0 * gap, mask), adv, rtol=1e-12, atol=0.0)


@each(ALL)
@given(steps(), st.sampled_from(GARBAGE))
def test_values_behind_the_mask_change_nothing(f, step, garbage):
    adv, gap, mask = step
    assert torch.equal(run(f, adv, torch.where(mask, gap, garbage), mask), run(f, adv, gap, mask))


@each(ALL)
@given(steps())
def test_nothing_is_given_to_tokens_that_were_not_sampled(f, step):
    assert not run(f, *step)[~step[2]].any()


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 200))
def test_the_share_rises_to_one_over_the_warmup_and_falls_to_nothing_over_the_decay(warmup, decay, steps):
    share = partial(distillation.linear_share, warmup=warmup, decay=decay)
    assert share(warmup) == 1.0
    if steps < warmup:
        assert share(steps) == steps / warmup
    after = share(warmup + steps)
    assert after == (1.0 if not decay else pytest.approx(max(0.0, 1 - steps / decay), abs=1e-15))
    assert (share(warmup + decay + steps) == 0.0) is (decay > 0)


@each(ALL, only={"teacher_reweighted"})
@given(steps())
def test_reweighted_advantages_keep_their_sign_and_come_no_farther_than_the_clip(f, step):
    adv, _, _ = step
    got, (lam, clip) = run(f, *step), (f.keywords["lam"], f.keywords["clip"])
    assert torch.equal(got.sign(), adv.sign())
    assert ((got - adv).abs() <= lam * clip * adv.abs() + 1e-12).all()


def test_early_tokens_weigh_more_by_the_golden_values():
    """|gap| 1, 2, 1 of 4 in all; gamma 0.5: weights 1.5, 1.375, 1.125, whatever is not sampled in between."""
    gap = torch.tensor([[[1.0, 9.0, -2.0, 1.0]]], dtype=torch.float64)
    mask = torch.tensor([[[True, False, True, True]]])
    early = partial(distillation.early_teacher_gap, share=None, coef=2.0, gamma=0.5)
    got = run(early, torch.zeros_like(gap), gap, mask)
    torch.testing.assert_close(got, torch.tensor([[[3.0, 0.0, -5.5, 2.25]]], dtype=torch.float64))


def test_reweighted_advantages_have_the_golden_values():
    """A = -2 and a token twice as likely under the teacher: exp(-log 2) = 0.5, clipped to 0.8; half of it counts."""
    adv, gap = torch.tensor([[[-2.0, 2.0]]]).double(), torch.full((1, 1, 2), 2.0).double().log()
    f = partial(distillation.teacher_reweighted, share=None, lam=0.5, clip=0.2)
    got = run(f, adv, gap, torch.ones(1, 1, 2, dtype=torch.bool))
    torch.testing.assert_close(got, torch.tensor([[[-1.8, 2.2]]]).double())


# -- around a credit, and for a share of the step


@each(ALL)
@given(steps(), st.integers(0, 12))
def test_a_share_takes_that_much_of_what_the_teacher_changes(f, step, taken):
    adv, gap, mask = step
    share = partial(distillation.linear_share, warmup=4, decay=6)
    expected = adv + share(taken) * (run(f, *step) - adv)
    torch.testing.assert_close(run(partial(f, share=share), adv, gap, mask, taken), expected, rtol=1e-12, atol=1e-12)


@each(ALL)
@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_beyond_0_and_1_is_refused(f, share):
    step = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"share: got {share} after 7 steps, expected a share, 0 to 1"):
        run(partial(f, share=lambda taken: share), *step, steps=7)


@given(steps(), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_credit_of_rewards_is_the_advantage_that_the_teacher_changes(step, coef):
    _, gap, mask = step
    value = torch.arange(gap[..., 0].numel()).double().view(gap.shape[:2])
    scored = scored_step(outcome_reward(value, torch.ones_like(value, dtype=torch.bool), {}), mask, teacher_gap=gap)
    inner = partial(credit.outcome, advantage=advantage.leave_one_out)
    got = distillation.teacher_gap(scored, credit=inner, share=None, coef=coef)
    torch.testing.assert_close(got, inner(scored) + coef * torch.where(mask, gap, 0.0))
    assert scored.figures == {"teacher/share": 1.0}
