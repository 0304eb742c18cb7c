"""Threads beside the one that computes take nothing from it."""

import subprocess
import sys
from concurrent.futures import Future
from threading import Thread

import torch

from grpo_fn.shell.process import helper

# A product is a piece of work for a team of threads. Nobody has any before the first.
TEAMS = """
import threading, torch
from grpo_fn.shell.process import helper

def threads():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))

def work():
    torch.rand(1 << 20).exp().sum().item()
    (torch.rand(256, 256) @ torch.rand(256, 256)).sum()

torch.set_num_threads(4)
work()
before, done, go = threads(), threading.Event(), threading.Event()
def beside():
    work()
    done.set()
    go.wait(60)
START
assert done.wait(60)
print(threads() - before)
go.set()
"""


def grown(start: str) -> int:
    """By how many threads of the operating system a process grows when another thread computes."""
    code = TEAMS.replace("START", start)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


def test_a_helper_has_no_team_of_threads() -> None:
    """Unlike a thread as it comes."""
    assert grown("helper(beside, name='log')") == 1
    assert grown("threading.Thread(target=beside, daemon=True).start()") > 1


def test_torch_keeps_its_threads_everywhere_else() -> None:
    """In the thread that computes, and in those that come after the helper."""
    before, asked = torch.get_num_threads(), Future()
    torch.set_num_threads(3)
    try:
        helper(lambda: asked.set_result(torch.get_num_threads()), name="log")
        assert asked.result(60) == 1
        assert torch.get_num_threads() == 3
        later = Future()
        Thread(target=lambda: later.set_result(torch.get_num_threads()), daemon=True).start()
        assert later.result(60) == 3
    finally:
        torch.set_num_threads(before)
