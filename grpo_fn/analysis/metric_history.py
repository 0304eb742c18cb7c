"""A run's metrics as the rules of health read them: one mapping of name to number a step, oldest first."""

import math
from collections.abc import Mapping, Sequence

Line = Mapping[str, float]
History = Sequence[Line]

# What is remembered of a run: its beginning, which some rules compare with, and its newest lines.
FIRST, LAST = 64, 1024


def is_finite_number(value: float | None) -> bool:
    """Whether it is there and a number."""
    return value is not None and math.isfinite(value)


def finite_series(history: History, name: str) -> list[float]:
    """The finite values of a metric, oldest first."""
    return [one[name] for one in history if is_finite_number(one.get(name))]


def newest_value(history: History, name: str) -> float | None:
    """The metric of the newest line; None when that line lacks it, or it is not finite."""
    value = history[-1].get(name) if history else None
    return value if is_finite_number(value) else None


def last(history: History, name: str, count: int) -> list[float]:
    """The last `count` values; none when there are fewer. Raises ValueError unless 1 <= count <= FIRST."""
    check_window("steps", count)
    values = finite_series(history[-LAST:], name)[-count:]
    return values if len(values) == count else []


def means_at_ends(history: History, name: str, window: int) -> tuple[float, float] | None:
    """Means of the first and the last `window` values; None while they would overlap."""
    check_window("window", window)
    values = finite_series(history, name)
    return (stable_mean(values[:window]), stable_mean(values[-window:])) if len(values) >= 2 * window else None


def stable_mean(values: Sequence[float]) -> float:
    """The mean; values that only differ in rounding do not move it out of their range."""
    return min(max(values), max(min(values), math.fsum(value / len(values) for value in values)))


def at(history: History) -> str:
    """The step of the newest line, ready to follow a number."""
    step = newest_value(history, "step")
    return "" if step is None else f" at step {step:.0f}"


def check_above_zero(name: str, value: float) -> None:
    """Raise ValueError unless the knob is a number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: got {value}, wanted a number above 0")


def check_share(value: float) -> None:
    """Raise ValueError unless the knob is a share above 0."""
    if not 0 < value <= 1:
        raise ValueError(f"share: got {value}, wanted more than 0 and at most 1")


def check_window(name: str, value: int) -> None:
    """Raise ValueError unless the knob counts lines that are remembered."""
    if not 1 <= value <= FIRST:
        raise ValueError(f"{name}: got {value}, wanted 1 to {FIRST}: no more of a run's beginning is remembered")
