"""A configuration's task, optimizer and schedule, each asked for a little before anything expensive starts.

What cannot be called as the trainer calls it, or returns something else, ends the run with one line: the knob, the
function by module and name, got and wanted. Errors that the package's own functions raise for bad input pass as they
are.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import Task
from grpo_fn.trainer.checks.try_out import own_functions, shown_type

T = TypeVar("T")


def try_task(make: Any) -> Task:
    """The task that a configuration makes, with a first training problem that can be drawn.

    Args:
        make: `sections.Data.task`, () -> Task.

    Returns:
        The task.

    Raises:
        ValueError: when it cannot be called, returns no Task, or one whose problems are none.
    """
    wanted = "a function of no arguments that returns a grpo_fn.tasks.task.Task (from_rows makes one of a list)"
    if not callable(make):
        at = " (bound with (), which calls it too early?)" if isinstance(make, Task) else ""
        raise ValueError(f"sections.Data.task: got {shown_type(make)}{at}, wanted {wanted}")
    task = _called("sections.Data.task", make, make, wanted=wanted)
    if not isinstance(task, Task):
        raise ValueError(f"sections.Data.task: got {shown_type(task)} from {_name(make)}, wanted {wanted}")
    found: list[Any] = list(task.test[:1])
    if task.size:
        draw = _called("sections.Data.task", make, lambda: task.train(prng.key(0, device="cpu"), 0), wanted="a Problem")
        found.append(draw)
    for one in found:
        if not isinstance(one, Problem):
            raise ValueError(
                f"sections.Data.task: got {shown_type(one)} as a problem of {_name(make)}, wanted a Problem"
            )
    return task


def try_optimizer(optimizer: Callable[..., Any]) -> None:
    """Raise ValueError unless it makes a torch optimizer of parameters.

    Args:
        optimizer: `sections.PolicyUpdate.optimizer`, (parameters) -> torch.optim.Optimizer.
    """
    knob, wanted = "sections.PolicyUpdate.optimizer", "a torch.optim.Optimizer of the parameters that it is given"
    made = _called(knob, optimizer, lambda: optimizer([nn.Parameter(torch.zeros(2, 2))]), wanted=wanted)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"{knob}: got {shown_type(made)} from {_name(optimizer)}, wanted {wanted}")


def try_schedule(schedule: Callable[[int], Any], updates: int) -> None:
    """Raise ValueError unless it gives a finite factor of at least 0 for the first and the last update.

    Args:
        schedule: `sections.PolicyUpdate.schedule`, update from 0 -> factor of the learning rate.
        updates: optimizer steps of the run.
    """
    knob, wanted = "sections.PolicyUpdate.schedule", "a finite number of at least 0, the factor of the learning rate"
    for update in (0, max(0, updates - 1)):
        factor = _called(knob, schedule, lambda at=update: schedule(at), wanted=wanted)
        number = not isinstance(factor, bool | Tensor) and isinstance(factor, int | float)
        if not number or not isfinite(factor) or factor < 0:
            got = repr(factor) if number else shown_type(factor)
            raise ValueError(f"{knob}: got {got} from {_name(schedule)} at update {update}, wanted {wanted}")


def _name(function: Any) -> str:
    names = [*own_functions(function)]
    return ", ".join([name for name in names if not name.startswith("grpo_fn.")] or names[:1])


def _called(knob: str, function: Any, call: Callable[[], T], *, wanted: str) -> T:
    try:
        return call()
    except (ValueError, OSError):
        raise  # bad input of the function's own, which says what it got
    except Exception as error:
        text = str(error).strip()
        got = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
        raise ValueError(f"{knob}: got {got} from {_name(function)}, wanted {wanted}") from error
