"""Rewards that the pool's tests run in worker processes, where they are found by name: nothing heavy is imported."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from grpo_fn.core.problem import Completion


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


def raises_its_text(problem, completion):
    raise ValueError(f"got {completion.text}")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raises_an_unprintable_one(problem, completion):
    raise Unprintable


def length_of_text_in_a_while(problem, completion):
    time.sleep(0.1)
    return float(len(completion.text))


def forks(problem, completion, *, disguise):
    parent = os.getpid()
    if os.fork() == 0 and disguise:
        os.getpid = lambda: parent
        time.sleep(0.05)
    return float(len(completion.text))


def raises_as_it_is_loaded():
    raise SystemError("<built-in function compile> returned NULL without setting an exception")


class Unloadable:
    """What importing a module under a small memory limit raises now and then, in the place of a MemoryError."""

    def __call__(self, problem, completion):
        return 1.0

    def __reduce__(self):
        return raises_as_it_is_loaded, ()


def own_process(problem, completion):
    if completion.text == "bad":
        raise KeyError("boom")
    return float(os.getpid())


async def slowly(problem, completion):
    await asyncio.sleep(0.01)
    match completion.text:
        case "raise":
            raise KeyError("boom")
        case "none":
            return None
        case "sleep":
            await asyncio.sleep(60)
        case "cancel":
            asyncio.current_task().cancel()
            await asyncio.sleep(60)
        case "leave behind":
            asyncio.get_running_loop().create_task(asyncio.sleep(60))
        case "together":
            return sum(await asyncio.gather(*(slowly(problem, Completion("x", 1, False)) for _ in range(10))))
    return 1.0


def hands_on(problem, completion):
    return slowly(problem, completion)


def takes(problem, completion, *, seconds):
    time.sleep(seconds)
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
        case "import":
            Path(folder := tempfile.mkdtemp(), "slow_package.py").write_text("import time; time.sleep(60)")
            sys.path.insert(0, folder)
            __import__("slow_package")
        case "import and sleep":
            __import__("colorsys")
            time.sleep(60)
        case "print":
            print("1.0")
            sys.stdin.read()
        case "print megabytes":
            print("\x1b[2J" + "x" * 3 * 2**20)
        case "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            time.sleep(60)
    return 1.0
