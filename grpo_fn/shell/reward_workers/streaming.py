"""Rewards of rows that have ended while others are still being decoded.

The sampler calls `on_completion` with every completion as soon as there is no more of it, and a thread has the reward
pool score it. When the rewards are asked for, most of them are there. They are the ones that would have been found
then: a reward is a pure function of problem and completion, every row goes to it once, and what a row was lost to is
counted, complained of and raised when that row is asked for, and never when it is not asked for.

Which rewards to begin with is learned from the last two rounds: those that were asked about every row, and that took
their time. So nothing is done ahead for the first two steps, for a reward that some rows never get to, or for one that
is another function every time; and an instantaneous one does not get in the way of the decoding.
"""

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Condition
from typing import Any, NamedTuple, Protocol, runtime_checkable

from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.reward_workers.reward_pool import JudgeCost, Loss, Outcome, by_name, ignore_loss
from grpo_fn.shell.sampler.interface import spread_score
from grpo_fn.shell.world import World

WORTH = 1e-3  # seconds of a row in a worker: below, handing rows over piecemeal costs what it saves
MAX_BATCH = 128  # rows of one call to the pool: another caller of the pool waits for no more
LOOK = 1.0  # seconds between two looks at whether the thread is there


@runtime_checkable
class Pool(Protocol):
    """What scores: a `reward_pool.RewardPool`."""

    def judge(
        self, fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion], **how: Callable
    ) -> list[Outcome]: ...

    def report(self, loss: Loss) -> None: ...

    def charge(self, cost: JudgeCost) -> None: ...


class StreamedRow(NamedTuple):
    """What a row is known by. The uid is a problem's place in the stream, which only goes forward."""

    uid: int
    prompt: str
    answer: str
    completion: Completion


Rows = Mapping[StreamedRow, Problem]


def row_of(problem: Problem, completion: Completion) -> StreamedRow:
    """The row by which it is known; equal ones are one."""
    return StreamedRow(problem.uid, problem.prompt, problem.answer, completion)


class StreamingRewards:
    """The pool of a training, which scores rows as they end. A context manager, inside that of the pool.

    `on_completion` is for samplers, in any thread; `round` for the step. `score` is a `grpo_fn.core.problem.Scorer`.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._scored = Condition()  # and the lock of all that follows
        self._asked: set[bytes] = set()  # rewards that the last round asked about every row, as workers find them
        self._rewards: dict[bytes, RewardFn] = {}  # those to begin with
        self._ended: deque[tuple[Problem, Completion]] = deque()  # not looked at yet; while it has any, a job is due
        self._found: dict[bytes, dict[StreamedRow, Outcome | None]] = {}  # by reward; None: being scored
        self._over = -1  # the last uid that a round was about
        self._worker: BackgroundWorker | None = None

    def __enter__(self) -> "StreamingRewards":
        self._worker = BackgroundWorker("early rewards", timeout=None, torch_threads=1)
        return self

    def __exit__(self, *_: object) -> None:
        with self._scored:
            worker, self._worker = self._worker, None
        worker.shutdown(cancel_futures=True)

    def on_completion(self, problem: Problem, completion: Completion) -> None:
        """This completion has ended. Returns at once."""
        with self._scored:
            if self._worker is not None and self._rewards:
                self._ended.append((problem, completion))
                if len(self._ended) == 1:
                    self._worker.submit(self._score_ended, self._worker.stopping.is_set, what="early rewards")

    def round(
        self, problems: Sequence[Problem], rollout: Rollout, *, reward: Callable[..., Reward], world: World
    ) -> Reward:
        """`reward` of the rollout, whose `score` is ours, shared with the other ranks.

        Afterwards nothing is known any more of these problems, nor of any before them in the stream.
        """
        asked: dict[bytes, RewardFn] = {}
        spread = spread_score(self.score, world)
        last = max((problem.uid for problem in problems), default=self._over)

        def score(fn: RewardFn, rows: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
            if len(completions) == len(rollout.text):
                payload = by_name(fn)
                asked[payload] = self._rewards.get(payload) or pickle.loads(payload)  # a copy: it may change
            return spread(fn, rows, completions)

        with self._scored:  # what has not been begun by now is done in one go
            self._over = last
            self._ended = deque(row for row in self._ended if row[0].uid > last)
        try:
            return reward(problems, rollout, score=score)
        finally:
            self._forget(last, asked)

    def score(self, fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        """`fn` of every row, in order, as the pool's own: rows that are known, or under way, are not scored again."""
        payload, asked = by_name(fn), [row_of(*row) for row in zip(problems, completions, strict=True)]
        rows = dict(zip(asked, problems, strict=True))
        whole = False
        while not whole:  # once, unless the thread gives up what it was at
            if left := self._claimed(payload, rows):
                self._settle(payload, left, partial(self._judged, fn))
            whole = self._there(payload, rows)
        for row in rows:
            outcome = self._found[payload][row]
            self._found[payload][row] = outcome._replace(loss=None, cost=None)  # they count now, and only once
            if outcome.loss is not None:
                self.pool.report(outcome.loss)
            if outcome.cost is not None:
                self.pool.charge(outcome.cost)
        return [self._found[payload][row].value for row in asked]

    def _judged(self, fn: RewardFn, *columns: Any) -> list[Outcome]:
        """The pool reports losses and costs by itself."""
        return [outcome._replace(loss=None, cost=None) for outcome in self.pool.judge(fn, *columns)]

    # -- who is at which row

    def _claimed(self, payload: bytes, rows: Rows) -> Rows:
        """Claim the rows that no thread has scored or is scoring, and return them."""
        with self._scored:
            found = self._found.setdefault(payload, {})
            left = {row: problem for row, problem in rows.items() if row not in found}
            found.update(dict.fromkeys(left))
            return left

    def _settle(self, payload: bytes, rows: Rows, judge: Callable[..., list[Outcome]]) -> None:
        """Score what was claimed. Where that raises, these rows are no longer claimed."""
        known: dict[StreamedRow, Outcome] = {}
        try:
            known.update(zip(rows, judge([*rows.values()], [row.completion for row in rows]), strict=True))
        finally:
            with self._scored:
                found = self._found.get(payload, {})
                for row in rows.keys() & found.keys():  # without those that were forgotten meanwhile
                    if row in known:
                        found[row] = known[row]
                    else:
                        del found[row]
                self._scored.notify_all()

    def _there(self, payload: bytes, rows: Rows) -> bool:
        """Wait until none of these is being scored, which is as long as the pool gives them; whether all are known."""
        with self._scored:
            found = self._found[payload]
            while any(found.get(row, row) is None for row in rows):
                self._scored.wait(LOOK)
                if self._worker is None:
                    raise RuntimeError("early rewards: got a thread that has ended, wanted the rewards of its rows")
            return all(row in found for row in rows)

    def _forget(self, last: int, rewards: dict[bytes, RewardFn]) -> None:
        """All of the problems up to this one; those of the rewards that are worth it are begun with from now on."""
        with self._scored:
            again = {payload: fn for payload, fn in rewards.items() if payload in self._asked}
            self._rewards = {payload: fn for payload, fn in again.items() if self._seconds(payload, last) >= WORTH}
            self._asked = {*rewards}
            self._found = {
                payload: {row: outcome for row, outcome in self._found.get(payload, {}).items() if row.uid > last}
                for payload in self._rewards
            }
            if not self._rewards:
                self._ended.clear()

    def _seconds(self, payload: bytes, last: int) -> float:
        """The mean of what a row took, of the problems up to this one."""
        found = self._found.get(payload, {}).items()
        seconds = [outcome.seconds for row, outcome in found if row.uid <= last and outcome is not None]
        return sum(seconds) / max(1, len(seconds))

    # -- the thread

    def _score_ended(self, should_stop: Callable[[], bool]) -> None:
        """The rows that have ended, as long as there are any, by each reward."""
        while (batch := self._batch()) and not should_stop():
            for payload, fn in [*self._rewards.items()]:
                if rows := self._early(payload, batch):
                    judge = partial(self.pool.judge, fn, report=ignore_loss, should_stop=should_stop)
                    try:
                        self._settle(payload, rows, judge)
                    except Exception:  # who asks for these rows finds out what is wrong with the reward
                        with self._scored:
                            self._rewards.pop(payload, None)

    def _early(self, payload: bytes, batch: Rows) -> Rows:
        """Claim the rows of the batch, without those that `round` has asked for or given up meanwhile."""
        with self._scored:
            batch = {row: problem for row, problem in batch.items() if row.uid > self._over}
            return self._claimed(payload, batch) if payload in self._rewards else {}

    def _batch(self) -> Rows:
        """The next rows that have ended, at most MAX_BATCH."""
        with self._scored:
            rows = [self._ended.popleft() for _ in range(min(MAX_BATCH, len(self._ended)))]
        return {row_of(problem, completion): problem for problem, completion in rows}
