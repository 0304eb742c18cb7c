"""Asynchronous sampling: batches are generated ahead of the training that learns from them.

The requests of a run are known in advance: one after another, the next so many problems of the stream. A batch begun
under weights of version w (`load` makes a new one, once a step) and used under version v is v - w versions stale, at
most `max_staleness`; groups that `group_sampling.dynamic` lets wait are a version older still.

Mostly completions end with the weights they began with (servers paused in mode "wait"): `load` waits for all that was
begun, every token is a function of (version at the start, prompt, key, uid, g), and resume and replay are as exact as
the engine's arithmetic. Where the sampler `mixes` (mode "keep": completions go on with the new weights) nothing is
waited for: a row's tokens have several versions, the oldest of them within the bound, and where one ends and the next
begins depends on the moment. Such a run can go on from a checkpoint, but not be repeated.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from threading import TIMEOUT_MAX
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from grpo_fn.core.batch import pack_rollout, unpack_rollout
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Policy, Rollout
from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.sampler.interface import DataParallelSampler, EngineSampler, engine_share, gather_rollouts
from grpo_fn.shell.world import World

Stream = Callable[[int, int], Sequence[Problem]]  # problems first, ..., first + count - 1


class RequestKey(NamedTuple):
    """A request. Equal ones under equal weights bring equal completions."""

    problems: tuple[tuple[int, str], ...]  # uid and prompt of each
    group_size: int
    key: tuple[int, ...]

    def __str__(self) -> str:
        return f"problems {self.problems[0][0]} to {self.problems[-1][0]}, {self.group_size} completions each"


@dataclass
class PendingBatch:
    """A request whose completions are on their way, or here."""

    request: RequestKey
    version: int  # of the weights when it was begun
    part: Future[Rollout | None] | None = None  # this rank's rows, if it has a share; None for a batch that was drained
    worker: BackgroundWorker | None = None  # the thread that samples it; None likewise
    whole: Rollout | None = None  # all ranks' rows, once they have exchanged


def request_key(problems: Sequence[Problem], group_size: int, key: Tensor) -> RequestKey:
    """The request for these problems."""
    return RequestKey(tuple((p.uid, p.prompt) for p in problems), group_size, tuple(key.tolist()))


class AsyncSampler(DataParallelSampler):
    """A `DataParallelSampler` that works ahead by `max_staleness` batches of the stream; every rank has one.

    `deadline` is how many seconds a step may wait for a batch. A request that is not the predicted one (another group
    size, key or prompt) drops what was sampled ahead; `complaints` says so, to be cleared once it is logged. What
    goes wrong in a thread is raised when its batch is collected, on all ranks.
    """

    def __init__(
        self,
        sampler: EngineSampler,
        world: World,
        probe: Callable[[DataParallelSampler, Policy], dict[str, float]] | None = None,
        *,
        stream: Stream,
        max_staleness: int,
        deadline: float,
    ) -> None:
        if type(max_staleness) is not int or max_staleness < 1:
            raise ValueError(f"max_staleness: got {max_staleness!r}, expected 0 or a positive integer")
        if not sampler.overlaps:
            raise ValueError(
                f"max_staleness: got {max_staleness} with {type(sampler).__name__}, which samples on the device that "
                "trains, expected 0, or an engine with its own devices (dedicated servers)"
            )
        if not 0 < deadline <= TIMEOUT_MAX:
            raise ValueError(f"deadline: got {deadline} s, expected more than 0 and at most {TIMEOUT_MAX:g}")
        if world.size > 1 and deadline >= world.deadline:
            raise ValueError(
                f"deadline: got {deadline:g} s to wait for completions, expected less than the {world.deadline:g} s "
                "that ranks wait for one another (mesh.Parallelism.collective_timeout)"
            )
        super().__init__(sampler, world, probe)
        self.stream, self.max_staleness, self.deadline = stream, max_staleness, deadline
        self.version = 0  # how many times weights were loaded
        self._queue: deque[PendingBatch] = deque()  # in the order of the stream

    @property
    def repeatable(self) -> bool:
        return self.sampler.repeatable and not self.sampler.mixes

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """As the sampler's own, once this batch and the next `max_staleness` are under way.

        Raises TimeoutError when it does not come within the deadline, what went wrong while it was sampled, and
        RuntimeError when it is staler than allowed: weights were loaded between which nothing was sampled.
        """
        start = time.monotonic()
        self._line_up(problems, group_size, key)
        batch = self._queue.popleft()
        age = self.version - batch.version
        if age > self.max_staleness:
            raise RuntimeError(
                f"got {batch.request} sampled {age} versions of the weights ago, expected at most max_staleness "
                f"{self.max_staleness}: weights were loaded between which nothing was sampled"
            )
        rollout = self._whole(batch)
        self._ages.append(age)
        self._waited += time.monotonic() - start
        return rollout

    def load(self, policy: Policy) -> None:
        """As the sampler's own: a new version. Unless the engine mixes versions, once all that was begun is done."""
        if not self.sampler.mixes:
            finished = partial(self._wait_for, self._queue)
            self.world.together(finished, what="completions that are under way before new weights come")
        super().load(policy)
        self.version += 1

    def rest(self) -> None:
        """Nothing: the sampler is at work during the training."""

    def drain(self) -> list[dict[str, Any]]:
        """All that was begun, once it is done, as containers of numbers, strings and tensors; it stays in the queue.

        Whole batches, so that another number of ranks can go on with them. Every rank has to take part; raises as
        `sample` does.
        """
        return [
            {
                "asked": [[uid, prompt] for uid, prompt in batch.request.problems],  # the name that checkpoints have
                "group_size": batch.request.group_size,
                "key": [*batch.request.key],
                "age": self.version - batch.version,
                "rollout": pack_rollout(self._whole(batch)),
            }
            for batch in self._queue
        ]

    def refill(self, drained: Sequence[Mapping[str, Any]]) -> None:
        """Take back what was drained, after the `load` of the weights that were current then.

        What is more or older than `max_staleness` allows now is dropped, and complained of. Raises RuntimeError where
        weights were not loaded yet, or batches are under way.
        """
        if self._queue or not self.version:
            raise RuntimeError(
                f"got batches to go on with after {self.version} loads and with {len(self._queue)} under way, expected "
                "them after the first load, before anything is sampled"
            )
        if self.drop_drained(drained):
            return
        for batch in drained:
            problems = tuple((uid, prompt) for uid, prompt in batch["asked"])
            request = RequestKey(problems, batch["group_size"], tuple(batch["key"]))
            fields = tree_map_only(Tensor, lambda x: x.to(self.world.device), batch["rollout"])
            version = self.version - batch["age"]
            self._queue.append(PendingBatch(request, version, whole=unpack_rollout(fields)))

    def close(self) -> None:
        """Abandon what is under way; its threads end with the sampler's requests, or with the process."""
        self._queue.clear()
        super().close()

    def _line_up(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> None:
        """Put this batch first in the queue, and the next ones of the stream behind it."""
        request = request_key(problems, group_size, key)
        if self._queue and (head := self._queue[0].request) != request:
            how = ", with other prompts or another key" if str(head) == str(request) else ""
            self.complain(f"dropped {len(self._queue)} batches sampled ahead: got {request}{how}, expected {head}")
            self._queue.clear()
        if not self._queue:
            self._queue.append(self._start(problems, group_size, key))
        while len(self._queue) <= self.max_staleness:
            last, _ = self._queue[-1].request.problems[-1]
            self._queue.append(self._start(self.stream(last + 1, len(problems)), group_size, key))

    def _start(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> PendingBatch:
        """Sample this rank's share in its own thread, which ends with it; what it raises is kept in `part`."""
        share = engine_share(problems, self.sampler, self.world)
        request, device = request_key(problems, group_size, key), self.world.device

        def sample_share() -> Rollout | None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own current device
            return self.sampler.sample(share, group_size, key=key) if share else None

        worker = BackgroundWorker("ahead", timeout=None)
        part = worker.submit(sample_share, what=f"sampling {request}")
        worker.shutdown(wait=False)
        return PendingBatch(request, self.version, part, worker)

    def _whole(self, batch: PendingBatch) -> Rollout:
        if batch.whole is None:
            part = self.world.together(partial(self._part, batch), what=f"completions of {batch.request}")
            batch.whole = gather_rollouts(part, self.sampler, self.world)
        return batch.whole

    def _part(self, batch: PendingBatch) -> Rollout | None:
        self._wait_for([batch])
        try:
            return batch.part.result()
        except Exception as error:
            error.add_note(f"while sampling {batch.request}, begun {self.version - batch.version} versions ago")
            raise

    def _wait_for(self, batches: Iterable[PendingBatch]) -> None:
        """Until they are sampled, or could not be. Raises TimeoutError, naming the first that is late."""
        late = wait([batch.part for batch in batches if batch.part], timeout=self.deadline).not_done
        for batch in batches:
            if batch.part in late:
                error = batch.worker.overdue(self.deadline)
                error.add_note(f"begun {self.version - batch.version} versions ago: is the engine alive?")
                raise error
