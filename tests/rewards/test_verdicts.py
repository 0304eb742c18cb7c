"""The judges against verdicts that were decided by hand: `verdicts.jsonl`, both directions of every class.

A row is `class`, `gold`, `completion`, whether it is `right`, which `judges` it is for (both, or one of them) and its
`part`: the judges were mended on "seen", while "apart" and "later" were measured before anything was changed for them;
"strangers" are answers as public completions spell them, and attacks, of which some have the `prompt` that they answer.
`python tests/rewards/test_verdicts.py` prints the table.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.math import correct, lenient

ROWS = [json.loads(line) for line in (Path(__file__).parent / "verdicts.jsonl").read_text("utf-8").splitlines()]
JUDGES = {"math": correct, "lenient": lenient}
SLOWEST = 5.0  # seconds of the processor for a row
# A right answer that is refused: the square of a name as the name of a sum of squares.
MISSED = {("a^2+b^2", "This gives $c^2 = a^2 + b^2$")}


def judged(rows):
    """(row, judge, is it accepted, seconds) for each row and each judge that it is for."""
    for row in rows:
        for name in JUDGES if row["judges"] == "both" else [row["judges"]]:
            if (row["class"], name, row["right"]) == ("closed forms", "lenient", False):
                continue  # what `correct` wants worked out, `lenient` takes as it is
            start = time.process_time()
            verdict = JUDGES[name](
                Problem(0, row.get("prompt", "?"), row["gold"], {}), Completion(row["completion"], 1, False)
            )
            yield row, name, verdict == 1.0, time.process_time() - start


def faults(rows):
    return [
        (row["gold"], row["completion"], name)
        for row, name, accepted, seconds in judged(rows)
        if (accepted != row["right"] and (row["gold"], row["completion"]) not in MISSED) or seconds > SLOWEST
    ]


def test_a_sample_of_the_verdicts_is_right():
    assert faults([row for row in ROWS if row["part"] != "strangers"][::20]) == []


def test_answers_of_strangers_are_right_as_often_as_mathematics_says():
    assert faults([row for row in ROWS if row["part"] == "strangers"][::3]) == []


@pytest.mark.slow
def test_every_verdict_is_right_but_for_one_and_takes_less_than_five_seconds():
    assert len(ROWS) > 1800
    assert faults(ROWS) == []


def test_every_class_has_right_and_wrong_rows_in_every_part():
    kinds = {(row["class"], row["part"]) for row in ROWS if row["right"] and row["part"] != "strangers"}
    assert {(row["class"], row["part"]) for row in ROWS if not row["right"]} >= kinds - {("marks", "later")}
    assert len({name for name, _ in kinds}) == 16


def print_table():
    """Of each class and part: verdicts that are as they should be, of all, and how many are accepted wrongly."""
    counts = defaultdict(lambda: [0, 0, 0])
    for row, _, accepted, _ in judged(ROWS):
        for name in (row["class"], "all"):
            count = counts[name, row["part"]]
            count[0] += accepted == row["right"]
            count[1] += 1
            count[2] += accepted and not row["right"]
    for name in dict.fromkeys(name for name, _ in counts):
        cells = [counts[name, part] for part in ("seen", "apart", "later", "strangers")]
        print(f"| {name} | " + " | ".join(f"{fit} of {every}, {wrong}" for fit, every, wrong in cells) + " |")


if __name__ == "__main__":
    sys.exit(print_table())
