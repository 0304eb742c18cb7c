"""GSM8K: grade-school word problems with integer answers (Cobbe et al. 2021, arXiv:2110.14168), as published."""

from pathlib import Path

from grpo_fn.core.problem import Problem
from grpo_fn.tasks import task as templates
from grpo_fn.tasks.rows import Row, jsonl_rows
from grpo_fn.tasks.task import Task, from_rows


def task(*, data: str, template: str) -> Task:
    r"""The problems of `train.jsonl` and `test.jsonl` in the folder `data`, each put to the model as `template` says.

    The held-out set is the test file, in its order.

    Args:
        data: folder with both files.
        template: text of a prompt; holds `{question}`. Other braces, as of `\boxed{}`, stand for themselves.

    Returns:
        The task.

    Raises:
        ValueError: for a missing or empty file, a row without the fields or an answer without `####`, naming file and
            line; for a template without `{question}`.
    """
    templates.check_template(template, ["question"])
    train, test = (
        [_problem(row, template) for row in jsonl_rows(Path(data), name, fields=("question", "answer"))]
        for name in ("train.jsonl", "test.jsonl")
    )
    return from_rows(train, test)


def gsm8k_answer(answer: str) -> str | None:
    """The text after the last `####` of a published solution, without thousands commas; None where there is none."""
    return answer.rpartition("####")[2].replace(",", "").strip() or None if "####" in answer else None


def _problem(row: Row, template: str) -> Problem:
    answer = gsm8k_answer(row.value["answer"])
    if answer is None:
        raise ValueError(f"{row.where}: got answer {row.value['answer'][-80:]!r}, wanted it to end in '#### n'")
    return Problem(0, templates.fill_template(template, {"question": row.value["question"]}), answer, {})
