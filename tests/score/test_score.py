"""python -m grpo_fn.score as people use it: every row comes back as it was, in order, with its verdict."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from select import select

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from published import published

from grpo_fn.core.problem import LIMITS, Completion, Problem, Turn, verdict_name
from grpo_fn.score.scoring import (
    EXIT_BROKEN_PIPE,
    MOST_BYTES,
    MOST_ROWS,
    PIECE,
    Lines,
    RewardSpec,
    annotate_row,
    parse_row,
    reward_of,
    score_lines,
    verdict_names,
)
from grpo_fn.shell.reward_workers.reward_pool import Outcome, RewardPool

MINE = '''
import asyncio, os, sys, time

def number(problem, completion):
    """As the text says."""
    return None if completion.text == "None" else float(completion.text)

def obeys(problem, completion, *, bonus=0.0):
    match completion.text.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["exit"]:
            os._exit(0)
        case ["kill"]:
            os.kill(os.getpid(), 9)
        case ["allocate"]:
            bytearray(10 * 2**30)
        case ["raise"]:
            raise KeyError("boom")
        case ["none"]:
            return None
        case ["wrong"]:
            return 0.0
        case ["nan"]:
            return float("nan")
        case ["torch"]:
            return float("torch" in sys.modules)
        case ["print"]:
            print("{}", flush=True)
    return 1.0 + bonus

async def later(problem, completion, *, unit):
    await asyncio.sleep(0.01)
    return float(completion.text == problem.meta["expected"] + unit)

def nowhere(limits):
    raise RuntimeError("no isolation here")

def of_prompt(problem, completion):
    return float(completion.text == problem.prompt + problem.answer)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the user sits, with a reward of his own."""
    path = tmp_path_factory.mktemp("mine")
    (path / "mine.py").write_text(MINE)
    return path


def command(*flags: str, reward: str = "mine.obeys", workers: int = 1) -> list[str]:
    return [sys.executable, "-m", "grpo_fn.score", "--reward", reward, "--workers", str(workers), *flags]


def score(
    folder: Path, data: bytes, *flags: str, reward: str = "mine.obeys", workers: int = 1
) -> tuple[int, list, str]:
    """Exit code, the rows that came out, and what was said."""
    done = subprocess.run(
        command(*flags, reward=reward, workers=workers), input=data, capture_output=True, cwd=folder, timeout=60
    )
    assert done.stdout == b"" or done.stdout.endswith(b"\n")
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr.decode()


def rows_of(*texts: str, **more: object) -> bytes:
    return b"".join(json.dumps({"completion": text, **more}).encode() + b"\n" for text in texts)


# The stream, taken apart

words = st.text(max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
added = {*verdict_names(""), "completion", "turns"}
others = st.dictionaries(words.filter(lambda name: name not in added), values, max_size=4)


@st.composite
def lines(draw: st.DrawFn, completion: st.SearchStrategy[str]) -> bytes:
    """A row as some program may write it: the completion anywhere in it, spaces between, with escapes or not."""
    fields = list(draw(others).items())
    fields.insert(draw(st.integers(0, len(fields))), ("completion", draw(completion)))
    between = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " : ")]))
    text = json.dumps(dict(fields), separators=between, ensure_ascii=True)
    if draw(st.booleans()):
        with suppress(UnicodeEncodeError):
            text = json.dumps(dict(fields), separators=between, ensure_ascii=False).encode().decode()
    pad = st.sampled_from(["", " ", "\t ", "\r"])
    return (draw(pad) + text[:-1] + draw(pad) + "}" + draw(pad)).encode()


outcomes = st.builds(Outcome, st.none() | st.floats(-2, 2), st.text(max_size=9), st.floats(0, 100))


@example(b'{"completion": "a", "b": {"c": {}}}', Outcome(1.0, "", 0.5), "")
@given(lines(st.text()), outcomes, st.sampled_from(["", "_b", "é\ud800"]))
def test_a_row_is_carried_along_byte_for_byte(line: bytes, outcome: Outcome, suffix: str) -> None:
    row = json.loads(line)
    problem, completion = parse_row("here", 7, line, needs=(), suffix=suffix)
    assert completion.text == row["completion"]
    assert problem.meta == {name: value for name, value in row.items() if name != "completion"}
    out = annotate_row(line, outcome, suffix=suffix)
    assert out.startswith(line.strip(b" \t\r")[:-1].rstrip(b" \t\r"))
    assert out.endswith(b"}\n")
    assert out.count(b"\n") == 1
    after = json.loads(out)
    expected = [verdict_name(outcome.value), outcome.value, outcome.reason, round(outcome.seconds, 6)]
    assert [after.pop(name) for name in verdict_names(suffix)] == expected
    assert after == row
    assert list(after) == list(row)


pieces = st.binary(max_size=12).map(lambda b: b.replace(b"\n", b""))


@given(st.lists(pieces, max_size=8), pieces, st.data())
def test_lines_are_those_of_the_stream_however_it_arrives(parts: list[bytes], tail: bytes, data: st.DataObject) -> None:
    whole = b"".join(part + b"\n" for part in parts) + tail
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as source, open(writing, "wb", buffering=0) as sink:
        lines = Lines(source, "rows")
        place = 0
        while place < len(whole):
            place += sink.write(whole[place : place + data.draw(st.integers(1, 20))])
            lines.fill()
        sink.close()
        assert not lines.ended
        lines.fill()
    numbered = enumerate(whole.split(b"\n"), start=1)
    expected = [(f"rows:{number}", number, line) for number, line in numbered if line.strip(b" \t\r")]
    assert lines.ended
    assert list(lines.ready) == expected


@pytest.fixture(scope="module")
def pool(folder: Path) -> RewardPool:
    sys.path.insert(0, str(folder))
    with RewardPool(workers=2, timeout_per_completion=5.0, memory_mb=1024, stop_on_error=False) as pool:
        yield pool
    sys.path.remove(str(folder))


def stream(pool: RewardPool, data: bytes, reward: str = "mine.number", *knobs: str) -> list[bytes]:
    """What comes out, until there is no more or a bad row."""
    fn = reward_of(RewardSpec(reward, (), "", 5.0, ()), knobs)
    out = []
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        file.seek(0)
        try:
            for batch in score_lines(Lines(file, "rows"), pool, fn, needs=(), suffix=""):
                out += [annotate_row(line, outcome, suffix="") for line, outcome in batch]
        except ValueError as error:
            out.append(str(error).encode())
    return out


good = lines(st.one_of(st.just("None"), st.floats(-2, 2).map(repr), st.just("no number")))


@given(st.lists(good, max_size=12), st.booleans())
def test_every_row_comes_back_in_order_with_its_own_verdict(pool: RewardPool, rows: list[bytes], ended: bool) -> None:
    out = stream(pool, b"\n\n".join(rows) + b"\n" * ended)
    assert len(out) == len(rows)
    for line, result in zip(rows, map(json.loads, out), strict=True):
        text = json.loads(line)["completion"]
        value = float(text) if text not in ("None", "no number") else None
        assert result.items() >= json.loads(line).items()
        assert (result["verdict"], result["score"]) == (verdict_name(value), value)
        assert (result["reason"] == "") == (value is not None)


BAD = {
    "no JSON": (b"oops", "got b'oops', expected a JSON object"),
    "a list": (b"[1]", "got a JSON list, expected an object"),
    "nothing in it": (b"{}", "got the fields none, expected text in 'completion'"),
    "null": (b'{"completion": null}', "got 'completion': null, expected text"),
    "scored before": (b'{"completion": "1", "reason": "x"}', "got a row with 'reason' already"),
    "Latin-1": ('{"completion": "é"}'.encode("latin-1"), "expected a JSON object in UTF-8"),
    "deep": (b'{"completion": "1", "a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "expected a JSON object"),
}


@given(st.sampled_from(sorted(BAD)), st.lists(good, max_size=4), st.lists(good, max_size=2))
def test_a_bad_row_is_named_after_all_before_it_are_scored(
    pool: RewardPool, bad: str, before: list[bytes], after: list[bytes]
) -> None:
    line, complaint = BAD[bad]
    *out, error = stream(pool, b"\n".join([*before, line, *after]))
    assert error.decode().startswith(f"rows:{len(before) + 1}: ")
    assert complaint in error.decode()
    assert [json.loads(row)["completion"] for row in out] == [json.loads(row)["completion"] for row in before]


amounts, said = st.integers(0, 9), st.text(max_size=5)


def test_a_row_of_a_runs_rollouts_is_scored_as_it_stands() -> None:
    row = {"uid": 7, "g": 0, "prompt": "1 + 1?", "text": "2", "answer": "2", "reward": 0.0, "length": 3, "tokens": [1]}
    problem, completion = parse_row("here", 1, json.dumps(row).encode(), needs=["answer"], suffix="")
    assert (completion.text, completion.length, problem.answer) == ("2", 3, "2")
    with pytest.raises(ValueError, match="expected text in 'completion'"):  # of MBPP: the task, with no completion
        parse_row("here", 1, b'{"task_id": 7, "text": "Write a function"}', needs=[], suffix="")


turns = st.builds(
    Turn,
    text=said,
    length=amounts,
    observation=said,
    reward=st.none() | st.integers(-2, 2) | st.floats(-2, 2),
    state=said,
    calls=amounts,
    error=said,
    limit=st.sampled_from(["", *LIMITS]),
    answer=said,
)


@given(st.lists(turns, max_size=3), st.booleans())
def test_the_turns_of_a_row_are_those_of_its_episode(episode: list[Turn], short: bool) -> None:
    fields = [turn._asdict() for turn in episode]
    if short:  # what is as it is when nothing is said may be left out
        fields = [{n: x for n, x in turn.items() if (n, x) not in Turn._field_defaults.items()} for turn in fields]
    line = json.dumps({"completion": "x", "turns": fields}).encode()
    problem, completion = parse_row("here", 1, line, needs=(), suffix="")
    assert completion.turns == tuple(episode)
    assert "turns" not in problem.meta


TURN = Turn("a", 1, "b", 0.5, "s")._asdict()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("a", "here: got 'turns': \"a\", expected a list with an object for each turn"),
        ([TURN, {**TURN, "role": "user"}], "here, turn 2: got 'role', expected the fields text, length, observation"),
        ([{**TURN, "reward": 10**400}], "here, turn 1: got 'reward': 1000"),
        ([{**TURN, "limit": "time"}], "here, turn 1: got 'limit': \"time\", expected an empty text or one of turns"),
    ],
)
def test_turns_that_are_none_are_refused(wrong: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}"):
        parse_row("here", 1, json.dumps({"completion": "x", "turns": wrong}).encode(), needs=(), suffix="")


def test_a_reward_of_episodes_scores_stored_rows(pool: RewardPool) -> None:
    rows = [{"completion": "b", "turns": [TURN, {**TURN, "reward": reward}]} for reward in (1.0, None)]
    data = b"\n".join(json.dumps(row).encode() for row in rows)
    found = stream(pool, data, "grpo_fn.rewards.episode.total_reward", "gamma=0.5")
    assert [json.loads(row)["score"] for row in found] == [1.0, None]


@pytest.mark.parametrize(
    ("needs", "field", "fits", "misfits"),
    [
        ("answer", "answer", ["42", 42, 4.5, ""], [None, True, ["42"], {}]),
        ("length", "length", [0, 7], [None, True, -1, 1.0, "7"]),
        ("tests", "tests", [["assert True"]], [None, [], "assert True", [1], {}]),
        ("tests", "test_list", [["assert True"]], [None, [], "assert True", [1], {}]),
    ],
)
def test_a_row_without_a_field_that_the_reward_needs_is_refused(
    needs: str, field: str, fits: list, misfits: list
) -> None:
    def ask(**fields: object) -> tuple[Problem, Completion]:
        return parse_row("here", 1, json.dumps({"completion": "x", **fields}).encode(), needs=(needs,), suffix="")

    for value in fits:
        ask(**{field: value})
    for value in misfits:
        with pytest.raises(ValueError, match=f"here: got '{needs}': .*expected .*'{field}'"):
            ask(**{field: value})
    with pytest.raises(ValueError, match="here: got the fields 'completion', expected"):
        ask()


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("72", "72"),
        (72, "72"),
        (7.5, "7.5"),
        ("48 + 24 = 72\n#### 72", "72"),
        ("12 #### 3 #### 1,000", "1,000"),
        ("#### Heading\ntext", "#### Heading\ntext"),
        (None, ""),
    ],
)
def test_the_gold_is_the_answer_or_what_follows_its_last_hashes(answer: object, gold: str) -> None:
    line = json.dumps({"completion": "x", "answer": answer, "length": 3, "truncated": True}).encode()
    problem, completion = parse_row("here", 5, line, needs=(), suffix="")
    assert (problem.uid, problem.answer, problem.meta["answer"]) == (5, gold, answer)
    assert completion == Completion("x", 3, True)


@pytest.mark.parametrize(
    ("row", "tests", "setup", "answer"),
    [
        ({"test_list": ["a"], "test_setup_code": "s", "code": "c ####1"}, ["a"], "s", "c ####1"),
        ({"test_list": ["a"], "test_imports": ["import x", "import y"], "code": "c"}, ["a"], "import x\nimport y", "c"),
        ({"tests": ["b"], "test_list": ["a"], "setup": "t", "answer": "r", "code": "c"}, ["b"], "t", "r"),
    ],
)
def test_published_and_plain_rows_of_programs_ask_the_same(row: dict, tests: list, setup: str, answer: str) -> None:
    line = json.dumps({"completion": "x", **row}).encode()
    problem, _ = parse_row("here", 1, line, needs=("tests",), suffix="")
    assert (problem.meta["tests"], problem.meta["setup"], problem.answer) == (tests, setup, answer)
    assert problem.meta.items() >= row.items()


# The command


def test_whatever_a_row_does_costs_that_row_only_and_says_why(folder: Path) -> None:
    texts = ["a", "exit", "wrong", "kill", "sleep 60", "allocate", "raise", "none", "nan", "print", "torch", "z"]
    code, rows, said = score(folder, rows_of(*texts), "--timeout", "1.5", workers=2)
    assert code == 0
    got = {row["completion"]: (row["verdict"], row["score"], row["reason"]) for row in rows}
    assert got == {
        "a": ("right", 1.0, ""),
        "exit": ("unscorable", None, "worker died: exit code 0"),
        "wrong": ("wrong", 0.0, ""),
        "kill": ("unscorable", None, "worker died: killed by SIGKILL"),
        "sleep 60": ("unscorable", None, "late: no answer within 1.5 s"),
        "allocate": ("unscorable", None, "worker died: over the memory limit of 1024 MB"),
        "raise": ("unscorable", None, "KeyError: 'boom'"),
        "none": ("unscorable", None, "the reward returned None"),
        "nan": ("unscorable", None, "ValueError: reward: got float nan, expected a finite number or None"),
        "print": ("right", 1.0, ""),
        "torch": ("wrong", 0.0, ""),
        "z": ("right", 1.0, ""),
    }
    assert [row["completion"] for row in rows] == texts
    assert 1.5 <= rows[4]["seconds"] < 3.0
    printed, summary, *complaints = said.splitlines()
    assert printed == "{}"
    assert summary.startswith("12 rows in")
    assert summary.endswith("3 right, 2 wrong, 7 unscorable, 1 timeouts, 3 worker crashes, 2 exceptions")
    assert any("mine.obeys lost problem 7, completion 'raise': KeyError: 'boom'" in line for line in complaints)


def test_published_answers_are_right_and_others_wrong_through_pipes_and_files(tmp_path: Path) -> None:
    source = [json.loads(line) for line in (published("gsm8k") / "test.jsonl").read_text().splitlines()[:200]]
    expected = []
    with open(tmp_path / "rows.jsonl", "w") as file:
        for number, row in enumerate(source):
            gold = row["answer"].rpartition("####")[2].strip()
            text, verdict = [
                (row["answer"], "right"),
                (rf"So it is \boxed{{{gold}}}.", "right"),
                (rf"{row['answer']} No: \boxed{{{gold}1}}", "wrong"),
                ("I do not know.", "wrong"),
            ][number % 4]
            expected.append(verdict)
            file.write(json.dumps({**row, "completion": text}) + "\n")
    flags = ["--input", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "scored.jsonl")]
    code, out, said = score(tmp_path, b"", *flags, reward="math")
    assert (code, out) == (0, [])
    assert said.startswith(f"{len(source)} rows in ")
    assert said.count("\n") == 1
    rows = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == expected
    assert [(row["question"], row["answer"]) for row in rows] == [(row["question"], row["answer"]) for row in source]
    first = b"".join((tmp_path / "scored.jsonl").read_bytes().splitlines(keepends=True)[:100])
    code, twice, _ = score(tmp_path, first, "--field_suffix", "_lenient", reward="lenient")
    assert code == 0
    assert [row["verdict"] for row in twice] == expected[:100]
    for row in twice:
        assert (row["score"], row["reason"]) == (float(row["verdict"] == "right"), "")
        assert row["verdict_lenient"] in (row["verdict"], "right")


def test_a_reward_of_ones_own_has_knobs_and_sees_the_whole_row(folder: Path) -> None:
    data = rows_of("3 km", expected="3 ") + rows_of("3 m", expected="3 ")
    code, rows, _ = score(folder, data, "--reward_param", "unit='km'", reward="mine.later")
    assert code == 0
    assert [row["score"] for row in rows] == [1.0, 0.0]
    _, rows, _ = score(folder, rows_of("6*7=42", prompt="6*7=", answer=42), reward="mine.of_prompt")
    assert rows[0]["score"] == 1.0
    flags = [
        "--reward_param",
        "seconds=0.5",
        "--reward_param",
        "reward=@mine.obeys",
        "--reward_param",
        "reward.bonus=2.0",
    ]
    _, rows, _ = score(folder, rows_of("a", "sleep 9"), *flags, reward="grpo_fn.rewards.wrappers.with_timeout")
    assert [(row["score"], row["reason"]) for row in rows] == [(3.0, ""), (None, "late: no answer within 0.5 s")]


REFUSED = {
    "a word": (["mathh"], "got 'mathh', expected math, math_evaluated, lenient"),
    "another signature": (["json.loads"], "expected f(problem, completion)"),
    "a knob missing": (["mine.later"], "mine.later: got no value for unit, expected --reward_param unit=VALUE"),
    "output that is there": (["mine.obeys", "--output", "mine.py"], "--output: got mine.py, which holds something"),
    "no sandbox": (["code", "--reward_param", "run.isolation=@mine.nowhere"], "error: no isolation here"),
    "a needed field": (["math"], "got the fields 'completion', expected text or a number in 'answer'"),
}


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("case", REFUSED)
def test_bad_flags_are_refused_with_one_message(folder: Path, case: str) -> None:
    (reward, *flags), message = REFUSED[case]
    code, rows, said = score(folder, rows_of("a"), *flags, reward=reward)
    assert (code, rows) == (2, [])
    assert said.splitlines()[-1].startswith("error: ")
    assert message in said
    assert "Traceback" not in said
    assert (folder / "mine.py").read_text() == MINE


def test_rows_come_out_as_they_come_in(folder: Path) -> None:
    with subprocess.Popen(command(), stdin=-1, stdout=-1, stderr=-1, cwd=folder, bufsize=0) as process:
        for text in ("a", "wrong"):
            process.stdin.write(rows_of(text))
            assert json.loads(process.stdout.readline())["completion"] == text
        process.stdin.close()
        assert process.wait(20) == 0


def test_a_reader_of_the_head_alone_ends_the_command_quietly(folder: Path) -> None:
    process = subprocess.Popen(command(), stdin=-1, stdout=-1, stderr=-1, cwd=folder, bufsize=0)
    with process.stderr, process.stdin:
        process.stdin.write(rows_of("a"))
        assert json.loads(process.stdout.readline())["verdict"] == "right"
        process.stdout.close()
        with suppress(BrokenPipeError):
            while process.poll() is None:
                process.stdin.write(rows_of("a"))
        assert process.wait(20) == EXIT_BROKEN_PIPE
        assert process.stderr.read() == b""


def test_an_interrupt_leaves_whole_rows_and_no_process(folder: Path) -> None:
    # A shell starts what it runs in the background with SIGINT ignored, pytest too, and what it starts inherits that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command(), stdin=-1, stdout=-1, stderr=-1, cwd=folder, preexec_fn=heed) as process:
        process.stdin.write(rows_of("a", "b", "sleep 60"))
        process.stdin.flush()
        seen = [process.stdout.readline(), process.stdout.readline()]
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert [json.loads(line)["completion"] for line in seen] == ["a", "b"]
        assert process.stdout.read() == b""
        assert b"interrupted" in process.stderr.read()
        assert workers
        assert not psutil.wait_procs(workers, timeout=5)[1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", [500, 20_000])
def test_rows_in_flight_are_bounded_while_one_takes_its_time(folder: Path, size: int) -> None:
    row = rows_of("a", filling="x" * size)
    bound, pipe, taken = min(MOST_BYTES, MOST_ROWS * len(row)), 2**16, 0
    with subprocess.Popen(command("--timeout", "60"), stdin=-1, stdout=-1, cwd=folder, bufsize=0) as process:
        process.stdin.write(rows_of("sleep 60"))
        os.set_blocking(process.stdin.fileno(), False)
        while taken < 2 * bound and select([], [process.stdin], [], 2.0)[1]:
            taken += process.stdin.write(row[taken % len(row) :] + row * 10)
        process.kill()
    assert bound - len(row) <= taken <= bound + pipe + 2 * PIECE + len(row)


def test_score_starts_without_torch(folder: Path) -> None:
    flags = ["-X", "importtime", "-m", "grpo_fn.score", "--reward", "math"]
    row = rows_of(r"\boxed{4}", answer="4")
    done = subprocess.run([sys.executable, *flags], input=row, capture_output=True, cwd=folder)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines() if "import time" in line}
    assert {"grpo_fn.score.scoring", "math_verify"} <= imported
    assert not imported & {"torch", "transformers", "tensorboard"}
