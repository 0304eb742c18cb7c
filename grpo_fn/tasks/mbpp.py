"""MBPP: short Python programs with asserts to pass (Austin et al. 2021, arXiv:2108.07732), full and sanitized."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from grpo_fn.core.problem import Problem
from grpo_fn.tasks import task as templates
from grpo_fn.tasks.rows import Row, jsonl_rows, text_field
from grpo_fn.tasks.task import Task, from_rows

# The published split, by task_id.
SPLITS = {"prompts": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


def task(*, data: str, file: str, train: Sequence[str], test: Sequence[str], template: str, shown_tests: int) -> Task:
    """The problems of `file` in the folder `data`: the splits `train` to train on, the splits `test` held out.

    Splits are prompts (task_id 1 to 10), test (11 to 510), validation (511 to 600) and train (601 to 974). The answer
    is the reference program; `meta` holds `tests`, every assert, and `setup`, code to run after the program and before
    them. Line ends become \\n.

    Args:
        data: folder with the file.
        file: either published file: `mbpp.jsonl`, or `sanitized-mbpp.jsonl`, whose `test_imports` are the setup.
        train: splits to train on, at least one.
        test: splits held out.
        template: text of a prompt; holds `{text}` and, when `shown_tests` is not 0, `{tests}`: asserts, a line each.
        shown_tests: asserts in the prompt, the first ones; with 0 the model has to guess the function's name.

    Returns:
        The task.

    Raises:
        ValueError: for a row without the fields, without asserts or with another task_id, naming file and line; for an
            unknown split, one on both sides, one without rows, and a template or number that does not fit.
    """
    _check_splits(train, test)
    if shown_tests < 0:
        raise ValueError(f"shown_tests: got {shown_tests}, wanted 0 or more")
    if not shown_tests and "{tests}" in template:
        raise ValueError("shown_tests: got 0 with a template that holds {tests}, wanted it without, or 1 test or more")
    templates.check_template(template, ["text", "tests"] if shown_tests else ["text"])
    splits: dict[str, list[Problem]] = {name: [] for name in SPLITS}
    for row in jsonl_rows(Path(data), file, fields=("code",)):
        splits[_split(row)].append(_problem(row, template, shown_tests))
    empty = [name for name in (*train, *test) if not splits[name]]
    if empty:
        raise ValueError(f"{Path(data) / file}: got no rows of {', '.join(empty)}, wanted a task_id of those splits")
    rows, held_out = (list(chain.from_iterable(splits[name] for name in names)) for names in (train, test))
    return from_rows(rows, held_out)


def _check_splits(train: Sequence[str], test: Sequence[str]) -> None:
    unknown = [name for name in (*train, *test) if name not in SPLITS]
    if unknown or len({*train, *test}) < len(train) + len(test) or not train:
        raise ValueError(
            f"splits: got train {list(train)} and test {list(test)}, wanted some of {', '.join(SPLITS)}, each once, "
            "and at least one to train on"
        )


def _split(row: Row) -> str:
    number = row.value.get("task_id")
    for name, numbers in SPLITS.items():
        if type(number) is int and number in numbers:
            return name
    raise ValueError(f"{row.where}: got task_id {number!r}, wanted a whole number from 1 to 974")


def _problem(row: Row, template: str, shown_tests: int) -> Problem:
    tests = _lines(row, "test_list")
    if not tests:
        raise ValueError(f"{row.where}: got no test in test_list, wanted at least one assert")
    imports = "test_imports" in row.value
    setup = "\n".join(_lines(row, "test_imports")) if imports else _unix(text_field(row, "test_setup_code"))
    asked = text_field(row, "text" if "text" in row.value else "prompt")
    prompt = templates.fill_template(template, {"text": asked, "tests": "\n".join(tests[:shown_tests])})
    return Problem(0, prompt, _unix(row.value["code"]), {"tests": tests, "setup": setup})


def _lines(row: Row, field: str) -> tuple[str, ...]:
    value = row.value.get(field)
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        raise ValueError(f"{row.where}: got the fields {', '.join(row.value)}, wanted a list of texts in {field!r}")
    return tuple(map(_unix, value))


def _unix(code: str) -> str:
    return code.replace("\r\n", "\n").replace("\r", "\n")
