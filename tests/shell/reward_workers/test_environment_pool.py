"""Environments in workers: what hangs, dies or has no plain state is a failure that says why; the next call works."""

from functools import partial

import pytest
from environment_fakes import TALK, broken, dies, dies_once, hangs, state_of_a_set, step

from grpo_fn.core.environment import Environment, Message
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import EnvironmentCall, decode_answer
from grpo_fn.shell.reward_workers.worker_pool import EnvironmentPool

PROBLEM, MESSAGE = Problem(1, "question", "", {}), Message("assistant", "text")
KNOBS = {"workers": 2, "deadline": 0.5, "memory_mb": 1024}


def pool(step: object = step, **knobs: float) -> EnvironmentPool:
    return EnvironmentPool(Environment(start=TALK.start, step=step, pure=True), **{**KNOBS, **knobs})


def test_a_worker_answers_as_this_process() -> None:
    here = EnvironmentCall(TALK)
    with pool(deadline=20.0) as workers:
        begun = workers.start(PROBLEM, 5).result()
        assert begun == decode_answer(here("start", PROBLEM, 5))
        found = [workers.step(begun.state, MESSAGE, key) for key in range(20)]
        assert [one.result() for one in found] == [
            decode_answer(here("step", begun.state, MESSAGE, k)) for k in range(20)
        ]
        assert workers.figures()["time/environments"] > 0
        assert workers.figures()["time/environments"] == 0


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (hangs, "late: no answer within 0.5 s"),
        (dies, "worker died: exit code 3"),
        (broken, "RuntimeError: the tool is out of order"),
        (state_of_a_set, "state['set']: got set"),
    ],
)
def test_a_failure_says_why_and_the_next_call_works(fails, said) -> None:
    with pool(fails, workers=1) as workers:
        answer = workers.step({}, MESSAGE, 0).result()
        assert said in answer.failure
        assert answer.lost == (fails in (hangs, dies))
        assert workers.start(PROBLEM, 0).result().state == {"left": 3, "seen": []}
        assert workers.figures()["episode/environment_failures"] == 1


def test_a_worker_that_is_killed_once_is_asked_again(tmp_path) -> None:
    with pool(partial(dies_once, mark=str(tmp_path / "died")), workers=1, deadline=20.0) as workers:
        assert workers.step({"left": 2, "seen": []}, MESSAGE, 7).result() == decode_answer(
            EnvironmentCall(TALK)("step", {"left": 2, "seen": []}, MESSAGE, 7)
        )
        assert (tmp_path / "died").exists()


def test_numbers_of_0_and_what_workers_cannot_find_by_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"environment pool deadline: got 0.*, expected more than 0"):
        pool(deadline=0.0)
    with pytest.raises(ValueError, match="expected a function that a module defines"):
        pool(partial(lambda *_: None))
