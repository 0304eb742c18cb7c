"""Mixtures: exact shares, every part walked without a gap, and a problem a function of (key, index)."""

import inspect
import itertools
import pickle
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core import prng
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards import wrappers as by_task_module
from grpo_fn.rewards.format import boxed
from grpo_fn.rewards.math import correct
from grpo_fn.rewards.wrappers import by_task
from grpo_fn.tasks import arithmetic, mixture
from grpo_fn.tasks.overlong import drop
from grpo_fn.tasks.task import TEST_UID, filter_rows, from_rows, held_out_only, train_problems

SIZES = (4, 3, 2, 1)
seeds = st.integers(0, 2**31 - 1)
ratios = st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any)


def key(seed):
    return prng.key(seed, device="cpu")


def part(name, size, tests=1):
    rows = [Problem(0, f"{name}{i}", "", {}) for i in range(size)]
    return from_rows(rows, [Problem(0, f"{name} held out {i}", "", {}) for i in range(tests)])


def mixed(weights, sizes=SIZES):
    names = "abcd"[: len(weights)]
    tasks = {name: partial(part, name, size) for name, size in zip(names, sizes, strict=False)}
    return mixture.task(tasks=tasks, weights=dict(zip(names, weights, strict=True)))


def names(problems):
    return [problem.meta["task"] for problem in problems]


@given(seeds, st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(0, 2))
def test_no_stretch_of_the_stream_is_far_off_its_shares(seed, weights, block):
    """From the start, part k is off by less than 1 + w_k (parts - 2) draws, w_k being its share."""
    counts = mixture.whole_counts(weights)
    size = sum(counts)
    turns = [mixture.part_at(key(seed), block * size + i, counts)[0] for i in range(size)]
    for k, count in enumerate(counts):
        share = count / size
        seen = itertools.accumulate((turn == k for turn in turns), initial=0)
        assert max(abs(have - n * share) for n, have in enumerate(seen)) < 1 + share * (len(counts) - 2) + 1e-9


@given(seeds, ratios, st.integers(0, 30), st.integers(1, 60))
def test_each_part_is_asked_its_own_stream_without_gap_or_repetition(seed, weights, start, count):
    counts, parts = mixture.whole_counts(weights), {}
    for index in range(start + count):
        which, before = mixture.part_at(key(seed), index, counts)
        assert before == parts.get(which, 0)
        parts[which] = before + 1


@given(seeds, ratios)
def test_every_row_of_a_part_is_asked_once_an_epoch_of_that_part(seed, weights):
    task, sizes = mixed(weights), dict(zip("abcd", SIZES, strict=True))
    rounds = max(sizes.values()) * sum(weights)
    asked = {name: [] for name in sizes}
    for problem in train_problems(task, key(seed), 0, rounds):
        asked[problem.meta["task"]].append(problem.prompt)
    for name, prompts in asked.items():
        for epoch in range(len(prompts) // sizes[name]):
            once = prompts[epoch * sizes[name] : (epoch + 1) * sizes[name]]
            assert sorted(once) == [f"{name}{i}" for i in range(sizes[name])]


@given(seeds, ratios, st.integers(1, 4), st.lists(st.integers(0, 20), max_size=3))
def test_ranks_and_restarts_see_one_stream_numbered_by_its_index(seed, weights, ranks, cuts):
    task = mixed(weights)
    straight = train_problems(task, key(seed), 0, 20)
    assert [problem.uid for problem in straight] == list(range(20))
    mixture._blocks.cache_clear()
    mixture._keys.cache_clear()
    resumed = [
        problem
        for lo, hi in reversed(list(itertools.pairwise(sorted({0, 20, *cuts}))))
        for problem in train_problems(mixed(weights), key(seed), lo, hi - lo)
    ]
    shared = [task.train(key(seed), index) for rank in range(ranks) for index in range(rank, 20, ranks)]
    assert tuple(sorted(resumed)) == tuple(sorted(shared)) == straight


def test_keys_blocks_and_parts_have_orders_of_their_own():
    weights = (4, 4)

    def order(seed, block):
        return tuple(names(train_problems(mixed(weights), key(seed), 2 * block, 2)))

    assert len({tuple(order(seed, block) for block in range(12)) for seed in range(6)}) == 6
    turns = [mixture.part_at(key(0), index, (1, 1))[0] for index in range(2048)]
    assert len({tuple(turns[i : i + 256]) for i in range(0, 2048, 256)}) == 8
    same = {"x": partial(part, "q", 50), "y": partial(part, "q", 50)}
    twins = mixture.task(tasks=same, weights={"x": 1, "y": 1})
    asked = {name: [p.prompt for p in train_problems(twins, key(0), 0, 100) if p.meta["task"] == name] for name in "xy"}
    assert sorted(asked["x"]) == sorted(asked["y"]) != asked["x"] != asked["y"]


def test_held_out_problems_of_all_parts_stand_one_after_the_other_with_names_and_numbers():
    tasks = {
        "a": partial(part, "a", 3, tests=2),
        "b": partial(part, "b", 2),
        "c": partial(held_out_only, [Problem(0, "c", "", {})]),
    }
    task = mixture.task(tasks=tasks, weights={"b": 1, "c": 0, "a": 2})
    assert [(p.uid - TEST_UID, p.meta["task"]) for p in task.test] == [(0, "a"), (1, "a"), (2, "b"), (3, "c")]
    assert (task.size, len(task.rows)) == (5, 5)
    assert {p.meta["task"] for p in train_problems(task, key(0), 0, 30)} == {"a", "b"}
    assert task.notes[0] == "of every 3 training problems: 2 of a, 1 of b, 0 of c"


def test_a_row_that_another_part_holds_out_is_left_out_and_noted():
    train = [Problem(0, f"shared {i}", "", {}) for i in range(4)]
    tasks = {
        "a": partial(from_rows, train, [Problem(0, "other", "", {})]),
        "b": partial(
            from_rows, [Problem(0, "b", "", {})], [Problem(0, "shared  2\n", "", {}), Problem(0, "other", "", {})]
        ),
    }
    task = mixture.task(tasks=tasks, weights={"a": 1, "b": 1})
    assert [row.prompt for row in task.rows] == ["shared 0", "shared 1", "shared 3", "b"]
    assert "shared 2" not in {p.prompt for p in train_problems(task, key(0), 0, 40)}
    assert task.notes[1:] == ("a: left out 1 training rows that are held-out problems of another part: 2",)


@given(seeds, st.lists(st.booleans(), min_size=8, max_size=8))
def test_rows_are_left_out_of_every_part_that_is_drawn(seed, stay):
    task = mixed((1, 2, 0, 1))
    expected = {row.prompt for row, stays in zip(task.rows, stay, strict=False) if stays}
    if {name[0] for name in expected} != {"a", "b", "d"}:
        with pytest.raises(ValueError, match=r"[abd]: training rows: got \d, of which none may stay"):
            filter_rows(task, lambda row: row.prompt in expected)
        return
    left, count = filter_rows(task, lambda row: row.prompt in expected and row.meta["task"] != "c")
    assert (left.size, count) == (len(expected), task.size - len(expected))
    assert {row.prompt for row in left.rows} == expected
    assert {p.prompt for p in train_problems(left, key(seed), 0, 16)} == expected
    assert (left.test, left.notes) == (task.test, task.notes)
    assert filter_rows(left, lambda row: True)[1] == 0


def test_a_mixture_in_a_mixture_and_one_with_problems_that_are_made():
    inner = partial(
        mixture.task, tasks={"a": partial(part, "a", 3), "b": partial(part, "b", 2)}, weights={"a": 1, "b": 1}
    )
    sums = partial(arithmetic.task, max_value=2, operations=1, test_size=1)
    task = mixture.task(tasks={"letters": inner, "sums": sums}, weights={"letters": 2, "sums": 1})
    assert Counter(names(train_problems(task, key(0), 0, 30))) == {"letters": 20, "sums": 10}
    assert names(task.test) == ["letters", "letters", "sums"]
    left, count = filter_rows(
        mixture.task(tasks={"letters": inner}, weights={"letters": 1}), lambda row: row.prompt != "a1"
    )
    assert count == 1
    assert "a1" not in {row.prompt for row in left.rows}
    with pytest.raises(ValueError, match="sums: got problems that are made"):
        drop(task, len, 10**6)


@pytest.mark.parametrize(
    ("weights", "want"),
    [
        ((3, 1), (3, 1)),
        ((0.7, 0.3), (7, 3)),
        ((50, 100, 0), (1, 2, 0)),
        ((2.5, 1), (5, 2)),
    ],
)
def test_weights_become_the_smallest_whole_numbers_of_their_ratio(weights, want):
    assert mixture.whole_counts(weights) == want


@pytest.mark.parametrize(
    "weights",
    [(0, 0), (-1, 2), (float("nan"), 1), (1 / 3, 1), (1, 10_000), ("1", 2), ()],
)
def test_weights_that_are_no_ratio_of_smallish_whole_numbers_are_refused(weights):
    with pytest.raises(ValueError, match=r"weights: got .*expected"):
        inspect.unwrap(mixture.whole_counts)(weights)  # a gin file is not checked for types of this kind


def test_names_that_differ_and_parts_that_cannot_be_drawn_or_made_are_refused():
    one = partial(part, "a", 2)
    with pytest.raises(ValueError, match="weights: got b, expected one each of a"):
        mixture.task(tasks={"a": one}, weights={"b": 1})
    with pytest.raises(ValueError, match="got 1 for a, which has no training rows, expected 0"):
        mixture.task(tasks={"a": partial(held_out_only, [])}, weights={"a": 1})
    with pytest.raises(ValueError, match="a: a task needs training rows"):
        mixture.task(tasks={"a": partial(from_rows, [], [])}, weights={"a": 1})
    with pytest.raises(ValueError, match="got -1"):
        mixed((1, 1)).train(key(0), -1)


# Rewards by part


def test_a_problem_is_scored_by_the_reward_of_its_part():
    reward = partial(by_task, rewards={"sums": correct, "prose": boxed})
    completion = Completion(r"\boxed{3}", 3, False)
    assert reward(Problem(0, "?", "4", {"task": "sums"}), completion) == 0.0
    assert reward(Problem(0, "?", "4", {"task": "prose"}), completion) == 1.0
    assert pickle.loads(pickle.dumps(reward))(Problem(0, "?", r"\frac", {"task": "sums"}), completion) is None


@pytest.mark.parametrize("meta", [{}, {"task": "verse"}])
def test_a_problem_without_a_reward_of_its_own_is_refused(meta):
    with pytest.raises(ValueError, match=r"problem 7: got task (None|'verse'), expected one with a reward: prose"):
        by_task_module.by_task(Problem(7, "?", "", meta), Completion("", 0, False), rewards={"prose": boxed})
