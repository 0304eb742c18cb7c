"""Rewards, sound and unsound, that the test kit is tried on: found by name in workers, so nothing heavy is imported."""

import math
import re
import time


def scaled(problem, completion, *, by):
    return by * completion.truncated


def returns_nan(problem, completion):
    return math.nan if completion.length > 100 else 0.0


def sleeps(problem, completion):
    time.sleep(60.0 if len(completion.text) > 1000 else 0.0)
    return 0.0


def backtracks(problem, completion):
    return float(bool(re.search(r"([0-9]+)\+([0-9]+)=([0-9]+)", completion.text)))


def computes(problem, completion):
    return float(eval("9**9**9**9") if "9^{9" in completion.text else 0)


def exits(problem, completion):
    exec("__import__('os')._exit(1)" if "_exit" in completion.text else "")
    return 0.0


def remembers(problem, completion, *, before=[None]):  # noqa: B006
    before[0], again = completion.text, completion.text == before[0]
    return float(again)


def salted(problem, completion):
    return float(hash(completion.text) % 1024)


def takes_the_time(problem, completion):
    return time.time()


def needs_meta(problem, completion):
    return float(len(problem.meta["tests"]))
