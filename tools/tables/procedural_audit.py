"""Audit of kinds of procedural problems of reasoning-gym: the table of docs/tasks/procedural.md.

Of each kind some problems at the library's own settings are made by processes with different hash seeds and with
another state of Python's global generator, and put to `procedural_correct`: the right answer, answers that say nothing,
the right answer among other words. What fails is AUDIT_FAILURES of grpo_fn/tasks/procedural.py, which a test holds to
the table.
"""

import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

from reasoning_gym.factory import create_dataset

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.format import last_box
from grpo_fn.rewards.procedural import procedural_correct
from grpo_fn.tasks import procedural

ITEMS = 24  # problems of each kind
HASH_SEEDS = ("1", "2")
# Answers that know nothing of the question. Each is wrong wherever the right answer is another text.
GUESSES = ("zzz", "0", "1", "-1", "True", "False", "Yes", "A", "None", "[]", "0 0", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10")
LUCK = 0.25  # share of problems that one guess may solve: some kinds have few different answers, or many right ones
SLOW = 2.0  # processor seconds that a problem may take to be made, or an answer to be scored, on the average


class Findings(NamedTuple):
    """What one process found of one kind."""

    entries: list[str]  # digest of each problem
    distinct: float  # share of different questions
    own: float | None  # share of problems whose own answer is right; None: the kind states no answer
    guess: str  # the guess that solves most of those that it is no answer of, and the share
    guessed: float
    contained: float  # share that the answer among other words solves
    make_seconds: float  # a problem, on the average
    score_seconds: float  # an answer, on the average


def table(_: str) -> str:
    """A line for every kind."""
    lines = [
        "| kind | passes | own answer right | best guess | among other words | different questions |",
        "|---|---|---|---|---|---|",
    ]
    for name, (x, failed) in audit(procedural.kinds()).items():
        own = "states none" if x.own is None else f"{x.own:.0%}"
        verdict = f"no: {'; '.join(failed)}" if failed else "yes"
        guess = f"`{x.guess}` {x.guessed:.0%}" if x.guessed else "0%"
        lines.append(f"| `{name}` | {verdict} | {own} | {guess} | {x.contained:.0%} | {x.distinct:.0%} |")
    return "\n".join(lines)


def audit(kinds: Sequence[str]) -> dict[str, tuple[Findings, list[str]]]:
    """By kind, what its first process found and what fails; there is a process for each hash seed."""
    found = []
    for seed in HASH_SEEDS:
        with patch.dict(os.environ, PYTHONHASHSEED=seed), ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found.append([*pool.map(examine, kinds)])
    return {name: (both[0], failures(name, *both)) for name, *both in zip(kinds, *found, strict=True)}


def examine(name: str) -> Findings:
    """The findings of one kind in this process."""
    random.seed(os.environ.get("PYTHONHASHSEED"))  # a kind that draws from the global generator differs by process
    started = time.process_time()
    entries = [procedural.make_entry(name, procedural.DEFAULT_LEVEL, seed) for seed in range(ITEMS)]
    made = (time.process_time() - started) / ITEMS
    answers = [entry["answer"] for entry in entries]
    problems = [Problem(i, x["question"], x["answer"] or "", {"entry": x}) for i, x in enumerate(entries)]
    started = time.process_time()
    own = [solved(problem, problem.answer) for problem in problems]
    scored = (time.process_time() - started) / ITEMS
    guesses = {text: share_solved(problems, text) for text in GUESSES}
    best = max(guesses, key=guesses.__getitem__)
    hedged = [(f"it may be {a} or not", f"{a}, {b}") for a, b in pairwise(answers)]
    contained = [max(solved(p, text) for text in texts) for p, texts in zip(problems, hedged, strict=False)]
    known = [score for score, answer in zip(own, answers, strict=True) if answer is not None]
    return Findings(
        entries=[digest(entry) for entry in entries],
        distinct=len({entry["question"] for entry in entries}) / ITEMS,
        own=sum(known) / len(known) if known else None,
        guess=best,
        guessed=guesses[best],
        contained=sum(contained) / len(contained),
        make_seconds=made,
        score_seconds=scored,
    )


def solved(problem: Problem, answer: str) -> float:
    """The verdict on an answer in a box."""
    return procedural_correct(problem, Completion(f"\\boxed{{{answer}}}", 1, False), answer_of=last_box)


def share_solved(problems: Sequence[Problem], guess: str) -> float:
    """The share of problems that a guess solves, those whose answer it is apart."""
    others = [problem for problem in problems if problem.answer.strip().lower() != guess.lower()]
    return sum(solved(problem, guess) for problem in others) / max(1, len(others))


def digest(entry: dict[str, Any]) -> str:
    """A hash of all that an entry says."""
    return blake2b(json.dumps(entry, sort_keys=True, default=repr).encode(), digest_size=8).hexdigest()


def failures(name: str, first: Findings, second: Findings) -> list[str]:
    """What fails, in words; nothing where a kind passes."""
    one, more = (create_dataset(name, seed=3, size=size)[0] for size in (1, 5))
    checks = {
        "another problem under another hash seed or state of the global generator": first.entries != second.entries,
        "another problem when its dataset has another size": digest(one) != digest(more),
        "states no answer of its own": first.own is None,
        f"its own answer is right on {first.own or 0:.0%} of its problems": first.own not in (None, 1.0),
        f"the answer {first.guess!r} solves {first.guessed:.0%} of what it is no answer to": first.guessed > LUCK,
        f"the answer among other words is right on {first.contained:.0%}": first.contained > 0,
        f"{first.distinct:.0%} of its questions are different": first.distinct < 0.5,
        f"a problem takes {first.make_seconds:.1f} s to make": first.make_seconds > SLOW,
        f"an answer takes {first.score_seconds:.1f} s to score": first.score_seconds > SLOW,
    }
    return [words for words, fails in checks.items() if fails]
