"""A small model for any task: made once, named by all that goes into it, warm-started on training problems alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fn.core import prng
from grpo_fn.core.partials import describe_function
from grpo_fn.core.problem import Problem
from grpo_fn.shell.model import tiny_task_model
from grpo_fn.shell.model.tiny_model import Shape
from grpo_fn.shell.model.tiny_task_model import (
    TaskRecipe,
    TaskWarmStart,
    answer_or_copied_number,
    given_completion,
    taught_completions,
)
from grpo_fn.tasks import arithmetic

SIZES = {"heads": 2, "kv_heads": 1, "intermediate": 16, "positions": 64}
RECIPE = {
    "task": partial(arithmetic.task, max_value=4, operations=1, test_size=4),
    "solution": arithmetic.answer_only,
    "shape": Shape(vocabulary=300, hidden=16, layers=1, **SIZES),
    "initializer_range": 0.02,
    "warm_start": TaskWarmStart(steps=2, rows=2, lr=1e-3),
    "seed": 0,
}


def wrong_answer(problem: Problem) -> str:
    return "\\boxed{99}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> TaskRecipe:
    return TaskRecipe(**RECIPE, cache=str(tmp_path_factory.mktemp("models")))


def test_the_model_is_made_once_and_opens(recipe: TaskRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(recipe.folder())
    config = AutoModelForCausalLM.from_pretrained(path).config
    assert (config.vocab_size, config.hidden_size) == (300, 16) == (recipe.config().vocab_size, 16)
    assert len(AutoTokenizer.from_pretrained(path)("\\boxed{7}")["input_ids"]) < 9
    monkeypatch.setattr(tiny_task_model, "make_task_model", lambda *_: pytest.fail("made again"))
    assert Path(recipe.folder()) == path


def test_all_that_goes_into_it_is_in_its_name(recipe: TaskRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_task_model, "make_task_model", lambda *_: None)
    changes = [
        {"task": partial(arithmetic.task, max_value=4, operations=1, test_size=5)},
        {"solution": wrong_answer},
        {"seed": 1},
        {"warm_start": TaskWarmStart(steps=3, rows=2, lr=1e-3)},
        {"shape": Shape(vocabulary=300, hidden=16, layers=2, **SIZES)},
        {"initializer_range": 0.07},
    ]
    names = [replace(recipe, **change).folder() for change in ({}, *changes)]
    assert len({*names}) == len(names)


def test_what_is_taught_are_training_problems(recipe: TaskRecipe) -> None:
    task = recipe.task()
    shown = taught_completions(task, recipe.solution, 0)
    pairs = [next(shown) for _ in range(50)]
    assert {completion[:7] for _, completion in pairs} == {"\\boxed{"}
    assert not {prompt for prompt, _ in pairs} & {problem.prompt for problem in task.test}


def test_the_weights_begin_with_the_deviation_of_the_knob(recipe: TaskRecipe, tmp_path: Path) -> None:
    still = TaskWarmStart(steps=1, rows=2, lr=0.0)
    deviation = {}
    for wanted in (0.02, 0.07):
        made = replace(recipe, initializer_range=wanted, warm_start=still, cache=str(tmp_path))
        assert made.config().initializer_range == wanted
        embedding = AutoModelForCausalLM.from_pretrained(made.folder()).get_input_embeddings().weight
        deviation[wanted] = float(embedding.float().std())
    assert deviation == pytest.approx({0.02: 0.02, 0.07: 0.07}, rel=0.1)


def test_the_share_of_answers_is_that_of_the_knob_and_the_uid_decides() -> None:
    problems = [Problem(uid, "What is 3 + 4?", "7", {}) for uid in range(1000)]
    said = [answer_or_copied_number(problem, answered_share=0.4) for problem in problems]
    assert {*said} == {"\\boxed{7}", "\\boxed{4}"}
    assert 350 < said.count("\\boxed{7}") < 450
    assert said[::-1] == [answer_or_copied_number(problem, answered_share=0.4) for problem in problems[::-1]]
    assert {answer_or_copied_number(problem, answered_share=0.0) for problem in problems} == {"\\boxed{4}"}


def test_a_question_without_a_number_has_none_to_copy() -> None:
    with pytest.raises(ValueError, match=r"problem 5: got 'Why\?', wanted a question that holds a number"):
        answer_or_copied_number(Problem(5, "Why?", "7", {}), answered_share=0.0)


def test_a_given_completion_is_that_of_the_task_and_has_to_be_there() -> None:
    knobs = {"max_value": 4, "operations": 2, "test_size": 4}
    task = arithmetic.demonstration_task(**knobs, worked_share=1.0)
    problem = task.train(prng.key(0, device="cpu"), 3)
    assert given_completion(problem) == arithmetic.worked_solution(problem)
    with pytest.raises(ValueError, match=r"problem 3: got no completion, wanted one in meta\['completion'\]"):
        given_completion(problem._replace(meta={}))


def test_a_function_is_described_with_its_knobs_at_any_depth() -> None:
    inner = partial(arithmetic.task, max_value=4)
    text = describe_function(partial(wrong_answer, tasks={"a": inner, "b": [inner, 1]}))
    task = "grpo_fn.tasks.arithmetic.task{'max_value': 4}"
    assert text == f"{__name__}.wrong_answer{{'tasks': {{'a': {task}, 'b': list({task}, 1)}}}}"
