"""Programs that a model wrote, run against tests where they can do no harm and cannot say themselves that they pass.

What happens inside is in `harness`, how it is shut in is in `isolation`; here it is started and listened to.
docs/rewards/sandbox.md says what that guards against and what it does not. It runs in reward workers, without torch.
"""

import marshal
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from grpo_fn.core.problem import Program, Ran
from grpo_fn.sandbox.isolation import Cell, Isolation, Limits, bubblewrap, namespaces, rlimits_only

BACKSTOP_SECONDS = 10.0  # on top of the wall time that the judge keeps, to start Python in; and should it hang itself
LONGEST_COMPLAINT = 600  # characters
# Not -I: it would ignore PYTHONHASHSEED, without which the order of a set of texts would differ from run to run.
PYTHON_FLAGS = ("-s", "-S", "-P", "-B", "-X", "utf8", "-W", "ignore")
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
MODULES = ("rpc", "confine", "harness")  # in this order
# The harness comes through the pipe: the inside has no file of it, and what is compiled once starts fast.
BOOT = """
import marshal, os, sys
def exactly(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            os._exit(1)
        data += more
    return data
def take():
    return marshal.loads(exactly(int.from_bytes(exactly(8), "big")))
modules, settings = take(), take()
package = sys.modules["grpo_fn.sandbox"] = type(sys)("grpo_fn.sandbox")
for name, code in modules:
    module = sys.modules["grpo_fn.sandbox." + name] = type(sys)(name)
    setattr(package, name, module)
    exec(code, module.__dict__)
module.main(settings, take)
"""
MEANING = {"right": True, "wrong": False, "unscorable": None}


def run_program(
    program: Program,
    *,
    wall_seconds: float,
    cpu_seconds: int,
    memory_mb: int,
    processes: int,
    file_mb: int,
    output_kb: int,
    isolation: Isolation,
) -> Ran:
    """Run a program against its tests, shut in.

    A lower limit that the calling process has holds instead.

    Args:
        program: sources, setup and tests.
        wall_seconds: wall clock of program and tests together, without the start of Python, seconds.
        cpu_seconds: CPU time of each process of it, seconds.
        memory_mb: address space of each process of it, MB.
        processes: its processes and threads.
        file_mb: size of one file, and of all of the scratch folder, MB.
        output_kb: size of all that it prints and answers, KB.
        isolation: `strongest_isolation`, or one of the module `isolation`.

    Returns:
        A verdict for each test, whether they are proven, and what was printed.

    Raises:
        ValueError: for a limit that is not more than 0.
        RuntimeError: where the isolation cannot be had here, or the harness does not start in it: that says nothing
            about the program.
    """
    limits = Limits(wall_seconds, cpu_seconds, memory_mb, processes, file_mb, output_kb)
    for name, value in limits._asdict().items():
        if not value > 0:
            raise ValueError(f"sandbox {name}: got {value}, expected more than 0")
    secret, start = secrets.token_hex(16), time.monotonic()
    life, held = os.pipe()  # `life`, which is read inside, hangs up when this process is gone, or done
    with open(life, "rb"), open(held, "wb"), isolation(limits) as cell:
        settings = {**limits._asdict(), **cell.settings, "life": life, "parent": os.getpid()}
        payload = _modules() + _packed(settings) + _packed({**program._asdict(), "secret": secret})
        output, complaint = _talk(cell, life, payload, wall_seconds + BACKSTOP_SECONDS)
    return _parse_report(output, complaint, secret, len(program.tests), time.monotonic() - start)


def strongest_isolation(limits: Limits) -> AbstractContextManager[Cell]:
    """Bubblewrap, or else kernel namespaces. Tried out once in a process.

    Args:
        limits: limits of one run.

    Returns:
        A context that gives the cell of the run.

    Raises:
        RuntimeError: where neither works.
    """
    for isolation in (bubblewrap, namespaces):
        if not _amiss(isolation):
            return isolation(limits)
    raise RuntimeError(
        f"sandbox: got bubblewrap {_amiss(bubblewrap)!r} and namespaces {_amiss(namespaces)!r}, expected one of them "
        "to work: install bubblewrap, allow user namespaces, or accept what docs/rewards/sandbox.md says of rlimits "
        "with sandbox.run_program.isolation = @isolation.rlimits_only"
    )


def check_runner(runner: Callable[[Program], Ran]) -> None:
    """Check that `runner`, `run_program` with its knobs, can judge a program here. Costs one program's run.

    Raises ValueError or RuntimeError that says what is amiss.
    """
    ran = runner(PROBE)
    if not ran.proven or ran.verdicts != (True, False):
        raise RuntimeError(f"sandbox: got {ran}, expected the right answer accepted and the wrong one rejected")


def available() -> dict[str, str]:
    """Each isolation, strongest first, and why it cannot be had here: empty where it can."""
    return {isolation.__name__: _amiss(isolation) for isolation in (bubblewrap, namespaces, rlimits_only)}


PROBE = Program(
    sources=("import collections, heapq, json, re\ndef right():\n    return 42\ndef wrong():\n    return 43\n",),
    setup="",
    tests=("assert right() == 42", "assert wrong() == 42"),
    names=("right", "wrong"),
)
ROOMY = Limits(wall_seconds=30.0, cpu_seconds=10, memory_mb=256, processes=8, file_mb=8, output_kb=64)


@lru_cache(maxsize=8)
def _amiss(isolation: Isolation) -> str:
    try:
        check_runner(partial(run_program, **ROOMY._asdict(), isolation=isolation))
    except (OSError, RuntimeError, ValueError) as error:
        return " ".join(f"{error}".split())
    return ""


def _talk(cell: Cell, life: int, payload: bytes, seconds: float) -> tuple[str, str]:
    """Start, send, and listen until everything inside has ended. Both outputs: the judge's alone, and complaints."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    process = subprocess.Popen(
        [*cell.wrapper, python, *PYTHON_FLAGS, "-c", BOOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        pass_fds=(life, *cell.descriptors),
        start_new_session=True,
    )
    with process:
        try:
            output, complaint = process.communicate(payload, timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # what it started is killed by the kernel then
            output, complaint = process.communicate(timeout=BACKSTOP_SECONDS)
        except BaseException:
            process.kill()
            raise
    return output.decode("ascii", "replace"), complaint.decode(errors="replace").strip()[-LONGEST_COMPLAINT:]


def _parse_report(output: str, complaint: str, secret: str, tests: int, seconds: float) -> Ran:
    """What the judge's lines say. Raises RuntimeError when it never was ready."""
    lines = [line.split(" ") for line in output.splitlines()]
    words = [(line[1], bytes.fromhex(line[2]).decode(errors="replace")) for line in lines if line[0] == secret]
    if ("ready", "") not in words:
        raise RuntimeError(f"sandbox: got {complaint or 'nothing'!r}, expected the harness to start")
    verdicts = [MEANING[text] for word, text in words if word == "verdict"]
    last = dict(words)
    return Ran(
        verdicts=(*verdicts, *[False] * (tests - len(verdicts))),
        proven="proven" in last and len(verdicts) == tests,
        reason=last.get("reason", f"the judge ended: {complaint}"),
        printed=last.get("printed", ""),
        seconds=seconds,
    )


def _packed(value: Any) -> bytes:
    data = marshal.dumps(value)
    return len(data).to_bytes(8, "big") + data


@lru_cache(maxsize=1)
def _modules() -> bytes:
    """The harness's code."""
    sources = {name: (Path(__file__).parent / f"{name}.py").read_text() for name in MODULES}
    return _packed([(name, compile(source, f"{name}.py", "exec", optimize=2)) for name, source in sources.items()])
