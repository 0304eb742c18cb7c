"""Tasks with arms: each arm is walked in its own order, no uid comes twice, and held-out problems stay apart."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks import arithmetic, mixture
from grpo_fn.tasks.task import filter_rows, from_rows, held_out_only, train_problems

seeds = st.integers(0, 2**31 - 1)
SIZES = {1: 3, 2: 2, 5: 4}


def key(seed):
    return prng.key(seed, device="cpu")


def leveled():
    rows = [Problem(0, f"{level}.{i}", "1", {"level": level}) for level, size in SIZES.items() for i in range(size)]
    return from_rows(rows, [Problem(0, "held out", "1", {"level": 2})])


def parts():
    return mixture.arms(tasks={"easy": partial(made, 1), "hard": partial(made, 2)})


def made(operations):
    return arithmetic.task(max_value=4, operations=operations, test_size=5)


TASKS = {
    "levels": partial(mixture.levels, base=leveled),
    "rows": partial(mixture.rows, base=leveled, size=0),
    "made": partial(mixture.rows, base=partial(made, 2), size=7),
    "parts": parts,
}


@pytest.mark.parametrize("arm", [0, 1])
def test_an_arm_is_walked_with_the_key_that_a_part_of_a_mixture_has(arm):
    own = prng.split(key(3), 3)[1 + arm]  # the first is that of the order
    expected = [made(1 + arm).train(own, turn).prompt for turn in range(5)]
    assert [parts().train(key(3), 2 * turn + arm).prompt for turn in range(5)] == expected


@given(seeds, st.sampled_from([*TASKS]), st.integers(0, 50), st.integers(1, 12))
def test_a_problem_is_a_function_of_key_and_index_and_its_uid_says_its_arm(seed, name, start, count):
    task = TASKS[name]()
    problems = train_problems(task, key(seed), start, count)
    assert [problem.uid for problem in problems] == [*range(start, start + count)]
    assert problems == train_problems(TASKS[name](), key(seed), start, count)
    with pytest.raises(ValueError, match="expected an integer >= 0"):
        task.train(key(seed), -1)


@given(seeds)
def test_a_level_is_walked_epoch_by_epoch(seed):
    task = TASKS["levels"]()
    assert task.arms == ("level_1", "level_2", "level_5")
    for arm, (level, size) in enumerate(SIZES.items()):
        asked = [task.train(key(seed), turn * 3 + arm).prompt for turn in range(2 * size)]
        assert {*asked[:size]} == {*asked[size:]} == {f"{level}.{i}" for i in range(size)}


@given(seeds, seeds)
def test_a_row_is_its_arm_whatever_the_key(seed, other):
    task = TASKS["rows"]()
    assert task.arms == tuple(f"level_{level}" for level, size in SIZES.items() for _ in range(size))
    first, again = train_problems(task, key(seed), 0, 9), train_problems(task, key(other), 9, 9)
    assert [x.prompt for x in first] == [x.prompt for x in again] == [row.prompt for row in task.rows]


@given(seeds)
def test_parts_keep_their_own_streams_and_their_held_out_problems(seed):
    task = parts()
    assert task.arms == ("easy", "hard")
    assert [problem.meta["task"] for problem in task.test] == ["easy"] * 5 + ["hard"] * 5
    held_out = {(p.meta["task"], str(p.meta["changes"]), p.meta["values"][0]) for p in task.test}
    for problem in train_problems(task, key(seed), 0, 30):
        assert problem.meta["task"] == task.arms[problem.uid % 2]
        assert (problem.meta["task"], str(problem.meta["changes"]), problem.meta["values"][0]) not in held_out


def test_rows_that_are_made_are_different_and_not_held_out():
    task = TASKS["made"]()
    assert len({row.prompt for row in task.rows}) == task.size == 7
    assert task.arms == ("rows",) * 7
    assert not {row.prompt for row in task.rows} & {problem.prompt for problem in task.test}


@pytest.mark.parametrize("name", ["levels", "rows"])
def test_rows_that_are_left_out_are_asked_no_more(name):
    task, left_out = filter_rows(TASKS[name](), lambda row: not row.prompt.endswith(".0"))
    assert left_out == 3
    asked = {task.train(key(0), index).prompt for index in range(30)}
    assert asked == {row.prompt for row in task.rows}
    assert not any(prompt.endswith(".0") for prompt in asked)
    assert len(task.arms) == (3 if name == "levels" else 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(mixture.levels, base=partial(made, 1)), "got a task without rows, expected rows with meta"),
        (partial(mixture.levels, base=lambda: from_rows([Problem(0, "a", "1", {})], [])), "got row 0 without one"),
        (partial(mixture.rows, base=partial(made, 1), size=0), "size: got 0, expected how many of the problems"),
        (partial(mixture.rows, base=leveled, size=10), "size: got 10, expected at most the 9 rows"),
        (partial(mixture.arms, tasks={"a": lambda: held_out_only(leveled().test)}), "a, which has no training rows"),
    ],
)
def test_a_refusal_says_got_and_expected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
