"""Rewards of rows that have ended while others are still being decoded, if they take long enough.

A sampler calls `on_completions` with completions as soon as they have ended, which begins to score them. The
step collects the futures. The rewards are those that it would get without: a reward is a pure function of problem and
completion, and what a row was lost to counts when it is collected.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean
from threading import Lock

from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.rewards.combine import combine
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.shell.reward_workers.worker_pool import BegunCall, pickled_function
from grpo_fn.shell.sampler.interface import spread_score
from grpo_fn.shell.world import World

# Of a row, on average. A faster reward is scored when the step collects it: 256 rows of run/arithmetic.gin then take
# 13 ms, whereas workers and messages beside the decoding took 60 ms of its two cores.
SECONDS_WORTH_AN_EARLY_START = 0.001


def parts_of(reward: Callable[..., Reward]) -> Sequence[RewardFn]:
    """The rewards that score every row, whatever others say: the parts of `combine`; none of another function."""
    function, knobs = function_and_knobs(reward)
    return knobs["parts"] if function is combine else ()


def row_key(problem: Problem, completion: Completion) -> tuple[int, Hashable]:
    """The row, after the problem's place in the stream, which only goes forward."""
    return problem.uid, (problem.prompt, problem.answer, completion)


class EarlyRewards:
    """The rewards of a training. `on_completions` is for samplers, in any thread; `reward_of` for the step."""

    def __init__(self, pool: RewardPool, fns: Sequence[RewardFn]) -> None:
        self.pool = pool
        self._fns = {pickled_function(fn): fn for fn in fns}
        self._lock = Lock()
        self._begun: dict[bytes, dict[tuple[int, Hashable], BegunCall]] = {payload: {} for payload in self._fns}
        self._seconds: dict[bytes, float] = {}  # of a row of the last call, on average; slow until that is known

    def on_completions(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
        """Begin to score completions that have ended; returns at once."""
        rows = {row_key(*row): row for row in zip(problems, completions, strict=True)}
        with self._lock:
            for payload, begun in self._begun.items():
                new = [key for key in rows if key not in begun]
                slow = self._seconds.get(payload, math.inf) >= SECONDS_WORTH_AN_EARLY_START
                if new and slow and self.pool.is_open:
                    calls = self.pool.submit(self._fns[payload], *zip(*(rows[key] for key in new), strict=True))
                    begun.update(zip(new, calls, strict=True))

    def reward_of(
        self, problems: Sequence[Problem], rollout: Rollout, *, reward: Callable[..., Reward], world: World
    ) -> Reward:
        """`reward` of the rollout, whose `score` is ours, shared with the other ranks.

        Afterwards nothing is known any more of these problems, nor of any before them in the stream.
        """
        try:
            return reward(problems, rollout, score=spread_score(self.score, world))
        finally:
            self._forget(max((problem.uid for problem in problems), default=-1))

    def score(self, fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        """`fn` of every row, in order, as the pool's own: rows that were begun are not scored again."""
        rows = [row_key(*row) for row in zip(problems, completions, strict=True)]
        with self._lock:
            begun = dict(self._begun.get(pickled_function(fn), {}))
        left = [i for i, row in enumerate(rows) if row not in begun]
        new = self.pool.submit(fn, [problems[i] for i in left], [completions[i] for i in left])
        late = dict(zip(left, new, strict=True))
        calls = [late[i] if i in late else begun[row] for i, row in enumerate(rows)]
        outcomes = self.pool.collect(fn, problems, completions, calls)
        if outcomes:
            self._seconds[pickled_function(fn)] = fmean(outcome.seconds for outcome in outcomes)
        return [outcome.value for outcome in outcomes]

    def _forget(self, last: int) -> None:
        with self._lock:
            for begun in self._begun.values():
                for row in [row for row in begun if row[0] <= last]:
                    begun.pop(row).future.cancel()
