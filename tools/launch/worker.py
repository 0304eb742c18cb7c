"""Runs a module as `python -m` would, and signals the agent when a retry cannot change the exit code.

Started by agent.py, once per rank. It is one process: the module gets every signal itself.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import sys

FINAL = (2, 76, 75)  # as in agent.py, which is not imported: importing it takes torch, and --help is immediate
AGENT = "GRPO_FN_AGENT"


def main() -> None:
    """Run the module that the first argument names, with the arguments after it."""
    sys.argv.pop(0)
    sys.path[0] = ""  # the current folder, as under -m, not this file's
    agent = int(os.environ[AGENT])
    die_with_parent()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code in FINAL and os.getppid() == agent:  # an orphan's parent is another process
            os.kill(agent, signal.SIGUSR1)
        raise


def die_with_parent() -> None:
    """A rank without its agent would keep its device and its port until it is killed by hand."""
    with contextlib.suppress(OSError, AttributeError):  # no prctl here
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
