"""A weight of observations has to be a number, and to have episodes to take observations from."""

from types import SimpleNamespace

import pytest

from grpo_fn.trainer.checks.supervised_stage import check_observations


def settings(coef: float, episodes: object) -> SimpleNamespace:
    return SimpleNamespace(algorithm=SimpleNamespace(observation_coef=coef), episodes=episodes)


@pytest.mark.parametrize("coef", [-0.1, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(coef: float):
    with pytest.raises(ValueError, match=r"observation_coef: got .*, wanted a finite number of at least 0"):
        check_observations(settings(coef, object()))


def test_a_run_without_episodes_has_no_observations():
    with pytest.raises(ValueError, match=r"observation_coef: got 0.1 in a run without episodes, .*wanted 0.0"):
        check_observations(settings(0.1, None))
    check_observations(settings(0.0, None))
    check_observations(settings(0.1, object()))
