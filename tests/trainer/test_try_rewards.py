"""A user's reward is called in a worker before anything expensive; what it returns wrongly is named in one line."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.running import command, finish

from grpo_fn.core.problem import Problem
from grpo_fn.rewards import combine, format
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.trainer.checks.try_out import reward_parts, try_rewards

PROBLEM = Problem(7, "2 + 2 =", "4", {})


def right(problem, completion):
    return np.float32(completion.text == problem.answer)


def cannot_say(problem, completion):
    return None


def of_torch(problem, completion):
    return torch.tensor(1.0)


def of_numpy(problem, completion):
    return np.array([1.0])


def alone(completion):
    return 1.0


def with_text_only(problem, completion):
    return 1.0 / len(completion.text)


def dies(problem, completion):
    os._exit(3)


def sleeps(problem, completion):
    time.sleep(60)


def tried(fn: Callable, stop_on_error: bool = True) -> None:
    pool = partial(RewardPool, workers=1, timeout_per_completion=2.0, memory_mb=4096, stop_on_error=stop_on_error)
    try_rewards("sections.Rewards.reward", [format.boxed, fn], PROBLEM, pool)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fn", [right, cannot_say, dies, sleeps])
def test_a_reward_that_a_run_could_begin_with_passes(fn: Callable) -> None:
    """A lost row ends no run: a rule of health counts them."""
    tried(fn)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (of_torch, r"got Tensor tensor\(1\.\), wanted a finite number or None"),
        (of_numpy, r"got ndarray \[1\.\], wanted a finite number or None"),
        (alone, r"TypeError: .*takes 1 positional argument.*; wanted a finite number or None"),
        (with_text_only, r"ZeroDivisionError: .*; wanted a finite number or None"),
    ],
)
def test_what_is_no_reward_is_named(fn: Callable, said: str) -> None:
    name = rf"{fn.__module__}\.{fn.__name__}"
    with pytest.raises(ValueError, match=rf"^sections\.Rewards\.reward: {name}, called with problem 7 .*: {said}"):
        tried(fn)


@pytest.mark.slow
def test_without_stop_on_error_only_what_fails_on_every_text_is_refused() -> None:
    tried(with_text_only, stop_on_error=False)
    with pytest.raises(ValueError, match="got Tensor"):
        tried(of_torch, stop_on_error=False)


def test_parts_are_found_with_their_functions() -> None:
    reward = partial(combine.combine, parts=[right, partial(format.answer_tags, tags=["a"])], weights=[1.0, 0.5])
    names, fns = reward_parts(reward, PROBLEM)
    assert (names, fns[0], len(fns)) == (["right", "answer_tags"], right, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("binding", "said"),
    [
        (
            "combine.combine.parts = [@test_try_rewards.of_numpy]\ncombine.combine.weights = [1.0]",
            "sections.Rewards.reward: trainer.test_try_rewards.of_numpy, called with",
        ),
        (
            "sections.Evaluation.graders = [@test_try_rewards.alone]",
            "sections.Evaluation.graders: trainer.test_try_rewards.alone, called with",
        ),
        (
            "sections.Rewards.reward = @test_try_rewards.right",
            "test_try_rewards.right: got a function of (problem, completion) in a knob of "
            "grpo_fn.trainer.sections.Rewards, which passes it score; wanted one that takes this too",
        ),
    ],
)
def test_a_dry_run_ends_with_one_line_and_makes_nothing(binding: str, said: str, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "over.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from grpo_fn.rewards import combine\n"
        "from grpo_fn.shell.reward_workers import reward_pool\n"
        "from grpo_fn.trainer import sections\n"
        "from trainer import test_try_rewards\n"
        f"{binding}\nreward_pool.RewardPool.memory_mb = 4096\n"  # this file imports torch: of a CUDA build, 3 GB
    )
    argv = command(cache, tmp_path / "run", "--gin_file", str(tmp_path / "over.gin"), "--dry_run")
    assert finish(argv, tmp_path / "out") == 2
    out = (tmp_path / "out").read_text()
    assert said in out
    assert "Traceback" not in out
    assert not (tmp_path / "run").exists()
