"""Rewards found while others are decoded: the same ones, each found once, and the caller waits for less."""

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
from hypothesis import given, settings
from policies import local
from pool_rewards import Unloadable, calls_so_far, length_of_text, obeys, raises, scaled, takes, unscorable
from test_probe import KEY, model, sampler
from test_probe import asked as probed

from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.shell.reward_workers.early_rewards import EarlyRewards
from grpo_fn.shell.reward_workers.reward_pool import RewardError, RewardPool, ScoringInterrupted
from grpo_fn.shell.reward_workers.worker_pool import pickled_function
from grpo_fn.shell.sampler.interface import DataParallelSampler, rank_share
from grpo_fn.shell.world import World, alone

EXAMPLES = settings.default.max_examples
ALONE = alone(CPU)
TEXTS = ["", "x", "xx", "xxx", "bad"]
FNS = [length_of_text, partial(scaled, by=2), unscorable, raises]


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


def rows(uids: Sequence[int], texts: Sequence[str]) -> list[tuple[Problem, Completion]]:
    return [(Problem(uid, "?", "1", {"uid": uid}), Completion(t, len(t), False)) for uid in uids for t in texts]


def columns(asked: Sequence[tuple[Problem, Completion]]) -> list[Any]:
    return [[p for p, _ in asked], [c for _, c in asked]]


def rollout(completions: Sequence[Completion]) -> Rollout:
    """All that is looked at is how many rows there are."""
    none = torch.zeros(len(completions), 1)
    no = torch.zeros(len(completions), 1, dtype=torch.bool)
    return Rollout(none.long(), no, none, no[:, 0], tuple(completion.text for completion in completions))


def step(
    early: EarlyRewards, fns: Sequence[Any], asked: Sequence[tuple[Problem, Completion]], world: World = ALONE
) -> list[Any]:
    """What each function made of the rows of a step."""
    found: list[Any] = []

    def reward(problems: Sequence[Problem], rollout: Rollout, *, score: Any) -> Reward:
        found.extend(score(fn, *columns(asked)) for fn in fns)
        value = torch.zeros(1, 1)
        return outcome_reward(value, value == 0, {})

    early.reward_of([p for p, _ in asked], rollout([c for _, c in asked]), reward=reward, world=world)
    return found


# -- the same rewards


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_rewards_and_counts_are_the_same_whatever_is_reported_when(patient, data, steps, prompts) -> None:
    fns = data.draw(st.lists(st.sampled_from(FNS), min_size=1, max_size=3, unique=True))
    texts = [data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5)) for _ in range(steps)]
    of_step = [rows(range(i * prompts, (i + 1) * prompts), texts[i]) for i in range(steps)]
    early, reported = EarlyRewards(patient, data.draw(st.permutations(fns))[: data.draw(st.integers(0, 3))]), -1
    for i, asked in enumerate(of_step):
        until = data.draw(st.integers(i, steps - 1))  # batches are sampled ahead
        for batch in of_step[max(reported + 1, i) : until + 1]:
            ended = data.draw(st.permutations(batch))[: data.draw(st.integers(0, len(batch)))]
            first = data.draw(st.integers(0, len(ended)))
            for look in (ended[:first], ended[first:]):
                early.on_completions(*columns(look))
        reported = max(reported, until)
        counts = [dict(patient.counts)]
        found = step(early, fns, asked)
        counts.append(dict(patient.counts))
        assert found == [patient.score(fn, *columns(asked)) for fn in fns]
        counts.append(dict(patient.counts))
        early_ones, plain = ({k: b[k] - a[k] for k in a} for a, b in pairwise(counts))
        assert early_ones == plain  # of what was asked for, and nothing else
    assert not any(early._begun.values())


def test_a_row_that_was_begun_is_not_scored_again() -> None:
    with pool_of(stop_on_error=True, workers=1) as pool:
        early, asked = EarlyRewards(pool, [calls_so_far]), rows([0, 1], "ab")
        for known in (asked[:2], asked[:3], asked[1:2]):
            early.on_completions(*columns(known))
        assert step(early, [calls_so_far], asked) == [[1.0, 2.0, 3.0, 4.0]]


# -- what goes wrong


def begun(early: EarlyRewards) -> None:
    """Wait for all that was begun."""
    wait([call.future for calls in early._begun.values() for call in calls.values()])


def test_an_exception_is_raised_when_its_row_is_asked_for_and_never_for_others(pool: RewardPool) -> None:
    early = EarlyRewards(pool, [raises])
    early.on_completions(*columns([*rows([1], ["good"]), *rows([1, 2, 3], ["bad"]), *rows([2], ["good"])]))
    begun(early)
    assert step(early, [raises], rows([1], ["good"])) == [[1.0]]
    with pytest.raises(RewardError, match="raises raised on problem 2") as early_one:
        step(early, [raises], rows([2], ["good", "bad"]))
    with pytest.raises(RewardError) as plain:
        pool.score(raises, *columns(rows([2], ["good", "bad"])))
    assert str(early_one.value) == str(plain.value)
    assert not any(pool.counts.values())


def test_a_reward_that_cannot_be_loaded_is_an_error_of_its_step(pool: RewardPool) -> None:
    early, asked = EarlyRewards(pool, [Unloadable()]), rows([1], "ab")
    early.on_completions(*columns(asked))
    begun(early)
    with pytest.raises(RewardError, match="could not be loaded"):
        step(early, [Unloadable()], asked)


# -- the pool beneath


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


def test_rows_that_have_ended_are_scored_before_the_step_asks(pool: RewardPool) -> None:
    early, asked = EarlyRewards(pool, [length_of_text]), rows(range(1, 7), "x")
    for row in asked:
        early.on_completions(*columns([row]))
    scored, late = wait([call.future for begun in early._begun.values() for call in begun.values()], timeout=60)
    assert (len(scored), len(late)) == (6, 0)
    assert step(early, [length_of_text], asked) == [[1.0] * 6]


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
        early._forget(1)
        assert pool.score(obeys, *columns(rows([0], ["fine", "fine too"]))) == [1.0, 1.0]
        early.on_completions(*columns(rows([2], ["sleep"])))
    assert [call.future.cancelled() for call in early._begun.popitem()[1].values()] == [True]
    early.on_completions(*columns(rows([3], ["fine"])))  # its answer is no longer expected


# -- what is not reported


def test_rows_of_the_probe_are_not_reported() -> None:
    module, reported = model(), []
    drawing = replace(sampler(module), on_completions=lambda problems, completions: reported.extend(completions))
    drawing.sample(columns(rows([0], "a"))[0], 1, key=KEY)
    assert len(reported) == 1
    probed(DataParallelSampler(drawing, ALONE), local(module, temperature=0.7))
    assert len(reported) == 1


# -- on many ranks


def shared(world: World, prompts: int, group: int) -> tuple[list[Any], int]:
    """A step, each rank reporting the problems that it samples: its rewards, and how many rows were begun."""
    own = rank_share(prompts, world.rank, world.size)
    with pool_of(stop_on_error=True, workers=1) as pool:
        early, sampled = EarlyRewards(pool, [length_of_text]), rows(range(prompts), ["x" * g for g in range(group)])
        early.on_completions(*columns(sampled[own.start * group : own.stop * group]))
        begun_rows = sum(map(len, early._begun.values()))
        return step(early, [length_of_text], sampled, world), begun_rows


@pytest.mark.xdist_group("spread")
@settings(max_examples=max(2, EXAMPLES // 25))
@given(st.integers(1, 4), st.integers(1, 4))
def test_ranks_begin_their_own_rows(half: int, group: int) -> None:
    found = crew(2).run(shared, 2 * half, group)
    right = [[float(g) for _ in range(2 * half) for g in range(group)]]
    assert found == [(right, half * group)] * 2


@pytest.mark.xdist_group("spread")
def test_a_row_that_another_rank_scores_is_scored_there() -> None:
    right = [[float(g) for _ in range(3) for g in range(3)]]
    assert [values for values, _ in crew(2).run(shared, 3, 3)] == [right, right]
