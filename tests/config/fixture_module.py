"""Functions for gin texts in tests to name. Never imported by the tests' own top level: gin imports it by name."""

from dataclasses import dataclass
from typing import Any

calls: list[Any] = []


def root(*, steps: int, rate: float, objective, advantage, task, extra=None):
    return steps


root.SUPPLIED = {"objective": ("batch", "totals")}


def taker(request, *, steps, objective):
    return steps


def anything(*, value):
    return value


def scale(x, *, factor, offset):
    return x * factor + offset


def shift(x, *, by=1):
    return x + by


def plain(x):
    return -x


def objective(scores, *, batch, totals, token_loss, beta: float):
    return token_loss(scores) * beta + batch + totals


def task(*, size: int):
    calls.append(size)
    return ("task", size)


def broken_task(*, size):
    raise FileNotFoundError(f"got no file for {size}")


def outer(x, *, inner):
    return inner(x)


def typed(x, *, count: int, ratio: float, name: str, flag: bool):
    return x


@dataclass(frozen=True)
class Sampler:
    width: int
    depth: int = 2


alias = scale
nameless = lambda x: x  # noqa: E731
