"""The lens shows what each algorithm would have done, and the shares of rows are shares of the step."""

from contextlib import nullcontext
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from batches import dealt
from fakes import WORDS, TablePolicy, TableSampler, problem, table_scores
from hypothesis import given
from strategies import tensors
from torch.func import grad

from grpo_fn.algo import credit, losses, objective
from grpo_fn.algo import masking as filters
from grpo_fn.algo.advantage import group_normalized, mean_centered
from grpo_fn.algo.step import AT_THE_START, Algorithm, grpo_step
from grpo_fn.core import prng
from grpo_fn.core.types import Gains, Scores
from grpo_fn.lab import presets
from grpo_fn.rewards.combine import combine, score_serially

UNMOVED = Gains(kl=1.0, entropy=1.0)
TABLE = torch.tensor([0.3, -0.2, 0.0, 0.5, -0.4, 0.2])
KEY = prng.key(5, device="cpu")


def algorithm(
    token_loss=losses.reinforce, advantage=mean_centered, loss_aggregation=objective.token_mean, **changes
) -> Algorithm:
    f = partial(
        objective.policy_objective,
        token_loss=token_loss,
        importance_correction=None,
        kl=objective.k2,
        loss_aggregation=loss_aggregation,
        beta=0.1,
        entropy_bonus=0.0,
    )
    plain = {"objective": f, "credit": partial(credit.outcome, advantage=advantage)}
    numbers = {"prompts": 3, "group_size": 4}
    return Algorithm(**{**plain, **numbers, **changes})


OTHERS = {
    "plain": algorithm(),
    "clipped": algorithm(partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.2)),
    "normalized": algorithm(
        advantage=partial(group_normalized, eps=1e-4, ddof=1), loss_aggregation=objective.sequence_mean
    ),
    "finished": algorithm(filters=[filters.drop_truncated]),
}


def likes_two(problem, completion) -> float:
    return completion.text.split().count("2") / completion.length


def one_step(algo: Algorithm):
    """A policy, and what it saw in a step of `algo`."""
    cut = partial(dealt, micro_tokens=10**6, devices=1)
    policy = TablePolicy(TABLE, lr=0.5, reference_table=torch.zeros(WORDS), cut=cut)
    experience, _, _ = grpo_step(
        policy,
        TableSampler(policy),
        lambda first, count: [problem(i, "?") for i in range(first, first + count)],
        AT_THE_START,
        key=KEY,
        algo=algo,
        reward=partial(combine, parts=[likes_two], weights=[1.0], score=score_serially),
        span=lambda name: nullcontext(),
        teacher=None,
        demonstrations=None,
    )
    return policy, experience


@pytest.mark.parametrize("name", list(OTHERS))
def test_a_view_is_the_signal_that_a_step_sends_back(name):
    policy, seen = one_step(OTHERS[name])
    old, ref = seen.batch.logp_old, seen.batch.logp_ref
    view = presets.view(OTHERS[name], seen.groups, old, ref, old, None, UNMOVED, KEY, steps=0)
    scores = table_scores(TABLE.double(), view.batch.tokens, seen.groups.rollout.mask)
    (signal,) = presets.signals(scores, {name: view}, UNMOVED)
    sent, shown = policy.signals[0].logp, policy.seen[0]
    order = [
        next(b for b, row in enumerate(view.batch.tokens) if same_row(view.batch, b, shown, i))
        for i in range(len(sent))
    ]
    width = shown.tokens.shape[1]
    assert not signal[sorted({*range(12)} - {*order})].any()
    torch.testing.assert_close(signal[order][:, :width], sent, rtol=1e-9, atol=1e-12)


def same_row(batch, b, shown, i) -> bool:
    width = shown.tokens.shape[1]
    pairs = ((batch.tokens, shown.tokens), (batch.mask, shown.mask), (batch.adv, shown.adv))
    return all(torch.equal(x[b, :width], y[i]) for x, y in pairs)


def test_one_vmapped_call_is_a_gradient_for_each_view():
    _, seen = one_step(OTHERS["plain"])
    old, ref = seen.batch.logp_old, seen.batch.logp_ref
    views = {
        name: presets.view(algo, seen.groups, old, ref, old, None, UNMOVED, KEY, steps=0)
        for name, algo in OTHERS.items()
    }
    drift = 0.5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    scores = Scores(torch.where(seen.groups.rollout.mask, old + drift, 0.0), torch.zeros_like(old))
    got = presets.signals(scores, views, UNMOVED)
    assert got.shape == (len(OTHERS), *old.shape)
    for signal, view in zip(got, views.values(), strict=True):
        loss = partial(view.objective, batch=view.batch, totals=view.totals, gains=UNMOVED)
        expected = grad(lambda s, loss=loss: loss(s)[0])(scores).logp
        torch.testing.assert_close(signal, expected)
    assert not torch.allclose(got[0], got[1])


signals = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: tensors(shape, st.one_of(st.just(0.0), st.floats(-3, 3)))
)


@given(signals)
def test_cosines_are_a_symmetric_matrix_in_minus_one_to_one(signal):
    got = presets.cosines(signal)
    torch.testing.assert_close(got, got.T, rtol=0, atol=1e-12)
    assert (got.abs() <= 1 + 1e-9).all()
    silent = ~signal.flatten(1).any(-1)
    assert (got[silent] == 0).all()
    torch.testing.assert_close(got.diagonal(), (~silent).double())


@given(signals, st.floats(0.01, 100))
def test_a_louder_view_does_not_disagree(signal, factor):
    one = signal[:1] if signal[0].any() else torch.ones_like(signal[:1])
    torch.testing.assert_close(presets.disagreement(torch.cat([one, factor * one])), torch.zeros_like(one[0]))
    assert presets.disagreement(torch.cat([one, -one])).max() > 0


def test_moved_is_a_share_of_the_sampled_tokens():
    mask = torch.tensor([[False, True, True], [False, True, False]])
    signal = torch.tensor([[[9.0, 1.0, 0.0], [0.0, 2.0, 0.0]], [[0.0, 0.0, 0.0], [0.0, 0.0, 5.0]]])
    assert presets.nonzero_share(signal, mask).tolist() == [pytest.approx(2 / 3), 0.0]
