"""Sweeps: which trials there are, how they run beside one another and go on, and the table of their results."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from e2e.running import SMALL, TESTS, Forked, metrics
from hypothesis import given

from grpo_fn.lab import sweep as tool
from grpo_fn.lab import trials as running

BASE = ["--gin_file", "run/arithmetic.gin", "--gin_file", str(SMALL)]


def argv(cache: Path, out: Path, *flags: str) -> list[str]:
    """The small run, swept."""
    return [*BASE, "--gin_param", f"models.TinyModel.cache={str(cache)!r}", "--out", str(out), *flags]


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    return list(csv.DictReader(path.read_text().splitlines()))


def trials(*flags: str) -> list[running.Trial]:
    return tool.sweep_trials(tool.flags().parse_args(["--gin_file", "f", "--out", "o", *flags]))


@pytest.fixture(autouse=True)
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials are processes that find the rewards of these tests; two at a time would not share one core."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# Which trials there are -----------------------------------------------------------------------------------------------

words = st.text("abc019.-", min_size=1, max_size=4)


@given(st.lists(words, min_size=1, max_size=4, unique=True), st.lists(words, min_size=1, max_size=3, unique=True))
def test_a_grid_is_every_pair_once(rates, seeds) -> None:
    points = trials("--grid", f"optimizer.adamw.lr={','.join(rates)}", "--grid", f"SEED={','.join(seeds)}")
    pairs = [(one.values["optimizer.adamw.lr"], one.values["SEED"]) for one in points]
    assert sorted(pairs) == sorted((rate, seed) for rate in rates for seed in seeds)
    assert len({one.name for one in points}) == len(points)


@given(st.lists(words, min_size=1, max_size=5))
def test_commas_within_brackets_and_quotes_do_not_part_a_value(parts) -> None:
    values = [f"({part}, [{part},1])" for part in parts] + ["'a,b'"]
    assert tool.split_values(",".join(values)) == values


@given(st.integers(1, 6))
def test_a_wider_search_has_the_trials_of_the_narrower_one(count) -> None:
    flags = ["--random", "a.b.c=loguniform(1e-4,1e-1)", "--random", "a.b.d=choice(x,(1,2))", "--grid", "SEED=0,1"]
    narrow, wide = (trials(*flags, "--trials", str(n)) for n in (count, count + 3))
    assert [one.name for one in narrow] == [one.name for one in wide][: len(narrow)]
    assert len(narrow) == 2 * count


@given(st.floats(1e-6, 1.0), st.floats(1.01, 100.0), st.text(max_size=5))
def test_draws_stay_within_their_bounds(low, times, seed) -> None:
    high = low * times
    for kind in ("uniform", "loguniform"):
        assert low * 0.999 <= float(tool.draw_value(f"{kind}({low!r},{high!r})", seed)) <= high * 1.001
    assert int(tool.draw_value("integer(-3,4)", seed)) in range(-3, 5)
    assert tool.draw_value("choice(@a.b, [1,2])", seed) in ("@a.b", "[1,2]")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "got neither --grid nor --random"),
        (["--grid", "SEED"], "got 'SEED', expected NAME=..."),
        (["--grid", "SEED=1", "--random", "SEED=integer(0,5)"], "expected each name once in --grid and --random"),
        (["--grid", "SEED=0,1", "--trials", "3"], "--trials: got 3 without --random"),
        (["--random", "SEED=normal(0,1)"], "--random: got 'normal(0,1)', expected uniform"),
        (["--grid", "SEED=1", "--grid", "optimizer.adamw.learning=1"], "expected one of"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(flags, complaint, tmp_path, capsys) -> None:
    assert tool.main(argv(tmp_path, tmp_path / "out", *flags)) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert complaint in said
    assert not (tmp_path / "out").exists()


def test_a_dry_run_names_the_trials_and_makes_nothing(tmp_path, capsys) -> None:
    assert tool.main(argv(tmp_path, tmp_path / "out", "--grid", "SEED=0,1", "--dry_run")) == 0
    assert "2 trials, 1 at a time" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_version_is_one_line_that_says_what_to_do(tmp_path, capsys) -> None:
    (tmp_path / tool.SPEC).write_text('{"gin_files": [], "gin_params": [], "trials": [{"title": "a"}]}')
    assert tool.main(["--report", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / tool.SPEC) in line
    assert "take another --out" in line


# What is made of the results ------------------------------------------------------------------------------------------


def outcomes(values: dict[tuple[str, str], float]) -> list[tool.TrialOutcome]:
    return [
        tool.TrialOutcome(tool.sweep_trial({"lr": rate, "SEED": seed}), "done" if value == value else "failed", value)
        for (rate, seed), value in values.items()
    ]


scores = st.floats(0.0, 1.0) | st.just(float("nan"))


@given(st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from("0123")), scores, min_size=1), st.booleans())
def test_a_setting_is_its_seeds_together_and_the_best_comes_first(values, lowest) -> None:
    found = tool.settings_by_score(outcomes(values), lowest)
    for one in found:
        mine = [v for (rate, _), v in values.items() if rate == one.values["lr"]]
        assert sorted(one.scores) == sorted(v for v in mine if v == v)
        assert one.missing == sum(v != v for v in mine)
        assert "SEED" not in one.values
    means = [one.mean for one in found if one.scores]
    assert means == sorted(means, reverse=not lowest)
    assert [bool(one.scores) for one in found] == sorted((bool(one.scores) for one in found), reverse=True)


# Running them ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trials_run_beside_one_another_a_failure_stops_none_and_a_second_call_repeats_none(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials are forked; those of the next test are what the tool itself starts."""
    monkeypatch.setattr(running, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))
    cache, out = tmp_path / "models", tmp_path / "sweep"  # other tests count the models in theirs
    cache.mkdir()
    flags = ["--grid", "SEED=0,1", "--grid", "sections.Compute.device='cpu','nowhere'"]
    flags += ["--jobs", "2", "--gin_param", "STEPS=2"]
    assert tool.main(argv(cache, out, *flags)) == 1
    said = capsys.readouterr()
    assert said.err.count(": done") == 2
    assert said.err.count("failed with exit code 2") == 2
    assert "got device 'nowhere'" in said.err  # its last lines
    rows = read(out / "table.csv")
    assert [(row["sections.Compute.device"], row["n"], row["missing"]) for row in rows] == [
        ("'cpu'", "2", "0"),
        ("'nowhere'", "0", "2"),
    ]
    each = read(out / "trials.csv")
    done = [row for row in each if row["state"] == "done"]
    last = [metrics(out / "trials" / row["trial"])[-1]["eval/accuracy"] for row in done]
    assert [float(row["eval/accuracy"]) for row in done] == last
    assert float(rows[0]["mean"]) == pytest.approx(sum(last) / 2, abs=1e-3)
    table = (out / "table.md").read_text()
    assert "| SEED |" not in table
    assert "| `sections.Compute.device`" not in table
    assert "| `'cpu'` |" in table
    assert "&" not in table

    stamps = {row["trial"]: (out / "trials" / row["trial"] / "summary.json").stat().st_mtime_ns for row in done}
    assert tool.main(["--report", "--out", str(out), "--metric", "reward/mean", "--lowest"]) == 1
    assert "reward/mean at the end, lowest mean first" in capsys.readouterr().out
    assert tool.main(["--report", "--out", str(out), "--metric", "reward/meen"]) == 2
    assert "--metric: got reward/meen, which no finished trial has" in capsys.readouterr().err
    assert tool.main(argv(cache, out, *flags)) == 1
    assert {n: (out / "trials" / n / "summary.json").stat().st_mtime_ns for n in stamps} == stamps
    assert capsys.readouterr().err.count(": started") == 2  # those that failed, once more

    assert tool.main(argv(cache, out, *flags, "--gin_param", "STEPS=3")) == 2
    assert "expected the same" in capsys.readouterr().err


@pytest.mark.slow
def test_sigterm_reaches_the_trials_and_the_same_command_goes_on(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    flags = ["--grid", "SEED=0", "--gin_param", "STEPS=60", "--gin_param", "sections.Checkpoints.every=400"]
    command = [sys.executable, "-m", "grpo_fn.lab.sweep", *argv(cache, out, *flags)]
    with open(tmp_path / "out", "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while not list(out.glob("trials/*/eval/step_2.jsonl")):
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            assert process.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, (tmp_path / "out").read_text()
    finally:
        process.kill()
    (run,) = [path for path in (out / "trials").iterdir() if path.is_dir()]
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved
    assert not (run / "summary.json").exists()
    (row,) = read(out / "trials.csv")
    assert row["state"] == "unfinished"
    sweep = json.loads((out / "sweep.json").read_text())
    assert [one["values"] for one in sweep["trials"]] == [{"SEED": "0"}]
    assert tool.main(argv(cache, out, *flags)) == 0
    assert "resumed after step" in (run / "log.txt").read_text()
    assert [row["step"] for row in metrics(run)] == list(range(61))
