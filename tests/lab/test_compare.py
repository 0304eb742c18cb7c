"""Evaluations are compared on the same problems and on no others, and the comparison says what flipped."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo_fn.lab import compare
from grpo_fn.lab.paired import mcnemar, paired_bootstrap, paired_cells, paired_difference
from grpo_fn.lab.trials import code_span
from grpo_fn.shell.logging import rollout_store
from grpo_fn.trainer.evaluation import wilson


def row(uid: int, score: float | None, **changed: Any) -> dict[str, Any]:
    scores = {"correct": score, "boxed": 1.0}
    return {"uid": uid, "prompt": f"question {uid}", "answer": str(uid), "text": "so 7", "scores": scores, **changed}


def evaluated(folder: Path, scores: list[float | None], **changed: Any) -> Path:
    folder.mkdir(parents=True)
    rows = [row(uid, score, **changed) for uid, score in enumerate(scores)]
    rollout_store.write_evaluation_rows(folder / "samples.jsonl", rows)
    return folder


def printed(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    capsys.readouterr()
    assert compare.main([str(arg) for arg in argv]) == code
    out, err = capsys.readouterr()
    assert bool(out) == (code == 0)
    return out or err


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# -- what it says


outcomes = st.lists(st.tuples(*[st.sampled_from([None, 0.0, 0.5, 1.0])] * 2), min_size=1, max_size=30)


@given(outcomes)
def test_changes_are_counted_and_are_symmetric(pairs):
    known = {(str(i), "", 0): (a == 1.0, b == 1.0) for i, (a, b) in enumerate(pairs) if None not in (a, b)}
    if not known:
        return
    before, after = ({key: pair[side] for key, pair in known.items()} for side in (0, 1))
    there, back = compare.count_flips(before, after), compare.count_flips(after, before)
    assert set(there.gained) == {key for key, pair in known.items() if pair == (False, True)} == set(back.lost)
    assert set(there.lost) == {key for key, pair in known.items() if pair == (True, False)} == set(back.gained)
    assert there.p == back.p == mcnemar(len(there.gained), len(there.lost))
    assert (there.low, there.high) == (-back.high, -back.low)
    assert (there.low, there.high) == paired_bootstrap(len(there.gained), len(there.lost), len(known))


def test_the_table_has_differences_and_the_problems_that_flipped(tmp_path, capsys):
    first = evaluated(tmp_path / "first", [1.0, 0.0, 0.0, 0.0, 0.5, 1.0, None, 1.0])
    second = evaluated(tmp_path / "second", [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, None], marked="7|8")
    third = evaluated(tmp_path / "third", [1.0] * 8)
    lines = printed(capsys, first, second, third).splitlines()
    assert lines[0] == "6 problems; 2 more left out, which some run could not score"
    a, b, c = (cells(line) for line in lines[4:7])
    low, high = wilson(2, 6)
    assert a[0].endswith("/first`")
    assert a[1:] == ["0.333", f"{low:.3f} to {high:.3f}", "", "", "", "", ""]
    assert (b[1], b[3], b[5:]) == ("0.667", "+0.333", ["3", "1", f"{mcnemar(3, 1):.3g}"])
    assert (c[1], c[5:7]) == ("1.000", ["4", "0"])  # against the first, too
    assert lines[8].endswith("3 gained, 1 lost")
    flips = [cells(line.replace("\\|", "/")) for line in lines[12:16]]
    assert [line[:2] for line in flips] == [["gained", "1"], ["gained", "2"], ["gained", "3"], ["lost", "5"]]
    assert flips[0][2:] == ["question 1", "1", "so 7", "`7/8`"]
    assert printed(capsys, first, second, "--max_rows", 1).splitlines()[-1] == "and 3 more (--max_rows 4)"
    assert "question" not in printed(capsys, first, second, "--max_rows", 0)


def test_another_judge_may_say_what_is_right(tmp_path, capsys):
    runs = evaluated(tmp_path / "one", [1.0, 0.0]), evaluated(tmp_path / "two", [0.0, None])
    lines = printed(capsys, *runs, "--grader", "boxed").splitlines()
    assert [cells(line)[1] for line in lines[4:6]] == ["1.000", "1.000"]
    assert "expected one that" in printed(capsys, *runs, "--grader", "lenient", code=2)


def test_run_folders_that_share_seeds_are_compared_over_those(tmp_path, capsys):
    accuracy = {("a", 0): 3, ("a", 1): 1, ("b", 0): 4, ("b", 1): 4, ("b", 2): 0, ("c", 1): 2}
    runs = []
    for (lr, seed), right in accuracy.items():
        runs.append(tmp_path / f"{lr}{seed}")
        rows = [row(uid, float(uid < right)) for uid in range(4)]
        rollout_store.store_evaluation(runs[-1] / "eval", 4, rows)
        (runs[-1] / "run.json").write_text(json.dumps({"hparams": {"lr": lr, "train.train.seed": seed}}))
    _, _, section = printed(capsys, *runs, "--max_rows", "0").partition("## Over shared seeds")
    (line,) = [cells(line) for line in section.split("##")[0].splitlines() if "`" in line]  # c shares one seed alone
    expected = paired_difference([0.75, 0.25], [1.0, 1.0])
    assert line == [f"`{runs[0]}`", f"`{runs[2]}`", *paired_cells(expected).values()]
    assert "shared seeds" not in printed(capsys, runs[0], runs[1], runs[5], "--max_rows", "0")


# -- which problems are the same


def test_other_problems_are_refused_with_how_many_match(tmp_path, capsys):
    one, two = evaluated(tmp_path / "one", [1.0, 0.0, 0.0]), evaluated(tmp_path / "two", [0.0, 0.0])
    error = printed(capsys, one, two, code=2)
    assert f"got different problems: 3 in {one}, 2 in {two}, of which 2 are in all of them" in error
    assert printed(capsys, one, two, "--intersection").startswith("2 problems\n")


def test_another_prompt_is_another_problem_unless_the_uid_is_to_decide(tmp_path, capsys):
    one, two = evaluated(tmp_path / "one", [1.0, 0.0]), evaluated(tmp_path / "two", [0.0, 1.0], prompt="Q:")
    assert "of which 0 are in all of them" in printed(capsys, one, two, "--intersection", code=2)
    assert printed(capsys, one, two, "--match", "uid").startswith("2 problems\n")
    other = evaluated(tmp_path / "other", [0.0, 1.0], answer="9")
    assert "of which 0" in printed(capsys, one, other, "--match", "uid", code=2)  # the same number of another problem


# -- bad input


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "got no rows"),
        ("{oops\n", "bad.jsonl:1: got '{oops', expected a JSON object"),
        ('{"uid": 1}\n', "got row 1 without prompt, answer, scores, text"),
        (json.dumps(row(0, None)) + "\n", "none of which every run could score"),
        (None, "expected a folder with samples.jsonl"),
    ],
)
def test_a_file_without_scored_rows_is_refused(tmp_path, capsys, text, error):
    if text is not None:
        (tmp_path / "bad.jsonl").write_text(text)
    assert error in printed(capsys, tmp_path / "bad.jsonl", tmp_path / "bad.jsonl", code=2)
    assert "expected two or more" in printed(capsys, tmp_path / "bad.jsonl", code=2)


@given(st.text())
def test_a_cell_is_one_line_and_does_nothing(text):
    span = code_span(compare.one_line(text))
    assert span.isprintable()
    assert "|" not in span.replace("\\|", "")
    fence = span[: len(span) - len(span.lstrip("`"))]
    if span:
        inner = span[len(fence) : -len(fence)]
        assert span.endswith(fence)
        assert fence not in inner.replace(f"{fence}`", "")  # no run of just that many ends it early
        assert len(inner) <= 2 * 80 + 2
    else:
        assert not "".join(c for c in text if c.isprintable()).strip()


# -- the files that it reads


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(rows=st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=4))
def test_rows_come_back_as_they_were(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rollout_store.write_evaluation_rows(path, rows)
    assert rollout_store.load_rows(path) == rows
    assert [*path.parent.iterdir()] == [path]


def test_values_without_a_json_form_become_their_text(tmp_path):
    odd = {"meta": {1: {3}, "tests": ("a", b"b"), "nan": float("nan")}}
    rollout_store.write_evaluation_rows(tmp_path / "x.jsonl", [odd])
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"meta": {"1": "{3}", "tests": ["a", "b'b'"], "nan": None}}
