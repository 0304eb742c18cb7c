"""Capturing steps without a device: torch.cuda's calls are replaced by ones that write down what was asked of them."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from grpo_fn.shell.sampler.local import cuda_steps
from grpo_fn.shell.sampler.local.cuda_steps import BrokenCapture, CudaGraph, GraphCache

WAIT = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:100.)"


class FakeCuda:
    """torch.cuda of one device on which a capture may fail: it leaves its stream current then, as torch's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.current, self.mode, self.fails = self.stream(), 0, False
        self.captured_on: list[object] = []
        for name, f in {
            "graph_pool_handle": lambda: (0, 1),
            "Stream": self.stream,
            "current_stream": lambda: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "stream": self.use,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": self.graph,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(
                self, "mode", {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
            ),
        }.items():
            monkeypatch.setattr(torch.cuda, name, f)

    def stream(self) -> SimpleNamespace:
        self.made += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def use(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        before, self.current = self.current, stream
        self.captured_on.append(stream)
        yield
        if self.fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore")
        self.current = before

    def wait(self) -> None:
        """What `.item()` does in the debug mode."""
        if self.mode == 1:
            warnings.warn(WAIT, UserWarning, stacklevel=2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def counted(runs: list[int], more: Callable[[], None] = lambda: None) -> Callable[[], None]:
    def step() -> None:
        runs.append(len(runs))
        more()

    return step


def test_a_step_is_warmed_up_twice_and_captured_on_one_side_stream(cuda: FakeCuda) -> None:
    runs, before = [], cuda.current
    capture = CudaGraph()
    for _ in range(5):
        capture(counted(runs))
    assert len(runs) == 5 * 3
    assert cuda.made == 2, "one stream beside the current one, however many captures"
    assert {id(stream) for stream in cuda.captured_on} == {id(capture.side)}
    assert cuda.current is before
    assert cuda.mode == 0


def test_waits_of_other_threads_do_not_count_and_are_not_shown_and_other_warnings_are(cuda: FakeCuda) -> None:
    def other() -> None:
        thread = threading.Thread(target=cuda.wait)
        thread.start()
        thread.join()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CudaGraph()(counted([], other))
    assert len(cuda.captured_on) == 1
    with pytest.warns(UserWarning, match="something else"):
        CudaGraph()(counted([], lambda: warnings.warn("something else", UserWarning, stacklevel=1)))


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.0"])
def test_a_failed_capture_ends_the_run_on_a_torch_that_cannot_go_on_after_one(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(cuda_steps.torch, "__version__", version)
    before, cuda.fails, cache, state = cuda.current, True, GraphCache(CudaGraph), [torch.zeros(1)]
    cache(1, counted([]), state, times=1)
    if version.startswith("2.11"):
        expected = pytest.raises(BrokenCapture, match=r"during capture.* on torch 2\.11\.0\S*, expected 2\.12 or later")
    else:
        expected = pytest.warns(RuntimeWarning, match="not as a CUDA graph: .* previous error during capture")
    with expected:
        cache(1, counted([]), state, times=1)
    assert cuda.current is before
    assert cuda.mode == 0


def test_a_step_that_waits_is_found_before_the_capture_and_no_other_is_tried_after_it(cuda: FakeCuda) -> None:
    runs: list[int] = []
    cache, state = GraphCache(CudaGraph), [torch.zeros(1)]
    for shape in (1, 2):
        cache(shape, counted(runs), state, times=1)
    with pytest.warns(RuntimeWarning, match="not as a CUDA graph: a step of this model waits for the device 2 times"):
        cache(1, counted(runs, lambda: (cuda.wait(), cuda.wait())), state, times=1)
    assert not cuda.captured_on
    assert cuda.mode == 0
    assert len(runs) == 2 + 2 + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache(2, counted(runs, cuda.wait), state, times=3)
    assert len(runs) == 2 + 2 + 1 + 3


def test_a_shape_is_captured_at_its_second_use_and_forgotten_with_its_buffers(cuda: FakeCuda) -> None:
    runs: list[int] = []
    cache, state = GraphCache(CudaGraph), [torch.zeros(1)]

    def step() -> None:
        runs.append(int(state[0].add_(1.0)))

    seen = []
    for shape in (1, 2, 1, 1, 2):
        cache(shape, step, state, times=4)
        seen.append((len(runs), len(cuda.captured_on), float(state[0])))
    # A capture runs the step three times (a real one twice and records it), and puts back what it has changed; replays
    # of this device do nothing.
    assert seen == [(4, 0, 4.0), (8, 0, 8.0), (11, 1, 8.0), (11, 1, 8.0), (14, 2, 8.0)]
    cache.drop()
    cache(1, step, state, times=1)
    assert (len(runs), len(cuda.captured_on)) == (15, 2)
