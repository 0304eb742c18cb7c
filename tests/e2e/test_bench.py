"""The bench runs, at a size at which its figures mean nothing."""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crew import crew

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import bench


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[list[str]]]:
    """The cells of the table's rows."""

    def cells(what: str, *flags: str) -> list[list[str]]:
        assert bench.main([what, "--size", "tiny", "--steps", "1", *flags]) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]

    return cells


def test_scaling_has_a_row_for_each_number_of_ranks(
    printed: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks are started as ever; one is there already."""
    start = bench.started

    def started(args: argparse.Namespace, ranks: int, model: Path, out: Path) -> dict[str, Any]:
        if ranks > 1:
            return start(args, ranks, model, out)
        args.model = model
        (found,) = crew(ranks).run(bench.scaling, args)
        return found

    monkeypatch.setattr(bench, "started", started)
    one, two = printed("scaling", "--ranks", "1,2")
    assert [one[0], two[0]] == ["1", "2"]
    assert one[1].endswith("(1.00x)")
    assert one[3] == "0%"
    assert re.fullmatch(r"\d+%", two[3])
    assert int(two[3][:-1]) > 0, "two ranks have something to tell each other"


@pytest.mark.slow
def test_a_checkpoint_costs_a_step_something(printed: Callable[..., list[list[str]]]) -> None:
    ((ranks, _, plain, waiting, beside, lost),) = printed("checkpoint")
    assert ranks == "1"
    assert plain.endswith(" s")
    assert waiting.endswith("x)")
    assert beside.endswith("x)")
    assert re.fullmatch(r"-?\d+%", lost)
