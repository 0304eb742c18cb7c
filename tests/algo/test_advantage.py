"""The formulas of the advantages' papers. Their invariants are in test_invariants.py."""

import math
import statistics
from functools import partial
from itertools import combinations

import hypothesis.strategies as st
import pytest
import torch
from catalogue import bound, each
from hypothesis import given
from torch import Tensor

from grpo_fn.algo import advantage
from grpo_fn.core.types import Batch
from grpo_fn.testing.strategies import masks, tensors

BASELINES = bound(advantage, "value", "energy", "mask")

number = st.floats(-100, 100, width=32)


def group(rewards, valid=None) -> tuple[Tensor, Tensor]:
    value = torch.tensor(rewards, dtype=torch.float64)
    return value, torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)


def close(got: Tensor, expected: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", ["group_normalized", "leave_one_out_normalized"])
@pytest.mark.parametrize("scale", [1e-40, 2e-39, 1e-38, 1.0, 1e38])
@pytest.mark.parametrize("ddof", [0, 1])
def test_without_eps_the_unit_of_the_reward_does_not_matter(name, scale, ddof):
    """Down to subnormal numbers, whose digits are few: 0 / unit is 0 there, not 0 * (1 / unit)."""
    f = partial(getattr(advantage, name), eps=0.0, ddof=ddof)
    everyone = torch.ones(4, dtype=torch.bool)
    reward = torch.tensor([1.0, 0.0, 0.0, 2.0])
    torch.testing.assert_close(f(reward * scale, everyone), f(reward, everyone), rtol=1e-4, atol=1e-4)
    assert not f(torch.full((4,), scale), everyone).any()


@given(st.lists(number, min_size=2, max_size=8))
def test_group_advantages_equal_their_scalar_loops(rewards):
    r, v = group(rewards)
    n, mean = len(rewards), statistics.fmean(rewards)
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(n)]
    close(advantage.mean_centered(r, v), group([x - mean for x in rewards])[0])
    close(advantage.leave_one_out(r, v), group([x - o for x, o in zip(rewards, others, strict=True)])[0])
    for ddof, std in ((0, statistics.pstdev(rewards)), (1, statistics.stdev(rewards))):
        got = advantage.group_normalized(r, v, eps=1e-4, ddof=ddof)
        close(got, group([(x - mean) / (std + 1e-4) for x in rewards])[0], 1e-7)


def leave_one_out_std_as_written(reward: Tensor) -> Tensor:
    """The others' mean and sample std from sums of rewards and of their squares, as one peer computes them."""
    n = len(reward) - 1
    # One after the other: how a product adds them up differs from processor to processor.
    mean, square = (
        torch.stack([sum(x[others]) for others in ~torch.eye(n + 1, dtype=torch.bool)]) / n for x in (reward, reward**2)
    )
    std = ((square - mean**2) * n / (n - 1)).sqrt().nan_to_num(0)
    return torch.where(std > 0, (reward - mean) / (std + 1e-6), reward - mean)


@given(st.lists(number, min_size=3, max_size=8).filter(lambda x: max(x) - min(x) > 1), st.sampled_from([0, 1]))
def test_leave_one_out_normalized_as_a_scalar_loop(rewards, ddof):
    r, v = group(rewards)
    n, std = len(rewards), (statistics.stdev if ddof else statistics.pstdev)
    whole = std(rewards)
    rest = [rewards[:i] + rewards[i + 1 :] for i in range(n)]
    expected = [(x - statistics.fmean(o)) / (max(std(o), whole) + 1e-4) for x, o in zip(rewards, rest, strict=True)]
    close(advantage.leave_one_out_normalized(r, v, eps=1e-4, ddof=ddof), group(expected)[0], 1e-7)


@pytest.mark.parametrize(
    ("right", "size", "expected"),
    [
        *[
            (1, 16, (1.0, -0.25820)),
            (15, 16, (0.25820, -1.0)),
            (2, 16, (3.61477, -0.37893)),
            (8, 16, (1.03279, -1.03279)),
        ],
        *[(1, 2, (1.0, -1.0)), (1, 3, (1.0, -0.70711)), (0, 16, (None, 0.0)), (16, 16, (0.0, None))],
    ],
)
def test_the_others_std_divides_as_in_nemo_rl(right, size, expected):
    """Golden values, of NeMo-RL's own arithmetic in float64; None: there is no such sample."""
    reward = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
    adv = advantage.leave_one_out_others_std(reward, torch.ones(size, dtype=torch.bool), eps=1e-6)
    for got, value in zip((adv[:right], adv[right:]), expected, strict=True):
        assert len(got) == 0 if value is None else got.tolist() == pytest.approx([value] * len(got), abs=1e-5)
    if size > 2:
        close(adv, leave_one_out_std_as_written(reward), 1e-7)


@given(st.lists(number, min_size=3, max_size=8))
def test_the_others_std_as_a_scalar_loop(rewards):
    r, v = group(rewards)
    rest = [rewards[:i] + rewards[i + 1 :] for i in range(len(rewards))]
    expected = [
        (x - statistics.fmean(o)) / (1.0 if max(o) == min(o) else statistics.stdev(o) + 1e-4)
        for x, o in zip(rewards, rest, strict=True)
    ]
    close(advantage.leave_one_out_others_std(r, v, eps=1e-4), group(expected)[0], 1e-7)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 5))
def test_pass_at_k_has_the_published_advantages(won, lost, k):
    """Equations for R-bar, sigma and both advantages with binomials, and with all groups of k drawn and scored."""
    n = won + lost
    rewards = [1.0] * won + [0.0] * lost
    got = advantage.pass_at_k(*group(rewards), k=k, threshold=1.0).tolist()
    mean = 1 - math.comb(lost, k) / math.comb(n, k) if n >= k else 1.0
    if mean == 1 or n < k:
        assert got == [0.0] * n
        return
    sigma = math.sqrt(mean * (1 - mean))
    good = (1 - mean) / sigma
    bad = (1 - mean - math.comb(lost - 1, k - 1) / math.comb(n - 1, k - 1)) / sigma
    assert got == pytest.approx([good] * won + [bad] * lost, rel=1e-9)
    drawn = [(max(rewards[i] for i in c), c) for c in combinations(range(n), k)]
    of = [[(best - mean) / sigma for best, c in drawn if i in c] for i in range(n)]
    assert got == pytest.approx([statistics.fmean(x) for x in of], rel=1e-9, abs=1e-12)


@given(st.floats(0.01, 0.99), st.integers(2, 9))
def test_max_rl_climbs_the_log_of_the_success_rate_up_to_the_group_size(p, n):
    """All outcomes of n coins of chance p = sigmoid(theta): grad log of a head is 1 - p, of a tail -p."""

    def expected(f):
        total = 0.0
        for heads in range(n + 1):
            adv = f(*group([1.0] * heads + [0.0] * (n - heads)))
            slope = (adv[:heads].sum() * (1 - p) - adv[heads:].sum() * p).item() / n
            total += math.comb(n, heads) * p**heads * (1 - p) ** (n - heads) * slope
        return total

    grad_p = p * (1 - p)
    assert expected(advantage.max_rl) == pytest.approx(sum((1 - p) ** (k - 1) * grad_p for k in range(1, n)))
    assert expected(advantage.mean_centered) == pytest.approx(grad_p * (n - 1) / n)
    assert expected(advantage.leave_one_out) == pytest.approx(grad_p)


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e30, 1e37])
def test_max_rl_of_tiny_and_huge_rewards_in_float32(scale):
    reward = torch.tensor([0.0, 1.0, 1.0, 2.0]) * scale
    close(advantage.max_rl(reward, torch.ones(4, dtype=torch.bool)), torch.tensor([-1.0, 0.0, 0.0, 1.0]), 1e-5)


# -- baselines of tokens


@st.composite
def tokens_of_a_group(draw) -> tuple[Tensor, Tensor, Tensor]:
    """Value, energy and mask of G rows of T tokens; columns and rows without any, garbage behind the mask."""
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    mask = draw(masks(shape))
    value, energy = (draw(tensors(shape, st.integers(low, 64))) / 16 for low in (-64, 0))
    garbage = draw(st.sampled_from([0.0, math.nan, math.inf]))
    return torch.where(mask, value, 0.0), torch.where(mask, energy, garbage), mask


@each(BASELINES)
@given(tokens_of_a_group())
def test_a_baseline_gives_finite_advantages_where_something_was_sampled_and_zero_elsewhere(f, step):
    adv = f(*step)
    assert adv.isfinite().all()
    assert (adv[~step[2]] == 0).all()


@given(tokens_of_a_group())
def test_the_weighted_mean_of_the_values_that_a_token_is_compared_with_is_taken_away(step):
    value, energy, mask = step
    adv = advantage.optimal_token_baseline(*step)
    for t in range(mask.shape[1]):
        rows = mask[:, t].nonzero()[:, 0].tolist()
        weight = [sum(energy[g, s].item() for s in range(t + 1) if mask[g, s]) for g in rows]
        if len(rows) < 2:
            assert adv[rows, t].tolist() == value[rows, t].tolist()
        elif sum(weight):
            left_over = sum(w * adv[g, t].item() for w, g in zip(weight, rows, strict=True))
            assert left_over / sum(weight) == pytest.approx(0, abs=1e-9)


@given(tokens_of_a_group(), st.floats(-9, 9))
def test_equal_values_of_more_than_one_row_have_no_advantage_at_all(step, value):
    _, energy, mask = step
    adv = advantage.optimal_token_baseline(torch.where(mask, value, 0.0).double(), energy, mask)
    assert (adv[:, mask.sum(0) > 1] == 0).all()


def test_the_noisier_row_has_more_say_and_the_longest_row_ends_alone():
    """Energies 3 and 1 of the first token: the baseline is 3/4 of the first reward; then the second row is alone."""
    value, energy = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[3.0, 9.0], [1.0, 1.0]])
    adv = advantage.optimal_token_baseline(value, energy, torch.tensor([[True, False], [True, True]]))
    close(adv, torch.tensor([[0.125, 0.0], [-0.375, 0.5]]), 1e-6)


# -- what becomes of advantages at an update


@st.composite
def rows_of_a_group(draw) -> tuple[Tensor, Batch]:
    """Log-probs now, and G rows of T tokens: right, wrong and neither, some without tokens, garbage behind the mask."""
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    mask = draw(masks(shape))
    now, old = (torch.where(mask, -draw(tensors(shape, st.integers(0, 64))) / 16, math.nan) for _ in range(2))
    side = draw(tensors((shape[0], 1), st.sampled_from([-1.0, 0.0, 1.0]))).expand(shape)
    adv = torch.where(mask, side, math.inf)
    return now, Batch(mask.long(), mask, now, old, now, now, adv, torch.zeros_like(mask), mask.long())


@given(rows_of_a_group(), st.sampled_from([0.5, 2.0]))
def test_before_the_policy_has_moved_they_are_what_rewards_as_labels_gives(rows, tau):
    _, group = rows
    kept = group.mask.any(-1)
    side = torch.where(kept, torch.where(group.mask, group.adv, 0.0).sum(-1).sign(), 0.0)
    expected = advantage.rewards_as_labels(side, kept & (side != 0), tau=tau, threshold=1.0)
    got = advantage.label_weights(group.logp_old, group, tau=tau)
    close(got, torch.where(group.mask, expected[:, None], 0.0))


def test_a_batch_is_refused_with_the_way_to_take_it():
    """Without the shape checks of the tests, which would refuse it first."""
    unchecked = getattr(advantage.mean_centered, "__wrapped__", advantage.mean_centered)
    with pytest.raises(ValueError, match=r"shape \(3, 4\), expected those of one group, \[G\]: torch\.func\.vmap"):
        unchecked(torch.rand(3, 4), torch.ones(3, 4, dtype=torch.bool))
