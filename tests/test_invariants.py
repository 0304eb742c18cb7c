"""What every algorithm holds, whatever its functions and their knobs: read this file first.

Each section is about one kind of function and finds all of them by their signature (helpers/catalogue.py): advantages,
KL estimators, weights of tokens, token losses, objectives composed of these, and whole steps of every preset. Examples
are drawn by hypothesis, in float64 unless a test says otherwise. Invariants that a user's own function should hold as
well are in grpo_fn/testing. Formulas of papers and golden numbers stand in tests/algo, one file a module;
tests/algo/test_unbiased.py proves by enumeration what other estimators estimate, and tests/shell/policy/test_fsdp.py
compares the gradients of a sharded policy with those of the oracle, over ranks.
"""

import math
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from batches import GARBAGE, batches, loss_rows, totals, with_garbage, with_padding
from catalogue import bound, each
from enumerated import expected, expected_in, policy, token_kl
from hypothesis import assume, given, settings
from objectives import KLS, LOSSES, WEIGHTS, objectives, signal_of
from profiles import profile, quarter
from steps import PRESETS, Learned, learn, preset, rich_step, steps
from torch import Tensor
from torch.func import grad

from grpo_fn.algo import advantage, losses
from grpo_fn.core.types import Batch
from grpo_fn.testing import advantages, aggregations, groups, kls
from grpo_fn.testing import losses as loss_invariants
from grpo_fn.testing.losses import loss_gradient

ADVANTAGES = bound(advantage, "reward", "valid")
# -- advantages of one group: zero mean, shift, scale, permutation, invalid samples, bounds

ZERO_SUM = {"group_normalized", "mean_centered", "leave_one_out", "pass_at_k", "max_rl"}
UNBOUNDED = {"leave_one_out_others_std"}  # as published; bounded for rewards of 0 and 1
SHIFT_INVARIANT = {"group_normalized", "mean_centered", "leave_one_out", "leave_one_out_normalized"}
SCALE_INVARIANT = {"group_normalized", "leave_one_out_normalized"}  # as eps -> 0
SCALE_EQUIVARIANT = {"mean_centered", "leave_one_out"}
# The largest |A| of n valid samples, whatever their rewards; those not here are as large as the rewards' range.
BOUND = {
    "group_normalized": lambda n, ddof, **_: math.sqrt((n - 1) * (n - ddof) / n),
    "leave_one_out_normalized": lambda n, **_: n / math.sqrt(n - 1),
    "pass_at_k": lambda n, k, **_: math.sqrt(max(0.0, n / k - 1)),
    "max_rl": lambda n, **_: n - 1,
}
number = st.floats(-100, 100, width=32)


def group(rewards, valid=None) -> tuple[Tensor, Tensor]:
    value = torch.tensor(rewards, dtype=torch.float64)
    return value, torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)


@st.composite
def spread_out(draw):
    """A fully valid group whose rewards differ by enough to speak of a scale."""
    rewards = draw(st.lists(number, min_size=2, max_size=8))
    assume(max(rewards) - min(rewards) > 1)
    return group(rewards)


def close(got: Tensor, expected: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)


@each(ADVANTAGES)
@pytest.mark.parametrize("invariant", advantages.INVARIANTS, ids=lambda invariant: invariant.__name__)
def test_an_advantage_holds_what_a_step_expects_of_one(f, invariant):
    bounded = invariant is not advantages.advantages_are_bounded or f.func.__name__ not in UNBOUNDED
    with profile(max_examples=quarter()):
        invariant(f, number if bounded else st.sampled_from([0.0, 1.0]))


@each(ADVANTAGES, only=ZERO_SUM)
@given(groups())
def test_the_advantages_of_a_group_sum_to_zero(f, g):
    out = f(*g)
    assert abs(out.sum().item()) <= 1e-9 * (1 + out.abs().max().item())


@each(ADVANTAGES, only=SHIFT_INVARIANT)
@given(spread_out(), number)
def test_shifting_every_reward_changes_nothing(f, g, shift):
    reward, valid = g
    close(f(reward + shift, valid), f(reward, valid))


@each(ADVANTAGES, only=SCALE_EQUIVARIANT)
@given(groups(), st.floats(1e-3, 1e3))
def test_scaling_every_reward_scales_the_advantages(f, g, scale):
    reward, valid = g
    close(f(reward * scale, valid), f(reward, valid) * scale)


@each(ADVANTAGES, only=SCALE_INVARIANT)
@given(spread_out(), st.floats(1, 1e6))
def test_scaling_every_reward_changes_nothing_but_eps(f, g, scale):
    """std is at least 0.3 here, so eps may move an advantage by its ratio to that and no more."""
    reward, valid = g
    before = f(reward, valid)
    assert ((f(reward * scale, valid) - before).abs() <= before.abs() * f.keywords["eps"] / 0.25 + 1e-9).all()


@each(ADVANTAGES, only=SCALE_INVARIANT)
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_squares_neither_overflow_nor_vanish_in_float32(f, scale):
    """eps is taken along with the unit, so only the arithmetic is on trial."""
    base = torch.tensor([0.0, 1.0, 1.0, 3.0])
    valid = torch.ones(4, dtype=torch.bool)
    knobs = {**f.keywords, "eps": f.keywords["eps"] * scale}
    close(f.func(base * scale, valid, **knobs), f(base, valid), 1e-5)


@each(ADVANTAGES)
def test_a_constant_group_is_exactly_zero_whatever_float32_holds(f):
    """The ulp between sum/G and R, divided by a tiny std, is a fault peers have."""
    advantages.constant_group_is_exactly_zero(f, st.floats(width=32, allow_nan=False, allow_infinity=False))


@each(ADVANTAGES, only=set(BOUND))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(groups(least=2), st.sampled_from([1.0, 1e-30, 1e-6, 1e6]))
def test_advantages_stay_bounded_whatever_the_rewards(f, dtype, g, unit):
    reward, valid = g
    n = int(valid.sum())
    if n > 1:
        limit = BOUND[f.func.__name__](n, **f.keywords)
        assert f((reward * unit).to(dtype), valid).abs().max() <= limit * (1 + 1e-5)


@each(ADVANTAGES, only=set(BOUND))
@given(st.floats(0.0, 100, width=32), st.integers(2, 64), st.integers(1, 3))
def test_rewards_that_differ_by_rounding_alone_stay_bounded(f, value, size, ulps):
    """The std of such a group is pure rounding, and eps may be far below it."""
    reward = torch.full((size,), value, dtype=torch.float32)
    for _ in range(ulps):
        reward[0] = torch.nextafter(reward[0], torch.tensor(torch.inf))
    limit = BOUND[f.func.__name__](size, **f.keywords)
    assert f(reward, torch.ones(size, dtype=torch.bool)).abs().max() <= limit * (1 + 1e-5)


# -- estimates of the KL: non-negative, zero between equal policies, value and gradient those of the KL

NEVER_NEGATIVE = {"k2", "k3", "k3_ratio"}
seeds = st.integers(0, 2**31)


def exactly(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@each(KLS)
@pytest.mark.parametrize("invariant", kls.INVARIANTS, ids=lambda invariant: invariant.__name__)
def test_a_kl_holds_what_an_objective_expects_of_one(f, invariant):
    with profile(max_examples=quarter()):
        invariant(f)


@each(KLS, only=NEVER_NEGATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kl_is_not_negative_by_rounding_close_to_the_reference(f, dtype):
    """exp(x) - x - 1 is, in 7 % of these cases in float32: its three terms cancel."""
    x = torch.logspace(-9, 0, 500, dtype=dtype)
    ref = torch.cat([-x, x])
    zero = torch.zeros_like(ref)
    row = Batch(
        zero.long(), torch.ones_like(ref, dtype=torch.bool), zero, zero, ref, ref, zero, zero.bool(), zero.long()
    )
    assert (f(zero, row) >= 0).all()
    assert (ref.exp() - ref - 1 < 0).any()


@each(KLS, only=NEVER_NEGATIVE)
@given(loss_rows())
def test_a_kl_is_zero_only_where_the_policies_agree(f, row):
    apart = row[1].mask & ((row[1].logp_ref - row[0]).abs() > 1e-6)
    assert (f(*row)[apart] > 0).all()


@each(KLS, only={"k1_ratio", "k3", "k3_ratio"})
@given(seeds, seeds)
def test_on_policy_the_value_is_the_kl(f, a, b):
    theta, ref = policy(a), policy(b)
    exactly(expected(f, theta, ref, theta), token_kl(theta, ref, theta))


@each(KLS, only={"k2", "k1_ratio", "k3_ratio"})
@given(seeds, seeds)
def test_on_policy_the_gradient_is_the_kls(f, a, b):
    theta, ref = policy(a), policy(b)
    exactly(grad(expected_in(f, ref, theta))(theta), grad(lambda x: token_kl(x, ref, theta))(theta))


@each(KLS, only={"k1_ratio", "k3_ratio"})
@given(seeds, seeds, seeds)
def test_off_policy_value_and_gradient_are_the_kls(f, a, b, c):
    theta, ref, old = policy(a), policy(b), policy(c)
    exactly(expected(f, theta, ref, old), token_kl(theta, ref, old))
    exactly(grad(expected_in(f, ref, old))(theta), grad(lambda x: token_kl(x, ref, old))(theta))


# -- weights of tokens: only what was sampled weighs, and the parts of a step add up


@each(WEIGHTS)
@pytest.mark.parametrize("invariant", aggregations.INVARIANTS, ids=lambda invariant: invariant.__name__)
def test_a_weighting_holds_what_an_objective_expects_of_one(f, invariant):
    invariant(f)


# -- token losses: masked tokens, clipped tokens, and what they are on-policy

# A penalty on the distance from the old policy or the sampler: there is something to learn without an advantage.
PENALISED = {name for name, f in LOSSES.items() if f.keywords.get("kappa") or {"coef", "beta"} & set(f.keywords)}
# One ratio for the whole row: a token's loss moves with every logp of the row.
WHOLE_ROW = {"sequence_ratio", "gmpo"}
REINFORCE_PER_TOKEN = {name.split("(")[0] for name in LOSSES} - WHOLE_ROW - {"clip_cov", "masked_ratio"}
COSTLY = settings(max_examples=quarter())  # of each loss at each setting
UNPENALISED = {name: f for name, f in LOSSES.items() if name not in PENALISED}


def one_advantage(row: Batch, adv: float) -> Batch:
    return row._replace(adv=torch.full_like(row.adv, adv))


@each(LOSSES)
@pytest.mark.parametrize("invariant", loss_invariants.INVARIANTS, ids=lambda invariant: invariant.__name__)
def test_a_token_loss_holds_what_an_objective_expects_of_one(f, invariant):
    with profile(max_examples=quarter()):
        invariant(f)


@each(LOSSES, only=REINFORCE_PER_TOKEN)
@COSTLY
@given(loss_rows(drift=0.0))
def test_on_policy_the_gradient_is_that_of_reinforce(f, row):
    exactly(loss_gradient(f, *row), -row[1].adv * row[1].mask)


@each(LOSSES, only=WHOLE_ROW)
@COSTLY
@given(loss_rows(drift=0.0), st.floats(-3, 3))
def test_on_policy_the_gradient_is_that_of_reinforce_for_one_advantage_a_row(f, row, adv):
    logp, row = row[0], one_advantage(row[1], adv)
    exactly(loss_gradient(f, logp, row), -row.adv * row.mask)


@each(LOSSES)
@COSTLY
@given(loss_rows())
def test_the_logp_of_a_clipped_token_moves_nothing_except_a_penalty(f, row):
    """Column t of the Jacobian: the gradient that reaches the policy. One A a row, where it is shared by all."""
    logp, row = row
    if f.func is losses.sequence_ratio:
        row = one_advantage(row, row.adv[0].item())
    clipped = sum(f(logp, row)[1][side] for side in ("clip_low", "clip_high")) > 0
    assert torch.equal(loss_gradient(f, logp, row)[clipped], loss_gradient(f, logp, one_advantage(row, 0.0))[clipped])


@each(UNPENALISED)
@COSTLY
@given(loss_rows(drift=20.0))
def test_without_advantage_there_is_nothing_to_learn(f, row):
    row = (row[0], one_advantage(row[1], 0.0))
    assert (f(*row)[0] == 0).all()
    assert (loss_gradient(f, *row) == 0).all()


# -- objectives composed of these: permutation, masking, partition of the rows


@given(objectives, batches(), st.data())
def test_splitting_into_micro_batches_changes_neither_loss_nor_gradient(f, data, draw):
    logp, batch = data
    cuts = sorted({0, len(logp), *draw.draw(st.lists(st.integers(0, len(logp)), max_size=3))})
    parts = [slice(a, b) for a, b in pairwise(cuts)]
    whole, value, aux = signal_of(f, logp, batch)
    micro = [signal_of(f, logp[s], Batch(*(x[s] for x in batch)), totals(batch)) for s in parts]
    exactly(torch.cat([signal for signal, _, _ in micro]), whole)
    exactly(sum(v for _, v, _ in micro), value)
    for name, x in aux.items():
        exactly(torch.cat([seen[name] for _, _, seen in micro]), x)


@given(objectives, batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(f, data, random):
    logp, batch = data
    order = list(range(len(logp)))
    random.shuffle(order)
    signal, value, _ = signal_of(f, logp, batch)
    shuffled, same, _ = signal_of(f, logp[order], Batch(*(x[order] for x in batch)))
    exactly(shuffled, signal[order])
    exactly(same, value)


@given(objectives, batches(), st.sampled_from(GARBAGE))
def test_garbage_behind_the_mask_reaches_neither_loss_nor_gradient(f, data, garbage):
    signal, value, _ = signal_of(f, *data)
    dirty, same, _ = signal_of(f, *with_garbage(*data, garbage))
    assert torch.equal(dirty, signal)
    assert torch.equal(same, value)
    assert (signal[~data[1].mask] == 0).all()


@given(objectives, batches(), st.integers(1, 3))
def test_padding_columns_change_nothing(f, data, extra):
    signal, value, _ = signal_of(f, *data)
    wide, same, _ = signal_of(f, *with_padding(*data, extra))
    exactly(wide[:, :-extra], signal)
    exactly(same, value)
    assert (wide[:, -extra:] == 0).all()


@given(objectives, batches())
def test_a_batch_without_a_sampled_token_teaches_nothing(f, data):
    logp, batch = data
    signal, value, _ = signal_of(f, logp, batch._replace(mask=torch.zeros_like(batch.mask)))
    assert value == 0
    assert (signal == 0).all()


@given(objectives, batches())
def test_beta_weighs_the_penalty_linearly(f, data):
    """signal(beta) = signal(0) + beta (signal(1) - signal(0))."""
    zero, one = (signal_of(partial(f, beta=b), *data)[0] for b in (0.0, 1.0))
    torch.testing.assert_close(
        signal_of(partial(f, beta=0.3), *data)[0], zero + 0.3 * (one - zero), rtol=1e-9, atol=1e-9
    )


# -- whole steps of every preset: micro-batches and ranks judge one step


SOME = settings(max_examples=max(3, settings.default.max_examples // 25))
FEW = settings(max_examples=max(2, settings.default.max_examples // 30))


def learned_exactly(got: Learned, expected: Learned) -> None:
    torch.testing.assert_close(got.signals, expected.signals, rtol=1e-12, atol=1e-12)
    assert got.objective == pytest.approx(expected.objective, rel=1e-12, abs=1e-12)


def in_piles(random, batch: Batch, micro_tokens: int, devices: int) -> list[Tensor]:
    """A split that looks at nothing: every row on any of up to four piles, the piles in any order."""
    rows = list(range(len(batch.tokens)))
    random.shuffle(rows)
    ends = sorted(random.choices(range(len(rows) + 1), k=3))
    piles = [rows[a:b] for a, b in zip([0, *ends], [*ends, len(rows)], strict=True)]
    return [torch.tensor(pile, dtype=torch.long) for pile in piles]


@pytest.mark.parametrize("name", PRESETS)
@SOME
@given(step=steps(st.integers(1, 4)), random=st.randoms(use_true_random=False), epochs=st.integers(1, 2))
def test_any_rows_in_any_order_may_share_a_micro_batch(name, step, random, epochs):
    """Also in a second pass over the rollout, when the policy has moved. An empty micro-batch is nothing, too."""
    learned = partial(learn, preset(name), step, epochs=epochs, lr=0.1)
    learned_exactly(learned(cut=partial(in_piles, random)), learned())


@pytest.mark.parametrize("name", PRESETS)
@FEW
@given(
    seed=st.integers(0, 2**32),
    minibatches=st.integers(1, 2),
    each=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_the_order_of_prompts_within_a_minibatch_changes_nothing(name, seed, minibatches, each, random):
    """One update a minibatch, whatever micro-batches it comes in; which prompts it has does matter."""
    how, step = preset(name), rich_step(seed, minibatches * each, group_size=3)
    runs = [[*range(m * each, (m + 1) * each)] for m in range(minibatches)]
    for run in runs:
        random.shuffle(run)
    learned = partial(learn, how, step, minibatches=minibatches, lr=0.1)
    learned_exactly(learned(only=[p for run in runs for p in run], micro_tokens=7), learned())
    assert len(learned().signals) == minibatches
