"""Rewards of many rows: from worker processes that can be killed, and from judges.

A row is begun with `submit`, by a step or, as soon as it has ended, by `EarlyRewards`; its future says what became of
it. What a row was lost to is counted, complained of and raised when its outcome is collected, so that a row that was
begun early and is never collected counts nowhere.
"""

import math
import pickle
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import wait
from statistics import fmean
from threading import Lock

from grpo_fn.core.display_text import escape_control
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.rewards.judge import Judge
from grpo_fn.rewards.wrappers import by_task, with_timeout
from grpo_fn.shell.reward_workers.judge_client import JudgedRow, JudgeRecord, JudgeRequests
from grpo_fn.shell.reward_workers.worker_pool import (
    LOAD,
    POLL,
    BegunCall,
    Outcome,
    WorkerPool,
    check_more_than_0,
    function_name,
    pickled_function,
)

COMPLAINTS = 8  # kept until they are logged
# Of a row, on average. A faster reward waits for the step: workers and messages beside the decoding cost it more.
SECONDS_WORTH_AN_EARLY_START = 0.001


class RewardError(RuntimeError):
    """A reward function raised, no worker could load it, or a judge does not answer any more."""


class ScoringInterrupted(RuntimeError):
    """Rows were given up, as they are of no use any more."""


class RewardPool(WorkerPool):
    """Worker processes that score rows, each row within a time limit and each process within a memory limit.

    A context manager; `score` is a `grpo_fn.core.problem.Scorer`, and any thread may ask. A reward must be a pure
    function of problem and completion, plain or async: equal rows are scored once.

    `counts` says how many rows were lost so far, and to what: `timeouts`, `worker_crashes` (the memory limit included),
    `protocol_errors` (a malformed reply) and `exceptions` of the reward. `complaints` holds a text on the first row
    lost to each of these, at most COMPLAINTS different ones; clear it once logged. Rows of a `judge.Judge` go to no
    worker: requests are sent about what `judge_record` does not hold, and `costs` says what for.

    Args:
        workers: processes.
        timeout_per_completion: wall clock of a row, seconds; `wrappers.with_timeout` gives a reward its own.
        memory_mb: address space of each process, MB.
        stop_on_error: True: an exception in a reward stops everything; False: it makes its row None.

    Raises:
        ValueError: for a number that is not more than 0.
    """

    def __init__(self, *, workers: int, timeout_per_completion: float, memory_mb: int, stop_on_error: bool) -> None:
        numbers = {"workers": workers, "timeout_per_completion": timeout_per_completion, "memory_mb": memory_mb}
        check_more_than_0("reward pool", **numbers)
        super().__init__(workers=workers, deadline=timeout_per_completion, memory_mb=memory_mb)
        self.stop_on_error = stop_on_error
        self.counts = {"timeouts": 0, "worker_crashes": 0, "protocol_errors": 0, "exceptions": 0}
        self.costs: Counter[str] = Counter()  # of judges: as Outcome.cost, added up
        self.judge_record = JudgeRecord(None, 0)
        self.complaints: list[str] = []
        self._judges, self._judges_lock = None, Lock()

    def __exit__(self, *error: object) -> None:
        with self._judges_lock:
            judges, self._judges = self._judges, None
        if judges is not None:
            judges.close()
        super().__exit__(*error)

    def score(
        self,
        fn: RewardFn,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[float | None]:
        """`fn` of every row, in order; None where it says so and where its worker was lost. Raises as `judge` does."""
        return [outcome.value for outcome in self.judge(fn, problems, completions, should_stop=should_stop)]

    def judge(
        self,
        fn: RewardFn,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        """`fn` of every row, in order, with the reason where there is no value and the seconds it took.

        Raises as `submit` and `collect` do.
        """
        begun = self.submit(fn, problems, completions)
        return self.collect(fn, problems, completions, begun, should_stop=should_stop)

    def submit(self, fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[BegunCall]:
        """Begin to score rows; equal ones are one.

        Raises ValueError when `fn` cannot be found by its name in another process.
        """
        payload, deadline = pickled_function(fn), seconds_of(fn, self.deadline)
        rows = [pickle.dumps(row) for row in zip(problems, completions, strict=True)]
        judged = {
            row: JudgedRow(*judge, problem, completion)
            for row, problem, completion in zip(rows, problems, completions, strict=True)
            if (judge := judge_of(fn, problem)) is not None
        }
        called = [row for row in dict.fromkeys(rows) if row not in judged]
        begun = dict(zip(called, self.submit_calls(payload, called, deadline), strict=True))
        if judged:
            with self._judges_lock:
                if self._judges is None:
                    self._judges = JudgeRequests(self.judge_record)
                futures = self._judges.submit([*judged.values()])
            begun |= zip(judged, (BegunCall(future, 0) for future in futures), strict=True)
        return [begun[row] for row in rows]

    def collect(
        self,
        fn: RewardFn,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        begun: Sequence[BegunCall],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        """Wait for the outcomes of rows; those that are left when it raises are given up.

        Raises RewardError when no worker can load `fn`, as under too small a memory limit, when a judge cannot be
        reached and, under `stop_on_error`, naming the row, when `fn` itself raises; ScoringInterrupted once
        `should_stop` says so.
        """
        waiting, outcomes, counted = deque(zip(problems, completions, begun, strict=True)), [], set()
        try:
            while waiting:
                if should_stop():
                    raise ScoringInterrupted(f"{function_name(fn)}: {len(waiting)} rows were given up")
                wait({call.future for *_, call in waiting}, POLL)
                while waiting and waiting[0][-1].future.done():
                    problem, completion, call = waiting.popleft()
                    outcome = call.future.result()[call.place]
                    if call not in counted:
                        counted.add(call)
                        self._count(fn, problem, completion, outcome)
                    outcomes.append(outcome)
        finally:
            for *_, call in waiting:
                call.future.cancel()
        return outcomes

    def _count(self, fn: RewardFn, problem: Problem, completion: Completion, outcome: Outcome) -> None:
        """Count what an outcome cost, and a row that was lost; complain of the latter.

        Raises RewardError for a loss that is to stop everything.
        """
        if outcome.cause == LOAD:
            raise RewardError(f"{function_name(fn)}: {outcome.reason}")
        if outcome.cause:
            row = f"problem {problem.uid}, completion {completion.text[:200]!r}"
            stops = outcome.cause == "exceptions" and self.stop_on_error
            said = f"raised on {row}:" if stops else f"lost {row}: {outcome.reason}"
            text = f"{function_name(fn)} {said}\n{escape_control(outcome.trace)}".rstrip()
            if stops:
                raise RewardError(text)
            if outcome.cause in self.counts:  # what a judge did not score is among its costs
                self.counts[outcome.cause] += 1
            if len(self.complaints) < COMPLAINTS and not any(outcome.reason in known for known in self.complaints):
                self.complaints.append(text)
        if outcome.cost is not None:
            self.costs.update(outcome.cost)


def seconds_of(fn: RewardFn, default: float) -> float:
    """The seconds that a row of this reward may take: those of `with_timeout`, the least where it is put around twice.

    Looks through knobs and through every wrapper that calls what it wraps `reward`. The rewards of a `by_task` table
    share one deadline, the longest of theirs.
    """
    function, knobs = function_and_knobs(fn)
    if function is by_task:
        return max(seconds_of(reward, default) for reward in knobs["rewards"].values())
    if function is with_timeout:
        if not knobs["seconds"] > 0:
            raise ValueError(f"wrappers.with_timeout seconds: got {knobs['seconds']}, expected more than 0")
        within = seconds_of(knobs["reward"], math.inf)
        return min(knobs["seconds"], within)
    return seconds_of(knobs["reward"], default) if "reward" in knobs else default


def judge_of(fn: RewardFn, problem: Problem) -> tuple[Judge, float] | None:
    """The judge that a reward asks about a problem, and the seconds for its answer; None where it asks none.

    Looks through `with_timeout` and the tables of `by_task`.
    """
    if isinstance(fn, Judge):
        return fn, fn.batch_seconds
    function, knobs = function_and_knobs(fn)
    if function is with_timeout:
        inner = judge_of(knobs["reward"], problem)
        return inner and (inner[0], min(inner[1], knobs["seconds"]))
    if function is by_task and (name := problem.meta.get("task")) in knobs["rewards"]:
        return judge_of(knobs["rewards"][name], problem)
    return None


# -- rewards of rows that have ended while others are still decoded, where a row takes long enough


class EarlyRewards:
    """Rewards that a training begins early: a pure function of problem and completion is worth the same whenever.

    A sampler calls `on_completions`, in any thread, with rows that have ended; the step scores with `score` and then
    forgets its rows.
    """

    def __init__(self, pool: RewardPool, fns: Sequence[RewardFn]) -> None:
        self.pool = pool
        self._fns = {pickled_function(fn): fn for fn in fns}
        self._lock = Lock()
        self._begun: dict[bytes, dict[Hashable, BegunCall]] = {payload: {} for payload in self._fns}
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

    def score(self, fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        """As `RewardPool.score`; rows that were begun are not scored again."""
        rows = [row_key(*row) for row in zip(problems, completions, strict=True)]
        with self._lock:
            begun = dict(self._begun.get(pickled_function(fn), {}))
        late = [i for i, row in enumerate(rows) if row not in begun]
        calls = self.pool.submit(fn, [problems[i] for i in late], [completions[i] for i in late])
        begun |= zip((rows[i] for i in late), calls, strict=True)
        outcomes = self.pool.collect(fn, problems, completions, [begun[row] for row in rows])
        if outcomes:
            self._seconds[pickled_function(fn)] = fmean(outcome.seconds for outcome in outcomes)
        return [outcome.value for outcome in outcomes]

    def forget(self, last: int) -> None:
        """Drop all that is known of rows whose problems have this place in the stream or an earlier one."""
        with self._lock:
            for begun in self._begun.values():
                for row in [row for row in begun if row[0] <= last]:
                    begun.pop(row).future.cancel()


def row_key(problem: Problem, completion: Completion) -> tuple[int, Hashable]:
    """The row, after the problem's place in the stream, which only goes forward."""
    return problem.uid, (problem.prompt, problem.answer, completion)
