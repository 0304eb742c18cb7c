"""The agent: one exit code for a host, torchrun's arguments, and what a stop does to the workers."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch.launching import environment, run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tools.launch import agent

codes = st.lists(st.sampled_from((0, 1, 2, 71, 75, 9, -6, -9, -15)), min_size=1, max_size=8)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(codes, st.randoms())
def test_the_order_of_the_workers_does_not_matter(ended: list[int], random: object) -> None:
    shuffled = list(ended)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert agent.verdict(shuffled) == agent.verdict(ended)


@given(codes)
def test_a_host_is_done_only_when_all_its_workers_are(ended: list[int]) -> None:
    assert (agent.verdict(ended) == 0) == (not any(ended))


@given(codes)
def test_a_final_code_of_one_worker_is_the_hosts(ended: list[int]) -> None:
    assert agent.verdict([*ended, 2]) == 2
    assert agent.verdict([*(c for c in ended if c != 2), 75]) == 75


@given(codes)
def test_lost_is_said_only_when_no_worker_knows_better(ended: list[int]) -> None:
    others = {code for code in ended if code > 0} - {71}
    assert (agent.verdict(ended) == 71) == (71 in ended and not others)


@given(st.lists(st.integers(1, 64), min_size=1))
def test_workers_that_signals_killed_are_the_shells_code_for_it(signals: list[int]) -> None:
    assert agent.verdict([-number for number in signals]) == 128 + max(signals)


@given(st.lists(words, max_size=6), st.sampled_from(("-m", "--module")))
def test_the_module_and_its_arguments_go_through_the_worker_unchanged(args: list[str], flag: str) -> None:
    given = agent.through_worker(["--nnodes=2", "--max-restarts", "5", flag, "some.module", *args])
    asked = agent.torchrun.parse_args(given)
    assert asked.training_script.endswith("worker.py")
    assert asked.training_script_args == ["some.module", *args]
    assert (asked.nnodes, asked.max_restarts, asked.module) == ("2", 5, False)


@pytest.mark.parametrize("flag", ["-m", "-q"])
def test_a_flag_of_the_module_is_not_taken_for_torchruns(flag: str) -> None:
    asked = agent.torchrun.parse_args(agent.through_worker(["-m", "mod", flag, "x", "mod"]))
    assert asked.training_script_args == ["mod", flag, "x", "mod"]


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


@given(st.floats(1e-3, 1e6))
def test_a_grace_is_read_exactly(number: float) -> None:
    assert agent.seconds("GRACE", str(number)) == number


@pytest.mark.parametrize(("how", "code"), [("exit 7", 7), ("kill -9 $$", -9), ("exit 0", 0)])
def test_looking_at_how_a_child_ended_leaves_it_for_its_owner(how: str, code: int) -> None:
    child = subprocess.Popen(["sleep", "30"])
    assert agent.exit_code(child.pid) is None
    child.kill()
    child.wait()
    child = subprocess.Popen(["bash", "-c", how])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert agent.exit_code(child.pid) == agent.exit_code(child.pid) == code
    assert child.wait() == code


@pytest.fixture(autouse=True)
def own_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session has children of its own (servers, a browser), which are no workers: only shells are asked to stop."""
    every = psutil.Process.children

    def shells(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        return [child for child in every(process, recursive) if child.name() == "bash"]

    monkeypatch.setattr(psutil.Process, "children", shells)


def stopped(program: str, number: int, grace: float) -> list[int]:
    child = subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    stop = agent.Stop(grace)
    try:
        with pytest.raises(agent.SignalException):
            stop(number, None)
        stop(signal.SIGTERM, None)  # a second one is nothing new
        assert stop.codes is not None
        return stop.codes
    finally:
        child.kill()
        child.communicate()


def test_failures_are_one_line_and_the_first_comes_first() -> None:
    ended = {0: (-15, 7), 1: (9, 5), 2: (1, 6)}  # rank: exit code, when
    found = {rank: ProcessFailure(rank, 100 + rank, code, "") for rank, (code, _) in ended.items()}
    for rank, (_, when) in ended.items():
        found[rank].timestamp = when
    said = agent.failures(ChildFailedError("worker.py", found))
    assert said == "error: rank 1 ended with 9, rank 0 ended by SIGTERM, rank 2 ended with 1; the first one says why"


def test_a_worker_that_is_asked_to_stop_is_waited_for() -> None:
    assert stopped("trap 'sleep 0.5; exit 75' TERM; echo; while :; do sleep 0.05; done", signal.SIGTERM, 20.0) == [75]


def test_a_worker_that_does_not_stop_is_given_up() -> None:
    assert stopped("trap '' TERM; echo; while :; do sleep 0.05; done", signal.SIGTERM, 0.3) == [-signal.SIGKILL]


def test_workers_that_end_by_themselves_are_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "trap 'exit 1' TERM; echo; for i in 1 2 3 4 5 6; do sleep 0.05; done; exit 75"
    assert stopped(program, agent.FINAL_EXIT, 20.0) == [75]
    monkeypatch.setattr(agent, "OTHERS", 0.05)
    assert stopped("trap 'exit 1' TERM; echo; while :; do sleep 0.05; done", agent.FINAL_EXIT, 20.0) == [1]


def test_a_second_interrupt_kills_what_would_still_save() -> None:
    child = subprocess.Popen(["bash", "-c", "trap '' TERM; echo; while :; do sleep 0.05; done"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    stop = agent.Stop(60.0)
    before = signal.signal(signal.SIGALRM, lambda number, frame: stop(signal.SIGINT, frame))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(agent.SignalException):
            stop(signal.SIGINT, None)
        assert stop.codes == [-signal.SIGKILL]
    finally:
        signal.signal(signal.SIGALRM, before)
        child.kill()
        child.communicate()


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


@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}])
def test_the_allocator_grows_its_segments_unless_it_was_configured(given: dict[str, str]) -> None:
    env = {"PATH": "p", **given}
    agent.grow_segments(env)
    assert env == {"PATH": "p", **(given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})}


class Begun(Exception):
    """Raised in the place of starting ranks."""


def test_ranks_begin_with_an_allocator_that_grows_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
    monkeypatch.setattr(os, "environ", bare)

    def begin(grace: float) -> None:
        raise Begun(bare["PYTORCH_ALLOC_CONF"])

    monkeypatch.setattr(agent, "Stop", begin)
    with pytest.raises(Begun, match="expandable_segments:True"):
        agent.main(["-m", "some.module"])
