"""A user's task, model, optimizer or schedule that does not fit is one line, before anything is loaded."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from grpo_fn.config import freeze, load_config
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import Task, from_rows, held_out_only
from grpo_fn.trainer.checks.try_out import try_optimizer, try_schedule, try_task
from grpo_fn.trainer.sections import model_source

ROWS = [Problem(uid, f"{uid} + 1", str(uid + 1), {}) for uid in range(4)]


def fits() -> Task:
    return from_rows(ROWS[:3], ROWS[3:])


def rows() -> list[Problem]:
    return ROWS


def wants_more(folder: str) -> Task:
    return fits()


def draws_rows() -> Task:
    return fits()._replace(train=lambda key, index: {"prompt": "1 + 1"})


def draws_nothing() -> Task:
    return fits()._replace(train=lambda key, index: ROWS[index + 99])


def holds_out_text() -> Task:
    return fits()._replace(test=("1 + 1",))


def has_no_file() -> Task:
    raise ValueError("got no file a.jsonl, expected one")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (fits(), r"got a Task of 7 \(bound with \(\), which calls it too early\?\), expected a function of no arg"),
        (ROWS, "got a list, expected a function of no arguments that returns a grpo_fn.tasks.task.Task"),
        (rows, "got a list from test_try_sources.rows, expected a function of no arguments"),
        (wants_more, "got TypeError: wants_more.. missing 1 required .* from test_try_sources.wants_more"),
        (draws_rows, "got a dict as a problem of test_try_sources.draws_rows, expected a Problem"),
        (draws_nothing, "got IndexError: list index out of range from test_try_sources.draws_nothing"),
        (holds_out_text, "got a str as a problem of test_try_sources.holds_out_text"),
        (has_no_file, "^got no file a.jsonl, expected one$"),
    ],
)
def test_a_task_that_does_not_fit_is_named(task: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        try_task(task)


def test_a_task_that_fits_is_returned() -> None:
    assert try_task(fits).test == fits().test
    assert try_task(lambda: held_out_only(ROWS)).size == 0  # nothing to draw


def no_optimizer(params: list[nn.Parameter]) -> None:
    return None


def no_arguments() -> None: ...


@pytest.mark.parametrize(
    ("made", "said"),
    [(no_optimizer, "got a NoneType from test_try_sources.no_optimizer"), (no_arguments, "got TypeError: .*")],
)
def test_an_optimizer_that_does_not_fit_is_named(made: Callable, said: str) -> None:
    with pytest.raises(ValueError, match=f"sections.PolicyUpdate.optimizer: {said}, expected a torch.optim.Optimizer"):
        try_optimizer(made)
    try_optimizer(torch.optim.SGD)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (lambda update: "1", "got a str from .* at update 0"),
        (lambda update: torch.tensor(1.0), "got a Tensor from .* at update 0"),
        (lambda update: math.nan, "got nan from .* at update 0"),
        (lambda update: 1.0 - update, r"got -8\.0 from .* at update 9"),
        (lambda update, total: 1.0, "got TypeError"),
    ],
)
def test_a_schedule_that_does_not_fit_is_named(factor: Callable, said: str) -> None:
    with pytest.raises(ValueError, match=f"sections.PolicyUpdate.schedule: {said}.*, expected a finite number"):
        try_schedule(factor, 10)


def test_a_model_that_is_neither_a_name_nor_a_source_is_named() -> None:
    with pytest.raises(ValueError, match=r"train\.train\.model: got a list, expected a Hugging Face folder"):
        model_source([], "train.train.model")
    assert model_source("some/name", "train.train.model").name == "some/name"


def test_those_of_the_default_fit() -> None:
    knobs = load_config(["run/arithmetic.gin"], []).root.knobs
    policy = freeze(knobs["policy"], {})
    try_optimizer(policy.optimizer)
    try_schedule(policy.schedule, 40)
    assert try_task(freeze(knobs["data"], {}).task).size > 0
