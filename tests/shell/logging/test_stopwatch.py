"""Every moment counts for one phase: whatever is nested in whatever, the phases of a lap add up to it."""

import gzip
import json
import re
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import CPU
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.shell.logging import stopwatch as profiling
from grpo_fn.shell.logging.stopwatch import OTHER, Profiler, Stopwatch, check_profile_steps
from grpo_fn.shell.world import World, alone

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


def happen(watch: Stopwatch, clock: Clock, what: object, phase: str, seen: list[Counter]) -> None:
    """Make it happen; what every phase should count since each lap goes to `seen`."""
    if what == "lap":
        lap(watch, seen)
    elif isinstance(what, float):
        clock.now += what
        seen[-1][phase] += what
    else:
        name, inner, raises = what
        with suppress(ArithmeticError), watch.span(name):
            for one in inner:
                happen(watch, clock, one, name, seen)
            if raises:
                raise ArithmeticError


def lap(watch: Stopwatch, seen: list[Counter]) -> None:
    found = watch.lap()
    expected = Counter({f"time/{name}": seconds for name, seconds in seen[-1].items() if seconds})
    assert {"time/total", f"time/{OTHER}"} | expected.keys() <= found.keys()
    expected["time/total"] = seen[-1].total()
    assert found == pytest.approx({name: expected[name] for name in found}, abs=1e-6)
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
        with suppress(ArithmeticError), watch.span("score"):
            raise ArithmeticError
        assert watch.phase == "score"
    assert watch.phase == "start"


# -- traces


# What torch-tb-profiler 0.4.3 takes for a trace: the worker's name, a number for the span, and this ending.
TAKEN = re.compile(r"^(.*?)(?:\.(\d+))?\.pt\.trace\.json(?:\.gz)?$")


def ranges(path: Path) -> dict[str, list[tuple[float, float]]]:
    """When the ranges of a trace began and ended, by name, in microseconds."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    found: dict[str, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def step(clock: Stopwatch, world: World) -> None:
    with clock.span("generate"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    with clock.span("train"), world.talking("forward"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    with clock.span("log"):
        pass


def test_every_chosen_step_has_a_trace_and_its_phases_lie_as_they_did(tmp_path: Path) -> None:
    world = alone(CPU)
    profiler = Profiler(tmp_path, world, (2, 4))
    clock, world.mark = Stopwatch(mark=profiler.mark), profiler.mark
    for n in (1, 2, 3, 4):
        with profiler.record_step(n, clock.span):
            step(clock, world)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank0.{n}.pt.trace.json.gz" for n in (2, 4)]
    for n in (2, 4):
        path = tmp_path / f"rank0.{n}.pt.trace.json.gz"
        assert TAKEN.match(path.name).groups() == ("rank0", str(n))
        found = ranges(path)
        assert found.keys() == {f"ProfilerStep#{n}", "generate", "train", "forward", "log"}
        assert all(len(times) == 1 for times in found.values())
        whole, generate, train, forward, log = (
            found[name][0] for name in (f"ProfilerStep#{n}", "generate", "train", "forward", "log")
        )
        assert whole[0] <= generate[0] <= generate[1] <= train[0] <= forward[0]
        assert forward[1] <= train[1] <= log[0] <= log[1] <= whole[1]
    assert clock.lap().keys() == {f"time/{name}" for name in ("generate", "train", "log", "profile", "other", "total")}


def test_a_step_that_is_taken_again_replaces_its_trace_and_one_that_raises_leaves_it(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, alone(CPU), (1,))
    path = tmp_path / "rank0.1.pt.trace.json.gz"
    for name in ("first", "second"):
        with profiler.record_step(1, lambda _: nullcontext()), profiler.mark(name):
            pass
        assert {name} == ranges(path).keys() - {"ProfilerStep#1"}
    with pytest.raises(ArithmeticError), profiler.record_step(1, lambda _: nullcontext()):
        raise ArithmeticError
    assert "second" in ranges(path)
    assert [path.name for path in tmp_path.iterdir()] == [path.name]
    assert isinstance(profiler.mark("nothing"), nullcontext)


def test_without_steps_the_profiler_of_torch_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "profile", None)
    monkeypatch.setattr(profiling, "record_function", None)
    world, profiler = alone(CPU), Profiler(tmp_path, alone(CPU), ())
    clock = Stopwatch(mark=profiler.mark)
    for n in (1, 2):
        with profiler.record_step(n, clock.span):
            step(clock, world)
    assert [*tmp_path.iterdir()] == []
    assert "time/profile" not in clock.lap()


@pytest.mark.parametrize(("steps", "got"), [((1, 7, -2), "got 7, -2, "), ((True,), "got True, "), (3, "got 3, ")])
def test_only_steps_of_the_run_are_taken(steps: Any, got: str) -> None:
    check_profile_steps([3, 1], 6)
    expected = f"sections.Logging.profile_steps: {got}expected whole numbers from 1 to 6"
    with pytest.raises(ValueError, match=re.escape(expected)):
        check_profile_steps(steps, 6)
