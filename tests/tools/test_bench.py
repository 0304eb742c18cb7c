"""The bench runs, at a size at which its figures mean nothing, and makes its figures of what both sides noted."""

import json
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench
import bench_trl_side
import bench_work
import pytest
from bench import Measured
from e2e.running import finish

PEAK = 3e9


def trl_steps(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What TRL's side writes when its steps take so long, by the code that runs there."""
    ends = accumulate(seconds, initial=5.0)
    monkeypatch.setattr(bench_trl_side, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    clock = bench_trl_side.step_clock(object)
    clock.on_train_begin(None, None, None)
    for _ in seconds:
        clock.on_step_end(None, None, None)
    logged = [{"loss": 0.0, "completions/mean_length": float(n + 1)} for n in range(len(seconds))]
    return bench_trl_side.record(clock.ends, [*logged, {"train_runtime": 1.0}], 8)


def test_the_table_shows_figures_that_the_trl_side_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Measured(json.loads(json.dumps(trl_steps([2.0, 4.0, 3.0], monkeypatch))), PEAK, {})
    assert (theirs.of("seconds"), theirs.of("length"), theirs.rate()) == ([2.0, 4.0, 3.0], [1.0, 2.0, 3.0], 8 / 3)
    faster = [{**step, "seconds": 1.0, "time/train": 0.5} for step in theirs.steps]
    ours = bench.together([Measured(faster[:2], 1e9, {}), Measured(faster[2:], 0.5e9, {})])
    lines = [*bench.against(bench_work.SCALES["small"], ours, theirs), *bench.phases(ours)]
    assert "| completions per second, median step | 8.0 | 2.7 | 3.00x | at least 3.0x |" in lines
    assert "| peak memory, GB | 1.00 | 3.00 | 0.33x | at most 0.33x |" in lines
    assert "| share of a step | 50% |" in lines
    with pytest.raises(ValueError, match="got lengths of 1 steps, expected those of 2"):
        bench_trl_side.record([0.0, 1.0, 2.0], [{"completions/mean_length": 3.0}], 8)


def test_the_evaluation_that_ends_a_run_of_ours_is_in_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"generation/rows": 8.0, "generation/tokens": 16.0}
    lines = {n: {"time/total": s, "time/train": s / 2, **rows} for n, s in enumerate([9.0, 1.0, 2.0, 3.0])}
    lines[3] |= {"time/total": 10.0, "time/evaluate": 7.0}
    monkeypatch.setattr(bench, "WARM_UP", 1)
    ours = bench.of_ours(lines, PEAK)
    assert (ours.of("seconds"), ours.of("time/train"), ours.of("length")) == ([2.0, 3.0], [1.0, 1.5], [2.0, 2.0])


@pytest.mark.slow
def test_our_side_runs_and_the_page_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our program is forked from the server that has everything imported; TRL's side is simulated."""

    def watched(command: list[str], folder: Path, *, threads: int) -> float:
        assert command[:3] == [sys.executable, "-m", "grpo_fn.run"]
        assert finish(command[3:], folder / "log.txt", seconds=120) == 0, (folder / "log.txt").read_text()
        return PEAK

    def simulated(shared: dict[str, Any], folder: Path, **settings: Any) -> Measured:
        rows = Path(shared["prompts_file"]).read_text().splitlines()
        assert len({*rows}) == shared["prompts"] * shared["steps"] + 1
        return Measured(trl_steps([1.0] * shared["steps"], monkeypatch)[bench.WARM_UP :], PEAK, {"trl": "1.16.0"})

    monkeypatch.setattr(bench, "watched", watched)
    monkeypatch.setattr(bench, "trl", simulated)
    monkeypatch.setitem(bench_work.SCALES, "tiny", bench_work.SCALES["tiny"]._replace(prompt_tokens=12))
    monkeypatch.setattr(bench, "WARM_UP", 1)
    flags = ["--scale", "tiny", "--steps", "1", "--rounds", "1", "--trl_python", sys.executable]
    assert bench.main([*flags, "--out", str(tmp_path / "trl.md")]) == 0
    page = (tmp_path / "trl.md").read_text()
    assert page.startswith("`python tools/bench --scale tiny")
    assert "after prompts of 12.0" in page
    assert " | 8.0 | " in next(line for line in page.splitlines() if line.startswith("| completions per second"))
    assert page == capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not bench.HOME.exists(), reason="no TRL here: python tools/bench makes .venv-trl")
def test_both_sides_run(tmp_path: Path) -> None:
    page = tmp_path / "trl.md"
    assert bench.main(["--scale", "tiny", "--steps", "2", "--rounds", "1", "--threads", "1", "--out", str(page)]) == 0
    (row,) = [line for line in page.read_text().splitlines() if line.startswith("| peak memory, GB")]
    assert all(float(gigabytes) > 0.1 for gigabytes in row.split(" | ")[1:3])


def test_a_program_is_watched_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that it held; and what it printed if it fails or takes too long."""
    size = 300_000_000
    idle, busy = (
        bench.watched([sys.executable, "-c", f"import time; {code}; time.sleep(.4)"], tmp_path, threads=1)
        for code in ("pass", f"x = b'1' * {size}")
    )
    assert 0 < idle < busy - size / 2
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*so it is"):
        bench.watched([sys.executable, "-c", "print('so it is'); exit(3)"], tmp_path, threads=1)
    monkeypatch.setattr(bench, "DEADLINE", 0.3)
    with pytest.raises(TimeoutError, match="not over after 0 s"):
        bench.watched([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, threads=1)


def test_a_scale_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--scale", "tiny,huge"]) == 2
    assert "got huge, expected some of tiny, arithmetic, small, " in capsys.readouterr().err
