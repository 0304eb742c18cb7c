"""A batch of completions that was asked for and is drawn in a thread, while something else goes on."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from grpo_fn.core.batch import pack_rollout, unpack_rollout
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Rollout
from grpo_fn.shell.background_worker import BackgroundWorker

Draw = Callable[[], Rollout | None]


class RequestKey(NamedTuple):
    """What was asked for. Equal requests under equal weights bring equal completions."""

    asked: tuple[tuple[int, str], ...]  # uid and prompt of every problem
    group_size: int
    key: tuple[int, ...]

    def __str__(self) -> str:
        return f"problems {self.asked[0][0]} to {self.asked[-1][0]}, {self.group_size} completions each"


@dataclass
class PendingBatch:
    """A request whose completions are on their way, or here."""

    request: RequestKey
    version: int  # of the weights when it was begun
    part: Future[Rollout | None] | None  # this rank's rows, if it has a share; None where all was here from the start
    worker: BackgroundWorker | None  # that samples it; None likewise
    whole: Rollout | None  # all ranks' rows, once they have exchanged


def request_key(problems: Sequence[Problem], group_size: int, key: Tensor) -> RequestKey:
    """What is asked for."""
    return RequestKey(tuple((p.uid, p.prompt) for p in problems), group_size, tuple(key.tolist()))


def start_sampling(asked: RequestKey, version: int, draw: Draw, device: torch.device) -> PendingBatch:
    """Call `draw` in a thread of its own, which ends with it; what it raises is kept in `part`."""
    worker = BackgroundWorker("ahead", timeout=None)
    part = worker.submit(_draw_on, device, draw, what=f"sampling {asked}")
    worker.shutdown(wait=False)
    return PendingBatch(asked, version, part, worker, None)


def pack_batch(asked: RequestKey, age: int, rollout: Rollout) -> dict[str, Any]:
    """A whole batch, `age` versions after it was begun, as containers of numbers, strings and tensors."""
    return {
        "asked": [[uid, prompt] for uid, prompt in asked.asked],
        "group_size": asked.group_size,
        "key": [*asked.key],
        "age": age,
        "rollout": pack_rollout(rollout),
    }


def unpack_batch(batch: Mapping[str, Any], version: int, device: torch.device) -> PendingBatch:
    """The inverse of `pack_batch`, under weights that count as `version`."""
    asked = RequestKey(tuple((uid, prompt) for uid, prompt in batch["asked"]), batch["group_size"], tuple(batch["key"]))
    fields = tree_map_only(Tensor, lambda x: x.to(device), batch["rollout"])
    return PendingBatch(asked, version - batch["age"], None, None, unpack_rollout(fields))


def _draw_on(device: torch.device, draw: Draw) -> Rollout | None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # every thread has a current one of its own
    return draw()
