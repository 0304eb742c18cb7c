"""Benches of episodes, run at a size at which their figures mean nothing."""

import argparse
from pathlib import Path

import bench_calculator
import bench_flags
import bench_turns
import bench_work
import pytest
from bench_turns import Taken

from grpo_fn.core.json_lines import json_rows


def flags(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_flags.add_turn_flags(parser)
    return parser.parse_args(argv)


def test_there_is_a_row_for_each_number_of_turns_and_a_verdict() -> None:
    printed = list(bench_turns.turns(flags("--size", "tiny", "--turns", "1,3", "--episodes", "8", "--steps", "1")))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed if line.startswith("| ")][1:]
    assert [float(row[0]) for row in rows] == [1.0, 3.0]
    assert float(rows[1][1]) > float(rows[0][1])
    assert all(float(cell) > 0 for row in rows for cell in row[2:4])
    assert printed[-1].startswith("Farthest off the line: 0%")  # of two points


@pytest.mark.parametrize(("last", "said"), [(5.0, "0%, bar 15%: passed"), (9.0, "FAILED")])
def test_a_number_of_turns_that_is_off_the_line_fails(last: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Taken(n, 8.0 * n, seconds, 0.0, (0.0, 0.0), 0.0) for n, seconds in ((1.0, 2.0), (2.0, 3.0), (4.0, last))]
    monkeypatch.setattr(bench_turns, "measured", lambda numbers, args: found)
    assert said in list(bench_turns.turns(flags("--turns", "1,2,4")))[-1]


def test_the_calculators_model_and_its_questions_are_made(tmp_path: Path) -> None:
    shared = bench_work.make(bench_work.SCALES["calculator_tiny"], 2, tmp_path)
    assert (Path(shared["model"]) / "config.json").exists()
    chats = list(json_rows(Path(shared["chats_file"]), wanted="a chat"))
    assert len(chats) == 2 * shared["prompts"] + 1
    assert shared["max_turns"] == bench_calculator.MAX_TURNS
