"""MBPP through the sandbox: every reference passes its own tests, and no other problem's."""

import json
from functools import partial

import pytest
from published import published
from test_sandbox import most

from grpo_fn import sandbox
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards import code

# Task 123 adds up amicable numbers for seconds.
KNOBS = {"wall_seconds": 60.0, "cpu_seconds": 30, "memory_mb": 512, "processes": 8, "file_mb": 8, "output_kb": 256}


def problems(file):
    rows = [json.loads(line) for line in (published("mbpp") / file).read_text().splitlines()]
    for row in rows:
        setup = "\n".join(row["test_imports"]) if "test_imports" in row else row["test_setup_code"]
        yield Problem(row["task_id"], "", row["code"], {"tests": tuple(row["test_list"]), "setup": setup})


def references(problem):
    return Completion(f"```python\n{problem.answer}\n```", 1, False)


def scores(reward, asked):
    """Of every problem's own reference."""
    scorer = partial(reward, run=partial(sandbox.run_program, **KNOBS, isolation=most()))
    return {problem.uid: scorer(problem, references(problem)) for problem in asked}


# Two of every hundred; and the two with a setup, one with a class in its tests, a built-in redefined, sys in the tests.
SAMPLE = {*range(11, 975, 48), 367, 927, 601, 126, 596}


def test_references_pass_their_own_tests():
    asked = [problem for problem in problems("mbpp.jsonl") if problem.uid in SAMPLE]
    assert len(asked) >= 25
    assert scores(code.all_tests_pass, asked) == {problem.uid: 1.0 for problem in asked}
    assert scores(code.share_of_tests, asked[:3]) == {problem.uid: 1.0 for problem in asked[:3]}


def test_references_do_not_pass_the_tests_of_another_problem():
    asked = [problem for problem in problems("mbpp.jsonl") if problem.uid in SAMPLE][:10]
    swapped = [mine._replace(answer=other.answer) for mine, other in zip(asked, asked[1:] + asked[:1], strict=True)]
    assert set(scores(code.all_tests_pass, swapped).values()) == {0.0}


@pytest.mark.slow
def test_every_fourth_reference_passes_its_own_tests():
    asked = [*problems("mbpp.jsonl")]
    assert len(asked) == 974
    found = scores(code.all_tests_pass, asked[::4])
    assert [task for task, score in found.items() if score != 1.0] == []
