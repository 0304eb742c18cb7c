"""A user's reward is called in a worker before anything expensive; what it returns wrongly is named in one line."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from e2e.running import command, finish
from trainer.reward_fakes import alone, cannot_say, dies, of_numpy, right, sleeps, with_text_only

from grpo_fn.core.problem import Problem
from grpo_fn.rewards import combine, format
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.trainer.checks.try_out import reward_parts, try_rewards

PROBLEM = Problem(7, "2 + 2 =", "4", {})


def tried(fn: Callable, stop_on_error: bool = True) -> None:
    pool = partial(RewardPool, workers=1, timeout_per_completion=2.0, memory_mb=2048, stop_on_error=stop_on_error)
    try_rewards("sections.Rewards.reward", [format.boxed, fn], PROBLEM, pool)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fn", [right, cannot_say, dies, sleeps])
def test_a_reward_that_a_run_could_begin_with_passes(fn: Callable) -> None:
    """A lost row ends no run: a rule of health counts them."""
    tried(fn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (of_numpy, r"got ndarray \[1\.\], expected a finite number or None"),
        (alone, r"TypeError: .*takes 1 positional argument.*; expected a finite number or None"),
        (with_text_only, r"ZeroDivisionError: .*; expected a finite number or None"),
    ],
)
def test_what_is_no_reward_is_named(fn: Callable, said: str) -> None:
    name = rf"{fn.__module__}\.{fn.__name__}"
    with pytest.raises(ValueError, match=rf"^sections\.Rewards\.reward: {name}, called with problem 7 .*: {said}"):
        tried(fn)


@pytest.mark.slow
def test_without_stop_on_error_only_what_fails_on_every_text_is_refused() -> None:
    tried(with_text_only, stop_on_error=False)
    with pytest.raises(ValueError, match="got ndarray"):
        tried(of_numpy, stop_on_error=False)


def test_parts_are_found_with_their_functions() -> None:
    reward = partial(combine.combine, parts=[right, partial(format.answer_tags, tags=["a"])], weights=[1.0, 0.5])
    names, fns = reward_parts(reward, PROBLEM)
    assert (names, fns[0], len(fns)) == (["right", "answer_tags"], right, 2)


@pytest.mark.slow
def test_a_dry_run_ends_with_one_line_and_makes_nothing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "over.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from grpo_fn.rewards import combine\n"
        "from trainer import reward_fakes\n"
        "combine.combine.parts = [@reward_fakes.of_numpy]\ncombine.combine.weights = [1.0]\n"
    )
    argv = command(cache, tmp_path / "run", "--gin_file", str(tmp_path / "over.gin"), "--dry_run")
    assert finish(argv, tmp_path / "out") == 2
    out = (tmp_path / "out").read_text()
    assert "sections.Rewards.reward: trainer.reward_fakes.of_numpy, called with" in out
    assert "Traceback" not in out
    assert not (tmp_path / "run").exists()
