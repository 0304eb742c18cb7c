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

from tools.launch import agent

WORKER = LAUNCH / "worker.py"
# An agent: starts the worker, prints its number, and counts the SIGUSR1 that it gets.
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


def start(tmp_path: Path, module: str, *args: str, off: int = 0) -> subprocess.Popen[str]:
    (tmp_path / "mod.py").write_text(module)
    argv = [sys.executable, "-c", AGENT, str(off), str(WORKER), "mod", *args]
    return subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("code", "off", "signals"), [(0, 0, 0), (1, 0, 0), (71, 0, 0), (2, 0, 1), (75, 0, 1), (75, 1, 0)]
)
def test_the_agent_alone_is_signalled_and_for_final_exit_codes_only(
    tmp_path: Path, code: int, off: int, signals: int
) -> None:
    out, _ = start(tmp_path, f"import sys; sys.exit({code})", off=off).communicate(timeout=60)
    assert out.splitlines()[-1] == f"{code} {signals}"


def test_the_module_sees_what_it_would_see_under_python_m_and_keeps_its_traceback(tmp_path: Path) -> None:
    module = "import json, sys; print(json.dumps([__name__, __package__, sys.argv[1:]])); raise KeyError(sys.path[0])"
    out, err = start(tmp_path, module, "--flag", "a b", "").communicate(timeout=60)
    argv = [sys.executable, "-m", "mod", "--flag", "a b", ""]
    plain = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert out.splitlines()[1:] == [plain.stdout.strip(), "1 0"]
    assert "KeyError: ''" in err  # the current folder, as ours
    assert json.loads(plain.stdout)[2] == ["--flag", "a b", ""]


def test_a_rank_dies_with_its_agent(tmp_path: Path) -> None:
    with start(tmp_path, "import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)") as parent:
        worker, end = int(parent.stdout.readline()), time.monotonic() + 60
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


def test_worker_and_agent_have_the_same_signal_codes_and_variable() -> None:
    assert agent.FINAL_EXIT == signal.SIGUSR1
    assert f"FINAL = {agent.FINAL}" in WORKER.read_text()
    assert f'AGENT = "{agent.AGENT}"' in WORKER.read_text()
