"""The task files of gin/task, laid over a run file: each makes its task from the published data."""

from functools import partial
from pathlib import Path

import pytest
from published import published

from grpo_fn.config import load_config
from grpo_fn.tasks import procedural, rows

FOLDER = Path(__file__).resolve().parents[2] / "gin" / "task"
# File: the macros that it takes, by the published file or folder, and its training rows and held-out problems.
TASKS = {
    "gsm8k": ({"DATA": "gsm8k"}, 7473, 1319),
    "math": ({"DATA": "math"}, 7498, 500),
    "mbpp": ({"DATA": "mbpp"}, 374, 500),
    "rows": ({"DATA": "math/test.jsonl"}, 5000 - 256, 256),
    "competitions": (
        {"AIME24": "aime/aime24.jsonl", "AIME25": "aime/aime25.jsonl", "AMC23": "amc/amc23.jsonl"},
        0,
        100,
    ),
    "procedural": ({}, 5 * procedural.EPOCH, 5 * 64),
    "gsm8k_math": ({"GSM8K": "gsm8k", "MATH": "math"}, 7473 + 7498, 1319 + 500),
}


def made(name, macros):
    """What a run file would receive as its task when this task file lies over it."""
    given = [f"{macro}={value}" for macro, value in {"MODEL": "some/model", **macros}.items()]
    return load_config(["run/math.gin", f"task/{name}.gin"], given).kwargs()["data"].task


# Those that bring an environment: over which run file, its macros, and what the policy reads first.
EPISODES = {
    "mbpp_retry": ("run/mbpp_code.gin", {"DATA": "mbpp"}, "Python"),
    "python_tool": ("run/gsm8k.gin", {"DATA": "gsm8k"}, "<tool_call>"),
}


def test_every_task_file_is_tried():
    assert {path.stem for path in FOLDER.glob("*.gin")} == {*TASKS, *EPISODES, "openmath", "demonstrations"}


@pytest.mark.parametrize("name", EPISODES)
def test_the_environment_of_a_task_file_begins_an_episode(name):
    run, macros, read = EPISODES[name]
    given = [f"{macro}={published(path)}" for macro, path in macros.items()]
    found = load_config([run, f"task/{name}.gin"], ["MODEL=some/model", *(given or ["DATA=no_such_folder"])]).kwargs()
    begun = found["episodes"].environment.start(found["data"].task().test[0], 7)
    assert read in " ".join(message.content for message in begun.messages)


def test_demonstrations_are_laid_beside_a_run(tmp_path):
    shown = tmp_path / "shown.jsonl"
    shown.write_text('{"prompt": "1+1?", "completion": "2"}\n')
    given = ["MODEL=some/model", "DATA=no_such_folder", f"DEMONSTRATIONS={shown}"]
    found = load_config(["run/math.gin", "algo/chord.gin", "task/demonstrations.gin"], given).kwargs()
    task = found["demonstrations"].task()
    assert (task.size, task.rows[0].prompt, task.rows[0].answer) == (1, "1+1?", "2")


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_file_makes_its_task(name):
    macros, size, held_out = TASKS[name]
    task = made(name, {macro: published(path) for macro, path in macros.items()})()
    assert (task.size, len(task.test)) == (size, held_out)
    assert all("\n" in problem.prompt for problem in (*task.rows[:3], *task.test))


def test_the_hub_task_reads_the_published_fields_and_holds_out_math500(monkeypatch):
    found = made("openmath", {"DATA": published("math/math500.jsonl")}).keywords
    (train,), (test,) = found["train"], found["test"]
    assert (test.func, len(test())) == (rows.read_problems, 500)
    assert test()[0].meta.keys() == {"row", "source", "level", "subject"}
    hub = {"name": "nvidia/OpenMathInstruct-2", "config": "", "split": "train_1M", "revision": ""}
    assert train.keywords["read"].keywords == hub
    fields = {"problem": "2?", "expected_answer": "2", "problem_source": "math", "generated_solution": "long"}
    reader = partial(stand_in, fields)
    (problem,) = partial(train, read=reader)()
    assert (problem.answer, problem.meta["problem_source"]) == ("2", "math")


def stand_in(value, fields):
    """One row with the published fields, of which the task may ask only these."""
    from grpo_fn.tasks.rows import Row

    return [Row("here:1", {field: value[field] for field in fields})]
