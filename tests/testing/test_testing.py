"""The test kit: every invariant lets the sound pass, catches what it is there for, and says so."""

import inspect
import math
from functools import partial

import pytest
import rewards_on_trial as trial
import torch
from hypothesis import given
from profiles import profile, quarter

from grpo_fn import testing
from grpo_fn.algo import advantage, objective
from grpo_fn.config import load_config
from grpo_fn.core.batch import check_rollout
from grpo_fn.rewards import format
from grpo_fn.rewards import format as repetition
from grpo_fn.rewards.math import correct, lenient
from grpo_fn.shell.reward_workers.reward_pool import RewardError
from grpo_fn.testing import advantages, aggregations, harness, kls
from grpo_fn.testing import losses as token_losses


@pytest.fixture
def unshrunk():
    """Shrinking a failure that is expected would only take time."""
    with profile(phases=harness.UNSHRUNK, max_examples=200):
        yield


@pytest.fixture
def fewer():
    """Examples: each costs two processes a call, or a gradient."""
    with profile(max_examples=quarter()):
        yield


# -- advantages


def plain_normalized(reward, valid):
    """The formula as written: the ulp between sum/G and R, over a tiny std."""
    dev = torch.where(valid, reward - reward[valid].mean(), 0.0)
    return dev / (dev.square().mean().sqrt() + 1e-9)


def counts_the_invalid(reward, valid):
    known = torch.where(valid, reward, 0.0)
    return torch.where(valid, known - known.mean(), 0.0) * (known.amax() > known.amin())


def against_the_first(reward, valid):
    return torch.where(valid, reward - torch.where(valid, reward, 0.0)[valid.int().argmax()], 0.0)


def others_std(reward, valid):
    """Leave-one-out in mean and std: without bound where all the others are equal."""
    others = (valid.sum() - 1).clamp(min=1)
    dev = advantage.mean_centered(reward, valid)
    mean, square = (dev.sum() - dev) / others, (dev.square().sum() - dev.square()) / others
    return dev / ((square - mean**2).clamp(min=0).sqrt() + 1e-6)


def looks_at_the_data(reward, valid):
    return advantage.mean_centered(reward, valid) if bool(valid.any()) else torch.zeros_like(reward)


def keeps_the_invalid(reward, valid):
    return advantage.mean_centered(reward.nan_to_num(), torch.ones_like(valid))


def hides_what_is_odd(reward, valid):
    return advantage.mean_centered(reward, valid).nan_to_num(0.0, 0.0, 0.0)


# -- token losses


def seen(logp, row, **also):
    zero = torch.zeros_like(logp)
    return {"ratio": zero + 1, "clip_low": zero, "clip_high": zero, **also}


def sound(logp, row):
    return torch.where(row.mask, -row.adv * torch.where(row.mask, logp, 0.0), 0.0), seen(logp, row)


def masks_the_output_only(logp, row):
    """The value is right, and the gradient is 0 * inf."""
    return torch.where(row.mask, -row.adv * (logp - row.logp_old).exp(), 0.0), seen(logp, row)


def branches(logp, row):
    return sound(logp, row) if bool(row.mask.any()) else (torch.zeros_like(logp), seen(logp, row))


def overflows(logp, row):
    ratio = torch.where(row.mask, logp - row.logp_old, 0.0).exp()
    return torch.where(row.mask, -row.adv * ratio, 0.0), seen(logp, row)


def says_what_no_metric_has(logp, row):
    return sound(logp, row)[0], {"ratio": torch.ones_like(logp), "novelty": torch.ones_like(logp)}


def says_nan(logp, row):
    return sound(logp, row)[0], seen(logp, row, ratio=torch.where(row.mask, 1.0, torch.nan))


def says_how_wide_it_is(logp, row):
    return sound(logp, row)[0], seen(logp, row, ratio=torch.full_like(logp, len(logp)))


class _Twice(torch.autograd.Function):
    """x -> x with a backward pass that is wrong by a factor of two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.clone()


def wrong_in_float32(logp, row):
    loss, diagnostics = sound(logp, row)
    return loss * (1.01 if logp.dtype == torch.float32 else 1.0), diagnostics


def wrong_backward(logp, row):
    return sound(_Twice.apply(logp), row)


# -- KL estimators


def plain_k3(logp, row):
    x = torch.where(row.mask, row.logp_ref - logp, 0.0)
    return x.exp() - x - 1


def never_zero(logp, row):
    return torch.where(row.mask, objective.k2(logp, row) + 1e-9, 0.0)


# -- weights


def by_its_own_tokens(batch, totals):
    return batch.mask / batch.mask.sum().double().clamp(min=1)


def by_its_width(batch, totals):
    return batch.mask / (totals.rows.clamp(min=1) * batch.mask.shape[1])


def weighs_padding(batch, totals):
    return torch.ones(batch.mask.shape, dtype=torch.float64) / totals.tokens.clamp(min=1)


def grows_with_the_ranks(batch, totals):
    return batch.mask * totals.rows


FAULTS = [
    (plain_normalized, advantages.constant_group_is_exactly_zero),
    (counts_the_invalid, advantages.invalid_samples_do_not_affect_others),
    (against_the_first, advantages.order_does_not_matter),
    (others_std, advantages.advantages_are_bounded),
    (looks_at_the_data, advantages.groups_do_not_leak),
    (keeps_the_invalid, advantages.finite_and_zero_where_invalid),
    (hides_what_is_odd, advantages.a_reward_that_is_not_finite_shows),
    (masks_the_output_only, token_losses.what_is_behind_the_mask_has_no_say),
    (says_how_wide_it_is, token_losses.padding_changes_nothing),
    (branches, token_losses.rows_do_not_leak),
    (overflows, token_losses.policies_worlds_apart_stay_finite),
    (says_what_no_metric_has, token_losses.reports_known_diagnostics),
    (says_nan, token_losses.reports_known_diagnostics),
    (wrong_in_float32, token_losses.float32_gives_what_float64_gives),
    (wrong_backward, token_losses.reverse_and_forward_gradient_agree),
    (plain_k3, token_losses.policies_worlds_apart_stay_finite),
    (never_zero, kls.agreeing_policies_cost_exactly_nothing),
    (by_its_own_tokens, aggregations.parts_of_a_step_weigh_what_they_weigh_in_the_whole),
    (by_its_width, aggregations.padding_changes_no_weight),
    (weighs_padding, aggregations.only_sampled_tokens_weigh),
    (grows_with_the_ranks, aggregations.totals_of_more_ranks_weigh_less),
]


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize(("faulty", "invariant"), FAULTS)
def test_a_faulty_function_is_caught_by_the_invariant_that_it_breaks(faulty, invariant):
    drawn = (testing.finite_floats(),) if invariant in advantages.INVARIANTS else ()
    with pytest.raises((AssertionError, RuntimeError)):
        invariant(faulty, *drawn)


# -- rewards


@pytest.mark.slow_after(5)
@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize(
    ("reward", "complaint"),
    [
        (trial.returns_nan, "expected a finite number or None"),
        (trial.needs_meta, "KeyError: 'tests'"),
        (trial.remembers, r"for the same rows, expected the same|in another process and order"),
        (trial.takes_the_time, r"for the same rows, expected the same|in another process and order"),
        (trial.salted, "in another process and order"),
        (partial(trial.scaled, by=2), r"got 2.0 on .* expected within \(-1, 1\), or None"),
    ],
)
def test_an_unsound_reward_is_caught_and_the_complaint_says_why(reward, complaint):
    with pytest.raises((AssertionError, RewardError), match=complaint):
        testing.check_reward(reward, bounds=(-1, 1) if isinstance(reward, partial) else (-math.inf, math.inf))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (trial.sleeps, "((((("),
        (trial.computes, "9^{9"),
        (trial.exits, "_exit"),
    ],
)
def test_a_reward_that_a_text_can_hang_bloat_or_end_is_caught_and_the_text_is_shown_in_brief(reward, text):
    with pytest.raises(AssertionError, match=r"got (late|worker died).* on Row\(.*expected a number or None") as caught:
        testing.check_reward(reward, deadline=1.0)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("reward", [lambda problem, completion: 1.0, partial(lambda p, c, *, by: by, by=1.0)])
def test_a_reward_without_a_name_is_caught(reward):
    with pytest.raises(AssertionError, match="expected a function that a module defines"):
        testing.check_reward(reward)


def test_the_defaults_are_the_deadline_and_the_memory_of_a_run():
    pool = load_config(["run/arithmetic.gin"], []).root.knobs["rewards"].knobs["pool"].knobs
    defaults = inspect.signature(testing.check_reward).parameters
    assert defaults["deadline"].default == pool["timeout_per_completion"]
    assert defaults["memory_mb"].default == pool["memory_mb"]


TAGS = ("think", "answer")
OVERLONG = partial(format.soft_overlong_punishment, max_length=2048, cache_length=512)
COSINE = partial(
    format.cosine_length,
    verdict=format.boxed,
    max_length=2048,
    right_empty=2.0,
    right_full=1.0,
    wrong_empty=-10.0,
    wrong_full=0.0,
    exceeded=-10.0,
)


@pytest.mark.slow_after(2)
@pytest.mark.usefixtures("fewer")
@pytest.mark.parametrize(
    ("reward", "bounds"),
    [
        (format.boxed, (0, 1)),
        (partial(format.answer_tags, tags=TAGS), (0, 1)),
        (partial(format.answer_tags_by_prompt, tags=TAGS), (0, 1)),
        (OVERLONG, (-1, 0)),
        (COSINE, (-10, 2)),
        (partial(repetition.repeated_ngrams, ngram=3, max_penalty=0.5), (-0.5, 0)),
        (correct, (0, 1)),
        (lenient, (0, 1)),
    ],
)
def test_the_rewards_of_the_package_are_fit_for_a_run(reward, bounds):
    testing.check_reward(reward, bounds=bounds)


# -- what is drawn


@given(testing.rollouts())
def test_a_drawn_rollout_is_one_that_a_sampler_may_return(rollout):
    check_rollout(rollout)
