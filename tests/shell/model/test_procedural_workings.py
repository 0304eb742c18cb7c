"""Workings that a small model is taught: right, step by step, and in the share that was asked for."""

import pytest

pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed", exc_type=ImportError)

from grpo_fn.core import prng
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.format import last_box
from grpo_fn.rewards.procedural import procedural_correct
from grpo_fn.shell.model.procedural_workings import WORKINGS, worked_or_answer
from grpo_fn.tasks import procedural
from grpo_fn.tasks.arithmetic import answer_only
from grpo_fn.tasks.task import train_problems

COUNTING = ("chain_sum", "leg_counting", "products")


@pytest.fixture(scope="module")
def problems() -> tuple[Problem, ...]:
    weights = dict.fromkeys(WORKINGS, 1)
    task = procedural.task(weights=weights, levels=[0], template="{question}\n", test_size=4, accept=[])
    return train_problems(task, prng.key(0, device="cpu"), 0, 500)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_every_completion_is_right_and_counts_to_the_answer(problems: tuple[Problem, ...], share: float) -> None:
    for problem in problems:
        text = worked_or_answer(problem, worked_share=share)
        assert procedural_correct(problem, Completion(text, 1, False), answer_of=last_box) == 1.0
        *steps, box = text.split()
        assert box == answer_only(problem)
        if problem.meta["task"] in COUNTING and steps:
            assert [step.partition(":")[0] for step in steps] == [str(i) for i in range(1, len(steps) + 1)]
            assert steps[-1].partition(":")[2] == problem.answer
        assert steps if share and problem.meta["task"] not in COUNTING else True
        assert share or not steps


def test_the_share_is_that_of_the_knob_and_the_uid_decides(problems: tuple[Problem, ...]) -> None:
    worked = [worked_or_answer(problem, worked_share=0.4) != answer_only(problem) for problem in problems]
    assert 0.3 < sum(worked) / len(worked) < 0.5
    assert worked == [worked_or_answer(problem, worked_share=0.4) != answer_only(problem) for problem in problems]


def test_what_it_has_no_working_for_is_refused() -> None:
    with pytest.raises(ValueError, match="problem 3: got kind 'gcd', wanted one of aiw, chain_sum"):
        worked_or_answer(Problem(3, "", "", {"task": "gcd"}), worked_share=0.5)
    longer = Problem(3, "State the final answer: 15 - 43 - 75 =", "-103", {"task": "chain_sum"})
    with pytest.raises(ValueError, match="wanted one of level 0"):
        worked_or_answer(longer, worked_share=1.0)
