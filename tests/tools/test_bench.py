"""The benches run, at a size at which their figures mean nothing."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench
import bench_rank
import bench_ranks
import bench_sides
import bench_trl
import bench_trl_side
import bench_work
import pytest
from crew import crew
from e2e.running import finish
from hypothesis import given
from hypothesis import strategies as st

USED = bench_sides.Used(peak=3e9, before=1e9, processor=12.0)
CELLS = Callable[..., list[list[str]]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> CELLS:
    """The cells of the table's rows."""

    def cells(what: str, *flags: str) -> list[list[str]]:
        assert bench.main([what, *flags]) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]

    return cells


def test_scaling_has_a_row_for_each_number_of_ranks(printed: CELLS, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are started as ever; one is there already."""
    start = bench_ranks.started

    def started(args: argparse.Namespace, ranks: int, model: Path, out: Path) -> dict[str, Any]:
        if ranks > 1:
            return start(args, ranks, model, out)
        args.model = model
        (found,) = crew(ranks).run(bench_rank.scaling, args)
        return found

    monkeypatch.setattr(bench_ranks, "started", started)
    one, two = printed("scaling", "--size", "tiny", "--steps", "1", "--ranks", "1,2")
    assert [one[0], two[0]] == ["1", "2"]
    assert one[1].endswith("(1.00x)")
    assert one[3] == "0%"
    assert re.fullmatch(r"\d+%", two[3])
    assert int(two[3][:-1]) > 0, "two ranks have something to exchange"


@pytest.mark.slow
def test_a_checkpoint_costs_a_step_something(printed: CELLS) -> None:
    ((ranks, _, plain, waiting, beside, lost),) = printed("checkpoint", "--size", "tiny", "--steps", "1")
    assert ranks == "1"
    assert plain.endswith(" s")
    assert waiting.endswith("x)")
    assert beside.endswith("x)")
    assert re.fullmatch(r"-?\d+%", lost)


# -- against TRL


class Callback:
    """As much of a trainer's callback as the side script needs."""


def noted(path: Path, seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What TRL's side writes when its steps take so long, by the code that runs there."""
    ends = iter([5.0, *accumulate(seconds, initial=5.0)][1:])
    monkeypatch.setattr(bench_trl_side, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    seen = bench_trl_side.noting(Callback)(path)
    seen.on_train_begin(None, None, None)
    assert json.loads(path.read_text()) == bench_trl_side.BEGUN
    for _ in seconds:
        seen.on_step_end(None, None, None)
    logged = [{"loss": 0.0, "completions/mean_length": float(n + 1)} for n in range(len(seconds))]
    return bench_trl_side.record(seen.ends, [*logged, {"train_runtime": 1.0}], 8, {"trl": "1.16.0"})


def test_what_trls_side_writes_is_what_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads(json.dumps(noted(tmp_path / "out.json", [9.0, 2.0, 4.0, 3.0], monkeypatch)))
    theirs = bench_sides.of_trl(record, 1, USED)
    assert theirs.seconds == [2.0, 4.0, 3.0]
    assert theirs.length == [2.0, 3.0, 4.0]
    assert theirs.rate() == 8 / 3
    assert theirs.processor == 12.0 / 4
    ours = theirs._replace(
        seconds=[1.0, 1.0, 1.0], used=bench_sides.Used(1e9, 0.5e9, 1.0), phases={"time/train": [0.5] * 3}
    )
    lines = [*bench_trl.against(bench_trl.BARS["small"], ours, theirs), *bench_trl.phases(ours)]
    assert "| completions per second, median step | 8.0 | 2.7 | 3.00x | at least 3.0x |" in lines
    assert "| peak memory, GB | 1.00 | 3.00 | 0.33x | at most 0.33x |" in lines
    assert "| of which above what it held before the first step, GB | 0.50 | 2.00 | 0.25x |  |" in lines
    assert "| share of a step | 50% |" in lines


def test_a_step_whose_length_trl_did_not_log_is_refused() -> None:
    with pytest.raises(ValueError, match="got lengths of 1 steps, wanted those of 2"):
        bench_trl_side.record([0.0, 1.0, 2.0], [{"completions/mean_length": 3.0}], 8, {})


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6), st.integers(0, 1))
def test_the_evaluation_that_ends_a_run_of_ours_is_in_no_step(seconds: list[float], warm_up: int) -> None:
    lines = [
        {"time/total": s, "time/train": s / 2, "generation/rows": 8.0, "generation/tokens": 16.0}
        for s in [1.0, *seconds]
    ]
    plain = bench_sides.of_ours(dict(enumerate(lines)), warm_up, USED)
    lines[-1] |= {"time/total": seconds[-1] + 7.0, "time/evaluate": 7.0}
    judged = bench_sides.of_ours(dict(enumerate(lines)), warm_up, USED)
    assert plain.seconds == seconds[warm_up:]
    assert judged.seconds == pytest.approx(plain.seconds)
    assert judged.phases == {"time/train": [s / 2 for s in seconds[warm_up:]]}
    assert judged.length == [2.0] * len(plain.seconds)


def test_our_side_runs_and_the_table_is_made(tmp_path: Path, printed: CELLS, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our program on the tiny scale, forked from the server that has everything imported; TRL's side is simulated."""

    def forked(command: list[str], folder: Path, begun: Path, *, threads: int, deadline: float) -> bench_sides.Used:
        assert command[:3] == [sys.executable, "-m", "grpo_fn.run"]
        assert finish(command[3:], folder / "log.txt", seconds=deadline) == 0, (folder / "log.txt").read_text()
        assert begun.exists()
        return USED

    def simulated(shared: dict[str, Any], folder: Path, *, warm_up: int, **settings: Any) -> bench_sides.Measured:
        rows = [json.loads(line) for line in Path(shared["prompts_file"]).read_text().splitlines()]
        assert len(rows) == shared["prompts"] * shared["steps"] + 1
        folder.mkdir()
        return bench_sides.of_trl(noted(folder / "out.json", [1.0] * shared["steps"], monkeypatch), warm_up, USED)

    monkeypatch.setattr(bench_sides, "watched", forked)
    monkeypatch.setattr(bench_sides, "trl", simulated)
    out = tmp_path / "trl.md"
    tiny = ("--scale", "tiny", "--steps", "1", "--warm_up", "1", "--rounds", "1", "--trl_python", sys.executable)
    rows = {row[0]: row[1:] for row in printed("trl", *tiny, "--timeout", "120", "--out", str(out))}
    ours, theirs, ratio, bar = rows["completions per second, median step"]
    assert theirs == "8.0"
    assert float(ours) > 0
    assert ratio.endswith("x")
    assert bar == ""
    assert float(rows["tokens of a completion, mean"][0]) <= bench_work.SCALES["tiny"].new_tokens
    assert "train" in rows["ours"]
    assert out.read_text().startswith("`python tools/bench trl --scale tiny")


@pytest.mark.slow
@pytest.mark.skipif(not bench_trl.HOME.exists(), reason="no TRL here: python tools/bench trl makes .venv-trl")
def test_both_sides_run(printed: CELLS) -> None:
    rows = {
        row[0]: row[1:] for row in printed("trl", "--scale", "tiny", "--steps", "2", "--rounds", "1", "--threads", "1")
    }
    ours, theirs, *_ = rows["completions per second, median step"]
    assert float(ours) > 0
    assert float(theirs) > 0
    assert all(float(gigabytes) > 0.1 for gigabytes in rows["peak memory, GB"][:2])


def test_a_program_is_watched_until_it_ends(tmp_path: Path) -> None:
    """What it held before it said that it begins, and the most that it held later; and what it printed if it fails."""
    begun, held = tmp_path / "begun", 300_000_000
    begin = f"from time import sleep; from pathlib import Path; sleep(.5); Path({str(begun)!r}).touch(); sleep(.5); "
    limits = {"threads": 1, "deadline": 60.0}
    used = bench_sides.watched(
        [sys.executable, "-c", begin + f"x = b'1' * {held}; sleep(.2)"], tmp_path, begun, **limits
    )
    assert 0 < used.before < used.peak - held / 2
    assert 0 <= used.processor < 5
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*so it is"):
        bench_sides.watched([sys.executable, "-c", "print('so it is'); exit(3)"], tmp_path, begun, **limits)
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(TimeoutError, match="not over after 0 s"):
        bench_sides.watched(slow, tmp_path, begun, threads=1, deadline=0.3)


def test_a_scale_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["trl", "--scale", "tiny,huge"]) == 2
    assert (
        "got huge, wanted some of tiny, arithmetic, calculator_tiny, calculator, calculator_described, "
        "calculator_card, small" in capsys.readouterr().err
    )
