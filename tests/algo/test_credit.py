"""Invariants of every credit function: an advantage for each token of a step."""

import math
import statistics
from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from batches import GARBAGE
from catalogue import bound, each
from hypothesis import example, given, settings
from torch import Tensor
from torch.utils._pytree import tree_map_only

from grpo_fn.algo import advantage, corrections, credit
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.types import Reward
from grpo_fn.testing.steps import scored_step
from grpo_fn.testing.strategies import masks, tensors

ALL = {**bound(credit, "scored"), **bound(credit, "scored")}
COSTLY = settings(max_examples=max(5, settings.default.max_examples // 4))  # of each function at each setting
eighths = st.integers(-24, 24).map(lambda n: n / 8)  # sums of them are exact, in float32 too


class Step(NamedTuple):
    """What a credit is shown; all but the reward is [P, G, T]."""

    reward: Reward
    drift: Tensor
    mask: Tensor
    energy: Tensor


@st.composite
def steps(draw) -> Step:
    """What a credit is shown of P prompts with G samples of T tokens; rows without a token and invalid ones too.

    Some are of episodes: up to three turns, not as many in each row as there are runs of tokens.
    """
    p, g, t = (draw(st.integers(1, 3)) for _ in range(3))
    numbers = st.one_of(eighths, st.sampled_from([0.0, 1.0]))
    same = draw(masks((p, 1)))  # groups of one reward
    value = draw(tensors((p, g), numbers))
    value = torch.where(same, value[:, :1], value)
    parts = {name: draw(tensors((p, g), numbers)) for name in ("correct", "boxed")}
    reward = outcome_reward(value, draw(masks((p, g))), parts)
    if draw(st.booleans()):
        k = draw(st.integers(1, 3))
        there = torch.arange(k) < draw(tensors((p, g, 1), st.integers(1, k)))
        turns = torch.where(there, draw(tensors((p, g, k), numbers)), 0.0)
        states = torch.where(there, draw(tensors((p, g, k), st.integers(0, 2))).long(), -1)
        reward = reward._replace(turns=turns, states=states)
    drift, energy = (draw(tensors((p, g, t), numbers)) for numbers in (eighths, eighths.map(abs)))
    return Step(reward, drift, draw(masks((p, g, t))), energy)


def run(f, step: Step) -> Tensor:
    return f(scored_step(step.reward, step.mask, drift=step.drift, energy=step.energy))


def counted(step: Step) -> Tensor:
    return step.mask & step.reward.valid[..., None]


def spoiled(step: Step, garbage: float) -> Step:
    """Garbage behind the mask of drift and energy, and in the rewards of samples that could not be scored."""
    reward, drift, mask, energy = step
    value, *parts = (torch.where(reward.valid, x, garbage) for x in (reward.value, *reward.parts.values()))
    named = dict(zip(reward.parts, parts, strict=True))
    turns = torch.where(reward.valid[..., None], reward.turns, garbage)
    spoiled = reward._replace(value=value, parts=named, turns=turns)
    return Step(spoiled, torch.where(mask, drift, garbage), mask, torch.where(mask, energy, garbage))


def close(got: Tensor, expected: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)


def outcomes(value, valid=None, length=None) -> Step:
    """A step in which row b has length[b] sampled tokens and nothing drifted."""
    value = torch.tensor(value)
    valid = torch.ones_like(value, dtype=torch.bool) if valid is None else torch.tensor(valid)
    length = torch.ones_like(value).int() if length is None else torch.tensor(length)
    mask = torch.arange(int(length.max())) < length[..., None]
    nothing = torch.zeros(mask.shape)
    return Step(outcome_reward(value, valid, {"correct": value, "boxed": value}), nothing, mask, nothing)


# -- what holds for each of them


@each(ALL)
@COSTLY
@given(steps())
def test_every_sampled_token_of_a_valid_sample_gets_a_finite_advantage_and_the_rest_zero(f, step):
    adv = run(f, step)
    assert adv.shape == step.mask.shape
    assert adv.dtype == step.reward.value.dtype
    assert adv.isfinite().all()
    assert (adv[~counted(step)] == 0).all()


@each(ALL)
@COSTLY
@given(steps(), st.sampled_from(GARBAGE))
def test_unsampled_tokens_and_unscored_rows_change_nothing(f, step, garbage):
    assert torch.equal(run(f, spoiled(step, garbage)), run(f, step))


@each(ALL)
@COSTLY
@given(steps(), st.randoms(use_true_random=False))
def test_the_order_of_prompts_does_not_matter(f, step, random):
    order = list(range(len(step.drift)))
    random.shuffle(order)
    shuffled = tree_map_only(Tensor, lambda x: x[order], step)
    close(run(f, shuffled), run(f, step)[order])


@each(ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_valid_reward_that_is_not_finite_shows(f, bad):
    """No silent zero: the seam to the batch refuses what is not finite."""
    step = outcomes([[0.0, bad, 1.0], [1.0, 0.0, 1.0]])
    assert not run(f, step).isfinite().all()


# -- formulas


@given(steps(), st.sampled_from([0.0, 0.3, -1.0]))
def test_the_kl_of_a_sample_is_a_part_of_its_reward(step, beta):
    reward, drift, mask, _ = step
    adv = run(partial(credit.outcome_minus_kl, advantage=advantage.leave_one_out, beta=beta), step)
    for p in range(len(drift)):
        value = [
            reward.value[p, g].item() - beta * sum(drift[p, g][mask[p, g]].tolist()) for g in range(drift.shape[1])
        ]
        expected = advantage.leave_one_out(torch.tensor(value, dtype=torch.float64), reward.valid[p])
        close(adv[p], torch.where(mask[p], expected[:, None], 0.0))


def test_parts_show_differences_that_their_sum_hides():
    """Two rewards of two samples, (0, 1) or (0, 2) in all: GDPO's example, arXiv:2601.05242, section 3.1."""
    normalized = partial(advantage.group_normalized, eps=0.0, ddof=1)
    correct, boxed = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    reward = outcome_reward(correct + boxed, torch.ones(2, 2, dtype=torch.bool), {"correct": correct, "boxed": boxed})
    step = Step(reward, torch.zeros(2, 2, 1), torch.ones(2, 2, 1, dtype=torch.bool), torch.zeros(2, 2, 1))
    half = math.sqrt(0.5)
    summed = run(partial(credit.outcome, advantage=normalized), step)[..., 0]
    apart = run(partial(credit.per_part, advantage=normalized, weights={"correct": 1.0, "boxed": 1.0}), step)[..., 0]
    close(summed, torch.tensor([[-half, half], [-half, half]]), 1e-6)
    close(apart, torch.tensor([[-half, half], [-2 * half, 2 * half]]), 1e-6)


@pytest.mark.parametrize("weights", [{"correct": 1.0, "style": 1.0}, {}])
def test_weights_of_parts_that_there_are_not_are_refused(weights):
    with pytest.raises(ValueError, match=r"weights: got .* expected some of \['boxed', 'correct'\]"):
        run(partial(credit.per_part, advantage=advantage.mean_centered, weights=weights), outcomes([[0.0, 1.0]]))


def whitened(numbers: list[float], eps: float) -> list[float]:
    mean, std = statistics.fmean(numbers), statistics.pstdev(numbers)
    return [(x - mean) / (std + eps) for x in numbers]


@given(steps(), st.sampled_from([1e-4, 1e-9]))
def test_row_whitened_standardises_the_rows_of_the_step(step, eps):
    inner = partial(credit.outcome, advantage=advantage.mean_centered)
    plain, adv = (run(f, step) for f in (inner, partial(credit.row_whitened, credit=inner, eps=eps)))
    rows = counted(step).any(-1)
    numbers = [plain[p, g][step.mask[p, g]][0].item() for p, g in rows.nonzero().tolist()]
    if not numbers or statistics.pstdev(numbers) < 1e-6:
        return
    for (p, g), expected in zip(rows.nonzero().tolist(), whitened(numbers, eps), strict=True):
        assert adv[p, g][step.mask[p, g]].tolist() == pytest.approx([expected] * int(step.mask[p, g].sum()), abs=1e-9)


@pytest.mark.parametrize(
    "inner",
    [
        partial(credit.outcome, advantage=advantage.mean_centered),
        partial(credit.outcome, advantage=partial(advantage.group_normalized, eps=1e-6, ddof=1)),
        partial(
            credit.per_part,
            advantage=partial(advantage.group_normalized, eps=1e-6, ddof=1),
            weights={"correct": 1.0, "boxed": 0.3},
        ),
    ],
    ids=["mean_centered", "group_normalized", "per_part"],
)
@given(
    st.lists(st.lists(st.floats(-10, 10, width=32), min_size=5, max_size=5), min_size=1, max_size=6),
    st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=40),
)
@example([[0.0] * 4 + [2.0**-149]], [0.0])  # subnormal: the group's advantages do not even cancel out
def test_row_whitened_leaves_groups_without_signal_at_exactly_zero_in_float32(inner, lively, silent):
    """The mean of advantages that cancel out is 0 but for rounding, which must not look like a signal."""
    step = outcomes([*lively, *([x] * 5 for x in silent)])
    adv = run(partial(credit.row_whitened, credit=inner, eps=1e-6), step)
    assert (adv[len(lively) :] == 0).all()
    spread = run(inner, step).abs().amax((1, 2)) > 1e-3
    assert adv[spread].abs().amax((1, 2)).gt(0).all()


# -- baselines of a group's tokens, and the scale of a step


@given(steps())
def test_the_length_baseline_as_a_scalar_loop(step):
    reward, _, mask, _ = step
    got = run(credit.outcome_length_baseline, step)
    for p in range(mask.shape[0]):
        scored = [g for g in range(mask.shape[1]) if reward.valid[p, g]]
        lengths = [int(mask[p, g].sum()) for g in scored]
        total = sum(n * reward.value[p, g].item() for n, g in zip(lengths, scored, strict=True))
        for g in scored:
            expected = reward.value[p, g].item() - total / max(1, sum(lengths))
            close(got[p, g][mask[p, g]], torch.full((int(mask[p, g].sum()),), expected, dtype=got.dtype))


@given(steps(), st.sampled_from([1e-4, 1e-9]))
def test_batch_scaled_divides_by_the_std_of_all_rewards_of_the_step(step, eps):
    inner = partial(credit.outcome, advantage=advantage.mean_centered)
    got, plain = run(partial(credit.batch_scaled, credit=inner, eps=eps), step), run(inner, step)
    values = step.reward.value[step.reward.valid].tolist()
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    close(got, plain / (std + eps) if std else torch.zeros_like(plain), tol=1e-7)


def test_batch_scaled_divides_two_rewards_by_the_std_of_two():
    adv = run(
        partial(credit.batch_scaled, credit=partial(credit.outcome, advantage=advantage.mean_centered), eps=0.0),
        outcomes([[0.0, 1.0]]),
    )
    close(adv[..., 0], torch.tensor([[-1.0, 1.0]]) * math.sqrt(0.5), 1e-6)


WEIGHTS = st.sampled_from([None, partial(corrections.truncated_weight, ratio=corrections.token_ratio, cap=3.0)])


@given(steps(), st.sampled_from([0.0, 0.3]), WEIGHTS)
def test_the_token_baseline_is_a_baseline_of_each_group_around_another_credit(step, beta, weight):
    """The rows of scored_step were sampled at logp_old, where every importance weight is 1."""
    inner = partial(credit.reward_to_go, beta=beta)
    got, value = run(partial(credit.token_baseline, credit=inner, energy_weight=weight), step), run(inner, step)
    for p in range(len(value)):
        close(got[p], advantage.optimal_token_baseline(value[p], step.energy[p], counted(step)[p]))


@given(steps())
def test_energies_count_with_the_square_of_their_weight(step):
    """A weight of 1/2 of every second token is a quarter of its energy."""
    half = torch.where(torch.arange(step.mask.shape[-1]) % 2 == 0, 0.5, 1.0)
    around = partial(credit.token_baseline, credit=partial(credit.reward_to_go, beta=0.0))
    got = run(partial(around, energy_weight=lambda logp, row: half.to(logp.dtype)), step)
    close(got, run(partial(around, energy_weight=None), step._replace(energy=step.energy * half.square())))
