"""A question that may crash or hang, asked in a process of its own with a deadline.

A driver that does not answer, a library built for another torch, an import that never ends: all of them are answers.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_fn.doctor.checks import Reply
from grpo_fn.doctor.report import one_line

SHOWN = 400  # characters of the end of a process's stderr


def call_in_subprocess(
    function: str, *arguments: str, deadline: int | float, environment: Mapping[str, str] | None = None
) -> Reply:
    """What `module:function` returns for these arguments, a JSON object, when it is called in a new process.

    The process and all that it has started are killed when `deadline` seconds have passed.
    """
    with tempfile.TemporaryDirectory(prefix="grpo_fn-") as folder:
        out, output = Path(folder) / "reply", Path(folder) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, function, str(out), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | (environment or {}),
                start_new_session=True,
            )
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired:
            return Reply(None, f"no answer within {deadline:g} s{_last(output)}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has left behind as well
            process.wait()
        if not out.is_file():
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return Reply(None, f"the process that looked {how}{_last(output)}")
        return read_reply(out)


def _last(output: Path) -> str:
    text = one_line(output.read_text(errors="replace"))
    return f": {text[-SHOWN:]}" if text else ""


def write_reply(function: str, out: str, *arguments: str) -> None:
    """The other side: call it, and write what it returns or raises, whole or not at all."""
    module, _, name = function.partition(":")
    try:
        facts = getattr(importlib.import_module(module), name)(*arguments)
    except Exception as error:  # whatever it is, it is the answer
        facts = {"error": f"{type(error).__name__}: {error}"}
    scratch = Path(f"{out}.new")
    scratch.write_text(json.dumps(facts))
    scratch.rename(out)


def read_reply(out: Path) -> Reply:
    """What `write_reply` has written."""
    facts = json.loads(out.read_text())
    return Reply(None, facts["error"]) if "error" in facts else Reply(facts, "")


def import_version(name: str) -> dict[str, Any]:
    """The version of a module that imports; raises what it raises when it does not."""
    return {"version": str(getattr(importlib.import_module(name), "__version__", "unknown"))}


if __name__ == "__main__":
    write_reply(*sys.argv[1:])
