"""A job over two hosts with their own addresses: by hand, when one disappears, when one is drained."""

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from launch.hosts import Host
from launch.launching import Started, documented, environment, flags, steps, trace

PORT = "29555"


def by_hand(folder: Path, **bindings: object) -> list[str | Path]:
    """The command of docs/running/cluster.md, the same on both hosts, for one rank on each and the stand-in."""
    (line,) = documented("python tools/launch/agent.py")
    here = {
        "host-a:29400": f"grpo-0:{PORT}",
        "--nproc-per-node=8": "--nproc-per-node=1",
        "grpo_fn.run": "launch.stand_in",
    }
    for there, changed in here.items():
        assert line.count(there) == 1
        line = line.replace(there, changed)
    own, _, _ = line.partition(" --gin_file ")
    return [sys.executable, *shlex.split(own)[1:], *flags(folder, **bindings)]


def start_all(stack: ExitStack, hosts: list[Host], command: list[str | Path], folder: Path) -> list[Started]:
    return [stack.enter_context(host.start(command, environment(), folder / f"log{n}")) for n, host in enumerate(hosts)]


@pytest.mark.slow
def test_a_host_that_disappears_and_comes_back_is_taken_in_again(two_hosts: list[Host], tmp_path: Path) -> None:
    second = two_hosts[1]
    command = by_hand(tmp_path, STEPS=400, DEADLINE=6)
    run_dir = tmp_path / "run"
    with ExitStack() as stack:
        here, there = start_all(stack, two_hosts, command, tmp_path)
        here.until(lambda: len(steps(run_dir)) >= 3)
        assert {line["host"] for line in trace(run_dir)} == {"grpo-0", "grpo-1"}
        second.reach(False)  # its end goes unnoticed: no connection is closed
        assert second.kill() >= 2
        there.process.wait(60)
        before = len(steps(run_dir))
        # A rank that waits for one who is gone gives up at its deadline, and its agent looks for a new second host.
        here.until(lambda: "lost another rank" in here.log.read_text() or "for the other ranks" in here.log.read_text())
        second.reach(True)
        back = stack.enter_context(second.start(command, environment(), tmp_path / "log2"))
        assert here.code() == 0, here.log.read_text() + back.log.read_text()
        assert back.code() == 0, back.log.read_text()
    taken = steps(run_dir)
    assert taken[-1] == 400
    # Resumed, not begun again: at most the step that was not saved is taken twice.
    assert before < 400
    assert sorted(set(taken)) == list(range(1, 401))
    assert len(taken) <= 402
    assert {line["size"] for line in trace(run_dir)} == {2}


@pytest.mark.slow
def test_when_the_rendezvous_host_disappears_the_other_ends_as_lost_and_both_go_on(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    first = two_hosts[0]
    command = by_hand(tmp_path, STEPS=60, DEADLINE=6)
    command.insert(2, "--rdzv-conf=read_timeout=10,join_timeout=30")
    with ExitStack() as stack:
        here, there = start_all(stack, two_hosts, command, tmp_path)
        here.until(lambda: len(steps(tmp_path / "run")) >= 3)
        first.reach(False)
        first.kill()
        here.process.wait(60)
        assert there.code() == 71, there.log.read_text()
        first.reach(True)
        again = start_all(stack, two_hosts, command, tmp_path)
        assert [one.code() for one in again] == [0, 0], "".join(one.log.read_text() for one in again)
    assert sorted(set(steps(tmp_path / "run"))) == list(range(1, 61))
