"""Published data sets as files: GSM8K, MATH and MBPP.

    data       folder with the files
    template   text of a prompt; holds the named fields in braces. Other braces, as of `\\boxed{}`, stand for themselves
    returns    the task

Rows without the fields raise ValueError, which names file and line, as do missing or empty files and a template
without its fields.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_fn.core.problem import Problem
from grpo_fn.rewards.format import last_box
from grpo_fn.tasks import task as templates
from grpo_fn.tasks.rows import Row, jsonl_rows, text_field
from grpo_fn.tasks.task import Task, all_answered, drop_unanswered, filter_rows, from_rows, with_notes

# -- GSM8K: grade-school word problems with integer answers (Cobbe et al. 2021, arXiv:2110.14168), as published.


def gsm8k(*, data: str, template: str) -> Task:
    r"""The problems of `train.jsonl` and `test.jsonl` in the folder `data`, each put to the model as `template` says.

    The held-out set is the test file, in its order. `template` holds `{question}`.
    """
    templates.check_template(template, ["question"])
    train, test = (
        [_gsm8k_problem(row, template) for row in jsonl_rows(Path(data), name, fields=("question", "answer"))]
        for name in ("train.jsonl", "test.jsonl")
    )
    return from_rows(train, test)


def gsm8k_answer(answer: str) -> str | None:
    """The text after the last `####` of a published solution, without thousands commas; None where there is none."""
    return answer.rpartition("####")[2].replace(",", "").strip() or None if "####" in answer else None


def _gsm8k_problem(row: Row, template: str) -> Problem:
    answer = gsm8k_answer(row.value["answer"])
    if answer is None:
        raise ValueError(f"{row.where}: got answer {row.value['answer'][-80:]!r}, expected it to end in '#### n'")
    return Problem(0, templates.fill_template(template, {"question": row.value["question"]}), answer, {})


# -- MATH: competition problems of five levels and seven subjects (Hendrycks et al. 2021, arXiv:2103.03874).
#
# The rows of `math500.jsonl`, the usual held-out set (Lightman et al. 2023, arXiv:2305.20050), are all in
# `test.jsonl` too: a run trained on that file as well and holds out the 500 keeps the other 4,500, since training rows
# that are held-out problems are left out.


def math(
    *,
    data: str,
    train: Sequence[str],
    test: str,
    levels: Sequence[int | None],
    subjects: Sequence[str],
    template: str,
) -> Task:
    r"""The problems of the files `train` and `test` in the folder `data`, put to the model as `template` says.

    The held-out set is all of its file, of every level and subject. The answer is the row's own, or where
    it has no such field, as in the original files, the last `\boxed{}` of its solution; `meta` holds `level` and
    `subject`. A training row without an answer is left out and noted (two of the published ones have an empty box); a
    held-out one is refused.

    Args:
        train: names of the files to train on, JSON lines.
        test: name of the held-out file, JSON lines.
        levels: levels of the training rows, 1 to 5; None for the two published rows that have none.
        subjects: subjects of the training rows, as the files name them.
        template: text of a prompt; holds `{problem}`.

    Raises:
        ValueError: for a row with another level, a level or subject of which there is no row, and a held-out row
            without an answer.
    """
    templates.check_template(template, ["problem"])
    read = partial(jsonl_rows, Path(data), fields=("problem",))
    held_out = all_answered([_math_problem(row, template) for row in read(test)])
    rows = [_math_problem(row, template) for name in train for row in read(name)]
    _check_there(levels, {problem.meta["level"] for problem in rows}, "levels")
    _check_there(subjects, {problem.meta["subject"] for problem in rows}, "subjects")
    every = drop_unanswered(from_rows(rows, held_out))
    chosen, left_out = filter_rows(every, lambda row: row.meta["level"] in levels and row.meta["subject"] in subjects)
    if left_out:
        chosen = with_notes(chosen, f"asks {chosen.size} of {every.size} training rows, by level and subject")
    return chosen


def _math_problem(row: Row, template: str) -> Problem:
    answer = text_field(row, "answer") if "answer" in row.value else last_box(text_field(row, "solution"))
    subject = text_field(row, "subject" if "subject" in row.value else "type")
    prompt = templates.fill_template(template, {"problem": row.value["problem"]})
    return Problem(0, prompt, (answer or "").strip(), {"level": _level(row), "subject": subject})


def _level(row: Row) -> int | None:
    """The level, given as 3 or as "Level 3"; None for "Level ?"."""
    given = row.value.get("level")
    if given == "Level ?":
        return None
    named = {name: level for level in range(1, 6) for name in (level, f"Level {level}")}
    if isinstance(given, bool | float | list | dict) or given not in named:
        raise ValueError(f"{row.where}: got level {given!r}, expected 1 to 5, or 'Level 1' to 'Level 5', or 'Level ?'")
    return named[given]


def _check_there(expected: Sequence[Any], there: set[Any], knob: str) -> None:
    absent = [value for value in expected if value not in there]
    if absent or not expected:
        known = ", ".join(sorted(map(str, there)))
        raise ValueError(f"{knob}: got {list(expected)!r}, expected some of those in the training files: {known}")


# -- MBPP: short Python programs with asserts to pass (Austin et al. 2021, arXiv:2108.07732), full and sanitized.


# The published split, by task_id.
SPLITS = {"prompts": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


def mbpp(*, data: str, file: str, train: Sequence[str], test: Sequence[str], template: str, shown_tests: int) -> Task:
    """The problems of `file` in the folder `data`: the splits `train` to train on, the splits `test` held out.

    Splits are prompts (task_id 1 to 10), test (11 to 510), validation (511 to 600) and train (601 to 974). The answer
    is the reference program; `meta` holds `tests`, every assert, and `setup`, code to run after the program and before
    them. Line ends become \\n.

    Args:
        file: either published file: `mbpp.jsonl`, or `sanitized-mbpp.jsonl`, whose `test_imports` are the setup.
        train: splits to train on, at least one.
        test: splits held out.
        template: text of a prompt; holds `{text}` and, when `shown_tests` is not 0, `{tests}`: asserts, a line each.
        shown_tests: asserts in the prompt, the first ones; with 0 the model has to guess the function's name.

    Raises:
        ValueError: for a row without asserts or with another task_id; for an unknown split, one on both sides, one
            without rows, and a template or number that does not fit.
    """
    unknown = [name for name in (*train, *test) if name not in SPLITS]
    if unknown or len({*train, *test}) < len(train) + len(test) or not train:
        raise ValueError(
            f"splits: got train {list(train)} and test {list(test)}, expected some of {', '.join(SPLITS)}, each once, "
            "and at least one to train on"
        )
    if shown_tests < 0:
        raise ValueError(f"shown_tests: got {shown_tests}, expected 0 or more")
    if not shown_tests and "{tests}" in template:
        raise ValueError(
            "shown_tests: got 0 with a template that holds {tests}, expected it without, or 1 test or more"
        )
    templates.check_template(template, ["text", "tests"] if shown_tests else ["text"])
    splits: dict[str, list[Problem]] = {name: [] for name in SPLITS}
    for row in jsonl_rows(Path(data), file, fields=("code",)):
        splits[_split(row)].append(_mbpp_problem(row, template, shown_tests))
    empty = [name for name in (*train, *test) if not splits[name]]
    if empty:
        raise ValueError(f"{Path(data) / file}: got no rows of {', '.join(empty)}, expected a task_id of those splits")
    rows, held_out = (list(chain.from_iterable(splits[name] for name in names)) for names in (train, test))
    return from_rows(rows, held_out)


def _split(row: Row) -> str:
    number = row.value.get("task_id")
    for name, numbers in SPLITS.items():
        if type(number) is int and number in numbers:
            return name
    raise ValueError(f"{row.where}: got task_id {number!r}, expected a whole number from 1 to 974")


def _mbpp_problem(row: Row, template: str, shown_tests: int) -> Problem:
    tests = _lines(row, "test_list")
    if not tests:
        raise ValueError(f"{row.where}: got no test in test_list, expected at least one assert")
    imports = "test_imports" in row.value
    setup = "\n".join(_lines(row, "test_imports")) if imports else _unix(text_field(row, "test_setup_code"))
    asked = text_field(row, "text" if "text" in row.value else "prompt")
    prompt = templates.fill_template(template, {"text": asked, "tests": "\n".join(tests[:shown_tests])})
    return Problem(0, prompt, _unix(row.value["code"]), {"tests": tests, "setup": setup})


def _lines(row: Row, field: str) -> tuple[str, ...]:
    value = row.value.get(field)
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        raise ValueError(f"{row.where}: got the fields {', '.join(row.value)}, expected a list of texts in {field!r}")
    return tuple(map(_unix, value))


def _unix(code: str) -> str:
    return code.replace("\r\n", "\n").replace("\r", "\n")
