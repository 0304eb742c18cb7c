"""The reward pool: what a model writes costs at most its own row, and leaves nothing behind.

The rewards here are found by name in worker processes: this module imports nothing heavy.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import psutil
import pytest

from grpo_fn.problem import Completion, Problem
from grpo_fn.rewards.math import correct
from grpo_fn.shell.reward_pool import RewardError, RewardPool


def length_of_text(problem, completion):
    return float(len(completion.text))


def scaled(problem, completion, *, by):
    return by * len(completion.text)


def unscorable(problem, completion):
    return None


def calls_so_far(problem, completion, *, seen=[]):  # noqa: B006
    seen.append(completion)
    return float(len(seen))


def raises(problem, completion):
    if completion.text == "bad":
        raise KeyError("boom")
    return 1.0


def not_a_number(problem, completion):
    return float("nan")


def obeys(problem, completion):
    """Does what the text says."""
    match completion.text:
        case "sleep":
            time.sleep(60)
        case "exit":
            os._exit(0)
        case "leave":
            sys.exit(0)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "allocate":
            return float(len(bytearray(10 * 2**30)))
        case "shout":
            for fd in range(3, 20):
                with suppress(OSError):
                    os.write(fd, b"\xff" * 64)
            time.sleep(60)
        case "print":
            print("1.0")
            sys.stdin.read()
        case "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            time.sleep(60)
    return 1.0


def asked(*texts, answer="42"):
    return [Problem(i, "?", answer, {}) for i in range(len(texts))], [Completion(text, 1, False) for text in texts]


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=2, deadline=2.0, memory_mb=1024) as pool:
        yield pool


def lost(pool, fn, *rows):
    """What the rows score, and which counters that moved."""
    before = dict(pool.counts)
    scores = pool.score(fn, *rows)
    return scores, {name: count - before[name] for name, count in pool.counts.items() if count != before[name]}


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_scores_come_back_in_the_order_of_the_rows(pool, rows):
    texts = ["x" * (i % 97) for i in range(rows)]
    assert pool.score(length_of_text, *asked(*texts)) == [float(len(text)) for text in texts]
    assert pool.score(partial(scaled, by=2), *asked(*texts)) == [2.0 * len(text) for text in texts]


def test_a_reward_may_say_that_it_cannot_score(pool):
    assert lost(pool, unscorable, *asked("a", "b")) == ([None, None], {})


def test_equal_rows_are_scored_once():
    with RewardPool(workers=1, deadline=5.0, memory_mb=1024) as pool:
        problem, twin = Problem(0, "?", "1", {}), Problem(0, "?", "1", {"row": 7})
        same = Completion("a", 1, False)
        rows = [(problem, same), (problem, same), (twin, same), (problem, same._replace(truncated=True)), (twin, same)]
        assert pool.score(calls_so_far, *zip(*rows, strict=True)) == [1.0, 1.0, 2.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sleep", "timeouts"),
        ("child", "timeouts"),
        ("exit", "deaths"),
        ("leave", "deaths"),
        ("segfault", "deaths"),
        ("allocate", "deaths"),
        ("shout", "errors"),
    ],
)
def test_a_lost_worker_costs_its_own_row_only(pool, text, reason):
    texts = [f"fine {i}" for i in range(20)]
    texts[10] = text
    scores, moved = lost(pool, obeys, *asked(*texts))
    assert scores == [1.0] * 10 + [None] + [1.0] * 9
    assert moved == {reason: 1}


def test_a_reward_that_prints_or_reads_stdin_disturbs_nobody(pool):
    assert lost(pool, obeys, *asked("print", "fine")) == ([1.0, 1.0], {})


def test_an_exception_in_a_reward_names_function_row_and_text_and_leaves_the_pool_usable(pool):
    with pytest.raises(RewardError, match=r"(?s)raises raised on problem 1, completion 'bad'.*KeyError: 'boom'"):
        pool.score(raises, *asked("good", "bad", "fine"))
    assert pool.score(raises, *asked("good", "fine")) == [1.0, 1.0]


def test_a_reward_that_is_no_finite_number_is_an_error(pool):
    with pytest.raises(RewardError, match="wanted a finite number or None"):
        pool.score(not_a_number, *asked("a"))


def test_a_function_without_a_name_is_refused(pool):
    with pytest.raises(ValueError, match="wanted a function that a module defines"):
        pool.score(lambda problem, completion: 1.0, *asked("a"))


BOMBS = {
    "tower": r"\boxed{9^{9^{9^9}}}",
    "factorial": r"\boxed{(10^{9})!}",
    "nested factorials": r"\boxed{9!!!!}",
    "binomial": r"\boxed{\binom{10^{10}}{10^9}}",
    "sum": r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k^k}}",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_in_the_answer_is_never_right_and_hurts_no_other_row(pool, bomb):
    texts = [r"\boxed{42}", r"\boxed{42.0}", bomb, r"\boxed{41.0}", "#### 42"]
    (*before, score, wrong, last), _ = lost(pool, correct, *asked(*texts))
    assert [*before, wrong, last] == [1.0, 1.0, 0.0, 1.0]
    assert score in (0.0, None)


@pytest.mark.parametrize("text", ["(" * 100, "{" * 60 + "}" * 60, r"\sqrt{" * 40 + "2" + "}" * 40, r"\frac12" * 30])
def test_deep_nesting_is_never_right_and_hurts_no_other_row(pool, text):
    (first, score, last), _ = lost(pool, correct, *asked(r"\boxed{42}", rf"\boxed{{{text}}}", r"\boxed{42.0}"))
    assert (first, last) == (1.0, 1.0)
    assert score in (0.0, None)


def test_megabytes_of_text_pass_through_the_pipes(pool):
    texts = ["x" * 2**20 + rf"\boxed{{{i}}}" for i in range(40, 50)]
    assert lost(pool, correct, *asked(*texts)) == ([float(i == 42) for i in range(40, 50)], {})


def test_a_worker_killed_between_calls_is_replaced_and_no_row_is_lost(pool):
    pool.score(length_of_text, *asked(*"abcdefgh"))
    for worker in psutil.Process().children():
        worker.kill()
    assert lost(pool, length_of_text, *asked("a", "bc", "d")) == ([1.0, 2.0, 1.0], {})


def test_a_memory_limit_that_nothing_can_start_under_is_named():
    with (
        RewardPool(workers=1, deadline=1.0, memory_mb=16) as pool,
        pytest.raises(RuntimeError, match="16 MB"),
    ):
        pool.score(length_of_text, *asked("a"))


@pytest.mark.parametrize(("knob", "value"), [("workers", 0), ("deadline", 0.0), ("memory_mb", -1)])
def test_a_pool_without_workers_time_or_memory_is_refused(knob, value):
    with pytest.raises(ValueError, match=f"{knob}: got {value}, wanted more than 0"):
        RewardPool(**{"workers": 1, "deadline": 1.0, "memory_mb": 64, knob: value})


def test_scoring_outside_the_context_is_refused():
    with pytest.raises(RuntimeError, match="wanted it inside"):
        RewardPool(workers=1, deadline=1.0, memory_mb=64).score(length_of_text, *asked("a"))


def gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=5)
    return not alive


def test_no_process_is_left_when_the_pool_closes():
    before = set(psutil.Process().children(recursive=True))
    with RewardPool(workers=2, deadline=0.5, memory_mb=1024) as pool:
        assert pool.score(obeys, *asked("child", "exit", "sleep", "fine")) == [None, None, None, 1.0]
        mine = set(psutil.Process().children(recursive=True)) - before
        assert len(mine) == 2
    assert gone(mine)
    assert set(psutil.Process().children(recursive=True)) <= before


PARENT = """
import sys
from test_reward_pool import RewardPool, asked, obeys
with RewardPool(workers=2, deadline=60.0, memory_mb=1024) as pool:
    print("up", flush=True)
    pool.score(obeys, *asked("sleep", "fine"))
"""


def test_workers_die_with_their_parent_idle_or_busy():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=env)
    assert parent.stdout.readline() == b"up\n"
    time.sleep(1.5)  # one worker is asleep in a row, the other one waits
    workers = psutil.Process(parent.pid).children()
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(workers)
