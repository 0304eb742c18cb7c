"""How a decoding step is run: as it is written, or, on CUDA, as a graph that is captured at its shape's second use.

A step reads and writes buffers that never move and never looks at a value on the host, so a captured one does on replay
what it did when it was captured. Weights are updated in place; where they have moved, what was captured is dropped.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn

SYNC_WARNING = "called a synchronizing CUDA operation"  # torch's own, in its debug mode for synchronization
RECOVERS = Version("2.12")  # before, a capture that failed left the allocator in capture mode (pytorch#180395)

Step = Callable[[], None]
Capture = Callable[[Step], Step]  # a step to its replay; may run the step, does not count as a run


class Sizes(NamedTuple):
    """Which batches and widths there are, and how many steps are made before anybody looks at what was drawn."""

    rows: Callable[[int], int]  # at least as many
    columns: Callable[[int], int]
    capacity: Callable[[int], int]  # of buffers
    steps: int


def exact_size(n: int) -> int:
    """Any size."""
    return n


def graph_size(n: int, *, least: int) -> int:
    """The next of least, 2 least, 4 least, ...: few shapes, for what is not seen costs little in a captured step."""
    size = least
    while size < n:
        size *= 2
    return size


def buffer_size(n: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, ...: no buffer is larger than one and a half times what was asked for."""
    size = graph_size(n, least=1)
    return size // 4 * 3 if n <= size // 4 * 3 else size


class Eager:
    """Every step as it is written."""

    def __call__(self, shape: Hashable, step: Step, state: Sequence[Tensor], *, times: int) -> None:
        """Run the step so many times."""
        for _ in range(times):
            step()

    def drop(self) -> None:
        """There is nothing to drop."""


class UncapturableStep(RuntimeError):
    """A step that waits for the device: found in its warm-up, before any capture begins."""


class BrokenCapture(Exception):
    """A capture that failed on a torch that cannot go on afterwards. Not a RuntimeError: nothing may run on."""


class GraphCache:
    """Steps by their shape, each captured when it is used for the second time: some shapes come once, in passing.

    `captures` makes what captures those that are kept together. After the first step that cannot be captured no other
    is tried: what one shape does, all do.
    """

    def __init__(self, captures: Callable[[], Capture]) -> None:
        self.captures, self.capture = captures, captures()
        self.replays: dict[Hashable, Step] = {}
        self.used: set[Hashable] = set()
        self.refused = False

    def __call__(self, shape: Hashable, step: Step, state: Sequence[Tensor], *, times: int) -> None:
        """Run the step so many times, which is one use; its inputs are in `state` at a capture and at every replay."""
        if shape in self.used and shape not in self.replays:
            before = [x.clone() for x in state]
            self.replays[shape] = step if self.refused else self.capture_graph(step)
            for x, was in zip(state, before, strict=True):
                x.copy_(was)
        self.used.add(shape)
        run = self.replays.get(shape, step)
        for _ in range(times):
            run()

    def capture_graph(self, step: Step) -> Step:
        """Its replay; the step itself where the model does what cannot be captured."""
        try:
            return self.capture(step)
        except RuntimeError as error:
            self.refused = True
            warnings.warn(
                f"decoding runs as written, not as a CUDA graph: {str(error).splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return step

    def drop(self) -> None:
        """Forget what was captured: what it reads or writes is gone."""
        self.used.clear()
        if self.replays:
            self.replays.clear()
            self.capture = self.captures()


class CudaGraph:
    """Captures steps on the current CUDA device.

    One memory pool serves all: they never run at once, and pass nothing on. One side stream, too: cuBLAS keeps a
    workspace for every stream that it was ever used on, 32 MiB on Hopper.
    """

    def __init__(self) -> None:
        self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, step: Step) -> Step:
        """Capture the step, after two warm-ups on the side stream: kernels are chosen and libraries set up in them.

        Raises:
            UncapturableStep: the second warm-up waited for the device.
            BrokenCapture: the capture failed, and this torch cannot go on after that.
            RuntimeError: the capture failed.
        """
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        try:
            with torch.cuda.stream(self.side):
                step()
                with synchronizations() as found:
                    step()
        finally:
            current.wait_stream(self.side)
        if found:
            raise UncapturableStep(f"a step of this model waits for the device {len(found)} times")
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (those that write checkpoints) may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.side, capture_error_mode="thread_local"):
                step()
        except Exception as error:
            torch.cuda.set_stream(current)  # an invalidated capture leaves the side stream current
            if Version(torch.__version__).release < RECOVERS.release:
                raise BrokenCapture(
                    f"got a CUDA graph that could not be captured ({str(error).splitlines()[0]}) on torch "
                    f"{torch.__version__}, wanted {RECOVERS} or later, which goes on without; or another sampler"
                ) from error
            raise
        return graph.replay


@contextmanager
def synchronizations() -> Iterator[list[str]]:
    """The waits of this thread for the device, one message each, by torch's debug mode for synchronization.

    The mode holds for the whole process and would end other threads' work as an error; so it warns, and warnings of
    other threads (the training's, beside a sampler) are left out.
    """
    found: list[str] = []
    here, mode = get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if SYNC_WARNING not in str(message):
                shown(message, *args, **kwargs)
            elif get_ident() == here:
                found.append(str(message))

        warnings.showwarning = note
        warnings.filterwarnings("always", message=f".*{SYNC_WARNING}")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def addresses(model: nn.Module) -> tuple[int, ...]:
    """Where the model's weights and buffers lie."""
    return tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))


def capturable(model: nn.Module) -> bool:
    """Whether all of the model is in plain tensors on one CUDA device: what is gathered for a call lies elsewhere
    each time."""
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(type(x.data) is Tensor and x.device.type == "cuda" for x in tensors)
    return bool(tensors) and plain and len({x.device for x in tensors}) == 1
