"""What a rank that does not write has in the place of a writer and a console: the same calls, to no effect."""

from collections.abc import Mapping

from torch import Tensor


class Mute:
    """Stands in for `Writer` and `Console` on all ranks but the main one."""

    def line(self, text: str) -> None: ...

    def step(self, metrics: Mapping[str, float | int]) -> None: ...

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None: ...

    def text(self, step: int, tag: str, text: str) -> None: ...

    def histogram(self, step: int, tag: str, values: Tensor) -> None: ...

    def image(self, step: int, tag: str, pixels: Tensor) -> None: ...

    def __enter__(self) -> "Mute":
        return self

    def __exit__(self, *exc: object) -> None: ...
