"""The curriculum of experiments/curriculum: levels by the index alone, every level walked without a gap."""

import math
import sys
from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.tasks.task import filter_rows, from_rows, train_problems

sys.path.append(str(Path(__file__).resolve().parents[2]))  # experiments are no part of the package

from experiments.curriculum import idea

seeds = st.integers(0, 2**31 - 1)
stage = st.dictionaries(st.integers(1, 3), st.integers(0, 2), min_size=1).filter(lambda s: sum(s.values()))
SIZES = {1: 3, 2: 2, 3: 4}


def key(seed):
    return prng.key(seed, device="cpu")


def base():
    rows = [Problem(0, f"{level}.{i}", "", {"level": level}) for level, size in SIZES.items() for i in range(size)]
    return from_rows([*rows, Problem(0, "?", "", {"level": None})], [Problem(0, "held out", "", {"level": 2})])


def made(stages, times):
    """The curriculum whose every stage repeats a whole number of times."""
    draws = times * math.lcm(*(sum(one.values()) for one in stages))
    return idea.task(base=base, stages=stages, stage_draws=draws), draws


def levels(problems):
    return Counter(problem.meta["level"] for problem in problems)


@given(seeds, st.lists(stage, min_size=1, max_size=3), st.integers(1, 2), st.integers(0, 1))
def test_each_stage_asks_its_levels_in_its_ratio_and_the_last_one_goes_on(seed, stages, times, beyond):
    task, draws = made(stages, times)
    for number in range(len(stages) + beyond):
        expected = stages[min(number, len(stages) - 1)]
        asked = levels(train_problems(task, key(seed), number * draws, draws))
        assert asked == Counter({n: count * draws // sum(expected.values()) for n, count in expected.items()})


def test_the_task_counts_the_rows_of_its_levels_and_keeps_the_held_out_set():
    task, _ = made([{1: 1, 2: 1, 3: 0}], 1)
    assert (task.size, len(task.rows), task.test) == (5, 5, base().test)
    assert task.notes == ("left out 5 rows of levels that no stage asks",)
    left, count = filter_rows(task, lambda row: row.prompt != "2.1")
    assert (left.size, count, left.notes) == (4, 1, task.notes)
    assert {p.prompt for p in train_problems(left, key(0), 0, 20)} == {"1.0", "1.1", "1.2", "2.0"}
