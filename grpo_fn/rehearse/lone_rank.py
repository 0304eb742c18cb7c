"""One rank of many, the only one that is there: what others would say is what this one says."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from grpo_fn.shell.world import World

T = TypeVar("T")
MOST_RANKS = 1024


class LoneRank(World):
    """Rank 0 of a world of `size` ranks, the others of which are not there."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size, torch.device("cpu"), deadline=3600.0)

    def group(self) -> None:
        """No group of other ranks can be made."""

    def exchange(self, mine: T, *, what: str) -> list[T]:
        """What this rank brings, in the place of every rank's."""
        return [mine] * self.size

    def _watch(self) -> None: ...


@contextmanager
def lone_rank(size: int, on_host: int) -> Iterator[LoneRank]:
    """Rank 0 of so many, in torch's backend "fake": its collectives return at once, their results are anything.

    Args:
        size: ranks.
        on_host: of them on each host.

    Raises:
        ValueError: more than 1,024 ranks, or a process that has a process group already.
    """
    # The backend and its operators without data are torch's own, for its tests and estimates of memory.
    import torch.distributed._tools.fake_collectives  # noqa: F401 registers them
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 1 <= size <= MOST_RANKS:
        raise ValueError(f"--ranks: got {size}, wanted 1 to {MOST_RANKS}")
    if dist.is_initialized():
        raise ValueError("--rehearse: got a process that is a rank of a run, wanted one alone, without torchrun")
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(on_host)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Set timeout is now only supported")  # nothing waits here
            yield LoneRank(size)
    finally:
        dist.destroy_process_group()
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before
