"""Work beside the training: one at a time, noticed alike on every rank, and never the end of the process."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from crew import CPU, crew
from hypothesis import given

from grpo_fn.shell.world import Elsewhere, World, alone
from grpo_fn.trainer.background import Background, ShouldStop

ALONE = alone(CPU)
FOREVER = 60.0
values = st.integers() | st.text() | st.lists(st.floats(allow_nan=False))


def first(value: Any, seconds: float) -> tuple[Any]:
    return (value,)


def waited(background: Background, take: Callable[[Any, float], Any] = first) -> Any:
    """What `poll_result` returns in the end."""
    while (made := background.poll_result(take, patience=0.05)) is None:
        pass
    return made


@given(st.lists(values, max_size=4))
def test_every_work_comes_back_once_and_in_its_turn(brought: list[Any]) -> None:
    with Background(ALONE, deadline=FOREVER) as background:
        assert background.poll_result(first, patience=0.0) is None
        for value in brought:
            background.start_task(f"work on {value!r}", partial(lambda value, should_stop: value, value))
            assert waited(background) == (value,)
            assert background.name is None
            assert background.poll_result(first, patience=0.0) is None


def test_there_are_never_two_at_once() -> None:
    gate = threading.Event()
    with Background(ALONE, deadline=FOREVER) as background:
        background.start_task("the first", lambda should_stop: gate.wait(FOREVER))
        with pytest.raises(RuntimeError, match="got the second to begin beside the first, expected one at a time"):
            background.start_task("the second", bool)
        gate.set()
        assert waited(background) == (True,)  # the first has not been touched


@pytest.mark.parametrize("raised", [ValueError("bad row"), TimeoutError("a socket's own")])
def test_an_error_of_the_work_is_raised_with_the_works_name(raised: Exception) -> None:
    def work(should_stop: ShouldStop) -> None:
        raise raised

    with Background(ALONE, deadline=FOREVER) as background:
        background.start_task("evaluation of step 7", work)
        with pytest.raises(type(raised), match=str(raised)) as caught:
            waited(background)
        assert caught.value is raised
        assert caught.value.__notes__[-1] == "in the evaluation of step 7, beside the training"
        background.start_task("evaluation of step 8", lambda should_stop: 8)
        assert waited(background) == (8,)


def test_a_hang_meets_the_deadline_and_is_named() -> None:
    hung = threading.Event()
    with Background(ALONE, deadline=0.3) as background:
        began = time.monotonic()
        background.start_task("evaluation of step 7", partial(stuck, hung))
        with pytest.raises(TimeoutError, match=r"got no result of the evaluation of step 7 within 0.3 s, expected one"):
            waited(background)
        assert 0.3 <= time.monotonic() - began < 5.0
    assert hung.wait(5.0), "the thread is still there"


def stuck(ended: threading.Event, should_stop: ShouldStop) -> None:
    """Work without an end but when it is to stop; says when that was."""
    while not should_stop():
        time.sleep(0.01)
    ended.set()


BUSY = """
import sys, threading
import torch
from grpo_fn.trainer.background import Background
from grpo_fn.shell.world import alone

torch.set_num_threads(1)
begun = threading.Event()

def work(should_stop):
    x, layer = torch.randn(64, 64), torch.nn.Linear(64, 64)
    while not should_stop():
        layer(x)[torch.tensor([1, 2, 3])].tolist()
        begun.set()

with Background(alone(torch.device("cpu")), deadline=60.0) as background:
    background.start_task("the work", work)
    begun.wait(60.0)
sys.exit(75)
"""


def test_the_exit_code_is_the_process_s_own_whatever_torch_is_at() -> None:
    ended = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (75, "")


# -- on many ranks


def poll_until_over(world: World, value: str) -> tuple[list[Any], int]:
    """What each look found until it was over, on this rank, and how often this rank worked."""
    ran, found, looked = [], [], threading.Event()

    def work(should_stop: ShouldStop) -> str:
        ran.append(world.rank)
        looked.wait(FOREVER)
        return value

    with Background(world, deadline=FOREVER) as background:
        background.start_task("the work", work)
        while not found or found[-1] is None:
            found.append(background.poll_result(first, patience=0.05))
            looked.set()
        return found, len(ran)


def test_every_rank_gets_the_same_and_the_main_one_alone_works() -> None:
    (found, worked), *others = crew(2).run(poll_until_over, "done")
    assert found[0] is None
    assert found[-1] == ("done",)
    assert worked == 1
    assert others == [(found, 0)]


def failing(world: World, hang: bool) -> tuple[str, str, Any]:
    """The error on this rank, its text, and what the next work came to."""

    def work(should_stop: ShouldStop) -> None:
        if hang:
            stuck(threading.Event(), should_stop)
        raise ValueError("bad row")

    with Background(world, deadline=0.3) as background:
        background.start_task("evaluation of step 7", work)
        try:
            waited(background)
        except Exception as error:
            background.start_task("evaluation of step 8", lambda should_stop: 8)
            return type(error).__name__, str(error), waited(background)
    return "", "", None


@pytest.mark.parametrize(("hang", "error", "text"), [(False, ValueError, "bad row"), (True, TimeoutError, "of step 7")])
def test_a_failure_reaches_every_rank_and_new_work_may_start(hang: bool, error: type[Exception], text: str) -> None:
    (name, said, after), *others = crew(2).run(failing, hang)
    assert name == error.__name__
    assert text in said
    assert after == (8,)
    for name, reported, after in others:
        assert name == Elsewhere.__name__
        assert reported == f"rank 0: {said}"
        assert after == (8,)
