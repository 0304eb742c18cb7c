"""Bytes that an offloaded model sends between a card's memory and its host's, counted where FSDP2 would copy them.

In a rehearsal both are the host's memory and nothing is copied, so no operator comes by that could be counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor

from grpo_fn.rehearse.tracing.counting import CountingMode


@contextmanager
def following_shards(mode: CountingMode) -> Iterator[None]:
    """Within it, shards that lie on the host are counted towards `mode.to_card` whenever they are gathered."""
    before = FSDPParam.all_gather_inputs  # a property

    def followed(param: FSDPParam) -> list[Tensor]:
        if param.offload_to_cpu and param.sharded_state == ShardedState.SHARDED:
            mode.to_card[mode.piece] += param._sharded_param_data.nbytes  # in the dtype that it is kept in
        return before.fget(param)

    FSDPParam.all_gather_inputs = property(followed)
    try:
        yield
    finally:
        FSDPParam.all_gather_inputs = before


def local_bytes(x: Tensor) -> int:
    """Of the part that this rank has."""
    return (x.to_local() if isinstance(x, DTensor) else x).nbytes
