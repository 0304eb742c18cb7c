"""Verifications per second on published answers, and how often the verdict differs from plain math-verify.

python tools/bench/bench_rewards.py --data DIR [--rows 1000]

DIR holds gsm8k/ and math/. Every problem is answered three times: by its reference solution, by that with another
answer in its place, and without an answer. Prints a markdown table; all figures are of one run on this machine.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from math_verify import parse, verify

from grpo_fn.core.json_lines import json_rows
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards import math
from grpo_fn.rewards.format import last_box
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.tasks import gsm8k


class Row(NamedTuple):
    """A problem and one of its completions."""

    problem: Problem
    completion: Completion


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="with gsm8k/ and math/")
    parser.add_argument("--rows", type=int, default=1000, metavar="N", help="problems of each test set (default 1000)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; returns the exit code."""
    args = flags().parse_args(argv)
    print("| data | rows | " + " | ".join(name for name, _ in WAYS) + " | verdicts that differ from plain |")
    print("|---|---|" + "---|" * (len(WAYS) + 1))
    for name, read in SETS.items():
        rows = read(args.data, args.rows)
        rates, verdicts = [], []
        for _, way in WAYS:
            rate, found = way(rows)
            rates.append(rate)
            verdicts.append(found)
        odd = [(row, a, b) for row, a, b in zip(rows, verdicts[0], verdicts[1], strict=True) if a != b]
        cells = " | ".join(f"{rate:,.0f}/s ({rate / rates[0]:.1f}x)" for rate in rates)
        print(f"| {name} | {len(rows)} | {cells} | {len(odd)} |", flush=True)
        for row, plain, ours in odd[:5]:
            tail = row.completion.text[-60:]
            print(f"  gold {row.problem.answer!r}, text ends {tail!r}: plain {plain}, ours {ours}", file=sys.stderr)
    return 0


def gsm8k_rows(data: Path, count: int) -> list[Row]:
    """GSM8K's test set: the solution ends in `#### n`."""
    found = []
    for number, (_, row) in enumerate(islice(json_rows(data / "gsm8k" / "test.jsonl", wanted="a problem"), count)):
        gold, text = gsm8k.gsm8k_answer(row["answer"]), row["answer"]
        found += three(number, gold, text, text.replace("#### ", "#### 1"), text.partition("####")[0])
    return found


def math_rows(data: Path, count: int) -> list[Row]:
    """MATH's test set: the solution holds a box."""
    found = []
    for number, (_, row) in enumerate(islice(json_rows(data / "math" / "test.jsonl", wanted="a problem"), count)):
        text, gold = row["solution"], row["answer"]
        box = last_box(text) or gold
        other = text.replace(f"{{{box}}}", f"{{{box}+1}}")
        found += three(number, gold, text, other, re.sub(r"\\(?:boxed|fbox)", "", text))
    return found


def three(number: int, gold: str, *texts: str) -> list[Row]:
    """A problem with its three completions."""
    problem = Problem(number, "", gold, {})
    return [Row(problem, Completion(text, len(text) // 4, False)) for text in texts]


def timed(
    judge: Callable[[Sequence[Row]], list[float | None]], rows: Sequence[Row]
) -> tuple[float, list[float | None]]:
    """Rows per second, and the verdicts."""
    start = time.perf_counter()
    found = judge(rows)
    return len(rows) / (time.perf_counter() - start), found


def plain(rows: Sequence[Row]) -> tuple[float, list[float | None]]:
    """math-verify as its own documentation calls it: parse both texts with its time-outs, compare."""

    def judge(rows: Sequence[Row]) -> list[float | None]:
        return [float(verify(parse(f"\\boxed{{{row.problem.answer}}}"), parse(row.completion.text))) for row in rows]

    return timed(judge, rows)


def ours(rows: Sequence[Row]) -> tuple[float, list[float | None]]:
    """`correct` in a loop in this process, nothing cached before."""
    return timed(lambda rows: [math.correct(*row) for row in rows], rows)


def pooled(workers: int, rounds: int) -> Callable[[Sequence[Row]], tuple[float, list[float | None]]]:
    """`correct` in worker processes; the last of several rounds, so that later ones find the cache warm."""

    def judge(rows: Sequence[Row]) -> tuple[float, list[float | None]]:
        with RewardPool(workers=workers, timeout_per_completion=5.0, memory_mb=1024, stop_on_error=True) as pool:
            pool.score(math.correct, [rows[0].problem], [rows[0].completion])  # the workers' start is not measured
            problems, completions = zip(*rows, strict=True)
            for _ in range(rounds - 1):
                pool.score(math.correct, problems, completions)
            return timed(lambda _: pool.score(math.correct, problems, completions), rows)

    return judge


SETS = {"GSM8K test": gsm8k_rows, "MATH test": math_rows}
WAYS = (
    ("plain math-verify loop", plain),
    ("`correct` in a loop", ours),
    ("pool, 1 worker", pooled(1, 1)),
    ("pool, 2 workers", pooled(2, 1)),
    ("pool, 2 workers, cached", pooled(2, 2)),
)


if __name__ == "__main__":
    sys.exit(main())
