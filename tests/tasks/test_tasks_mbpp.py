"""MBPP: the published split, every assert in meta, and only as many in the prompt as are asked for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import published

from grpo_fn.tasks import benchmarks
from grpo_fn.tasks.task import TEST_UID

KNOBS = {
    **{"file": "mbpp.jsonl", "train": ["train"], "test": ["test"], "template": "{text}\n{tests}", "shown_tests": 2},
}


def row(number, **changes):
    tests = [f"assert f({number}) == {i}" for i in range(3)]
    code = f"def f(x):\r\n    return {number}"
    made = {"task_id": number, "text": f"Task {number}.", "code": code, "test_list": tests, "test_setup_code": ""}
    return {k: v for k, v in (made | changes).items() if v is not ...}


ROWS = [row(number) for number in (1, 10, 11, 510, 511, 600, 601, 974)]
SPLIT_OF = dict(zip((1, 10, 11, 510, 511, 600, 601, 974), [s for s in benchmarks.SPLITS for _ in "ab"], strict=True))


def folder(path, rows=ROWS, file="mbpp.jsonl"):
    (path / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"data": str(path), **KNOBS}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("mbpp"))


@given(st.permutations(list(benchmarks.SPLITS)), st.integers(1, 4), st.integers(0, 3))
def test_rows_go_to_the_side_that_names_their_split(data, names, cut, held_out):
    train, test = names[:cut], names[cut : cut + held_out]
    task = benchmarks.mbpp(**{**data, "train": train, "test": test})
    want = [[n for name in names for n, split in SPLIT_OF.items() if split == name] for names in (train, test)]
    assert [[p.prompt.split("\n")[0] for p in side] for side in (task.rows, task.test)] == [
        [f"Task {n}." for n in side] for side in want
    ]
    assert [p.uid for p in task.test] == [TEST_UID + i for i in range(len(task.test))]


@given(st.integers(0, 5))
def test_the_prompt_shows_the_first_asserts_and_meta_holds_all(data, shown):
    template = "{text} {tests}" if shown else "{text}"
    task = benchmarks.mbpp(**{**data, "template": template, "shown_tests": shown})
    for problem, number in zip(task.rows, (601, 974), strict=True):
        tests = tuple(f"assert f({number}) == {i}" for i in range(3))
        assert problem.prompt == f"Task {number}." + (" " + "\n".join(tests[:shown]) if shown else "")
        assert problem.meta == {"row": problem.meta["row"], "tests": tests, "setup": ""}
        assert problem.answer == f"def f(x):\n    return {number}"


def test_the_setup_is_the_rows_code_or_its_imports(tmp_path):
    rows = [row(601, test_setup_code="a = 1\r\nb = 2\r"), row(11)]
    assert benchmarks.mbpp(**folder(tmp_path, rows=rows)).rows[0].meta["setup"] == "a = 1\nb = 2\n"
    changes = {"text": ..., "test_setup_code": ..., "prompt": "Do.", "test_imports": ["import math", "import re"]}
    knobs = folder(tmp_path, rows=[row(601, **changes), row(11, **changes)], file="sanitized-mbpp.jsonl")
    task = benchmarks.mbpp(**{**knobs, "file": "sanitized-mbpp.jsonl"})
    assert task.rows[0].meta["setup"] == "import math\nimport re"
    assert task.rows[0].prompt.startswith("Do.\n")


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"task_id": 0}, r"mbpp\.jsonl:2: got task_id 0, expected a whole number from 1 to 974"),
        ({"test_list": ["assert True", 3]}, "expected a list of texts in 'test_list'"),
        ({"text": ...}, r"expected text in 'prompt'"),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(tmp_path, changes, want):
    with pytest.raises(ValueError, match=want):
        benchmarks.mbpp(**folder(tmp_path, rows=[ROWS[0], row(601, **changes), *ROWS[1:]]))


@pytest.mark.parametrize(
    ("knobs", "want"),
    [
        (
            {"train": ["training"]},
            r"splits: got train \['training'\].*expected some of prompts, test, validation, train",
        ),
        ({"shown_tests": 0}, "shown_tests: got 0 with a template that holds"),
        ({"template": "{text}"}, r"expected one that holds \{tests\}"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(data, knobs, want):
    with pytest.raises(ValueError, match=want):
        benchmarks.mbpp(**{**data, **knobs})


# The published files


@pytest.mark.parametrize(
    ("file", "sizes"), [("mbpp.jsonl", (10, 500, 90, 374)), ("sanitized-mbpp.jsonl", (7, 257, 43, 120))]
)
def test_the_published_files_have_their_published_splits(file, sizes):
    data = str(published("mbpp"))
    for name, size in zip(benchmarks.SPLITS, sizes, strict=True):
        task = benchmarks.mbpp(**{**KNOBS, "file": file, "train": [name], "test": []}, data=data)
        assert (task.size, task.notes) == (size, ())
        assert all(set(row.meta) == {"row", "tests", "setup"} and "\r" not in row.answer for row in task.rows)
        assert all(test.startswith("assert ") for row in task.rows for test in row.meta["tests"])
