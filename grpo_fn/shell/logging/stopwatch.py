"""The cost of steps: wall-clock time by phase, torch.profiler's traces, memory of the process and the GPUs."""

import gzip
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from grpo_fn.shell.atomic_io import write_bytes
from grpo_fn.shell.model.blocks import recompilations
from grpo_fn.shell.world import World

OTHER = "other"  # the phase of what is in none

Mark = Callable[[str], AbstractContextManager[object]]


class Stopwatch:
    """Adds up the seconds spent in named phases; `phase` is the one going on now.

    Every moment counts once: for the innermost span around it, or for OTHER. So the phases of a lap add up to it.
    Each span is also inside `mark(name)`, for a profiler that records more than seconds.
    """

    def __init__(self, *, now: Callable[[], float] = time.perf_counter, mark: Mark = nullcontext) -> None:
        self.phase = "start"
        self._now, self._mark = now, mark
        self._seconds: dict[str, float] = defaultdict(float)
        self._counted = OTHER  # what the seconds since the last turn count towards
        self._turned = self._lap = now()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what happens inside towards `name`, except for the spans in it, which count for themselves."""
        around, before, self.phase = self._turn(name), self.phase, name
        try:
            with self._mark(name):
                yield
        finally:
            self._turn(around)
        self.phase = before  # not when it raises: then the phase is part of the message

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap, as time/<phase>; time/total is their sum, up to rounding."""
        self._turn(self._counted)
        out = {f"time/{name}": seconds for name, seconds in {OTHER: 0.0, **self._seconds}.items()}
        out["time/total"] = self._turned - self._lap
        self._seconds.clear()
        self._lap = self._turned
        return out

    def _turn(self, name: str) -> str:
        """Count towards `name` from now on; returns what was counted towards until now."""
        before, now = self._counted, self._now()
        self._seconds[before] += now - self._turned
        self._counted, self._turned = name, now
        return before


class ErrorContext(AbstractContextManager):
    """Adds step, phase and rank to whatever is raised inside, and keeps the world's record of where it is."""

    def __init__(self, world: World, step: int, clock: Stopwatch) -> None:
        self.world, self.step, self.clock = world, step, clock

    def __enter__(self) -> None:
        self.world.where = self.place

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(f"at {self.place()}")

    def place(self) -> str:
        rank = f", rank {self.world.rank}" if self.world.size > 1 else ""
        return f"step {self.step}, phase {self.clock.phase}{rank}"


# -- traces of chosen steps by torch.profiler, where TensorBoard finds them (torch-tb-profiler); Perfetto opens them too


QUICKLY = 3  # gzip's level: a trace shrinks to a twelfth or less at any


def check_profile_steps(steps: Any, last: int) -> None:
    """Raise ValueError unless `steps` lists steps that a run of `last` steps takes."""
    name, expected = "sections.Logging.profile_steps", f"expected whole numbers from 1 to {last}"
    if not isinstance(steps, list | tuple):
        raise ValueError(f"{name}: got {steps!r}, {expected} in parentheses")
    if unusable := [
        step for step in steps if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= last
    ]:
        raise ValueError(f"{name}: got {', '.join(map(repr, unusable))}, {expected}, which is how many the run takes")


class Profiler:
    """Records the chosen steps of this rank and writes their traces into `folder`."""

    def __init__(self, folder: Path, world: World, steps: Sequence[int]) -> None:
        self.folder, self.world, self.steps = folder, world, {*steps}
        self._recording = False

    def mark(self, name: str) -> AbstractContextManager[object]:
        """A range of that name, while a step is recorded."""
        return record_function(name) if self._recording else nullcontext()

    @contextmanager
    def record_step(self, step: int, span: Mark) -> Iterator[None]:
        """A step, if it is one to record; starting to and the writing are in the span "profile".

        A step that raises leaves no trace.
        """
        if step not in self.steps:
            yield
            return
        with span("profile"):
            on_cpu = self.world.device.type == "cpu"
            recorder = profile(activities={ProfilerActivity.CPU} if on_cpu else supported_activities())
            recorder.start()
        self._recording = True
        try:
            with record_function(f"ProfilerStep#{step}"):  # what the plugin knows a step by
                yield
        finally:
            self._recording = False
            with span("profile"):
                recorder.stop()
        with span("profile"):
            write_trace(recorder, self.folder / f"rank{self.world.rank}.{step}.pt.trace.json.gz")


def write_trace(recorder: profile, path: Path) -> None:
    """The trace, compressed; a reader finds the whole file or none."""
    with TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(plain))
        write_bytes(path, gzip.compress(plain.read_bytes(), compresslevel=QUICKLY))


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens now; 0 is never."""
    return every > 0 and step % every == 0


# -- memory of the main rank's process, and memory and utilisation of every rank's card


COMPILER = "torch._dynamo.convert_frame"


def usage(world: World) -> dict[str, float]:
    """The ranks' use of their machines; every rank calls it."""
    figures = {"system/memory_gb": psutil.Process().memory_info().rss / 1e9}
    if world.device.type == "cuda":
        cards = world.exchange(card_usage(world.device), what="memory of the cards")
        figures |= {
            f"system/gpu{rank}_{name}": value for rank, card in enumerate(cards) for name, value in card.items()
        }
    if COMPILER in sys.modules:  # asking would import it, which takes seconds
        graphs = recompilations()
        figures |= {"system/compiled_graphs": float(graphs.built), "system/recompilations": float(graphs.again)}
    return figures


def card_usage(device: torch.device) -> dict[str, float]:
    """Memory that this process has allocated on a card, now and at most, in GB (1e9 bytes), and utilisation in %.

    Utilisation needs nvidia-ml-py and a device that reports it; without either its key is left out.
    """
    figures = {
        "memory_gb": torch.cuda.memory_allocated(device) / 1e9,
        "memory_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9,
    }
    with suppress(Exception):  # no nvidia-ml-py or driver library, a MIG slice: a missing gauge must not end a run
        figures["utilization"] = float(torch.cuda.utilization(device))
    return figures
