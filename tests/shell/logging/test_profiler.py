"""A trace of each chosen step, in which the phases lie within one another as they did; nothing of any other step."""

import gzip
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import CPU

from grpo_fn.shell.logging import stopwatch as profiling
from grpo_fn.shell.logging.stopwatch import Profiler, Stopwatch, check_profile_steps
from grpo_fn.shell.world import World, alone

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


def inside(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]


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
        assert {name: len(times) for name, times in found.items()} == {
            f"ProfilerStep#{n}": 1,
            **dict.fromkeys(("generate", "train", "forward", "log"), 1),
        }
        (whole,), (generate,), (train,) = found[f"ProfilerStep#{n}"], found["generate"], found["train"]
        (forward,), (log,) = found["forward"], found["log"]
        assert all(inside(one, whole) for one in (generate, train, log))
        assert inside(forward, train)
        assert generate[1] <= train[0]
        assert train[1] <= log[0]
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
