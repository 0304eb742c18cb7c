"""Asynchronous sampling: batches are generated ahead of the training that learns from them.

The requests of a run are known in advance: one after another, the next so many problems of the stream. A batch begun
under weights of version w (`load` makes a new one, once a step) and used under version v is v - w versions stale, at
most `max_staleness`; groups that `group_sampling.dynamic` lets wait are a version older still. 0 overlaps nothing and
is `DataParallelSampler`, call by call.

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
from statistics import fmean
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

# -- a batch that a thread samples


Draw = Callable[[], Rollout | None]


class RequestKey(NamedTuple):
    """What was asked for. Equal requests under equal weights bring equal completions."""

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
    part: Future[Rollout | None] | None  # this rank's rows, if it has a share; None where all was here from the start
    worker: BackgroundWorker | None  # that samples it; None likewise
    whole: Rollout | None  # all ranks' rows, once they have exchanged


def request_key(problems: Sequence[Problem], group_size: int, key: Tensor) -> RequestKey:
    """The request for these problems."""
    return RequestKey(tuple((p.uid, p.prompt) for p in problems), group_size, tuple(key.tolist()))


def start_sampling(request: RequestKey, version: int, draw: Draw, device: torch.device) -> PendingBatch:
    """Call `draw` in a thread of its own, which ends with it; what it raises is kept in `part`."""
    worker = BackgroundWorker("ahead", timeout=None)
    part = worker.submit(_draw_on, device, draw, what=f"sampling {request}")
    worker.shutdown(wait=False)
    return PendingBatch(request, version, part, worker, None)


def pack_batch(request: RequestKey, age: int, rollout: Rollout) -> dict[str, Any]:
    """A whole batch, `age` versions after it was begun, as containers of numbers, strings and tensors."""
    return {
        "asked": [[uid, prompt] for uid, prompt in request.problems],  # the name that checkpoints have
        "group_size": request.group_size,
        "key": [*request.key],
        "age": age,
        "rollout": pack_rollout(rollout),
    }


def unpack_batch(batch: Mapping[str, Any], version: int, device: torch.device) -> PendingBatch:
    """The inverse of `pack_batch`, under weights that count as `version`."""
    problems = tuple((uid, prompt) for uid, prompt in batch["asked"])
    request = RequestKey(problems, batch["group_size"], tuple(batch["key"]))
    fields = tree_map_only(Tensor, lambda x: x.to(device), batch["rollout"])
    return PendingBatch(request, version - batch["age"], None, None, unpack_rollout(fields))


def _draw_on(device: torch.device, draw: Draw) -> Rollout | None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # every thread has a current one of its own
    return draw()


COMPLAINTS = 8  # kept until they are logged

Stream = Callable[[int, int], Sequence[Problem]]  # problems first, ..., first + count - 1


def check_staleness(max_staleness: int, sampler: EngineSampler) -> None:
    """Raise ValueError unless it is an integer from 0, and 0 where the sampler cannot sample during training."""
    if type(max_staleness) is not int or max_staleness < 0:
        raise ValueError(f"max_staleness: got {max_staleness!r}, expected 0 or a positive integer")
    if max_staleness and not sampler.overlaps:
        raise ValueError(
            f"max_staleness: got {max_staleness} with {type(sampler).__name__}, which samples on the device that "
            "trains, expected 0, or an engine with devices of its own (dedicated servers)"
        )


class AsyncSampler:
    """A `DataParallelSampler` that works ahead by `max_staleness` batches of the stream; every rank has one.

    `deadline` is how many seconds a step may wait for a batch. A request that is not the predicted one (another group
    size, key or prompt) drops what was sampled ahead; `complaints` says so, to be cleared once it is logged. What
    goes wrong in a thread is raised when its batch is collected, on all ranks.
    """

    def __init__(self, spread: DataParallelSampler, stream: Stream, *, max_staleness: int, deadline: float) -> None:
        check_staleness(max_staleness, spread.sampler)
        if not 0 < deadline <= TIMEOUT_MAX:
            raise ValueError(f"deadline: got {deadline} s, expected more than 0 and at most {TIMEOUT_MAX:g}")
        if max_staleness and spread.world.size > 1 and deadline >= spread.world.deadline:
            raise ValueError(
                f"deadline: got {deadline:g} s to wait for completions, expected less than the "
                f"{spread.world.deadline:g} s that ranks wait for one another (mesh.Parallelism.collective_timeout)"
            )
        self.spread, self.stream = spread, stream
        self.max_staleness, self.deadline = max_staleness, deadline
        self.version = 0  # how many times weights were loaded
        self.complaints: list[str] = []
        self._queue: deque[PendingBatch] = deque()  # in the order of the stream
        self._ages: list[int] = []  # of the batches that were used since the last figures
        self._waited = 0.0

    @property
    def sampler(self) -> EngineSampler:
        """Of this rank."""
        return self.spread.sampler

    @property
    def world(self) -> World:
        """The ranks that share the work."""
        return self.spread.world

    @property
    def repeatable(self) -> bool:
        """Whether the same run brings the same tokens."""
        return self.sampler.repeatable and not (self.max_staleness and self.sampler.mixes)

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """As the sampler's own, once this batch and the next `max_staleness` are under way.

        Raises TimeoutError when it does not come within the deadline, what went wrong while it was sampled, and
        RuntimeError when it is staler than allowed: weights were loaded between which nothing was sampled.
        """
        start = time.monotonic()
        if self.max_staleness:
            self._line_up(problems, group_size, key)
            head = self._queue.popleft()
            age = self._age(head)
            rollout = self._whole(head)
        else:
            age, rollout = 0, self.spread.sample(problems, group_size, key=key)
        self._ages.append(age)
        self._waited += time.monotonic() - start
        return rollout

    def load(self, policy: Policy) -> None:
        """As the sampler's own: a new version. Unless the engine mixes versions, once all that was begun is done."""
        if self.max_staleness and not self.sampler.mixes:
            finished = partial(self._wait_for, self._queue)
            self.world.together(finished, what="completions that are under way before new weights come")
        self.spread.load(policy)
        self.version += 1

    def rest(self) -> None:
        """As the sampler's own, unless it is at work during the training."""
        if not self.max_staleness:
            self.spread.rest()

    def drain(self) -> list[dict[str, Any]]:
        """All that was begun, once it is done, as containers of numbers, strings and tensors; it stays in the queue.

        Whole batches, so that another number of ranks can go on with them. Every rank has to take part; raises as
        `sample` does.
        """
        return [pack_batch(batch.request, self.version - batch.version, self._whole(batch)) for batch in self._queue]

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
        ages = [batch["age"] for batch in drained]
        if any(age + place > self.max_staleness for place, age in enumerate(ages)):  # one batch a version, at least
            self._complain(
                f"dropped {len(ages)} batches sampled ahead: got some of {ages} versions ago, the first to be used "
                f"first, expected none that gets over max_staleness {self.max_staleness}"
            )
            return
        self._queue.extend(unpack_batch(batch, self.version, self.world.device) for batch in drained)

    def figures(self) -> dict[str, float]:
        """Messages since the last call, the sampler's own included.

        `generation/staleness` and `generation/staleness_max` of the batches that were used, in versions, and
        `generation/wait_seconds`, for which the steps waited for them.
        """
        ages, waited = self._ages, self._waited
        self._ages, self._waited = [], 0.0
        stale = {"generation/staleness": fmean(ages), "generation/staleness_max": float(max(ages))} if ages else {}
        return {**self.spread.figures(), **stale, "generation/wait_seconds": waited}

    def messages(self) -> list[str]:
        """What there is to say to people since it was last asked, the sampler's own included."""
        messages = [*self.complaints, *self.sampler.complaints]
        self.complaints.clear()
        self.sampler.complaints.clear()
        return messages

    def close(self) -> None:
        """Abandon what is under way; its threads end with the sampler's requests, or with the process."""
        self._queue.clear()
        self.spread.close()

    def _line_up(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> None:
        """See to it that this batch stands first in the queue, and the next ones of the stream behind it."""
        request = request_key(problems, group_size, key)
        if self._queue and (head := self._queue[0].request) != request:
            how = ", with other prompts or another key" if str(head) == str(request) else ""
            self._complain(f"dropped {len(self._queue)} batches sampled ahead: got {request}{how}, expected {head}")
            self._queue.clear()
        if not self._queue:
            self._queue.append(self._start(problems, group_size, key))
        while len(self._queue) <= self.max_staleness:
            last, _ = self._queue[-1].request.problems[-1]
            self._queue.append(self._start(self.stream(last + 1, len(problems)), group_size, key))

    def _start(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> PendingBatch:
        """Sample this rank's share in a thread."""
        share = engine_share(problems, self.sampler, self.world)
        draw = partial(self.sampler.sample, share, group_size, key=key) if share else lambda: None
        return start_sampling(request_key(problems, group_size, key), self.version, draw, self.world.device)

    def _age(self, batch: PendingBatch) -> int:
        age = self.version - batch.version
        if age > self.max_staleness:
            raise RuntimeError(
                f"got {batch.request} sampled {age} versions of the weights ago, expected at most max_staleness "
                f"{self.max_staleness}: weights were loaded between which nothing was sampled"
            )
        return age

    def _whole(self, batch: PendingBatch) -> Rollout:
        """All ranks' rows of it."""
        if batch.whole is None:
            part = self.world.together(partial(self._part, batch), what=f"completions of {batch.request}")
            batch.whole = gather_rollouts(part, self.sampler, self.world)
        return batch.whole

    def _part(self, batch: PendingBatch) -> Rollout | None:
        """This rank's rows of it."""
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

    def _complain(self, text: str) -> None:
        if len(self.complaints) < COMPLAINTS:
            self.complaints.append(text)
