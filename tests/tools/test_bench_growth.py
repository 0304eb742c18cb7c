"""How a step grows, measured at a size at which the figures mean nothing."""

import argparse

import bench_flags
import bench_growth
import pytest
from bench_growth import Point, Taken


def test_there_is_a_row_for_each_point_and_a_verdict_on_each_table() -> None:
    parser = argparse.ArgumentParser()
    bench_flags.add_growth_flags(parser)
    args = parser.parse_args(["--size", "tiny", "--completions", "8,16", "--lengths", "2,4", "--steps", "1"])
    printed = list(bench_growth.growth(args))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed if line.startswith("| ")]
    heads, rows = cells[::3], [cells[1:3], cells[4:]]
    assert [head[0] for head in heads] == ["completions", "length"]
    assert [[row[0] for row in each] for each in rows] == [["8", "16"], ["2", "4"]]
    assert all(float(cell.removesuffix(" s")) > 0 for each in rows for row in each for cell in row[1:3])
    shares = [int(share.removesuffix("%")) for share in rows[1][1][3].split(", ")]  # at this size one may round to 0
    assert sum(shares) > 0
    assert all(0 <= share < 100 for share in shares)
    assert [line.split(" within")[0] for line in printed if "within" in line] == [
        "Linear in completions",
        "Linear in length",
    ]


@pytest.mark.parametrize(("slow", "said"), [(1.0, "passed (1.00x to 1.00x"), (1.3, "FAILED (1.00x to 1.30x")])
def test_a_point_that_takes_longer_a_token_than_the_median_fails(slow: float, said: str) -> None:
    points = [Point(n, 4) for n in (8, 16, 32)]
    found = {p: Taken(1.0 * p.completions, 2.0 * p.completions, 4 * p.completions, (0.5, 0.0)) for p in points}
    found[points[2]] = found[points[2]]._replace(sample=32 * slow, train=64 * slow)
    assert said in list(bench_growth.table("completions", points, found, apart=False))[-1]


def test_attention_is_taken_out_of_what_has_to_be_linear_in_length() -> None:
    points = [Point(8, n) for n in (4, 8, 16)]
    found = {p: Taken(1.0 * p.length, 1.0 * p.length, 8 * p.length, (0.0, 0.0)) for p in points}
    found[points[2]] = Taken(32.0, 16.0, 128, (0.5, 0.0))
    verdicts = [list(bench_growth.table("length", points, found, apart=apart))[-1] for apart in (False, True)]
    assert ["FAILED" in verdict for verdict in verdicts] == [True, False]
