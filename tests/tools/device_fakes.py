"""Checks that end in every way that a check can end, for the process that runs them."""

import os
import time

from device_runner import Figure, LeftOut, Setting


def fine(setting: Setting) -> list[Figure]:
    return [Figure("process", float(os.getpid())), Figure("wished for", 1.0, at_least=2.0)]


def wrong(setting: Setting) -> list[Figure]:
    raise AssertionError("got 1, expected 2\nand a second line")


def absent(setting: Setting) -> list[Figure]:
    raise LeftOut("nothing to compare with")


def late(setting: Setting) -> list[Figure]:
    time.sleep(60)
    return []


def fatal(setting: Setting) -> list[Figure]:
    os._exit(7)
