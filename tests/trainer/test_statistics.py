"""Shares: intervals, estimates from samples and paired differences, each against counting all cases."""

import math
from fractions import Fraction
from itertools import combinations, product

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo_fn.lab.paired import mcnemar, paired_bootstrap
from grpo_fn.trainer.evaluation import (
    estimate_pass_at_k,
    exact_mean,
    maj_at_k,
    majority,
    wilson,
)

# -- the interval of a share


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, the score method.
        *((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)),
        *((0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (1, 1, 0.2065, 1.0)),
    ],
)
def test_intervals_are_those_of_newcombes_table(right, n, low, high):
    assert wilson(right, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 3000), st.data())
def test_the_interval_holds_the_shares_that_could_have_given_the_count(n, data):
    right = data.draw(st.integers(0, n))
    low, high = wilson(right, n)
    assert 0 <= low <= right / n + 1e-12
    assert right / n - 1e-12 <= high <= 1
    for edge in (low, high):  # the score test is at its limit there: |share - edge| = z sd(edge)
        inside = 1e-9 < edge < 1 - 1e-9
        assert inside or right in (0, n)
        if inside:
            z = (right / n - edge) / math.sqrt(edge * (1 - edge) / n)
            assert abs(z) == pytest.approx(1.959964, rel=1e-3)
    mirrored = wilson(n - right, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)


@given(st.permutations([1e16, 1.0, -1e16, 0.1, 3.0]))
def test_a_mean_is_the_same_in_any_order(values):
    assert exact_mean(values) == 4.1 / 5
    assert math.isnan(exact_mean([]))


# -- pass@k

counts = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@given(counts)
def test_pass_at_k_is_the_share_of_choices_of_k_samples_that_hold_a_right_one(case):
    n, c, k = case
    choices = list(combinations([True] * c + [False] * (n - c), k))
    assert estimate_pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


# -- maj@k

ballots = st.lists(st.sampled_from(["", "1", "2", "3"]), min_size=1, max_size=9)


@given(ballots)
def test_the_majority_is_the_first_vote_for_an_answer_that_no_other_has_more_of(votes):
    place = majority(votes)
    given_votes = [vote for vote in votes if vote]
    assert (place is None) == (not given_votes)
    if place is not None:
        won = votes[place]
        assert won
        assert votes.index(won) == place
        for other in given_votes:
            more = votes.count(won) - votes.count(other)
            assert more > 0 or (more == 0 and votes.index(won) <= votes.index(other))


@given(ballots, st.data())
def test_every_run_of_k_samples_votes_by_itself(votes, data):
    k = data.draw(st.integers(1, len(votes)))
    right = [vote == "1" for vote in votes]
    runs = [votes[i * k : (i + 1) * k] for i in range(len(votes) // k)]
    places = [majority(run) for run in runs]
    won = [place is not None and run[place] == "1" for run, place in zip(runs, places, strict=True)]
    assert maj_at_k(votes, right, k) == pytest.approx(sum(won) / len(won))


def test_the_verdict_of_a_majority_is_that_of_the_sample_that_gave_it_first():
    assert maj_at_k(["7", "5", "5"], [True, True, False], 3) == 1.0
    assert maj_at_k(["7", "5", "5"], [True, False, True], 3) == 0.0
    assert maj_at_k(["7", "5"], [True, False], 2) == 1.0  # a tie: the first
    assert maj_at_k(["", ""], [True, True], 2) == 0.0  # no vote, whatever the judge says


# -- McNemar's test


@given(st.integers(0, 12), st.integers(0, 12))
def test_the_p_value_is_the_share_of_coin_tosses_at_least_as_uneven(gained, lost):
    n = gained + lost
    uneven = sum(math.comb(n, heads) for heads in range(n + 1) if abs(2 * heads - n) >= abs(gained - lost))
    assert mcnemar(gained, lost) == pytest.approx(float(Fraction(uneven, 2**n)), abs=1e-15)


# -- the paired bootstrap


def resampled(differences):
    """The interval by listing every resample."""
    n = len(differences)
    sums = sorted(sum(differences[i] for i in drawn) for drawn in product(range(n), repeat=n))
    out = int(0.025 * len(sums))  # of this many on a side less than 2.5 % lie beyond
    return sums[out] / n, sums[-1 - out] / n


@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=5))
def test_the_interval_is_that_of_all_resamples(differences):
    n = len(differences)
    interval = paired_bootstrap(differences.count(1), differences.count(-1), n)
    assert interval == pytest.approx(resampled(differences), abs=1e-12)


@given(st.integers(500, 4000), st.floats(0.05, 0.45), st.floats(0.05, 0.45))
def test_with_many_problems_the_interval_is_the_normal_one(n, share_gained, share_lost):
    gained, lost = round(n * share_gained), round(n * share_lost)
    d = (gained - lost) / n
    half = 1.96 * math.sqrt(((gained + lost) / n - d * d) / n)
    assert paired_bootstrap(gained, lost, n) == pytest.approx((d - half, d + half), abs=2.5 / n)
