"""MirrorWriter: what a tracker beside TensorBoard is given; this one drops it, trackers override what they keep."""

from collections.abc import Mapping, Sequence

from torch import Tensor

Rows = Sequence[Mapping[str, object]]


class MirrorWriter:
    """Called in the thread that writes the metrics; a step has one call of `scalars` and may have more (`amend`)."""

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        """Figures of a step by name."""

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        """Finite values `[N]`, N at least 1."""

    def table(self, step: int, tag: str, rows: Rows) -> None:
        """Cells by column, one row at least: samples, findings of the health rules."""
