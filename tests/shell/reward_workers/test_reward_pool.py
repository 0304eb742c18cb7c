"""The reward pool: what a model writes costs at most its own row, and leaves nothing behind."""

import os
import subprocess
import sys
from functools import partial

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_rewards import (
    Unloadable,
    calls_so_far,
    forks,
    hands_on,
    length_of_text,
    length_of_text_in_a_while,
    not_a_number,
    obeys,
    own_process,
    raises,
    raises_an_unprintable_one,
    raises_its_text,
    scaled,
    slowly,
    takes,
    unscorable,
)

from grpo_fn.core.display_text import CONTROL
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.wrappers import with_timeout
from grpo_fn.shell.reward_workers.reward_pool import COMPLAINTS, RewardError, RewardPool
from grpo_fn.shell.reward_workers.worker import check_reward_value
from grpo_fn.shell.reward_workers.worker_pool import MOST_PRINTED, RETURNED_NONE, PrintedText


def asked(*texts, answer="42"):
    return [Problem(i, "?", answer, {}) for i in range(len(texts))], [Completion(text, 1, False) for text in texts]


def pool_of(workers=1, timeout=1.0, *, stop_on_error=True):
    return RewardPool(workers=workers, timeout_per_completion=timeout, memory_mb=1024, stop_on_error=stop_on_error)


@pytest.fixture(scope="module")
def pool():
    with pool_of(2, 2.0) as pool:
        yield pool


def lost(pool, fn, *rows):
    """What the rows score, and which counters that moved."""
    before = dict(pool.counts)
    scores = pool.score(fn, *rows)
    return scores, {name: count - before[name] for name, count in pool.counts.items() if count != before[name]}


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_scores_come_back_in_the_order_of_the_rows(pool, rows):
    texts = ["x" * (i % 97) for i in range(rows)]
    assert pool.score(length_of_text, *asked(*texts)) == [float(len(text)) for text in texts]
    assert pool.score(partial(scaled, by=2), *asked(*texts)) == [2.0 * len(text) for text in texts]


def test_what_workers_print_is_kept_in_a_file_without_controls_and_no_more_than_fits(tmp_path, capfd):
    pool = pool_of(timeout=30.0)
    pool.printed = PrintedText(tmp_path / "printed.txt")
    assert not (tmp_path / "printed.txt").exists()
    with pool:
        assert pool.score(obeys, *asked("print", "print megabytes")) == [1.0, 1.0]
    text = (tmp_path / "printed.txt").read_text()
    assert text.startswith(r"1.0" + "\n" + r"\x1b[2Jxxx")
    assert text.endswith("is not kept\n")
    assert "\x1b" not in text
    assert MOST_PRINTED <= len(text) < 2 * MOST_PRINTED
    assert capfd.readouterr() == ("", "")


def test_a_reward_may_say_that_it_cannot_score_and_print_and_read_its_input(pool):
    assert lost(pool, unscorable, *asked("a", "b")) == ([None, None], {})
    assert lost(pool, obeys, *asked("print", "fine")) == ([1.0, 1.0], {})


@pytest.mark.parametrize("disguise", [False, True])
def test_a_reward_that_forks_and_leaves_its_child_going_on_ends_nothing(pool, disguise):
    """In disguise the child has its parent's process number: its late answers must not be those of the next call."""
    texts = ["x" * i for i in range(12)]
    for fn in (partial(forks, disguise=disguise), length_of_text_in_a_while):
        assert lost(pool, fn, *asked(*texts)) == ([float(len(text)) for text in texts], {})


def test_a_bool_of_numpy_is_a_reward_and_an_array_of_them_is_none():
    assert [check_reward_value(np.bool_(value)) for value in (True, False)] == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"got ndarray .*, expected a finite number or None"):
        check_reward_value(np.array([True]))


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400, float("inf"), float("nan")])
def test_a_number_that_float32_cannot_hold_is_no_reward(value):
    with pytest.raises(ValueError, match=r"reward: got (int|float) .*, expected a finite number or None"):
        check_reward_value(value)
    assert check_reward_value(1e38) == 1e38


def test_equal_rows_are_scored_once():
    problem, twin, same = Problem(0, "?", "1", {}), Problem(0, "?", "1", {"row": 7}), Completion("a", 1, False)
    rows = [(problem, same), (problem, same), (twin, same), (problem, same._replace(truncated=True)), (twin, same)]
    with pool_of() as pool:
        assert pool.score(calls_so_far, *zip(*rows, strict=True)) == [1.0, 1.0, 2.0, 3.0, 2.0]


LATE, DIED, REPLY = "timeouts", "worker_crashes", "protocol_errors"
IMPORTED = (
    "late: no answer within 2 s, while it imported slow_package: import it at the top of the reward's module, on "
)


@pytest.mark.parametrize(
    ("text", "kind", "reason", "least"),
    [
        ("sleep", LATE, "late: no answer within 2 s", 2.0),
        ("child", LATE, "late: no answer within 2 s", 2.0),
        ("import", LATE, IMPORTED + "loading time", 2.0),
        ("import and sleep", LATE, "late: no answer within 2 s", 2.0),
        ("leave", DIED, "worker died: exit code 0", 0.0),
        ("segfault", DIED, "worker died: killed by SIGSEGV", 0.0),
        ("allocate", DIED, "worker died: over the memory limit of 1024 MB", 0.0),
        ("shout", REPLY, "worker sent a malformed reply", 0.0),
    ],
)
def test_a_lost_worker_costs_its_own_row_only_which_says_why_and_how_long_it_took(pool, text, kind, reason, least):
    before = dict(pool.counts)
    outcomes = pool.judge(obeys, *asked(*["fine"] * 10, text, *["fine"] * 9))
    assert [outcome.value for outcome in outcomes] == [1.0] * 10 + [None] + [1.0] * 9
    assert reasons(outcomes) == [""] * 10 + [reason] + [""] * 9
    assert {name: count - before[name] for name, count in pool.counts.items() if count > before[name]} == {kind: 1}
    assert least <= outcomes[10].seconds < least + 1.5
    assert all(0 <= outcome.seconds < 1.0 for outcome in outcomes[:10])


def test_an_exception_in_a_reward_names_function_row_and_text_and_leaves_the_pool_usable(pool):
    with pytest.raises(RewardError, match=r"(?s)raises raised on problem 1, completion 'bad'.*KeyError: 'boom'"):
        pool.score(raises, *asked("good", "bad", "fine"))
    with pytest.raises(RewardError, match=r"ValueError: got \\x1b\[2J\\u202e") as caught:
        pool.score(raises_its_text, *asked("\x1b[2J\u202e"))
    assert not CONTROL.search(str(caught.value))
    assert pool.score(raises, *asked("good", "fine")) == [1.0, 1.0]


@pytest.fixture(scope="module")
def patient():
    """Goes on after an exception."""
    with pool_of(2, stop_on_error=False) as pool:
        yield pool


def reasons(outcomes):
    return [outcome.reason for outcome in outcomes]


@given(st.lists(st.sampled_from(["fine", "bad", "x", "xx"]), max_size=20))
def test_score_is_judge_without_the_reasons_and_rows_do_not_meet(patient, texts):
    outcomes = patient.judge(raises, *asked(*texts))
    assert [outcome.value for outcome in outcomes] == [None if text == "bad" else 1.0 for text in texts]
    assert reasons(outcomes) == ["KeyError: 'boom'" if text == "bad" else "" for text in texts]
    assert patient.score(raises, *asked(*texts)) == [outcome.value for outcome in outcomes]


def test_an_exception_costs_its_row_and_no_process_where_it_is_not_to_stop_everything(patient):
    before = {worker.pid for worker in psutil.Process().children()}
    texts = ["good", "bad"] * 20
    scores, moved = lost(patient, own_process, *asked(*texts))
    assert moved == {"exceptions": 20}
    assert scores[1::2] == [None] * 20
    assert set(scores[::2]) <= {float(pid) for pid in before}


def test_complaints_name_each_kind_of_loss_once_and_are_bounded():
    with pool_of(stop_on_error=False) as one:  # so rows come in order
        one.score(raises, *asked("bad", "good", "bad"))
        (text,) = one.complaints
        assert text.startswith("pool_rewards.raises lost problem 0, completion 'bad': KeyError: 'boom'\nTraceback")
        one.score(obeys, *asked("exit"))
        assert one.complaints[1].endswith("completion 'exit': worker died: exit code 0")
        one.score(raises_its_text, *asked(*map(str, range(100))))
        assert len(one.complaints) == COMPLAINTS
        one.complaints.clear()
        one.score(raises, *asked("bad"))
        assert len(one.complaints) == 1


@pytest.mark.parametrize(
    ("fn", "text", "reason"),
    [
        (raises_its_text, "two\nlines", "ValueError: got two lines"),
        (raises_its_text, "x" * 10**6, "ValueError: got xxx"),
        (raises_an_unprintable_one, "", "Unprintable: <exception str() failed>"),
        (not_a_number, "", "ValueError: reward: got float nan, expected a finite number or None"),
    ],
    ids=["lines", "length", "unprintable", "NaN"],
)
def test_any_exception_becomes_a_single_short_line(patient, fn, text, reason):
    (got,) = reasons(patient.judge(fn, *asked(text)))
    assert got.removeprefix("pool_rewards.").startswith(reason)
    assert len(got) <= 200
    assert "\n" not in got


def test_a_reward_may_be_async(patient):
    texts = ["a", "raise", "none", "sleep", "cancel", "leave behind", "together", "b"]
    outcomes = patient.judge(slowly, *asked(*texts))
    assert [outcome.value for outcome in outcomes] == [1.0, None, None, None, None, 1.0, 10.0, 1.0]
    late, cancelled = "late: no answer within 1 s", "RuntimeError: the reward was cancelled from inside"
    assert reasons(outcomes)[1:5] == ["KeyError: 'boom'", RETURNED_NONE, late, cancelled]
    assert patient.score(hands_on, *asked("a", "none")) == [1.0, None]


@pytest.mark.parametrize(("own", "value", "reason"), [(0.2, None, "late: no answer within 0.2 s"), (60.0, 1.0, "")])
def test_a_reward_may_have_its_own_deadline(own, value, reason):
    slow = partial(takes, seconds=0.6)
    with pool_of(timeout=0.3) as pool:
        for fn, expected in (
            (partial(with_timeout, reward=slow, seconds=own), (value, reason)),
            (slow, (None, "late: no answer within 0.3 s")),
        ):
            (got,) = pool.judge(fn, *asked("a"))
            assert (got.value, got.reason) == expected


def test_a_worker_killed_between_calls_is_replaced_and_no_row_is_lost():
    before = set(psutil.Process().children())  # what other tests keep: the server that forks, its tracker, a browser
    with pool_of(2, 60.0) as pool:
        pool.score(length_of_text, *asked(*"abcdefgh"))
        mine = set(psutil.Process().children()) - before
        assert mine
        for worker in mine:
            worker.kill()
        assert lost(pool, length_of_text, *asked("a", "bc", "d")) == ([1.0, 2.0, 1.0], {})


def test_a_memory_limit_that_nothing_can_start_under_is_named():
    with (
        RewardPool(workers=1, timeout_per_completion=1.0, memory_mb=16, stop_on_error=True) as pool,
        pytest.raises(RuntimeError, match="16 MB"),
    ):
        pool.score(length_of_text, *asked("a"))


def test_a_reward_that_cannot_be_loaded_or_named_is_refused_with_the_memory_limit(pool):
    with pytest.raises(RewardError, match=r"(?s)could not be loaded in a worker of 1024 MB:.*SystemError"):
        pool.score(Unloadable(), *asked("a"))
    with pytest.raises(ValueError, match="expected a function that a module defines"):
        pool.score(lambda problem, completion: 1.0, *asked("a"))
    assert pool.score(length_of_text, *asked("ab")) == [2.0]


def test_a_pool_of_nothing_and_scoring_outside_the_context_are_refused():
    with pytest.raises(ValueError, match="workers: got 0, expected more than 0"):
        pool_of(0)
    with pytest.raises(RuntimeError, match="expected it inside"):
        pool_of().score(length_of_text, *asked("a"))


def gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=5)
    return not alive


PARENT = """
import sys
from test_reward_pool import RewardPool, asked, obeys
with RewardPool(workers=2, timeout_per_completion=60.0, memory_mb=1024, stop_on_error=True) as pool:
    print("up", flush=True)
    pool.score(obeys, *asked("sleep", "fine"), should_stop=lambda: print("waiting", flush=True))
"""


def test_workers_die_with_their_parent_idle_or_busy():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=env)
    assert parent.stdout.readline() == b"up\n"
    assert [parent.stdout.readline() for _ in range(3)] == [b"waiting\n"] * 3  # one worker is asleep in a row by now
    workers = psutil.Process(parent.pid).children()
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(workers)
