"""How a decoding step is run: as it is written, or, on CUDA, as a graph that was captured when its shape was first met.

A step reads and writes buffers that never move and never looks at a value on the host, so a captured one does on replay
what it did when it was captured. Weights are updated in place; where they have moved, what was captured is dropped.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

Step = Callable[[], None]
Capture = Callable[[Step], Step]  # a step to its replay; may run the step, does not count as a run


class Sizes(NamedTuple):
    """Which batches and widths there are, and how many steps are made before anybody looks at what was drawn."""

    rows: Callable[[int], int]  # at least as many
    columns: Callable[[int], int]
    steps: int


def exact_size(n: int) -> int:
    """Any size."""
    return n


def graph_size(n: int, *, least: int) -> int:
    """The next of least, 1.5 least, 2 least, 3 least, 4 least, ...: at most half as many again as asked for, from there
    on."""
    size = least
    while size < n:
        half = size + size // 2
        if n <= half and half * 2 == size * 3:
            return half
        size *= 2
    return size


class Eager:
    """Every step as it is written."""

    def __call__(self, shape: Hashable, step: Step, state: Sequence[Tensor]) -> None:
        """Run the step."""
        step()

    def drop(self) -> None:
        """There is nothing to drop."""


class GraphCache:
    """Steps by their shape, each captured once. `captures` makes what captures those that are kept together."""

    def __init__(self, captures: Callable[[], Capture]) -> None:
        self.captures, self.capture = captures, captures()
        self.replays: dict[Hashable, Step] = {}

    def __call__(self, shape: Hashable, step: Step, state: Sequence[Tensor]) -> None:
        """Run the step, whose inputs are in `state` when it is captured and when it is replayed."""
        if shape not in self.replays:
            before = [x.clone() for x in state]
            self.replays[shape] = self.capture_graph(step)
            for x, was in zip(state, before, strict=True):
                x.copy_(was)
        self.replays[shape]()

    def capture_graph(self, step: Step) -> Step:
        """Its replay; the step itself where the model does what cannot be captured."""
        try:
            return self.capture(step)
        except RuntimeError as error:
            warnings.warn(
                f"decoding runs as written, not as a CUDA graph: {str(error).splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return step

    def drop(self) -> None:
        """Forget what was captured: what it reads or writes is gone."""
        if self.replays:
            self.replays.clear()
            self.capture = self.captures()


class CudaGraph:
    """Captures steps on the current CUDA device. One pool serves all: they never run at once, and hand nothing on."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """On a stream beside, kernels are chosen and libraries set up before: capturing forbids both."""
        beside, current = torch.cuda.Stream(), torch.cuda.current_stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(2):
                step()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads (those that write checkpoints) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            step()
        return graph.replay


def addresses(model: nn.Module) -> tuple[int, ...]:
    """Where the model's weights and buffers lie."""
    return tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))


def capturable(model: nn.Module) -> bool:
    """Whether all of the model is in plain tensors on one CUDA device: what is gathered for a call lies elsewhere
    each time."""
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(type(x.data) is Tensor and x.device.type == "cuda" for x in tensors)
    return bool(tensors) and plain and len({x.device for x in tensors}) == 1
