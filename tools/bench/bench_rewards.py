"""Verifications a second on published answers, and how often the verdict differs from plain math-verify.

Every problem is answered three times: by its reference solution, by that with another answer in its place, and without
an answer.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from bench import table
from math_verify import parse, verify

from grpo_fn.core.json_lines import json_rows
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards import math
from grpo_fn.rewards.format import last_box
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.tasks import gsm8k

Row = tuple[Problem, Completion]
Judged = tuple[float, list[float | None]]  # rows a second, verdicts


def rewards(args: argparse.Namespace) -> Iterator[str]:
    """A row for each test set; verdicts that differ go to stderr, five of each set."""
    rows = []
    for name, answers in ANSWERS.items():
        judged, verdicts = answered(args.data / name / "test.jsonl", args.rows, answers), []
        rates = []
        for way in WAYS.values():
            rate, of_way = way(judged)
            rates.append(rate)
            verdicts.append(of_way)
        odd = [(row, a, b) for row, a, b in zip(judged, verdicts[0], verdicts[1], strict=True) if a != b]
        for (problem, completion), plain, ours in odd[:5]:
            end = completion.text[-60:]
            print(f"  gold {problem.answer!r}, text ends {end!r}: plain {plain}, ours {ours}", file=sys.stderr)
        cells = [f"{rate:,.0f}/s ({rate / rates[0]:.1f}x)" for rate in rates]
        rows.append((f"{name} test", str(len(judged)), *cells, str(len(odd))))
    yield from table(("data", "rows", *WAYS, "verdicts that differ from plain"), rows)


def answered(path: Path, count: int, answers: Callable[[dict[str, str]], tuple[str, ...]]) -> list[Row]:
    """So many problems of a test set, each with three completions."""
    rows: list[Row] = []
    for number, (_, row) in enumerate(islice(json_rows(path, wanted="a problem"), count)):
        gold, *texts = answers(row)
        problem = Problem(number, "", gold, {})
        rows += [(problem, Completion(text, len(text) // 4, False)) for text in texts]
    return rows


def gsm8k_answers(row: dict[str, str]) -> tuple[str, ...]:
    """The gold answer and three texts: the solution ends in `#### n`."""
    text = row["answer"]
    return gsm8k.gsm8k_answer(text), text, text.replace("#### ", "#### 1"), text.partition("####")[0]


def math_answers(row: dict[str, str]) -> tuple[str, ...]:
    """The gold answer and three texts: the solution holds a box."""
    text, gold = row["solution"], row["answer"]
    box = last_box(text) or gold
    return gold, text, text.replace(f"{{{box}}}", f"{{{box}+1}}"), re.sub(r"\\(?:boxed|fbox)", "", text)


def timed(judge: Callable[[Sequence[Row]], list[float | None]], rows: Sequence[Row]) -> Judged:
    """Rows a second, and the verdicts."""
    begun = time.perf_counter()
    verdicts = judge(rows)
    return len(rows) / (time.perf_counter() - begun), verdicts


def plain(rows: Sequence[Row]) -> list[float | None]:
    """math-verify as its own documentation calls it: parse both texts with its time-outs, compare."""
    return [
        float(verify(parse(f"\\boxed{{{problem.answer}}}"), parse(completion.text))) for problem, completion in rows
    ]


def ours(rows: Sequence[Row]) -> list[float | None]:
    """`correct` in a loop in this process, nothing cached before."""
    return [math.correct(*row) for row in rows]


def pooled(rows: Sequence[Row], *, workers: int, rounds: int) -> Judged:
    """`correct` in worker processes; the last of several rounds, so that later ones find the cache warm."""
    with RewardPool(workers=workers, timeout_per_completion=5.0, memory_mb=1024, stop_on_error=True) as pool:
        problems, completions = zip(*rows, strict=True)
        pool.score(math.correct, problems[:1], completions[:1])  # the workers' start is not measured
        for _ in range(rounds - 1):
            pool.score(math.correct, problems, completions)
        return timed(lambda _: pool.score(math.correct, problems, completions), rows)


ANSWERS = {"gsm8k": gsm8k_answers, "math": math_answers}
WAYS: dict[str, Callable[[Sequence[Row]], Judged]] = {
    "plain math-verify loop": partial(timed, plain),
    "`correct` in a loop": partial(timed, ours),
    "pool, 1 worker": partial(pooled, workers=1, rounds=1),
    "pool, 2 workers": partial(pooled, workers=2, rounds=1),
    "pool, 2 workers, cached": partial(pooled, workers=2, rounds=2),
}
