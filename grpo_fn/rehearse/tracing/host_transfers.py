"""What no operator shows of FSDP2: bytes that go between a card's memory and its host's, and gathered weights.

In a rehearsal both memories are the host's and nothing is copied between them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor

from grpo_fn.rehearse.tracing.counting import HOLDERS, CountingMode


@contextmanager
def following_shards(mode: CountingMode) -> Iterator[None]:
    """Within it, shards that lie on the host are counted towards `mode.to_card` whenever they are gathered.

    What a block computes with is held as gathered weights, on one device too, where nothing is gathered.
    """
    before, made = FSDPParam.all_gather_inputs, FSDPParam.init_unsharded_param  # a property, and a method

    def followed(param: FSDPParam) -> list[Tensor]:
        if param.offload_to_cpu and param.sharded_state == ShardedState.SHARDED:
            mode.to_card[mode.piece] += param._sharded_param_data.nbytes  # in the dtype that it is kept in
        return before.fget(param)

    def held(param: FSDPParam) -> None:
        made(param)
        mode.live.hold(param._unsharded_param.detach(), HOLDERS["fsdp::split_with_sizes_copy"])

    FSDPParam.all_gather_inputs, FSDPParam.init_unsharded_param = property(followed), held
    try:
        yield
    finally:
        FSDPParam.all_gather_inputs, FSDPParam.init_unsharded_param = before, made


def local_bytes(x: Tensor) -> int:
    """Of the part that this rank has."""
    return (x.to_local() if isinstance(x, DTensor) else x).nbytes
