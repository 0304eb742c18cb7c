"""Statistics merge as sets of values do, and every summary has the names and values it promises."""

import math
from functools import reduce

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from grpo_fn.algo import losses, metrics
from grpo_fn.algo.metrics import Stat, merge, merge_all, stat
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.types import Batch, Rollout, Scores
from grpo_fn.testing.strategies import finite_floats, masks, tensors

values = st.integers(0, 6).flatmap(lambda n: tensors(n, finite_floats(1e4)))


def of(x: Tensor) -> Stat:
    return stat(x, torch.ones_like(x, dtype=torch.bool))


def same(a: Stat, b: Stat) -> None:
    for got, expected in zip(a, b, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-6)  # squares of 1e4, and their rounding


def check(s: Stat, x: np.ndarray) -> None:
    """s is the Stat of the numbers x by numpy's account."""
    assert float(s.count) == x.size
    if x.size:
        assert float(s.mean) == pytest.approx(x.mean(), rel=1e-9, abs=1e-9)
        assert float(s.m2) == pytest.approx(x.var() * x.size, rel=1e-9, abs=1e-6)
        assert (float(s.low), float(s.high)) == (x.min(), x.max())


@given(st.data(), st.integers(1, 6))
def test_a_stat_is_numpys_where_the_mask_is(data, n):
    x, mask = data.draw(tensors(n)), data.draw(masks(n))
    check(stat(torch.where(mask, x, torch.nan), mask), x[mask].numpy())


@given(st.lists(values, min_size=1, max_size=5))
def test_merging_is_the_stat_of_all_values_together(parts):
    check(reduce(merge, map(of, parts)), torch.cat(parts).numpy())


@given(values, values, values)
def test_merge_is_a_commutative_monoid(a, b, c):
    x, y, z = of(a), of(b), of(c)
    same(merge(merge(x, y), z), merge(x, merge(y, z)))
    same(merge(x, y), merge(y, x))
    none = of(torch.zeros(0))
    for s in (x, y, z):
        assert merge(s, none) == merge(none, s) == s


def test_a_small_spread_around_a_large_mean_is_kept():
    parts = [of(1e8 + torch.tensor([0.0, 1.0], dtype=torch.float64)) for _ in range(50)]
    assert metrics.extent_and_std("", reduce(merge, parts))["std"] == pytest.approx(0.5, rel=1e-6)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), values, max_size=3), max_size=4))
def test_tables_merge_name_by_name(tables):
    merged = merge_all([{name: of(x) for name, x in table.items()} for table in tables])
    assert merged.keys() == set().union(*tables)
    for name, s in merged.items():
        check(s, torch.cat([table[name] for table in tables if name in table]).numpy())


# -- what a step reports


def test_figures_of_a_rollout_have_the_golden_values():
    mask = torch.tensor([[False, True, True, False], [False, True, False, False]])
    seen = Rollout(mask.long(), mask, torch.zeros(2, 4), torch.tensor([True, False]), ("", ""))
    assert metrics.rollout_metrics(seen) == {
        **{"generation/rows": 2.0, "generation/tokens": 3.0, "generation/truncated": 0.5},
        **{"generation/length_mean": 1.5, "generation/length_min": 1.0, "generation/length_max": 2.0},
    }


def test_a_rewards_figures_leave_out_what_could_not_be_scored():
    valid = torch.tensor([[True, True], [True, False]])
    right, form = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    got = metrics.reward_metrics(outcome_reward(right + 0.5 * form, valid, {"right": right, "form": form}))
    numbers = np.array([1.5, 0.5, 0.0])
    assert got == pytest.approx(
        {
            **{"reward/mean": numbers.mean(), "reward/min": 0.0, "reward/max": 1.5, "reward/std": numbers.std()},
            **{"reward/correct_rate": 1 / 3, "reward/invalid": 0.25, "reward/right": 1 / 3, "reward/form": 2 / 3},
        }
    )


def test_figures_of_learning_have_the_golden_values():
    numbers = {"kl": [0.5, 1.5], "entropy": [2.0], "clip_low": [0.0, 1.0], "clip_high": [0.0], "ratio": [0.5, 2.0]}
    numbers |= {"correction": [0.0, 1.5], "importance_masked": [1.0, 0.0], "ratio_capped": [1.0, 0.0, 0.0, 0.0]}
    stats = {name: of(torch.tensor(x)) for name, x in numbers.items()}
    got = metrics.of_learning(stats, reference=True)
    without = metrics.of_learning(stats, reference=False)
    assert {**without, "loss/kl": without["loss/approx_kl"]} == {**got, "loss/approx_kl": 1.0}
    assert "loss/kl" not in without
    assert got == {
        **{"loss/kl": 1.0, "loss/entropy": 2.0, "loss/clip_low": 0.5, "loss/clip_high": 0.0},
        **{"loss/ratio_mean": 1.25, "loss/ratio_min": 0.5, "loss/ratio_max": 2.0},
        **{"loss/correction_mean": 0.75, "loss/importance_masked_frac": 0.5, "loss/ratio_capped": 0.25},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_that_has_no_gradient_any_more_is_counted(dtype):
    """The loss of such a bad token is 1e18 and more, and its gradient 0; of a good one it is clipped."""
    logp = torch.full((3,), -1.0, dtype=dtype)
    old = logp - torch.tensor([0.0, 500.0, -500.0], dtype=dtype)
    everything = torch.ones(3, dtype=torch.bool)
    row = Batch(
        torch.zeros(3).long(),
        everything,
        old,
        old,
        old,
        old,
        torch.full_like(logp, -1.0),
        ~everything,
        everything.long(),
    )
    loss, seen = losses.clipped_ratio(logp, row, clip_low=0.2, clip_high=0.2)
    assert loss[1] > 1e18
    assert torch.func.grad(lambda x: losses.clipped_ratio(x, row, clip_low=0.2, clip_high=0.2)[0][1])(logp)[1] == 0
    found = metrics.diagnose(row, {**seen, "correction": torch.ones_like(logp)})["ratio_capped"]
    assert float(found.mean) == pytest.approx(1 / 3)


# -- what can be said of a token without its loss


def rows(logp: float, old: float, ref: float, teacher: float = math.nan) -> tuple[Scores, Batch]:
    """Two rows of which the last token is not sampled."""
    one = torch.ones(2, 3, dtype=torch.float64)
    mask = torch.tensor([[True, True, False]] * 2)
    fields = (x * one for x in (old, old, ref, teacher, 1.0))
    return Scores(logp * one, 0.5 * one), Batch(mask.long(), mask, *fields, ~mask, mask.long())


def test_a_loss_that_says_nothing_has_figures_of_its_tokens():
    """k3 of x = -0.5: exp(x) - x - 1."""
    scores, batch = rows(logp=-1.0, old=-2.0, ref=-1.5)
    figures = metrics.of_tokens(scores, batch, {})
    expected = {"ratio": math.e, "clip_low": 0.0, "clip_high": 0.0, "correction": 1.0, "entropy": 0.5}
    assert figures.keys() == {*expected, "kl"}
    for name, value in {**expected, "kl": math.exp(-0.5) - 0.5}.items():
        assert figures[name][batch.mask].tolist() == pytest.approx([value] * 4), name
    assert figures["ratio"][~batch.mask].tolist() == [1.0, 1.0]


def test_diagnostics_of_a_loss_replace_the_measured_ones():
    scores, batch = rows(logp=-1.0, old=-2.0, ref=-1.5)
    said = {name: torch.full_like(scores.logp, 7.0) for name in ("ratio", "clip_low", "clip_high", "correction")}
    figures = metrics.of_tokens(scores, batch, said)
    assert all(torch.equal(figures[name], said[name]) for name in said)
    assert all(
        not x.requires_grad
        for x in metrics.of_tokens(Scores(*(x.requires_grad_() for x in scores)), batch, {}).values()
    )


two_policies = st.integers(1, 6).flatmap(lambda n: st.tuples(*(tensors((3, n), st.floats(-6, 0)) for _ in range(2))))


@given(two_policies, st.data())
def test_the_mismatch_is_what_loops_make_of_it_however_it_is_cut_up(two, draw):
    now, sampled = two
    mask = draw.draw(masks(now.shape))
    parts = [metrics.mismatch((now - sampled)[i : i + 1], mask[i : i + 1]) for i in range(3)]
    got = metrics.of_mismatch(metrics.merge_all(parts))
    x = (now - sampled)[mask].tolist()
    if not x:
        assert got == {}
        return
    w = [math.exp(one) for one in x]
    assert got == pytest.approx(
        {
            "loss/logprob_diff_mean": sum(map(abs, x)) / len(x),
            "loss/logprob_diff_max": max(map(abs, x)),
            "loss/mismatch_kl": sum(r - 1 - one for r, one in zip(w, x, strict=True)) / len(x),
            "loss/mismatch_ess": sum(w) ** 2 / len(w) / sum(r * r for r in w),
        },
        rel=1e-9,
        abs=1e-12,
    )
    assert 0 < got["loss/mismatch_ess"] <= 1 + 1e-12
    assert got["loss/mismatch_kl"] >= 0


@pytest.mark.parametrize("x", [[1e3, 0.0], [-1e3, -1e3], [1e3, -1e3], [90.0, 0.0]])
def test_policies_worlds_apart_have_figures_that_are_finite(x):
    for dtype in (torch.float32, torch.float64):
        got = metrics.of_mismatch(metrics.mismatch(torch.tensor(x, dtype=dtype), torch.ones(2, dtype=torch.bool)))
        assert all(math.isfinite(value) for value in got.values()), got
        assert 0 <= got["loss/mismatch_ess"] <= 1


def test_the_teachers_figures_are_of_what_is_learned_from_and_its_rows_of_all():
    gap = torch.tensor([[0.0, 1.0, -3.0], [0.0, 0.0, 0.0], [torch.nan, 2.0, torch.nan]], dtype=torch.float64)
    sampled = torch.tensor([[False, True, True], [False, True, True], [False, True, False]])
    learned = sampled & torch.tensor([[True], [False], [True]])
    found = metrics.teacher_metrics(gap, learned, sampled)
    assert found == {
        "teacher/reverse_kl": 0.0,
        "teacher/gap_abs": 2.0,
        "teacher/gap_min": -3.0,
        "teacher/rows_taught": pytest.approx(2 / 3),
    }
