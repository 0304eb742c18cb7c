"""MATH: levels and subjects by knob, answers that are there, and no held-out problem among the training rows."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import published

from grpo_fn.core import prng
from grpo_fn.tasks import benchmarks
from grpo_fn.tasks.task import TEST_UID

SUBJECTS = ["Algebra", "Geometry"]
KNOBS = {
    **{"train": ["train.jsonl"], "test": "math500.jsonl", "levels": [1, 2, 3, 4, 5, None], "subjects": SUBJECTS},
    "template": "{problem}",
}
TRAIN = [
    {"problem": f"p{i}", "level": level, "type": subject, "solution": rf"\boxed{{{i}}}", "answer": str(i)}
    for i, (level, subject) in enumerate((f"Level {n}", s) for n in (1, 2, 3, 4, 5, "?") for s in SUBJECTS)
]
TEST = [{"problem": f"t{i}", "level": i + 1, "subject": "Algebra", "answer": f"{i}"} for i in range(3)]


def key(seed):
    return prng.key(seed, device="cpu")


def folder(path, **files):
    for name, rows in ({"train": TRAIN, "math500": TEST} | files).items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"data": str(path), **KNOBS}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("math"))


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 5, None]), min_size=1, unique=True),
    st.lists(st.sampled_from(SUBJECTS), min_size=1, unique=True),
)
def test_training_asks_the_levels_and_subjects_named_and_the_held_out_set_stays_whole(data, levels, subjects):
    task = benchmarks.math(**{**data, "levels": levels, "subjects": subjects})
    assert Counter((row.meta["level"], row.meta["subject"]) for row in task.rows) == Counter(
        (level, subject) for level in levels for subject in subjects
    )
    assert all(row.prompt == f"p{row.meta['row']}" and row.answer == str(row.meta["row"]) for row in task.rows)
    assert [(p.uid - TEST_UID, p.prompt, p.answer, p.meta["level"]) for p in task.test] == [
        (i, f"t{i}", str(i), i + 1) for i in range(3)
    ]
    whole = len(levels) * len(subjects) == len(TRAIN)
    assert task.notes == (() if whole else (f"asks {task.size} of 12 training rows, by level and subject",))


def test_the_prompt_is_the_template_and_a_row_without_an_answer_field_has_its_last_box(tmp_path):
    rows = [
        {
            "problem": r"Is \boxed{x} {y}?",
            "level": 3,
            "subject": "Algebra",
            "solution": r"\boxed{1}, no: \boxed{\frac{1}{2}}",
        },
        {"problem": "Z", "level": "Level 3", "type": "Algebra", "solution": "?", "answer": "  7 "},
    ]
    knobs = folder(tmp_path, train=rows) | {
        "levels": [3],
        "subjects": ["Algebra"],
        "template": r"Q: {problem} \boxed{}",
    }
    task = benchmarks.math(**knobs)
    assert [(row.prompt, row.answer) for row in task.rows] == [
        (r"Q: Is \boxed{x} {y}? \boxed{}", r"\frac{1}{2}"),
        (r"Q: Z \boxed{}", "7"),
    ]


def test_training_rows_without_an_answer_are_left_out_and_noted_and_held_out_ones_refused(tmp_path):
    empty = [{**TRAIN[0], "answer": " "}, {**TRAIN[1], "answer": ""}]
    bare = {"problem": "no box", "level": 1, "type": "Algebra", "solution": "?"}
    task = benchmarks.math(**folder(tmp_path, train=[*empty, *TRAIN[2:], bare]))
    assert task.size == 10
    assert task.notes == ("left out 3 training rows without an answer: 0, 1, 12",)
    with pytest.raises(ValueError, match=r"held-out rows: got no answer in 1 \(counted from 0\)"):
        benchmarks.math(**folder(tmp_path, math500=[TEST[0], {**TEST[1], "answer": ""}]))


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"level": "Level 6"}, r"train\.jsonl:1: got level 'Level 6', expected 1 to 5"),
        ({"problem": "a\ud800"}, r"train\.jsonl:1: got 'problem' with '\\ud800', expected Unicode text"),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(tmp_path, row, want):
    with pytest.raises(ValueError, match=want):
        benchmarks.math(**folder(tmp_path, train=[{**TRAIN[0], **row}]))


@pytest.mark.parametrize(
    ("knob", "want"),
    [
        ({"levels": [6]}, r"levels: got \[6\], expected some of those in the training files: 1, 2, 3, 4, 5, None"),
        ({"subjects": ["algebra"]}, r"subjects: got \['algebra'\].*: Algebra, Geometry"),
        ({"template": "{question}"}, r"template: got '\{question\}', expected one that holds \{problem\}"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(data, knob, want):
    with pytest.raises(ValueError, match=want):
        benchmarks.math(**{**data, **knob})


# The published files

ALL_SUBJECTS = [
    *["Algebra", "Counting & Probability", "Geometry", "Intermediate Algebra", "Number Theory", "Prealgebra"],
    "Precalculus",
]
PUBLISHED = {**KNOBS, "subjects": ALL_SUBJECTS}


def test_the_published_files_lose_two_empty_answers_and_one_problem_of_the_test_file():
    data = str(published("math"))
    small = benchmarks.math(**PUBLISHED, data=data)
    assert (small.size, len(small.test)) == (7498, 500)
    assert small.notes == ("left out 2 training rows without an answer: 5341, 5343",)
    assert Counter(row.meta["level"] for row in small.rows)[None] == 2
    against_test = benchmarks.math(**{**PUBLISHED, "test": "test.jsonl"}, data=data)
    assert (against_test.size, len(against_test.test)) == (7497, 5000)
    assert against_test.notes[0] == "left out 1 training rows that are held-out problems: 2948"
    both = benchmarks.math(**{**PUBLISHED, "train": ["train.jsonl", "test.jsonl"]}, data=data)
    assert both.size == 7498 + 5000 - 500
    assert both.notes[0].startswith("left out 500 training rows that are held-out problems:")
