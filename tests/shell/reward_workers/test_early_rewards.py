"""Rewards begun while others are decoded: the same ones, each scored once, and lost rows count in their own step."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from itertools import pairwise
from threading import Lock, Thread
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from crew import CPU, crew
from hypothesis import given
from policies import local
from pool_rewards import calls_so_far, length_of_text, obeys, raises, scaled, takes, unscorable
from test_probe import KEY, model, sampler
from test_probe import asked as probed

from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.shell.reward_workers.reward_pool import EarlyRewards, RewardError, RewardPool, ScoringInterrupted
from grpo_fn.shell.reward_workers.worker_pool import pickled_function
from grpo_fn.shell.sampler.interface import DataParallelSampler, rank_share
from grpo_fn.shell.world import World, alone
from grpo_fn.trainer.build import step_reward

ALONE = alone(CPU)
TEXTS = ["", "x", "xx", "xxx", "bad"]
FNS = [length_of_text, partial(scaled, by=2), unscorable, raises]
Rows = list[tuple[Problem, Completion]]
NO = torch.zeros(0, 1).bool()
ROLLOUT = Rollout(NO.long(), NO, NO.float(), NO[:, 0], ())  # which only a reward would look at


def pool_of(*, stop_on_error: bool, workers: int = 2) -> RewardPool:
    return RewardPool(workers=workers, timeout_per_completion=30.0, memory_mb=1024, stop_on_error=stop_on_error)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with pool_of(stop_on_error=True) as made:
        yield made


@pytest.fixture(scope="module")
def patient() -> Iterator[RewardPool]:
    """Goes on after an exception."""
    with pool_of(stop_on_error=False) as made:
        yield made


def rows(uids: Sequence[int], texts: Sequence[str]) -> Rows:
    return [(Problem(uid, "?", "1", {"uid": uid}), Completion(t, len(t), False)) for uid in uids for t in texts]


def columns(batch: Rows) -> list[Any]:
    return [[p for p, _ in batch], [c for _, c in batch]]


def step(early: EarlyRewards, fns: Sequence[Any], batch: Rows, world: World = ALONE) -> list[Any]:
    """What each function made of the rows of a step."""
    scores: list[Any] = []

    def reward(problems: Sequence[Problem], rollout: Rollout, *, score: Any) -> Reward:
        scores.extend(score(fn, *columns(batch)) for fn in fns)
        value = torch.zeros(1, 1)
        return outcome_reward(value, value == 0, {})

    step_reward([p for p, _ in batch], ROLLOUT, reward=reward, early=early, world=world)
    return scores


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_rewards_and_counts_are_the_same_whatever_is_reported_when(patient, data, steps, prompts) -> None:
    fns = data.draw(st.lists(st.sampled_from(FNS), min_size=1, max_size=3, unique=True))
    texts = [data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5)) for _ in range(steps)]
    of_step = [rows(range(i * prompts, (i + 1) * prompts), texts[i]) for i in range(steps)]
    early, reported = EarlyRewards(patient, data.draw(st.permutations(fns))[: data.draw(st.integers(0, 3))]), -1
    for i, batch in enumerate(of_step):
        until = data.draw(st.integers(i, steps - 1))  # batches are sampled ahead
        for ahead in of_step[max(reported + 1, i) : until + 1]:
            ended = data.draw(st.permutations(ahead))[: data.draw(st.integers(0, len(ahead)))]
            first = data.draw(st.integers(0, len(ended)))
            for part in (ended[:first], ended[first:]):
                early.on_completions(*columns(part))
        reported = max(reported, until)
        counts = [dict(patient.counts)]
        scores = step(early, fns, batch)
        counts.append(dict(patient.counts))
        assert scores == [patient.score(fn, *columns(batch)) for fn in fns]
        counts.append(dict(patient.counts))
        of_early, of_plain = ({k: b[k] - a[k] for k in a} for a, b in pairwise(counts))
        assert of_early == of_plain  # the rows of the step, and nothing else
    assert not any(early._begun.values())


def test_a_row_that_was_begun_is_not_scored_again() -> None:
    with pool_of(stop_on_error=True, workers=1) as pool:
        early, batch = EarlyRewards(pool, [calls_so_far]), rows([0, 1], "ab")
        for ended in (batch[:2], batch[:3], batch[1:2]):
            early.on_completions(*columns(ended))
        assert step(early, [calls_so_far], batch) == [[1.0, 2.0, 3.0, 4.0]]


def test_an_exception_is_raised_in_the_step_of_its_row_and_in_no_other(pool: RewardPool) -> None:
    early = EarlyRewards(pool, [raises])
    early.on_completions(*columns([*rows([1], ["good"]), *rows([1, 2, 3], ["bad"]), *rows([2], ["good"])]))
    wait([call.future for calls in early._begun.values() for call in calls.values()])
    assert step(early, [raises], rows([1], ["good"])) == [[1.0]]
    with pytest.raises(RewardError, match="raises raised on problem 2") as of_early:
        step(early, [raises], rows([2], ["good", "bad"]))
    with pytest.raises(RewardError) as of_plain:
        pool.score(raises, *columns(rows([2], ["good", "bad"])))
    assert str(of_early.value) == str(of_plain.value)
    assert not any(pool.counts.values())


def test_rows_of_two_threads_are_scored_in_the_order_in_which_they_were_submitted() -> None:
    with pool_of(stop_on_error=True, workers=1) as pool:
        batch, scored, submitted = columns(rows(range(4), "ab")), [], Lock()
        submitted.acquire()  # until the first thread has submitted its first batch and the second one its own

        def submit(by: int) -> list[Future[Any]]:
            calls = pool.submit(partial(scaled, by=by), *batch)
            calls[-1].future.add_done_callback(lambda _: scored.append(by))
            return [call.future for call in calls]

        def second_thread() -> None:
            futures.extend(submit(2))
            submitted.release()

        futures = submit(1)
        thread = Thread(target=second_thread)
        thread.start()
        assert submitted.acquire(timeout=60)
        futures += submit(3)
        wait(futures)
        thread.join(60)
    assert scored == [1, 2, 3]  # the second thread does not wait until the first one has nothing more to submit


def test_a_reward_that_takes_no_time_is_left_to_the_step_once_that_is_known(pool: RewardPool) -> None:
    slow = partial(takes, seconds=0.005)
    fns = {"length": length_of_text, "slow": slow}
    early = EarlyRewards(pool, [*fns.values()])
    for uid, begun_early in ((1, ["length", "slow"]), (2, ["slow"])):
        ended = rows([uid], ["x", "xx"])
        early.on_completions(*columns(ended))
        assert [name for name, fn in fns.items() if early._begun[pickled_function(fn)]] == begun_early
        assert step(early, [length_of_text, slow], ended) == [[1.0, 2.0], [1.0, 1.0]]


def test_the_end_does_not_wait_for_rows_that_are_not_expected() -> None:
    with pool_of(stop_on_error=True) as pool:
        early = EarlyRewards(pool, [obeys])
        early.on_completions(*columns(rows([1], ["sleep"])))
        with pytest.raises(ScoringInterrupted):
            pool.score(obeys, *columns(rows([0], ["sleep"])), should_stop=iter([False, True]).__next__)
        early.forget(1)
        assert pool.score(obeys, *columns(rows([0], ["fine", "fine too"]))) == [1.0, 1.0]
        early.on_completions(*columns(rows([2], ["sleep"])))
    assert [call.future.cancelled() for call in early._begun.popitem()[1].values()] == [True]
    early.on_completions(*columns(rows([3], ["fine"])))  # the pool is closed: nothing is begun


def test_rows_of_the_probe_are_not_reported() -> None:
    module, reported = model(), []
    drawing = replace(sampler(module), on_completions=lambda problems, completions: reported.extend(completions))
    drawing.sample(columns(rows([0], "a"))[0], 1, key=KEY)
    probed(DataParallelSampler(drawing, ALONE), local(module, temperature=0.7))
    assert len(reported) == 1


def step_of_rank(world: World, prompts: int, group: int) -> tuple[list[Any], int]:
    """A step, each rank reporting the problems that it samples: its rewards, and how many rows were begun."""
    own = rank_share(prompts, world.rank, world.size)
    with pool_of(stop_on_error=True, workers=1) as pool:
        early, sampled = EarlyRewards(pool, [length_of_text]), rows(range(prompts), ["x" * g for g in range(group)])
        early.on_completions(*columns(sampled[own.start * group : own.stop * group]))
        begun_rows = sum(map(len, early._begun.values()))
        return step(early, [length_of_text], sampled, world), begun_rows


@pytest.mark.xdist_group("spread")
@pytest.mark.parametrize("prompts", [4, 3])
def test_ranks_begin_their_own_rows_and_all_learn_every_reward(prompts: int) -> None:
    """With 3, one rank scores a row that the other one has sampled and begun."""
    outcomes = crew(2).run(step_of_rank, prompts, 3)
    assert [scores for scores, _ in outcomes] == [[[float(g) for _ in range(prompts) for g in range(3)]]] * 2
    assert sum(begun for _, begun in outcomes) == 3 * prompts
