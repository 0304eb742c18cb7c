"""Rewards as users write them, right and wrong. A worker imports this file in no time: it needs no torch."""

import os
import time

import numpy as np


def right(problem, completion):
    return np.float32(completion.text == problem.answer)


def cannot_say(problem, completion):
    return None


def of_numpy(problem, completion):
    return np.array([1.0])


def alone(completion):
    return 1.0


def with_text_only(problem, completion):
    return 1.0 / len(completion.text)


def dies(problem, completion):
    os._exit(3)


def sleeps(problem, completion):
    time.sleep(60)
