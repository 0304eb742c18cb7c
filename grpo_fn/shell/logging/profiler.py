"""Traces of chosen steps by torch.profiler, where TensorBoard finds them (torch-tb-profiler); Perfetto opens them, too.

One file a step and rank, RUN/tensorboard/rank<r>.<step>.pt.trace.json.gz: the plugin reads a worker and a span off the
name, and a step that is taken again after a resume replaces its trace. The phases of the step, and what its ranks may
wait in (forward, backward, ...), lie over the operators as ranges.
"""

import gzip
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from grpo_fn.shell.atomic_io import write_bytes
from grpo_fn.shell.logging.stopwatch import Mark
from grpo_fn.shell.world import World

QUICKLY = 3  # gzip's level: a trace shrinks to a twelfth or less at any


def check_profile_steps(steps: Any, last: int) -> None:
    """Raise ValueError unless `steps` lists steps that a run of `last` steps takes."""
    name, wanted = "sections.Logging.profile_steps", f"wanted whole numbers from 1 to {last}"
    if not isinstance(steps, list | tuple):
        raise ValueError(f"{name}: got {steps!r}, {wanted} in parentheses")
    if odd := [step for step in steps if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= last]:
        raise ValueError(f"{name}: got {', '.join(map(repr, odd))}, {wanted}, which is how many the run takes")


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
