"""The exponential moving average of weights that train, beside them and spread as they are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class WeightAverage:
    """e <- e + rate (theta - e) of tensors that are changed in place; each rank has the average of its own part."""

    def __init__(self, live: Mapping[str, Tensor], *, rate: float) -> None:
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"self_teachers.moving_average.rate: got {rate}, wanted above 0 and up to 1")
        self.rate = rate
        self.kept = {name: x.detach().clone() for name, x in live.items()}

    @torch.no_grad()
    def follow(self, live: Mapping[str, Tensor]) -> None:
        """Come nearer to the tensors as they are now."""
        for name, x in live.items():
            rank_part(self.kept[name]).lerp_(rank_part(x), self.rate)

    @contextmanager
    def swap_in(self, live: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it the tensors hold the average, and it holds them; after it each is what it was, bit for bit."""
        self._swap(live)
        try:
            yield
        finally:
            self._swap(live)

    @torch.no_grad()
    def _swap(self, live: Mapping[str, Tensor]) -> None:
        for name, x in live.items():
            mine, theirs = rank_part(self.kept[name]), rank_part(x)
            held = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(held)


def rank_part(x: Tensor) -> Tensor:
    """A tensor's part on this rank."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x
