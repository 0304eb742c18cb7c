"""MetricsWriter: metrics.jsonl and TensorBoard under the same names, rewound exactly on resume; and its null object.

A MirrorWriter is what a tracker beside TensorBoard is given (`tracker`).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from grpo_fn.core.display_text import markdown_cell
from grpo_fn.core.json_lines import step_lines
from grpo_fn.shell.atomic_io import to_json, write_bytes

Rows = Sequence[Mapping[str, object]]


class MirrorWriter:
    """Drops what it is given; trackers override what they keep.

    It is called in the thread that writes the metrics. A step has one call of `scalars` and may have more (`amend`).
    """

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        """Figures of a step by name."""

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        """Finite values `[N]`, N at least 1."""

    def table(self, step: int, tag: str, rows: Rows) -> None:
        """Cells by column, one row at least: samples, findings of the health rules."""


class MetricsWriter(AbstractContextManager):
    """Writes `metrics.jsonl` and `tensorboard/` of a run folder, and gives figures and tables to its mirror.

    A step's number is that of the step just taken, counted from 0: after k steps a run resumes with `start_step=k`,
    and whatever was recorded for steps >= k is dropped from both. In metrics.jsonl NaN and infinities are null.
    """

    def __init__(self, run_dir: Path, *, start_step: int, mirror: MirrorWriter | None = None) -> None:
        self._mirror = mirror or MirrorWriter()
        rewind(run_dir / "metrics.jsonl", start_step)
        self._next = start_step
        self._lines = open(run_dir / "metrics.jsonl", "a", encoding="ascii")  # noqa: SIM115 - closed by close()
        self._folder = run_dir / "tensorboard"
        # From the very first start: TensorBoard drops what a restart has undone only if it saw the start before it.
        self._board = SummaryWriter(str(self._folder), purge_step=start_step)

    @contextmanager
    def _tensorboard(self) -> Iterator[SummaryWriter]:
        """TensorBoard's writer, flushed afterwards; its folder is made anew where it has been deleted."""
        self._folder.mkdir(exist_ok=True)
        yield self._board
        self._board.flush()

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        """All scalars of a step, once: one line of metrics.jsonl. Raises ValueError for a step that does not grow."""
        if step < self._next:
            raise ValueError(f"got scalars of step {step}, wanted one call a step, {self._next} or later")
        self._next = step + 1
        self._add_scalars(step, values)
        self._lines.write(to_json({"step": step, **values}) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())  # a checkpoint of this step must never outlive the step's line

    def amend(self, step: int, values: Mapping[str, float | int]) -> None:
        """What a step is found out about after its line was written goes into that line; the file is replaced at once.

        Raises ValueError for a step without a line.
        """
        path = Path(self._lines.name)
        lines = {line.step: line for line in step_lines(path, torn_end=False)}
        if step not in lines:
            raise ValueError(f"got figures for step {step}, wanted a step with a line in {path}")
        self._add_scalars(step, values)
        amended = (to_json({**lines[step].row, **values}) + "\n").encode("ascii")
        self._lines.close()
        write_bytes(path, b"".join(amended if line.step == step else line.line for line in lines.values()))
        self._lines = open(path, "a", encoding="ascii")  # noqa: SIM115 - closed by close()

    def _add_scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        with self._tensorboard() as board:
            for name, value in values.items():
                board.add_scalar(name, value, step)
        self._mirror.scalars(step, values)

    def _add_summaries(self, *summaries: Summary) -> None:
        with self._tensorboard() as board:
            for summary in summaries:
                board._get_file_writer().add_summary(summary)

    def text(self, step: int, tag: str, text: str) -> None:
        """Markdown for TensorBoard's text tab; what a model wrote goes through `table`."""
        with self._tensorboard() as board:
            board.add_text(tag, text.encode("utf-8", "replace").decode("utf-8"), step)

    def table(self, step: int, tag: str, rows: Rows) -> None:
        """Rows of cells by column: a markdown table in TensorBoard's text tab, a table in the mirror."""
        if rows:
            self.text(step, tag, markdown_table(rows))
            self._mirror.table(step, tag, rows)

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        """Distribution of the finite values; of none there is no histogram."""
        flat = values.detach().double().flatten().cpu()
        flat = flat[torch.isfinite(flat)]
        if len(flat):
            with self._tensorboard() as board:
                board.add_histogram(tag, flat.numpy(), step)
            self._mirror.histogram(step, tag, flat)

    def image(self, step: int, tag: str, pixels: Tensor) -> None:
        """A picture `[3, H, W]` of numbers from 0 to 1."""
        with self._tensorboard() as board:
            board.add_image(tag, pixels.detach().cpu().numpy(), step)

    def layout(self, charts: Mapping[str, Mapping[str, tuple[str, list[str]]]]) -> None:
        """The charts of the tab "Custom Scalars", by heading and title: ("Multiline" or "Margin", tags)."""
        with self._tensorboard() as board:
            board.add_custom_scalars(charts)

    def hparams(self, knobs: Mapping[str, int | float | str], measures: Sequence[str]) -> None:
        """A line of the tab "HParams": the knobs, beside the newest values of the scalars `measures`."""
        experiment, started, _ = hparams(dict(knobs), dict.fromkeys(measures))
        self._add_summaries(experiment, started)

    def finish(self) -> None:
        """Say in the tab "HParams" that the run came to its end."""
        *_, ended = hparams({}, {})
        self._add_summaries(ended)

    def close(self) -> None:
        """Write out everything and let go of the files."""
        self._lines.close()
        with self._tensorboard() as board:
            board.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def rewind(path: Path, start_step: int) -> None:
    """Drop the lines of steps >= `start_step`, all but the last of a step, and a last line torn by a crash.

    The file is replaced at once.

    Raises ValueError for a line before the last that is not an object with a step: that is no crash of ours.
    """
    kept = b"".join({one.step: one.line for one in step_lines(path, torn_end=True) if one.step < start_step}.values())
    if path.exists() and path.stat().st_size != len(kept):
        write_bytes(path, kept)


def markdown_table(rows: Rows) -> str:
    """A markdown table of the rows, columns in order of first appearance; the cells show their text and do nothing."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    lines = ["| " + " | ".join(markdown_cell(str(value)) for value in line) + " |" for line in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(columns), *lines[1:]])


class NullLogger(AbstractContextManager):
    """Stands in for an object of `kinds` on all ranks but the main one: every method of theirs does nothing."""

    failed = False

    def __init__(self, *kinds: type) -> None:
        self.kinds = kinds

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_") or not any(hasattr(kind, name) for kind in self.kinds):
            raise AttributeError(f"got {name}, wanted a method of {', '.join(kind.__name__ for kind in self.kinds)}")
        return lambda *given: None

    def __exit__(self, *exc: object) -> None: ...
