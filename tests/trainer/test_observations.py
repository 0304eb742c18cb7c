"""A weight of observations has to be a number, and to have episodes to take observations from."""

import pytest

from grpo_fn.trainer.checks.supervised_stage import check_observations


@pytest.mark.parametrize("coef", [-0.1, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(coef: float):
    with pytest.raises(ValueError, match=r"observation_coef: got .*, wanted a finite number of at least 0"):
        check_observations(coef, with_episodes=True)


def test_a_run_without_episodes_has_no_observations():
    with pytest.raises(ValueError, match=r"observation_coef: got 0.1 in a run without episodes, .*wanted 0.0"):
        check_observations(0.1, with_episodes=False)
    check_observations(0.0, with_episodes=False)
    check_observations(0.1, with_episodes=True)
