"""UCB1 as a value: it finds the best arm, and the same rewards give the same pulls."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.lab.redteam import fresh_arms, mean_paid, next_arm, record_pull

means = st.lists(st.integers(0, 10), min_size=2, max_size=6, unique=True).map(lambda tenths: [t / 10 for t in tenths])


def played(means, pulls):
    arms = fresh_arms(len(means))
    for _ in range(pulls):
        arm = next_arm(arms, spread=1.0)
        arms = record_pull(arms, arm, means[arm])
    return arms


@given(means)
def test_the_best_arm_is_pulled_most_and_every_arm_once(means):
    arms = played(means, 400)
    assert min(arms.pulls) >= 1
    assert sum(arms.pulls) == 400
    assert arms.pulls.index(max(arms.pulls)) == means.index(max(means))


@given(means, st.integers(1, 60))
def test_the_mean_of_an_arm_is_what_it_paid(means, pulls):
    arms = played(means, pulls)
    for mean, known, count in zip(means, mean_paid(arms), arms.pulls, strict=True):
        assert (abs(known - mean) < 1e-9) if count else known == float("-inf")
    assert played(means, pulls) == arms


def test_an_arm_is_pulled_less_often_than_the_bound_of_auer_et_al_allows():
    """Theorem 1: at most 8 ln n / gap^2 + 1 + pi^2 / 3 pulls of an arm that is `gap` below the best."""
    arms = played([0.9, 0.4, 0.1], 1000)
    for pulls, gap in zip(arms.pulls[1:], (0.5, 0.8), strict=True):
        assert pulls <= 8 * 6.91 / gap**2 + 4.3
