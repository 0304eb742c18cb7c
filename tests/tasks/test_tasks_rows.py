"""Rows of any file: named fields to problems, whatever the reader, and errors that say which file, line and field."""

import json
import math
import pickle
import sys
from functools import partial
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import published

from grpo_fn.core import prng
from grpo_fn.core.problem import Conversation, Problem
from grpo_fn.tasks import benchmarks, mixture, rows
from grpo_fn.tasks.rows import Row
from grpo_fn.tasks.task import train_problems

FIELDS = {
    "prompt_field": "q",
    "answer_field": "a",
    "meta_fields": [],
    "gold": rows.field_text,
    "template": "{prompt}",
    "size": 0,
}


def key(seed):
    return prng.key(seed, device="cpu")


def given_rows(*values):
    """A reader of these rows."""
    return lambda fields: (Row(f"here:{i}", value) for i, value in enumerate(values, start=1))


def source(*values, name="s", **changes):
    return partial(rows.read_problems, **{"read": given_rows(*values), "source": name, **FIELDS, **changes})


def numbers(first, last, **changes):
    return source(*({"q": f"q{i}", "a": f"{i}"} for i in range(first, last)), **changes)


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def chat(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[role], "content": content} for role, content in turns]


# Problems


@given(
    st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.integers() | st.text("xy ")), min_size=1)
)
def test_a_row_becomes_the_problem_that_its_fields_say(values):
    found = source(*({"q": q, "a": a, "n": i} for i, (q, a) in enumerate(values)), name="mine", meta_fields=["n"])()
    assert found == [
        Problem(0, q, str(a).strip(), {"row": i, "source": "mine", "n": i}) for i, (q, a) in enumerate(values)
    ]


def test_size_reads_no_further_than_it_has_to():
    def guarded(fields):
        assert fields == ["q", "a"]
        yield from (Row(f"here:{i}", {"q": f"q{i}", "a": "1"}) for i in range(3))
        pytest.fail("read on after the last row that was asked for")

    assert len(source(read=guarded, size=3)()) == 3


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**30), 10**30))
def test_a_number_is_written_as_one_that_reads_back_equal_and_whole_ones_without_a_point(value):
    said = rows.field_text(value)
    assert float(said) == float(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 2**53):
        assert int(said) == value


@pytest.mark.parametrize("value", [True, math.nan, math.inf, ["1"], {"n": 1}])
def test_an_answer_that_is_neither_text_nor_a_number_is_refused(value):
    with pytest.raises(ValueError, match=r"here:2: 'a': got .*expected text or a finite number"):
        source({"q": "?", "a": "1"}, {"q": "?", "a": value})()


@pytest.mark.parametrize(
    ("knobs", "want"),
    [
        ({"template": "{problem}"}, r"expected one that holds \{prompt\}"),
        ({"size": -1}, "size: got -1"),
        ({"meta_fields": ["n", "task"]}, "meta_fields: got task, expected other fields"),
        ({"prompt_field": "a"}, "here:1: got the fields q, a, expected text in 'a'"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(knobs, want):
    with pytest.raises(ValueError, match=want):
        source({"q": "?", "a": 1}, **knobs)()


# Chat messages


def test_messages_are_a_conversation_whose_last_message_has_the_template():
    turns = (("s", "Be brief."), ("u", "Who?"), ("a", "Tom."), ("u", "And \u00e9?"))
    (found,) = source({"q": chat(*turns), "a": 7}, template="{prompt} Box it.")()
    assert isinstance(found.prompt, Conversation)
    assert found.prompt.messages == chat(*turns[:-1], ("u", "And \u00e9? Box it."))
    assert "\u00e9" in found.prompt
    assert pickle.loads(pickle.dumps(found)).prompt.messages == found.prompt.messages


def test_the_last_message_of_the_assistant_is_the_answer_where_one_field_holds_both():
    row = {"messages": chat(("u", "6 * 7?"), ("a", "It is 42. #### 42"))}
    fields = {"prompt_field": "messages", "answer_field": "messages"}
    (found,) = source(row, **fields, gold=benchmarks.gsm8k_answer)()
    assert (found.prompt, found.answer) == ("6 * 7?", "42")
    with pytest.raises(ValueError, match=r"here:1: 'messages': last message: got one of 'user', expected the answer"):
        source({"messages": chat(("u", "6 * 7?"))}, **fields)()


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "6 *"}, {"type": "text", "text": " 7?"}]
    assert source({"q": [{"role": "user", "content": parts, "name": None}], "a": "42"})()[0].prompt == "6 * 7?"


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (
            [{"from": "human", "value": "6 * 7?"}],
            r"message 0: got the keys (from, value|value, from), expected role, content",
        ),
        (chat(("u", "6 * 7?"), ("a", "42")), "last message: got one of 'assistant', expected one of 'user'"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "message 0: got content .*image.*, expected text, or a list of text parts",
        ),
        ([{"role": "user", "content": "\ud800"}], r"message 0: got '\\ud800', expected Unicode text"),
    ],
)
def test_messages_that_are_none_are_refused_with_file_line_and_field(messages, fault):
    with pytest.raises(ValueError, match=f"here:2: 'q': {fault}"):
        source({"q": "fine", "a": "1"}, {"q": messages, "a": "42"})()


# Tasks


def test_sources_follow_each_other_and_each_side_keeps_its_own():
    task = rows.task(train=[numbers(0, 2, name="x"), numbers(2, 4, name="y")], test=[numbers(5, 6), numbers(6, 7)])
    assert [(row.prompt, row.meta["source"], row.meta["row"]) for row in task.rows] == [
        *[("q0", "x", 0), ("q1", "x", 1), ("q2", "y", 0), ("q3", "y", 1)]
    ]
    assert [p.prompt for p in task.test] == ["q5", "q6"]
    assert task.notes == ()


def test_rows_that_repeat_have_no_answer_or_are_held_out_are_left_out_and_noted():
    again = source(
        {"q": "q1", "a": "1"}, {"q": "q1", "a": "other"}, {"q": "q9", "a": None}, {"q": "q 5", "a": ""}, name="z"
    )
    task = rows.task(train=[numbers(0, 6), again], test=[source({"q": " q5\n", "a": "5"})])
    assert [(row.prompt, row.answer) for row in task.rows] == [*((f"q{i}", f"{i}") for i in range(5)), ("q1", "other")]
    assert task.notes == (
        "left out 1 training rows that are held-out problems: s 5",
        "left out 1 rows that repeat an earlier one: z 0",
        "left out 2 training rows without an answer: z 2, z 3",
    )


def test_a_held_out_row_without_an_answer_is_refused_and_a_task_without_sources_too():
    with pytest.raises(ValueError, match=r"held-out rows: got no answer in s 1 \(counted from 0\)"):
        rows.task(train=[numbers(0, 2)], test=[source({"q": "?", "a": 1}, {"q": "!", "a": None})])
    with pytest.raises(ValueError, match="got no source"):
        rows.task(train=[], test=[])
    with pytest.raises(ValueError, match="none may stay"):
        rows.task(train=[source({"q": "?", "a": None})], test=[])


def test_a_task_without_training_sources_can_only_be_evaluated_on_or_be_a_part():
    task = rows.task(train=[], test=[numbers(0, 3)])
    assert (task.size, len(task.test)) == (0, 3)
    tasks = {"held": lambda: task, "train": partial(rows.task, train=[numbers(1, 9)], test=[])}
    both = mixture.task(tasks=tasks, weights={"held": 0, "train": 1})
    assert {p.prompt for p in train_problems(both, key(0), 0, 20)} == {f"q{i}" for i in range(3, 9)}


@given(st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1), st.integers(1, n - 1))))
def test_split_holds_out_the_same_rows_always_and_more_of_them_extend_fewer(sizes):
    n, small, large = sizes[0], *sorted(sizes[1:])
    few, many = (rows.hold_out(rows=[numbers(0, n)], test_size=size) for size in (small, large))
    assert [p.prompt for p in many.test][:small] == [p.prompt for p in few.test]
    assert sorted(p.prompt for p in (*few.rows, *few.test)) == sorted(f"q{i}" for i in range(n))
    assert (few.size, len(few.test), few.notes) == (n - small, small, ())
    assert all(p.prompt == f"q{p.meta['row']}" for p in (*few.rows, *few.test))


def test_split_holds_out_only_rows_with_an_answer_and_shuffles():
    some = numbers(0, 40)
    bad = source({"q": "q1", "a": "1"}, {"q": "none", "a": None}, name="bad")
    task = rows.hold_out(rows=[some, bad], test_size=20)
    assert (task.size, len(task.test)) == (20, 20)
    assert [p.meta["row"] for p in task.test] != sorted(p.meta["row"] for p in task.test)
    assert task.notes == (
        "left out 1 rows that repeat an earlier one: bad 0",
        "left out 1 training rows without an answer: bad 1",
    )
    for size in (0, 40, -1):
        with pytest.raises(ValueError, match=r"test_size: got .*expected 1 to 39 of the 40 rows"):
            rows.hold_out(rows=[some, bad], test_size=size)


# Readers

LINES = [{"q": f"q{i}", "a": i, "extra": "x" * i} for i in range(5)]


def parquet(path, lines):
    arrow = pytest.importorskip("pyarrow", reason="NOT TESTED without pyarrow: parquet files")
    from pyarrow import parquet as writer

    writer.write_table(arrow.Table.from_pylist(lines), path, row_group_size=2)
    return str(path)


WRITERS = {"jsonl": write, "json": write, "parquet": parquet}


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_same_rows_with_file_and_line(tmp_path, suffix):
    path = WRITERS[suffix](tmp_path / f"a.{suffix}", LINES)
    found = list(rows.file(["a", "q"], path=path))
    assert [row.where for row in found] == [f"{path}:{i}" for i in range(1, 6)]
    assert [(row.value["q"], row.value["a"]) for row in found] == [(f"q{i}", i) for i in range(5)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_star_reads_all_files_that_match_in_order(tmp_path, suffix):
    for name, lines in (("b", LINES[2:]), ("a", LINES[:2]), ("c", [])):
        if lines:
            WRITERS[suffix](tmp_path / f"part-{name}.{suffix}", lines)
    (tmp_path / "other.txt").write_text("?")
    found = list(rows.file(["q"], path=str(tmp_path / f"part-?.{suffix}")))
    assert [row.value["q"] for row in found] == [f"q{i}" for i in range(5)]


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("a.csv", b"q,a", r"path: got .*a\.csv, expected a file that ends in \.jsonl, \.json, \.parquet"),
        ("a.jsonl", b"\xff", r"a\.jsonl: got a file that cannot be read, expected UTF-8"),
        ("a.jsonl", b'{"q": 1}\n[', r"a\.jsonl:2: got '\[', expected a JSON object"),
        ("b.jsonl", b"{}", r"path: got .*a\.jsonl, which is no file, expected one; .* has: b\.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, content, want):
    (tmp_path / name).write_bytes(content)
    asked = tmp_path / (name if name[0] == "a" else "a.jsonl")
    with pytest.raises(ValueError, match=want):
        list(rows.file(["q"], path=str(asked)))


def test_an_absent_library_is_named_with_what_installs_it(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"got no library 'pyarrow', expected it: pip install 'grpo-fn\[data\]'"):
        list(rows.file(["q"], path=str(tmp_path / "a.parquet")))
    with pytest.raises(ValueError, match=r"got no library 'datasets', expected it: pip install 'grpo-fn\[data\]'"):
        list(rows.hub(["q"], name="a/b", config="", split="train", revision=""))


class Table(list):
    """What the `datasets` library returns, as far as it is used."""

    column_names = ("q", "a", "extra")

    def select_columns(self, names):
        return Table({name: row[name] for name in names} for row in self)


class Datasets(ModuleType):
    """The library with one dataset in it."""

    def __init__(self):
        super().__init__("datasets")
        self.asked = []

    def load_dataset(self, *args, **kwargs):
        self.asked.append((args, kwargs))
        if args[0] != "owner/there":
            raise FileNotFoundError(f"no {args[0]}")
        return Table(LINES)


def test_a_hub_dataset_gives_its_rows_or_says_what_is_wrong(monkeypatch):
    fake = Datasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    hub = partial(rows.hub, config="", split="train", revision="")
    found = list(hub(["q"], name="owner/there"))
    assert [(row.where, row.value) for row in found][:2] == [
        ("owner/there/train:1", {"q": "q0"}),
        ("owner/there/train:2", {"q": "q1"}),
    ]
    assert fake.asked == [(("owner/there", None), {"split": "train", "revision": None})]
    with pytest.raises(ValueError, match=r"owner/there, split train: got the fields q, a, extra, expected also answer"):
        list(hub(["answer"], name="owner/there"))
    with pytest.raises(ValueError, match=r"got dataset 'owner/gone', .*: FileNotFoundError: no owner/gone"):
        list(hub(["q"], name="owner/gone"))


def test_the_real_library_loads_a_folder_of_parquet(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="NOT TESTED without the datasets library: hub datasets")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    parquet(tmp_path / "train-0.parquet", LINES)
    hub = partial(rows.hub, name=str(tmp_path), config="", revision="")
    found = list(hub(["a", "q"], split="train[1:3]"))
    assert [row.value for row in found] == [{"a": 1, "q": "q1"}, {"a": 2, "q": "q2"}]
    with pytest.raises(ValueError, match="split 'test'"):
        list(hub(["q"], split="test"))


# The published competitions


def test_the_published_competitions_are_a_held_out_set_with_whole_number_golds():
    files = {"aime24": "aime/aime24.jsonl", "aime25": "aime/aime25.jsonl", "amc23": "amc/amc23.jsonl"}
    made = {"prompt_field": "problem", "answer_field": "answer"}
    sources = [
        partial(
            rows.read_problems, read=partial(rows.file, path=str(published(path))), source=name, **{**FIELDS, **made}
        )
        for name, path in files.items()
    ]
    task = rows.task(train=[], test=sources)
    assert [sum(p.meta["source"] == name for p in task.test) for name in files] == [30, 30, 40]
    assert all(p.answer.lstrip("-").isdigit() for p in task.test)
    assert [p.answer for p in task.test if p.meta["source"] == "amc23"][:3] == ["27", "36", "45"]
    assert len({p.prompt for p in task.test}) == 100
