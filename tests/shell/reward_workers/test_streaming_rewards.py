"""Rewards found while others are decoded: the same ones, each found once, and the caller waits for less."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from crew import CPU, crew
from hypothesis import given, settings
from policies import local
from pool_rewards import length_of_text, not_a_number, obeys, raises, scaled, takes, unscorable
from test_probe import KEY, model, sampler
from test_probe import asked as probed

from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.shell.reward_workers import reward_pool
from grpo_fn.shell.reward_workers.reward_pool import (
    JudgeCost,
    Loss,
    Outcome,
    RewardError,
    RewardPool,
    ScoringInterrupted,
    ignore_loss,
)
from grpo_fn.shell.reward_workers.streaming import StreamingRewards, row_of
from grpo_fn.shell.sampler.interface import DataParallelSampler, rank_share
from grpo_fn.shell.world import World, alone

EXAMPLES = settings.default.max_examples
SLOW = [length_of_text, partial(scaled, by=2), unscorable, raises, partial(scaled, by=3)]
ALONE = alone(CPU)
TEXTS = ["", "x", "xx", "xxx", "bad"]


class Fake:
    """A pool in this process. `raises` of the text "bad" is lost; with `stops` it stops everything."""

    def __init__(self, *, stops: bool = False, seconds: float = 1.0, pause: float = 0.0) -> None:
        self.stops, self.seconds, self.pause = stops, seconds, pause
        self.scored: Counter[Any] = Counter()
        self.ahead: Counter[Any] = Counter()  # of these, before anybody asked
        self.counts: Counter[str] = Counter()

    def judge(
        self,
        fn: Any,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        *,
        report: Any = None,
        should_stop: Any = None,
    ) -> list[Outcome]:
        if report is ignore_loss:
            return self.foresee(fn, problems, completions)
        found = [*map(partial(self.one, fn), problems, completions)]
        for outcome in dict.fromkeys(zip(problems_of(problems), completions, found, strict=True)):
            if outcome[-1].loss is not None:
                self.report(outcome[-1].loss)
        return found

    def foresee(self, fn: Any, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Outcome]:
        time.sleep(self.pause)
        for problem, completion in zip(problems, completions, strict=True):
            self.ahead[str(fn), problem.uid, completion] += 1
        return [*map(partial(self.one, fn), problems, completions)]

    def one(self, fn: Any, problem: Problem, completion: Completion) -> Outcome:
        self.scored[str(fn), problem.uid, completion] += 1
        try:
            value = fn(problem, completion)
            return Outcome(None if value is None else float(value), "", self.seconds)
        except KeyError:
            return Outcome(None, "lost", self.seconds, Loss("exceptions", "lost", f"raised on problem {problem.uid}"))

    def report(self, loss: Loss) -> None:
        if self.stops:
            raise RewardError(loss.text)
        self.counts[loss.cause] += 1

    def charge(self, cost: JudgeCost) -> None:
        raise AssertionError("no reward here asks a judge")


def problems_of(problems: Sequence[Problem]) -> list[int]:
    return [problem.uid for problem in problems]


def rows(uids: Sequence[int], texts: Sequence[str]) -> list[tuple[Problem, Completion]]:
    return [(Problem(uid, "?", "1", {"uid": uid}), Completion(t, len(t), False)) for uid in uids for t in texts]


def rollout(completions: Sequence[Completion]) -> Rollout:
    """All that is looked at is how many rows there are."""
    none = torch.zeros(len(completions), 1)
    no = torch.zeros(len(completions), 1, dtype=torch.bool)
    return Rollout(none.long(), no, none, no[:, 0], tuple(completion.text for completion in completions))


def asking(fns: Sequence[Any], asked: Sequence[tuple[Problem, Completion]], into: list[Any]) -> Callable[..., Reward]:
    """A reward that has these rows scored by each of these functions."""

    def reward(problems: Sequence[Problem], rollout: Rollout, *, score: Any) -> Reward:
        into.extend(score(fn, [p for p, _ in asked], [c for _, c in asked]) for fn in fns)
        value = torch.zeros(1, 1)
        return outcome_reward(value, value == 0, {})

    return reward


def step(
    one: StreamingRewards, fns: Sequence[Any], asked: Sequence[tuple[Problem, Completion]], world: World = ALONE
) -> Any:
    """A round over these rows; returns what each function made of them."""
    found: list[Any] = []
    reward = asking(fns, asked, found)
    one.round([p for p, _ in asked], rollout([c for _, c in asked]), reward=reward, world=world)
    return found


def known(one: StreamingRewards, fns: Sequence[Any]) -> None:
    """Two rounds, after which it begins with these."""
    for uid in (-3, -2):
        step(one, fns, rows([uid], "ab"))


def plainly(fns: Sequence[Any], asked: Sequence[tuple[Problem, Completion]], pool: Fake) -> list[Any]:
    """The same without anything done before."""
    return [[outcome.value for outcome in pool.judge(fn, *zip(*asked, strict=True))] for fn in fns]


@contextmanager
def opened(pool: Any) -> Iterator[StreamingRewards]:
    with StreamingRewards(pool) as one:
        yield one


# -- the same rewards


@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.sampled_from([0.0, 2e-4]))
def test_rewards_are_the_same_and_every_row_is_scored_once_whatever_is_reported_when(
    data, steps, prompts, pause
) -> None:
    fns = data.draw(st.lists(st.sampled_from(SLOW), min_size=1, max_size=3, unique=True))
    texts = [data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5)) for _ in range(steps)]
    of_step = [rows(range(i * prompts, (i + 1) * prompts), texts[i]) for i in range(steps)]
    pool, plain = Fake(pause=pause), Fake()
    with opened(pool) as one:
        reported = -1
        for i, asked in enumerate(of_step):
            until = data.draw(st.integers(i, steps - 1))  # batches are sampled ahead
            for batch in of_step[max(reported + 1, i) : until + 1]:
                for row in data.draw(st.permutations(batch))[: data.draw(st.integers(0, len(batch)))]:
                    one.on_completion(*row)
            reported = max(reported, until)
            if data.draw(st.booleans()):
                time.sleep(5e-4)
            assert step(one, fns, asked) == plainly(fns, [*asked], plain)
            assert pool.counts == plain.counts  # of what was asked for, and nothing else
        assert not any(one._found.values())
    assert set(pool.scored) == set(plain.scored)
    assert set(pool.scored.values()) == {1}


def test_what_is_reported_is_scored_before_it_is_asked_for_from_the_third_round_on() -> None:
    pool = Fake()
    with opened(pool) as one:
        for i in range(3):
            asked = rows([2 * i, 2 * i + 1], "ab")
            for row in asked:
                one.on_completion(*row)
            until(lambda: pool.ahead.total() == 4 or not one._rewards)
            assert step(one, [length_of_text], asked) == [[1.0] * 4]
            assert pool.ahead.total() == (4 if i == 2 else 0)
    assert pool.scored.total() == 12


def until(true: Callable[[], bool]) -> None:
    """Wait for it."""
    end = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


@pytest.mark.parametrize("why", ["instantaneous", "not of every row", "another every time"])
def test_a_reward_that_is_not_worth_it_is_left_alone(why: str) -> None:
    pool = Fake(seconds=1e-6 if why == "instantaneous" else 1.0)
    with opened(pool) as one:
        for i in range(4):
            asked = rows([i], "abc")
            for row in asked:
                one.on_completion(*row)
            fn = partial(scaled, by=i) if why == "another every time" else length_of_text
            found: list[Any] = []
            part = asked[:2] if why == "not of every row" else asked
            reward = asking([fn], part, found)
            one.round([p for p, _ in asked], rollout([c for _, c in asked]), reward=reward, world=ALONE)
            assert found == plainly([fn], part, Fake())
            assert not one._ended
    assert not pool.ahead


# -- what goes wrong


def test_an_exception_is_raised_when_its_row_is_asked_for_and_never_for_others() -> None:
    pool, bad = Fake(stops=True), rows([1, 2, 3], ["bad"])
    with opened(pool) as one:
        known(one, [raises])
        for row in [*rows([1], ["good"]), *bad, *rows([2], ["good"])]:
            one.on_completion(*row)
        until(lambda: pool.ahead.total() == 5)
        assert step(one, [raises], rows([1], ["good"])) == [[1.0]]
        with pytest.raises(RewardError, match="raised on problem 2"):
            step(one, [raises], rows([2], ["good", "bad"]))
    assert set(pool.scored.values()) == {1}


def test_where_nothing_can_be_foreseen_the_caller_gets_the_error() -> None:
    pool = Fake()

    def broken(*_: Any, **__: Any) -> list[Outcome]:
        pool.ahead["broken"] += 1
        raise RewardError("could not be loaded")

    with opened(pool) as one:
        known(one, [length_of_text])
        pool.foresee = broken
        for row in rows([1, 2], "ab"):
            one.on_completion(*row)
        until(lambda: bool(pool.ahead))
        assert step(one, [length_of_text], rows([1], "ab")) == [[1.0, 1.0]]
        pool.judge = broken
        with pytest.raises(RewardError, match="could not be loaded"):
            step(one, [length_of_text], rows([2], "ab"))


def test_a_dead_thread_is_reported() -> None:
    pool = Fake()
    with opened(pool) as one:
        known(one, [length_of_text])
        one._claimed(next(iter(one._rewards)), {row_of(*row): row[0] for row in rows([1], "a")})
    with pytest.raises(RuntimeError, match="thread that has ended"):
        step(one, [length_of_text], rows([1], "a"))


# -- the pool itself


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=2, timeout_per_completion=30.0, memory_mb=1024, stop_on_error=True) as made:
        yield made


def columns(asked: Sequence[tuple[Problem, Completion]]) -> list[Any]:
    return [[p for p, _ in asked], [c for _, c in asked]]


def test_a_loss_that_was_foreseen_counts_and_raises_when_it_is_reported(pool: RewardPool) -> None:
    asked = columns(rows([0], ["good", "bad", "fine"]))
    found = pool.judge(raises, *asked, report=ignore_loss)
    assert [outcome.value for outcome in found] == [1.0, None, 1.0]
    with pytest.raises(RewardError) as early_one:
        pool.report(found[1].loss)
    with pytest.raises(RewardError) as plain:
        pool.score(raises, *asked)
    assert str(early_one.value) == str(plain.value)
    assert not any(pool.counts.values())
    pool.stop_on_error = False
    try:
        (outcome,) = pool.judge(not_a_number, *columns(rows([0], ["a"])), report=ignore_loss)
        assert not any(pool.counts.values())
        pool.report(outcome.loss)
        assert pool.counts == {"timeouts": 0, "worker_crashes": 0, "protocol_errors": 0, "exceptions": 1}
        assert "not_a_number lost problem 0" in pool.complaints[0]
    finally:
        pool.stop_on_error = True


def test_threads_have_the_workers_in_turn(pool: RewardPool) -> None:
    asked, turns = columns(rows(range(8), "ab")), []

    def ask(by: int) -> None:
        for _ in range(6):
            assert pool.score(partial(scaled, by=by), *asked) == [float(by)] * 16
            turns.append(by)

    threads = [Thread(target=ask, args=(by,)) for by in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(turns) == [2] * 6 + [3] * 6
    both = turns[turns.index(3) if turns[0] == 2 else turns.index(2) :][:4]
    assert len(set(both)) == 2  # neither has them to itself once the other one waits


def test_the_time_of_decoding_is_not_waited_for_again(pool: RewardPool) -> None:
    slow = partial(takes, seconds=0.05)
    with opened(pool) as one:
        known(one, [slow])
        began = time.monotonic()
        pool.score(slow, *columns(rows(range(100, 136), "x")))  # 36 rows, two at a time: 0.9 s
        plain = time.monotonic() - began
        asked = rows(range(1, 37), "x")
        for row in asked:
            time.sleep(1.0 / len(asked))
            one.on_completion(*row)
        began = time.monotonic()
        assert step(one, [slow], asked) == [[1.0] * len(asked)]
        assert time.monotonic() - began < 0.6 * plain


def test_the_end_does_not_wait_for_rows_that_are_not_wanted(pool: RewardPool) -> None:
    with opened(pool) as one:
        known(one, [partial(takes, seconds=0.002)])
        one._rewards = {reward_pool.by_name(obeys): obeys}
        one.on_completion(*rows([1], ["sleep"])[0])
        until(lambda: any(worker.rows for worker in pool._workers))
        began = time.monotonic()
    assert time.monotonic() - began < 5.0
    assert pool.score(obeys, *columns(rows([0], ["fine"]))) == [1.0]
    with pytest.raises(ScoringInterrupted):
        pool.score(obeys, *columns(rows([0], ["sleep"])), should_stop=lambda: time.monotonic() > began + 0.1)


# -- what is not reported


def test_rows_of_the_probe_are_not_reported() -> None:
    module, reported = model(), []
    drawing = replace(sampler(module), on_completion=lambda *row: reported.append(row))
    drawing.sample(columns(rows([0], "a"))[0], 1, key=KEY)
    assert len(reported) == 1
    probed(DataParallelSampler(drawing, ALONE), local(module, temperature=0.7))
    assert len(reported) == 1


# -- on many ranks


def shared(world: World, prompts: int, group: int) -> tuple[list[Any], Counter[Any], int]:
    """Three rounds, each rank reporting the problems that it samples: what it found, scored and foresaw."""
    pool, own = Fake(), rank_share(prompts, world.rank, world.size)
    with opened(pool) as one:
        for i in range(3):
            asked = rows(range(i * prompts, (i + 1) * prompts), ["x" * g for g in range(group)])
            for row in asked[own.start * group : own.stop * group]:
                one.on_completion(*row)
            if i == 2:
                until(lambda: pool.ahead.total() == (own.stop - own.start) * group)
            found = step(one, [length_of_text], asked, world)
    return found, pool.scored, pool.ahead.total()


@pytest.mark.xdist_group("spread")
@settings(max_examples=max(4, EXAMPLES // 12))
@given(st.integers(1, 4), st.integers(1, 4))
def test_ranks_foresee_their_own_rows_and_score_nothing_twice(half: int, group: int) -> None:
    found = crew(2).run(shared, 2 * half, group)
    right = [[float(g) for _ in range(2 * half) for g in range(group)]]
    assert [values for values, _, _ in found] == [right, right]
    scored = found[0][1] + found[1][1]
    assert len(scored) == 3 * 2 * half * group
    assert set(scored.values()) == {1}
    assert [ahead for _, _, ahead in found] == [half * group, half * group]


@pytest.mark.xdist_group("spread")
def test_a_row_that_another_rank_scores_is_scored_there() -> None:
    found = crew(2).run(shared, 3, 3)
    right = [[float(g) for _ in range(3) for g in range(3)]]
    assert [values for values, _, _ in found] == [right, right]
