"""A function of a user that does not fit its knob is one line with got and expected, before anything is loaded."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from trainer.reward_fakes import alone, cannot_say, dies, of_numpy, right, sleeps, with_text_only

from grpo_fn.core import sampling
from grpo_fn.core.problem import Problem
from grpo_fn.rewards import combine, format
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.tasks.task import Task, from_rows, held_out_only
from grpo_fn.trainer.validate import (
    check_full_support,
    reward_parts,
    try_optimizer,
    try_rewards,
    try_schedule,
    try_task,
    try_token_sampler,
)

# -- token samplers


def tokens_alone(logits, u, *, temperature):
    return logits.argmax(-1)


def as_floats(logits, u, *, temperature):
    return u, u


@pytest.mark.parametrize(
    ("token_sampler", "got"),
    [(tokens_alone, "a Tensor"), (as_floats, "a tensor of float32"), (torch.add, "TypeError: ")],
)
def test_a_token_sampler_that_does_not_fit_is_named(token_sampler: Callable, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^sections\.Sampling\.token_sampler: got {got}"):
        try_token_sampler(token_sampler, 0.7)
    try_token_sampler(sampling.categorical, 0.7)


def lying(logits, u, *, top_k, temperature):
    """Cuts the tail and reports the log-probabilities of what was not cut."""
    token, _ = sampling.nucleus(logits, u, temperature=temperature, top_k=top_k, top_p=1.0)
    return token, torch.log_softmax(logits / temperature, -1).gather(-1, token[..., None])[..., 0]


def min_p(logits, u, *, temperature, share):
    """Leaves out tokens less likely than a share of the likeliest."""
    x = logits / temperature
    return sampling.categorical(
        torch.where(x - x.amax(-1, keepdim=True) >= math.log(share), x, -torch.inf), u, temperature=1.0
    )


def backwards(logits, u, *, temperature):
    """As good as sampling.categorical, in another order."""
    token, logp = sampling.categorical(logits.flip(-1), u, temperature=temperature)
    return logits.shape[-1] - 1 - token, logp


WHOLE = [sampling.categorical, sampling.gumbel_max, partial(sampling.nucleus, top_k=0, top_p=1.0), backwards]
CUT = [
    *(partial(sampling.nucleus, top_k=k, top_p=p) for k, p in ((0, 0.1), (0, 0.999), (1, 1.0), (32000, 1.0))),
    *(partial(lying, top_k=k) for k in (1, 1000)),
    partial(sampling.gumbel_max_nucleus, top_k=0, top_p=0.95),
    partial(min_p, share=0.05),
]


@pytest.mark.parametrize("temperature", [0.05, 1.0, 10.0])
@pytest.mark.parametrize("token_sampler", WHOLE)
def test_draws_from_the_full_support_are_taken(token_sampler: Callable, temperature: float) -> None:
    check_full_support(partial(token_sampler, temperature=temperature), temperature, False)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("cut", CUT)
def test_a_sampler_that_cuts_its_tail_is_refused_unless_the_bias_is_accepted(cut: Callable, temperature: float) -> None:
    token_sampler = partial(cut, temperature=temperature)
    said = rf"^token_sampler: got .* expected draws from softmax\(logits / {temperature:g}\)"
    with pytest.raises(ValueError, match=said):
        check_full_support(token_sampler, temperature, False)
    check_full_support(token_sampler, temperature, True)


def test_greedy_is_for_evaluation_and_nan_for_nothing() -> None:
    """At temperature 1 the log-probabilities of greedy are right and only the draws give it away."""
    ways_out = r"sections\.Sampling\.token_sampler = @sampling\.categorical, or sections\.Sampling\.allow_biased"
    for temperature in (0.6, 1.0):
        with pytest.raises(ValueError, match=ways_out):
            check_full_support(sampling.greedy, temperature, False)

    def broken(logits, u):
        token, logp = sampling.greedy(logits, u)
        return token, logp * torch.nan

    with pytest.raises(ValueError, match="got log-probabilities up to inf nats off"):
        check_full_support(broken, 1.0, False)


@given(st.floats(0.3, 3), st.floats(0.3, 3))
def test_a_sampler_at_another_temperature_than_the_trainers_is_refused(own: float, trainers: float) -> None:
    if abs(own / trainers - 1) > 0.01:
        with pytest.raises(ValueError, match="got log-probabilities up to"):
            check_full_support(partial(sampling.categorical, temperature=own), trainers, False)


# -- tasks, models, optimizers and schedules

ROWS = [Problem(uid, f"{uid} + 1", str(uid + 1), {}) for uid in range(4)]


def fits() -> Task:
    return from_rows(ROWS[:3], ROWS[3:])


def rows() -> list[Problem]:
    return ROWS


def draws_rows() -> Task:
    return fits()._replace(train=lambda key, index: {"prompt": "1 + 1"})


def has_no_file() -> Task:
    raise ValueError("got no file a.jsonl, expected one")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (ROWS, "got a list, expected a function of no arguments that returns a grpo_fn.tasks.task.Task"),
        (rows, "got a list from test_tried_functions.rows, expected a function of no arguments"),
        (draws_rows, "got a dict as a problem of test_tried_functions.draws_rows, expected a Problem"),
        (has_no_file, "^got no file a.jsonl, expected one$"),
    ],
)
def test_a_task_that_does_not_fit_is_named(task: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        try_task(task)
    assert try_task(fits).test == fits().test
    assert try_task(lambda: held_out_only(ROWS)).size == 0  # nothing to draw


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [(lambda params: None, "got a NoneType from .*"), (lambda: None, "got TypeError: .*")],
)
def test_an_optimizer_that_does_not_fit_is_named(optimizer: Callable, said: str) -> None:
    with pytest.raises(ValueError, match=f"sections.PolicyUpdate.optimizer: {said}, expected a torch.optim.Optimizer"):
        try_optimizer(optimizer)
    try_optimizer(torch.optim.SGD)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (lambda update: math.nan, "got nan from .* at update 0"),
        (lambda update: 1.0 - update, r"got -8\.0 from .* at update 9"),
        (lambda update, total: 1.0, "got TypeError"),
    ],
)
def test_a_schedule_that_does_not_fit_is_named(factor: Callable, said: str) -> None:
    with pytest.raises(ValueError, match=f"sections.PolicyUpdate.schedule: {said}.*, expected a finite number"):
        try_schedule(factor, 10)


# -- rewards, each called in a worker

PROBLEM = Problem(7, "2 + 2 =", "4", {})


def tried(reward: Callable, stop_on_error: bool = True) -> None:
    pool = partial(RewardPool, workers=1, timeout_per_completion=2.0, memory_mb=2048, stop_on_error=stop_on_error)
    try_rewards("sections.Rewards.reward", [format.boxed, reward], PROBLEM, pool)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("reward", [right, cannot_say, dies, sleeps])
def test_a_reward_that_a_run_could_begin_with_passes(reward: Callable) -> None:
    """A lost row ends no run: a rule of health counts them."""
    tried(reward)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (of_numpy, r"got ndarray \[1\.\], expected a finite number or None"),
        (alone, r"TypeError: .*takes 1 positional argument.*; expected a finite number or None"),
        (with_text_only, r"ZeroDivisionError: .*; expected a finite number or None"),
    ],
)
def test_a_function_that_is_no_reward_is_named(reward: Callable, said: str) -> None:
    name = rf"{reward.__module__}\.{reward.__name__}"
    with pytest.raises(ValueError, match=rf"^sections\.Rewards\.reward: {name}, called with problem 7 .*: {said}"):
        tried(reward)


def test_parts_are_found_with_their_functions() -> None:
    reward = partial(combine.combine, parts=[right, partial(format.answer_tags, tags=["a"])], weights=[1.0, 0.5])
    names, functions = reward_parts(reward, PROBLEM)
    assert (names, functions[0], len(functions)) == (["right", "answer_tags"], right, 2)
