"""The agent: one exit code for a host, torchrun's arguments, and what a stop does to the workers."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch.launching import environment, run

from tools.launch import agent

codes = st.lists(st.sampled_from((0, 1, 2, 71, 75, 9, -6, -9, -15)), min_size=1, max_size=8)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(codes, st.data())
def test_a_hosts_code_is_done_for_all_final_for_one_and_lost_when_no_worker_knows_better(
    ended: list[int], data: st.DataObject
) -> None:
    assert agent.verdict(data.draw(st.permutations(ended))) == agent.verdict(ended)
    assert (agent.verdict(ended) == 0) == (not any(ended))
    assert agent.verdict([*ended, 2]) == 2
    assert agent.verdict([*(code for code in ended if code != 2), 75]) == 75
    assert (agent.verdict(ended) == 71) == (71 in ended and not {code for code in ended if code > 0} - {71})


@given(st.lists(st.integers(1, 64), min_size=1))
def test_workers_that_signals_killed_are_the_shells_code_for_it(signals: list[int]) -> None:
    assert agent.verdict([-number for number in signals]) == 128 + max(signals)


@given(st.lists(words, max_size=6), st.sampled_from(("-m", "--module")))
def test_the_module_and_its_arguments_go_through_the_worker_unchanged(args: list[str], flag: str) -> None:
    parsed = agent.torchrun.parse_args(
        agent.through_worker(["--nnodes=2", "--max-restarts", "5", flag, "some.module", "-m", "x", *args])
    )
    assert parsed.training_script.endswith("worker.py")
    assert parsed.training_script_args == ["some.module", "-m", "x", *args]
    assert (parsed.nnodes, parsed.max_restarts, parsed.module) == ("2", 5, False)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["train.py"], "got 'train.py' to start, expected a module: -m grpo_fn.run"),
        (["--rdzv-conf=read_timeout=0", "-m", "x"], "read_timeout: got '0', expected seconds above 0"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agent.main(argv) == 2
    assert capsys.readouterr() == ("", f"error: {complaint}\n")


@given(st.one_of(st.floats(max_value=0.0).map(str), st.sampled_from(("", "nan", "inf", "1m"))))
def test_a_grace_that_is_no_time_is_bad_input(text: str) -> None:
    with pytest.raises(ValueError, match=r"GRACE: got .*, expected seconds above 0"):
        agent.seconds("GRACE", text)


@pytest.mark.parametrize(("program", "code"), [("exit 7", 7), ("kill -9 $$", -9), ("exit 0", 0)])
def test_looking_at_how_a_child_ended_leaves_it_for_its_owner(program: str, code: int) -> None:
    child = subprocess.Popen(["bash", "-c", f"read; {program}"], stdin=subprocess.PIPE)
    assert agent.exit_code(child.pid) is None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert agent.exit_code(child.pid) == agent.exit_code(child.pid) == code
    assert child.wait() == code


@pytest.fixture
def own_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session has its own children (servers, a browser), which are no workers: only shells are asked to stop."""
    every = psutil.Process.children

    def shells(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        return [child for child in every(process, recursive) if child.name() == "bash"]

    monkeypatch.setattr(psutil.Process, "children", shells)


def stop_codes(program: str, number: int, grace: float, again: int = signal.SIGTERM) -> list[int] | None:
    """What a worker that runs a program of bash ended with after a signal to the agent, and a second one in 0.3 s."""
    child = subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE)
    child.stdout.readline()
    stop = agent.Stop(grace)
    before = signal.signal(signal.SIGALRM, lambda _, frame: stop(again, frame))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(agent.SignalException):
            stop(number, None)
        return stop.codes
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        child.kill()
        child.communicate()


LOOP = "echo; while :; do sleep 0.05; done"


@pytest.mark.usefixtures("own_children")
@pytest.mark.parametrize(
    ("program", "number", "grace", "again", "code"),
    [
        (f"trap 'sleep 0.5; exit 75' TERM; {LOOP}", signal.SIGTERM, 20.0, signal.SIGTERM, 75),  # it is waited for
        (f"trap '' TERM; {LOOP}", signal.SIGTERM, 0.5, signal.SIGTERM, -9),  # it is given up
        (f"trap '' TERM; {LOOP}", signal.SIGINT, 60.0, signal.SIGINT, -9),  # a second interrupt kills
        ("trap 'exit 1' TERM; echo; sleep 0.5; exit 75", agent.FINAL_EXIT, 20.0, signal.SIGTERM, 75),  # by itself
        (f"trap 'exit 1' TERM; {LOOP}", agent.FINAL_EXIT, 20.0, signal.SIGTERM, 1),  # it does not end by itself
    ],
)
def test_a_worker_has_time_to_save_and_no_more(
    monkeypatch: pytest.MonkeyPatch, program: str, number: int, grace: float, again: int, code: int
) -> None:
    monkeypatch.setattr(agent, "OTHERS", 20.0 if code == 75 else 0.05)
    began = time.monotonic()
    assert stop_codes(program, number, grace, again) == [code]
    assert again == signal.SIGTERM or time.monotonic() < began + grace / 2  # killed, and not given up


@pytest.mark.slow
def test_a_store_that_never_answers_ends_the_agent_once_its_workers_are_gone() -> None:
    program = """
import subprocess, time
from tools.launch import agent
agent.STORE_GRACE = 1.0
agent.StoreWatch(0.5).start()
def _call_store(seconds): time.sleep(seconds)
for _ in range(100): _call_store(0.03)  # many that are answered, for longer together than one may take
worker = subprocess.Popen(["sleep", "30"])
_call_store(4)
print("still there", flush=True)
worker.kill()  # and it is not reaped: the thread that would do so is waiting
_call_store(30)
"""
    done = run([sys.executable, "-c", program], environment())
    assert (done.returncode, done.stdout) == (71, "still there\n"), done.stderr
    assert "for the rendezvous host to answer, expected at most 1.5" in done.stderr


@pytest.mark.parametrize("config", [{}, {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}])
def test_ranks_begin_with_an_allocator_that_grows_its_segments_unless_it_was_configured(
    config: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")} | config
    monkeypatch.setattr(os, "environ", bare)
    monkeypatch.setattr(agent, "Stop", lambda grace: 1 / 0)  # in the place of starting ranks
    with pytest.raises(ZeroDivisionError):
        agent.main(["-m", "some.module"])
    kept = {name: value for name, value in bare.items() if name.startswith("PYTORCH_")}
    assert kept == (config or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
