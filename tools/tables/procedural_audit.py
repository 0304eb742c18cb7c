"""Audit every kind of procedural problem of reasoning-gym, and print the table of docs/tasks/procedural.md.

python tools/tables/procedural_audit.py

Of each kind some problems at the library's own settings are made by processes with different hash seeds and with
another state of Python's global generator, and put to `procedural_correct`: the right answer, answers that say nothing,
the right answer among other words. The last lines are AUDIT_FAILURES of grpo_fn/tasks/procedural.py.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise, product
from typing import Any, NamedTuple

from reasoning_gym.factory import create_dataset, get_score_answer_fn

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
    """What the audit found of one kind."""

    entries: list[str]  # digest of each problem
    distinct: float  # share of different questions
    own: float | None  # share of problems whose own answer is right; None: the kind states no answer
    guess: str  # the guess that solves most of those that it is no answer of, and the share
    guessed: float
    contained: float  # share that the answer among other words solves
    raised: bool  # whether the library's scorer raised on any of these
    make_seconds: float  # a problem, on the average
    score_seconds: float  # an answer, on the average


def flags() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="print what this process finds of these, as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; with --kinds, the findings of these kinds in this process, as JSON."""
    asked = flags().parse_args(argv)
    if asked.kinds:
        print("\n" + json.dumps({name: examine(name)._asdict() for name in asked.kinds}))
        return 0
    print(*table(audit(procedural.kinds())), sep="\n")
    return 0


def audit(kinds: Sequence[str]) -> dict[str, tuple[Findings, list[str]]]:
    """By kind, what its first process found and what fails; there is a process for each hash seed."""
    command = [sys.executable, __file__, "--kinds", *kinds]
    outputs = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=900
        )
        for seed in HASH_SEEDS
    ]
    # The last line: the library prints dots without a line end.
    found = [{k: Findings(**v) for k, v in json.loads(out.stdout.splitlines()[-1]).items()} for out in outputs]
    return {name: (found[0][name], failures(name, *(each[name] for each in found))) for name in kinds}


def examine(name: str) -> Findings:
    """The findings of one kind in this process."""
    random.seed(os.environ.get("PYTHONHASHSEED"))  # a kind that draws from the global generator differs by process
    started = time.process_time()
    entries = [procedural.make_entry(name, procedural.DEFAULT_LEVEL, seed) for seed in range(ITEMS)]
    made = (time.process_time() - started) / ITEMS
    answers = [entry["answer"] for entry in entries]
    problems = [Problem(i, x["question"], x["answer"] or "", {"entry": x}) for i, x in enumerate(entries)]
    started = time.process_time()
    own = [scores(problem, [problem.answer]) for problem in problems]
    scored = (time.process_time() - started) / ITEMS
    guesses = {text: share_solved(problems, text) for text in GUESSES}
    best = max(guesses, key=guesses.__getitem__)
    among = (
        [f"it may be {a} or not" for a in answers],
        [f"{a}, {b}" for a, b in pairwise(answers)],
    )
    contained = [scores(p, [x, *y]) for p, x, *y in zip(problems, *among, strict=False)]
    known = [score for score, answer in zip(own, answers, strict=True) if answer is not None]
    return Findings(
        entries=[digest(entry) for entry in entries],
        distinct=len({entry["question"] for entry in entries}) / ITEMS,
        own=sum(known) / len(known) if known else None,
        guess=best,
        guessed=guesses[best],
        contained=sum(contained) / len(contained),
        raised=raises(name, entries[:4]),
        make_seconds=made,
        score_seconds=scored,
    )


def scores(problem: Problem, answers: Sequence[str]) -> float:
    """The best verdict on any of the answers, each in a box."""
    boxes = (Completion(f"\\boxed{{{answer}}}", 1, False) for answer in answers)
    return max(procedural_correct(problem, box, answer_of=last_box) for box in boxes)


def share_solved(problems: Sequence[Problem], guess: str) -> float:
    """The share of problems that a guess solves, those whose answer it is apart."""
    others = [problem for problem in problems if problem.answer.strip().lower() != guess.lower()]
    return sum(scores(problem, [guess]) for problem in others) / max(1, len(others))


def raises(name: str, entries: Sequence[dict[str, Any]]) -> bool:
    """Whether the library's scorer raises on a guess."""
    score = get_score_answer_fn(name)
    for entry, guess in product(entries, GUESSES):
        try:
            score(guess, entry)
        except Exception:
            return True
    return False


def digest(entry: dict[str, Any]) -> str:
    """A hash of all that an entry says."""
    return blake2b(json.dumps(entry, sort_keys=True, default=repr).encode(), digest_size=8).hexdigest()


def failures(name: str, first: Findings, second: Findings) -> list[str]:
    """What fails, in words; nothing where a kind passes."""
    checks = {
        "another problem under another hash seed or state of the global generator": first.entries != second.entries,
        "another problem when its dataset has another size": not size_is_ignored(name),
        "states no answer of its own": first.own is None,
        f"its own answer is right on {first.own or 0:.0%} of its problems": first.own not in (None, 1.0),
        f"the answer {first.guess!r} solves {first.guessed:.0%} of what it is no answer to": first.guessed > LUCK,
        f"the answer among other words is right on {first.contained:.0%}": first.contained > 0,
        f"{first.distinct:.0%} of its questions are different": first.distinct < 0.5,
        f"a problem takes {first.make_seconds:.1f} s to make": first.make_seconds > SLOW,
        f"an answer takes {first.score_seconds:.1f} s to score": first.score_seconds > SLOW,
    }
    return [words for words, fails in checks.items() if fails]


def size_is_ignored(name: str) -> bool:
    """Whether item 0 is the same in a dataset of another size."""
    one, more = (create_dataset(name, seed=3, size=size)[0] for size in (1, 5))
    return digest(one) == digest(more)


def table(found: dict[str, tuple[Findings, list[str]]]) -> Iterator[str]:
    """The page's table, and AUDIT_FAILURES."""
    yield "| kind | passes | own answer right | best guess | among other words | scorer raises | different questions |"
    yield "|---|---|---|---|---|---|---|"
    for name, (x, failed) in found.items():
        own = "states none" if x.own is None else f"{x.own:.0%}"
        verdict = f"no: {'; '.join(failed)}" if failed else "yes"
        guess = f"`{x.guess}` {x.guessed:.0%}" if x.guessed else "0%"
        raised = "yes" if x.raised else ""
        yield f"| `{name}` | {verdict} | {own} | {guess} | {x.contained:.0%} | {raised} | {x.distinct:.0%} |"
    passed = sum(not failed for _, failed in found.values())
    yield ""
    yield f"{passed} of {len(found)} kinds pass. AUDIT_FAILURES = {{"
    yield from (f'    "{name}": "{"; ".join(failed)}",' for name, (_, failed) in found.items() if failed)
    yield "}"


if __name__ == "__main__":
    sys.exit(main())
