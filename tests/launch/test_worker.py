"""worker.py: `python -m` with a signal to the agent, and never a rank without one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch.launching import LAUNCH

WORKER = LAUNCH / "worker.py"
# An agent: starts the worker, says its number, and counts the SIGUSR1 that it gets.
AGENT = """
import os, signal, subprocess, sys
received = []
signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
os.environ["GRPO_FN_AGENT"] = str(os.getpid() + int(sys.argv[1]))
worker = subprocess.Popen([sys.executable, *sys.argv[2:]])
print(worker.pid, flush=True)
code = worker.wait()
print(code, len(received))
"""


def agent(tmp_path: Path, module: str, *args: str, off: int = 0) -> subprocess.Popen[str]:
    (tmp_path / "mod.py").write_text(module)
    argv = [sys.executable, "-c", AGENT, str(off), str(WORKER), "mod", *args]
    return subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [0, 1, 2, 71, 75, 130])
def test_the_agent_is_signalled_for_final_exit_codes_only(tmp_path: Path, code: int) -> None:
    out, _ = agent(tmp_path, f"import sys; sys.exit({code})").communicate(timeout=60)
    assert out.splitlines()[-1] == f"{code} {int(code in (2, 75))}"


def test_an_exception_keeps_its_traceback_and_its_code(tmp_path: Path) -> None:
    out, err = agent(tmp_path, "raise KeyError('here')").communicate(timeout=60)
    assert out.splitlines()[-1] == "1 0"
    assert "KeyError: 'here'" in err


def test_no_process_but_the_agent_is_signalled(tmp_path: Path) -> None:
    out, _ = agent(tmp_path, "import sys; sys.exit(75)", off=1).communicate(timeout=60)
    assert out.splitlines()[-1] == "75 0"


def test_the_module_sees_what_it_would_see_under_python_m(tmp_path: Path) -> None:
    module = "import json, sys; print(json.dumps([__name__, __package__, sys.argv[1:], sys.path[0]]))"
    out, _ = agent(tmp_path, module, "--flag", "a b", "").communicate(timeout=60)
    plain = subprocess.run(
        [sys.executable, "-m", "mod", "--flag", "a b", ""], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    seen, expected = json.loads(out.splitlines()[1]), json.loads(plain.stdout)
    assert (seen[3], expected[3]) == ("", str(tmp_path))  # two names of one folder
    assert seen[:3] == expected[:3]


def test_a_rank_dies_with_its_agent(tmp_path: Path) -> None:
    running = "import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)"
    with agent(tmp_path, running) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        end = time.monotonic() + 60
        while not (tmp_path / "up").exists() and time.monotonic() < end:
            time.sleep(0.02)
        parent.kill()
    while is_running(worker) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(worker)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is not merely waiting to be reaped."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_signal_is_one_that_the_agent_listens_to() -> None:
    from tools.launch import agent as module

    assert module.FINAL_EXIT == signal.SIGUSR1
    assert f"FINAL = {module.FINAL}" in WORKER.read_text()
    assert f'AGENT = "{module.AGENT}"' in WORKER.read_text()
