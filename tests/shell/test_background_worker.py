"""Calls in a thread beside the training: in their order, each with its result, none waited for without end."""

import subprocess
import sys
import time
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from threading import Event, Thread, current_thread

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo_fn.shell import background_worker
from grpo_fn.shell.background_worker import BackgroundWorker

SOON = 20.0  # seconds

# A product is a piece of work for a team of threads. No thread has one before the first.
TEAMS = """
import threading, torch
from grpo_fn.shell.background_worker import BackgroundWorker

def threads():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))

def work():
    torch.rand(1 << 20).exp().sum().item()
    (torch.rand(256, 256) @ torch.rand(256, 256)).sum()

torch.set_num_threads(4)
work()
before, done, go = threads(), threading.Event(), threading.Event()
def beside():
    work()
    done.set()
    go.wait(60)
START
assert done.wait(60)
print(threads() - before)
go.set()
"""


def run(code: str) -> str:
    """What a process of that code prints on its standard output."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_torch_has_no_team_in_a_worker_with_one_thread() -> None:
    """Unlike in a thread as it comes: by how many threads of the operating system a process grows as each computes."""
    starts = (
        "BackgroundWorker('log', timeout=None, torch_threads=1).submit(beside)",
        "BackgroundWorker('ahead', timeout=None).submit(beside)",
    )
    assert [int(run(TEAMS.replace("START", start))) > 1 for start in starts] == [False, True]


def test_torch_keeps_its_threads_everywhere_else() -> None:
    """In the thread that computes, and in those that come after the worker's."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with BackgroundWorker("log", timeout=SOON, torch_threads=1) as worker:
            assert worker.submit(torch.get_num_threads).result(60) == 1
        assert torch.get_num_threads() == 3
        later = Future()
        Thread(target=lambda: later.set_result(torch.get_num_threads()), daemon=True).start()
        assert later.result(60) == 3
    finally:
        torch.set_num_threads(before)


@given(st.lists(st.integers() | st.just(ValueError("bad")), max_size=9))
def test_calls_are_made_in_their_order_and_each_has_its_result(brought: list) -> None:
    def made(value: object) -> object:
        at.append((current_thread().name, value))
        if isinstance(value, Exception):
            raise value
        return value

    at: list[tuple[str, object]] = []
    with BackgroundWorker("the worker", timeout=SOON) as worker:
        futures = [worker.submit(made, value, what=f"{value}") for value in brought]
        worker.wait()  # which raises no call's error
        assert all(future.done() for future in futures)
        assert at == [("the worker", value) for value in brought]
        for future, value in zip(futures, brought, strict=True):
            assert (future.exception() or future.result()) == value


@pytest.fixture
def worker() -> BackgroundWorker:
    with BackgroundWorker("the worker", timeout=SOON) as made:
        yield made


def test_an_exit_ends_the_call_and_not_the_thread(worker: BackgroundWorker) -> None:
    with pytest.raises(RuntimeError, match="the call ended by SystemExit: no engine"):
        worker.submit(sys.exit, "no engine", what="the call").result(SOON)
    assert worker.submit(int, "3", base=8).result(SOON) == 3


def test_a_late_call_is_named_with_the_line_it_waits_at(worker: BackgroundWorker) -> None:
    gate = Event()
    worker.submit(gate.wait, SOON, what="the gate")
    worker.submit(int, what="the next one")
    with pytest.raises(
        TimeoutError, match=r"^got no result of the gate within 0\.05 s, expected one by then"
    ) as caught:
        worker.wait(timeout=0.05)
    assert "waiter.acquire" in caught.value.__notes__[0]  # where its thread is
    gate.set()
    worker.wait()


def test_submit_waits_where_too_many_calls_are_not_done() -> None:
    gate = Event()
    with BackgroundWorker("the worker", timeout=0.05, max_pending=2) as worker:
        for name in ("the first", "the second"):
            worker.submit(gate.wait, SOON, what=name)
        with pytest.raises(TimeoutError, match="of the first within"):
            worker.submit(int)
        gate.set()
        assert worker.submit(int).result(SOON) == 0


def wait_at(gate: Event, begun: Event) -> bool:
    """Say that it has begun, and wait for the gate."""
    begun.set()
    return gate.wait(SOON)


@pytest.mark.parametrize("cancel", [False, True])
def test_shutdown_makes_what_is_left_or_cancels_it_and_takes_nothing_more(cancel: bool) -> None:
    gate, begun, worker = Event(), Event(), BackgroundWorker("the worker", timeout=SOON)
    first, second = worker.submit(wait_at, gate, begun), worker.submit(int)
    assert begun.wait(SOON)
    worker.shutdown(wait=False, cancel_futures=cancel)
    assert worker.stopping.is_set() == cancel
    with pytest.raises(RuntimeError, match="the worker: got a third after the shutdown"):
        worker.submit(int, what="a third")
    gate.set()
    worker.shutdown()
    assert first.result(0) is True
    with pytest.raises(CancelledError) if cancel else nullcontext():
        assert second.result(0) == 0
    assert not worker._thread.is_alive()


def test_a_call_that_looks_at_nothing_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_worker, "CLOSE_TIMEOUT", 0.05)
    gate, worker, start = Event(), BackgroundWorker("the worker", timeout=SOON), time.monotonic()
    worker.submit(gate.wait, SOON)
    worker.shutdown(cancel_futures=True)
    assert time.monotonic() - start < 5.0
    gate.set()


HANGING = """
import threading
from grpo_fn.shell.background_worker import BackgroundWorker
BackgroundWorker("hanging", timeout=None).submit(threading.Event().wait)
print("over")
"""


@pytest.mark.slow
def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    assert run(HANGING) == "over\n"


def test_a_thread_uses_the_card_of_the_thread_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((current_thread().name, device)))
    worker = BackgroundWorker("saver", timeout=10.0)
    worker.submit(int).result(10.0)
    worker.shutdown()
    assert chosen == [("saver", 3)]
