"""What a reward of your own is tested with: the first test is all that a run asks of it."""

import hypothesis.strategies as st
from hypothesis import given

from experiments.custom_reward.idea import right_steps
from grpo_fn import testing
from grpo_fn.core.problem import Completion
from grpo_fn.tasks import arithmetic

PROBLEMS = st.sampled_from(arithmetic.task(max_value=5, operations=3, test_size=128).test)


def test_right_steps_is_fit_for_a_run():
    testing.check_reward(right_steps, problems=PROBLEMS, bounds=(0, 1))


@given(PROBLEMS, st.integers(0, 3), st.integers(0, 3))
def test_steps_count_once_and_from_the_start(problem, first, last):
    steps = arithmetic.worked_solution(problem).split()[:3]
    assert right_steps(problem, Completion(" ".join(steps), 9, False)) == 1
    assert right_steps(problem, Completion(" ".join(steps[:last]), 9, False)) == last / 3
    assert right_steps(problem, Completion(" ".join(steps[first:] + steps), 9, False)) <= 3 / (6 - first) or first == 0
    assert right_steps(problem, Completion(arithmetic.answer_only(problem), 9, False)) == 0
