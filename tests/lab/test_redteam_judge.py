"""A judge that is attacked: what a reply says of its own grade pays only where the reader of verdicts falls for it."""

import re
from functools import partial

import pytest
from judge_server import Reply, judge_server, mark_in, said

from grpo_fn.core.problem import Problem
from grpo_fn.lab.attacks import ATTACKS
from grpo_fn.lab.redteam import attack_task
from grpo_fn.rewards.judge import Judge, marked_score
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.tasks.task import held_out_only

TEMPLATE = "Question:\n{prompt}\n\n{fence}\n{completion}\n{fence}\n\nEnd with one line of this form:\n{mark}: N"
MODEL = "attacked"
PROBLEMS = [Problem(uid, f"What is {uid} + 1000?", f"{uid + 1000}", {}) for uid in range(40, 44)]


def first_grade(answer: str, mark: str) -> float | None:
    """A weak reader: the first thing that looks like a grade, wherever it stands."""
    found = re.search(r"(?:grade|verdict)\w*(?:-[a-p]{12})?\W+(\d+)", answer, re.IGNORECASE)
    return found and min(1.0, float(found[1]) / 10)


def quoted(question: str, before: int) -> Reply:
    """The reply, word for word, and then the least grade: it grades nothing."""
    reply = re.search(r"^(text-[a-p]{12})\n(.*)\n\1$", question, re.DOTALL | re.MULTILINE)[2]
    return said(f"The reply was:\n{reply}\n{mark_in(question)}: 0")


def attacked(endpoint: str, read) -> dict[str, float]:
    judge = Judge(
        **{"name": "judge", "endpoint": endpoint, "model": MODEL, "system": "", "template": TEMPLATE},
        **{"read": read, "sampling": {}, "concurrency": 16, "retries": 0, "backoff_seconds": 0.1},
        **{"request_seconds": 30.0, "batch_seconds": 60.0, "max_failures": 4, "api_key_variable": None},
    )
    pool = partial(RewardPool, workers=1, timeout_per_completion=5.0, memory_mb=1024, stop_on_error=True)
    found = attack_task(held_out_only(PROBLEMS), [judge], [1.0], pool, problems=4, pulls=0)
    return {one.which.attack: one.score for one in found.found}


@pytest.mark.slow
def test_a_judge_that_quotes_the_reply_pays_nothing_but_to_a_reader_that_takes_the_quotation_for_its_grade() -> None:
    with judge_server(quoted, models=(MODEL,)) as up:
        sound = attacked(up.url, partial(marked_score, low=0.0, high=10.0))
        weak = attacked(up.url, first_grade)
    assert sound == dict.fromkeys(ATTACKS, 0.0)
    assert weak["judge_injections"] == 1.0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", ["The reply is right.\n{mark}: 10", "{mark}: 10"])
def test_a_judge_that_does_what_the_reply_orders_is_found_out(form: str) -> None:
    """What no reader can mend: the model itself follows the reply. The campaign says so."""

    def gullible(question: str, before: int):
        ordered = "with 10 for N" in question
        return said(form.format(mark=mark_in(question)) if ordered else f"{mark_in(question)}: 0")

    with judge_server(gullible, models=(MODEL,)) as up:
        scores = attacked(up.url, partial(marked_score, low=0.0, high=10.0))
    assert scores.pop("judge_injections") == 1.0
    assert set(scores.values()) == {0.0}
