"""Sampling and scoring shared among ranks: each has its part, and all know every row."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import given
from test_async_sampler import KEY, Engine, Weights, drawn, ranks, same_rollout, sound, stream

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Rollout
from grpo_fn.rewards.combine import score_serially
from grpo_fn.shell.sampler.interface import DataParallelSampler, rank_share, spread_score
from grpo_fn.shell.world import World

sizes = st.integers(1, 4)


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_all_items_in_order_and_as_even_as_can_be(items, size):
    shares = [range(items)[rank_share(items, rank, size)] for rank in range(size)]
    assert [i for part in shares for i in part] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def sampled(world: World, engine_ranks: int, problems: int, group_size: int) -> tuple[Rollout, list[Any]]:
    engine = Engine(ranks=engine_ranks)
    made = DataParallelSampler(engine, world)
    made.load(Weights(1))
    return made.sample(stream(3, problems), group_size, key=KEY), engine.log


@given(sizes, st.booleans(), st.integers(1, 6), st.integers(1, 3))
def test_every_row_is_sampled_by_one_engine_and_known_to_all_ranks(size, shared, problems, group_size):
    """Also if there are fewer problems than ranks, and if all ranks have one engine together."""
    engine_ranks = size if shared else 1
    right, logs = drawn(1, 1, stream(3, problems), group_size, KEY), []
    for rollout, log in sound(ranks(size, sampled, engine_ranks, problems, group_size)):
        same_rollout(rollout, right)
        logs.append(log)
    assert [uid for log in logs[::engine_ranks] for part in log for uid in part] == list(range(3, 3 + problems))


def letters(problem: Problem, completion: Completion) -> float | None:
    """The share of letters among the characters; what begins with a digit cannot be scored."""
    text = completion.text
    return None if text[:1].isdigit() else sum(c.isalpha() for c in text) / max(1, len(text))


def scored(world: World, n: int) -> tuple[list[float | None], int]:
    """Scores of n rows, and how many of them this rank scored."""
    mine = []

    def score(fn: Any, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        mine.extend(problems)
        return score_serially(fn, problems, completions)

    rows = [Completion("1" * (i % 3 == 0) + "ab." * i, i, False) for i in range(n)]
    return spread_score(score, world)(letters, stream(0, n), rows), len(mine)


@given(sizes, st.integers(0, 9))
def test_every_row_is_scored_once_and_known_to_all(size, n):
    found = sound(ranks(size, scored, n))
    ((right, _),) = sound(ranks(1, scored, n))
    assert [scores for scores, _ in found] == [right] * size
    assert sum(count for _, count in found) == n
