"""The bench runs, at a size at which its figures mean nothing."""

import json
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench
import bench_sides
import bench_trl_side
import bench_work
import pytest
from bench_sides import Measured
from e2e.running import finish
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.json_lines import json_rows

PEAK = 3e9
CELLS = Callable[..., list[list[str]]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> CELLS:
    """The cells of the table's rows."""

    def cells(*flags: str) -> list[list[str]]:
        assert bench.main(flags) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]

    return cells


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our program is forked from the server that has everything imported."""

    def watched(command: list[str], folder: Path, *, threads: int, deadline: float) -> float:
        assert command[:3] == [sys.executable, "-m", "grpo_fn.run"]
        assert finish(command[3:], folder / "log.txt", seconds=deadline) == 0, (folder / "log.txt").read_text()
        return PEAK

    monkeypatch.setattr(bench_sides, "watched", watched)


# -- against TRL


def noted(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What TRL's side writes when its steps take so long, by the code that runs there."""
    ends = accumulate(seconds, initial=5.0)
    monkeypatch.setattr(bench_trl_side, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    clock = bench_trl_side.step_clock(object)
    clock.on_train_begin(None, None, None)
    for _ in seconds:
        clock.on_step_end(None, None, None)
    logged = [{"loss": 0.0, "completions/mean_length": float(n + 1)} for n in range(len(seconds))]
    return bench_trl_side.record(clock.ends, [*logged, {"train_runtime": 1.0}], 8)


def test_what_trls_side_writes_is_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Measured(json.loads(json.dumps(noted([2.0, 4.0, 3.0], monkeypatch))), PEAK, {})
    assert theirs.of("seconds") == [2.0, 4.0, 3.0]
    assert theirs.of("length") == [1.0, 2.0, 3.0]
    assert theirs.rate() == 8 / 3
    faster = [{**step, "seconds": 1.0, "time/train": 0.5} for step in theirs.steps]
    ours = bench_sides.together([Measured(faster[:2], 1e9, {}), Measured(faster[2:], 0.5e9, {})])
    lines = [*bench.against(bench_work.SCALES["small"], ours, theirs), *bench.phases(ours)]
    assert "| completions per second, median step | 8.0 | 2.7 | 3.00x | at least 3.0x |" in lines
    assert "| peak memory, GB | 1.00 | 3.00 | 0.33x | at most 0.33x |" in lines
    assert "| share of a step | 50% |" in lines


def test_a_step_whose_length_trl_did_not_log_is_refused() -> None:
    with pytest.raises(ValueError, match="got lengths of 1 steps, expected those of 2"):
        bench_trl_side.record([0.0, 1.0, 2.0], [{"completions/mean_length": 3.0}], 8)


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6), st.integers(0, 1))
def test_the_evaluation_that_ends_a_run_of_ours_is_in_no_step(seconds: list[float], warm_up: int) -> None:
    lines = [
        {"time/total": s, "time/train": s / 2, "generation/rows": 8.0, "generation/tokens": 16.0}
        for s in [1.0, *seconds]
    ]
    plain = bench_sides.of_ours(dict(enumerate(lines)), warm_up, PEAK)
    lines[-1] |= {"time/total": seconds[-1] + 7.0, "time/evaluate": 7.0}
    judged = bench_sides.of_ours(dict(enumerate(lines)), warm_up, PEAK)
    assert plain.of("seconds") == seconds[warm_up:]
    assert judged.of("seconds") == pytest.approx(plain.of("seconds"))
    assert judged.of("time/train") == [s / 2 for s in seconds[warm_up:]]
    assert "time/evaluate" not in judged.steps[-1]
    assert judged.of("length") == [2.0] * len(plain.steps)


@pytest.mark.parametrize("scale", ["tiny", "calculator_tiny"])
def test_our_side_runs_and_the_table_is_made(
    scale: str, tmp_path: Path, printed: CELLS, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our program on the scale, completions or episodes; TRL's side is simulated."""

    def simulated(shared: dict[str, Any], folder: Path, *, warm_up: int, **settings: Any) -> Measured:
        rows = [json.loads(line) for line in Path(shared["prompts_file"]).read_text().splitlines()]
        assert len(rows) == shared["prompts"] * shared["steps"] + 1
        return Measured(noted([1.0] * shared["steps"], monkeypatch)[warm_up:], PEAK, {"trl": "1.16.0"})

    monkeypatch.setattr(bench_sides, "trl", simulated)
    out = tmp_path / "trl.md"
    small = ("--scale", scale, "--steps", "1", "--warm_up", "1", "--rounds", "1", "--trl_python", sys.executable)
    rows = {row[0]: row[1:] for row in printed(*small, "--timeout", "120", "--out", str(out))}
    ours, theirs, ratio, bar = rows["completions per second, median step"]
    assert theirs == "8.0"
    assert float(ours) > 0
    assert ratio.endswith("x")
    assert bar == ""
    assert float(rows["tokens of a completion, mean"][0]) <= bench_work.SCALES[scale].new_tokens
    assert "train" in rows["ours"]
    assert out.read_text().startswith(f"`python tools/bench --scale {scale}")


def test_prompts_of_random_words_have_as_many_tokens_as_the_work_says(tmp_path: Path) -> None:
    work = bench_work.SCALES["tiny"]._replace(prompt_tokens=12)
    shared = bench_work.make(work, 2, tmp_path)
    assert shared["prompt_tokens"] == 12
    assert len({line for _, line in enumerate(Path(shared["prompts_file"]).read_text().splitlines())}) == 5


@pytest.mark.slow
@pytest.mark.skipif(not bench.HOME.exists(), reason="no TRL here: python tools/bench makes .venv-trl")
def test_both_sides_run(printed: CELLS) -> None:
    rows = {row[0]: row[1:] for row in printed("--scale", "tiny", "--steps", "2", "--rounds", "1", "--threads", "1")}
    ours, theirs, *_ = rows["completions per second, median step"]
    assert float(ours) > 0
    assert float(theirs) > 0
    assert all(float(gigabytes) > 0.1 for gigabytes in rows["peak memory, GB"][:2])


def test_a_program_is_watched_until_it_ends(tmp_path: Path) -> None:
    """The most that it held, helpers included; and what it printed if it fails."""
    held, limits = 300_000_000, {"threads": 1, "deadline": 60.0}
    idle, busy = (
        bench_sides.watched([sys.executable, "-c", f"import time; {code}; time.sleep(.4)"], tmp_path, **limits)
        for code in ("pass", f"x = b'1' * {held}")
    )
    assert 0 < idle < busy - held / 2
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*so it is"):
        bench_sides.watched([sys.executable, "-c", "print('so it is'); exit(3)"], tmp_path, **limits)
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(TimeoutError, match="not over after 0 s"):
        bench_sides.watched(slow, tmp_path, threads=1, deadline=0.3)


def test_a_scale_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--scale", "tiny,huge"]) == 2
    assert "got huge, expected some of tiny, arithmetic, small, " in capsys.readouterr().err


def test_the_calculators_model_and_its_questions_are_made(tmp_path: Path) -> None:
    shared = bench_work.make(bench_work.SCALES["calculator_tiny"], 2, tmp_path)
    assert (Path(shared["model"]) / "config.json").exists()
    chats = list(json_rows(Path(shared["chats_file"]), expected="a chat"))
    assert len(chats) == 2 * shared["prompts"] + 1
    assert shared["max_turns"] == bench_work.MAX_TURNS
