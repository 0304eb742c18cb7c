"""JSON lines: rows with their places, and the files that a run adds a step's line to."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.json_lines import json_object, json_rows, metrics_by_step, step_lines

VALUES = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=3)


@given(st.lists(VALUES, max_size=5), st.booleans(), st.booleans())
def test_rows_come_back_with_their_lines_whatever_is_between(tmp_path_factory, rows, packed, ascii_only) -> None:
    path = tmp_path_factory.mktemp("rows") / ("rows.jsonl.gz" if packed else "rows.jsonl")
    text = "\ufeff" + "".join(json.dumps(row, ensure_ascii=ascii_only) + "\r\n \n" for row in rows)
    data = text.encode("utf-8")
    path.write_bytes(gzip.compress(data) if packed else data)
    found = list(json_rows(path, expected="an object"))
    assert [row.value for row in found] == rows
    assert [row.where for row in found] == [f"{path}:{2 * i + 1}" for i in range(len(rows))]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{oops", r"x:1: got '\{oops', expected a JSON object in UTF-8: Expecting"),
        (b"\xff", r"x:1: got b'\\xff', expected a JSON object in UTF-8: 'utf-8' codec"),
        ("[" * 10**5, r"x:1: got '\[+', expected a JSON object in UTF-8: "),
        ("[1]", "x:1: got a JSON list, expected an object with a name"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "x:1: got .*, expected a JSON object in UTF-8: it has the key 'b' twice"),
        ("null", "x:1: got a JSON NoneType, expected an object with a name"),
    ],
)
def test_a_line_that_is_no_object_is_refused(line: str | bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        json_object("x:1", line, expected="an object with a name")


@given(st.integers(0, 4), st.data())
def test_only_a_torn_end_may_be_left_out(tmp_path_factory, count, data) -> None:
    path = tmp_path_factory.mktemp("steps") / "metrics.jsonl"
    assert step_lines(path, torn_end=False) == []
    whole = [json.dumps({"step": step, "a": None}) + "\n" for step in range(count)]
    torn = json.dumps({"step": count}) + "\n"
    torn = data.draw(
        st.sampled_from([torn[:cut] for cut in range(len(torn) - 1)] + ["\0\0\n", "[1]\n", '{"step": "x"}\n'])
    )
    path.write_text("".join(whole) + torn)
    assert [line.line.decode() for line in step_lines(path, torn_end=True)] == whole
    assert metrics_by_step(path.parent, torn_end=True) == {step: {"a": None} for step in range(count)}
    if torn and not torn.endswith("}"):
        with pytest.raises(
            ValueError, match=rf"metrics\.jsonl:{count + 1}: got .*, expected a JSON object with a step"
        ):
            step_lines(path, torn_end=False)
        path.write_text("".join(whole) + torn.rstrip("\n") + '\n{"step": 9}\n')
        with pytest.raises(
            ValueError, match=rf"metrics\.jsonl:{count + 1}: got .*, expected a JSON object with a step"
        ):
            step_lines(path, torn_end=True)
