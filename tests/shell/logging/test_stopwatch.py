"""Every moment counts for one phase: whatever is nested in whatever, the phases of a lap add up to it."""

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.shell.logging.stopwatch import OTHER, Stopwatch

NAMES = ("generate", "score", "train", "log")
SECONDS = st.floats(0, 1e4, allow_nan=False)


class Clock:
    """Stands still until it is advanced."""

    def __init__(self, start: float) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now


# What happens: seconds pass, a lap is asked for, or a phase in which something happens and which may raise at its end.
HAPPENING = st.recursive(
    SECONDS | st.just("lap"),
    lambda inner: st.tuples(st.sampled_from(NAMES), st.lists(inner, max_size=4), st.booleans()),
    max_leaves=12,
)


class Oops(Exception):
    pass


def happen(watch: Stopwatch, clock: Clock, what: object, phase: str, seen: list[Counter]) -> None:
    """Make it happen; what every phase should count since each lap goes to `seen`."""
    if what == "lap":
        lap(watch, seen)
    elif isinstance(what, float):
        clock.now += what
        seen[-1][phase] += what
    else:
        name, inner, raises = what
        with suppress(Oops), watch.span(name):
            for one in inner:
                happen(watch, clock, one, name, seen)
            if raises:
                raise Oops


def lap(watch: Stopwatch, seen: list[Counter]) -> None:
    found = watch.lap()
    total = found.pop("time/total")
    assert sum(found.values()) == pytest.approx(total, abs=1e-6)
    expected = seen[-1]
    assert total == pytest.approx(expected.total(), abs=1e-6)
    assert {name.removeprefix("time/") for name in found} >= {OTHER, *(name for name in expected if expected[name])}
    for name, seconds in found.items():
        assert seconds == pytest.approx(expected[name.removeprefix("time/")], abs=1e-6)
    seen.append(Counter())


@given(st.lists(HAPPENING, max_size=6), SECONDS)
def test_phases_are_exclusive_and_add_up_to_the_lap(happenings: list[object], start: float) -> None:
    clock, seen = Clock(start), [Counter()]
    watch = Stopwatch(now=clock)
    for what in happenings:
        happen(watch, clock, what, OTHER, seen)
    lap(watch, seen)


def test_the_phase_is_the_innermost_one_and_stays_where_it_raised() -> None:
    watch = Stopwatch()
    assert watch.phase == "start"
    with watch.span("train"):
        with watch.span("log"):
            assert watch.phase == "log"
        assert watch.phase == "train"
        with suppress(Oops), watch.span("score"):
            raise Oops
        assert watch.phase == "score"
    assert watch.phase == "start"
