"""tools/launch/slurm.sbatch under a fake Slurm: what it derives, passes on and records, when it queues itself again."""

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch.fake_slurm import calls, install, job
from launch.launching import (
    LAUNCH,
    ROOT,
    Started,
    agent_arguments,
    environment,
    flags,
    listening_python,
    program,
    run,
    steps,
    trace,
)

args = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12), max_size=5)


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder with the commands in bin/, and the script as Slurm has it: a copy far from the repository."""
    install(tmp_path / "bin")
    shutil.copy(LAUNCH / "slurm.sbatch", tmp_path / "slurm_script")
    return tmp_path


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("", 0))
        return str(one.getsockname()[1])


def summary(run_dir: Path, restart: int = 0) -> dict:
    return json.loads((run_dir / f"job_4242_{restart}.json").read_text())


def ended(slurm: Path, code: int, *, terminate: bool, **more: str) -> tuple[int, dict, bool]:
    """Exit code, summary and whether it was queued again, of a job whose step ends with `code`."""
    (slurm / "run").mkdir()
    (slurm / "run" / "run.json").touch()
    short = "" if terminate else "yes"
    env = environment(slurm / "bin", **job(slurm, FAKE_CODE=str(code), FAKE_SHORT=short, **more))
    with Started(["bash", slurm / "slurm_script", *flags(slurm)], env, slurm / "log", cwd=slurm) as launch:
        if terminate:
            launch.until((slurm / "running").exists)
            launch.process.send_signal(signal.SIGTERM)
        got = launch.code()
    requeued = calls(slurm, "scontrol").count("requeue 4242")
    assert requeued in (0, 1)
    return got, summary(slurm / "run", int(more.get("SLURM_RESTART_COUNT", "0"))), bool(requeued)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("code", "terminate", "more", "again"),
    [
        (75, True, {}, True),  # saved
        (71, True, {}, True),  # not saved, but the newest checkpoint is there
        (0, True, {}, False),  # it was the last step
        (2, True, {}, False),
        (75, False, {}, False),  # stopped by hand
        (75, True, {"FAKE_STATE": "COMPLETING"}, False),  # scancel, or Slurm queues it again itself
        (75, True, {"SLURM_RESTART_COUNT": "3", "MAX_REQUEUES": "4"}, True),
        (75, True, {"SLURM_RESTART_COUNT": "4", "MAX_REQUEUES": "4"}, False),
    ],
)
def test_a_preempted_job_is_queued_again_and_no_other(
    slurm: Path, code: int, terminate: bool, more: dict[str, str], again: bool
) -> None:
    got, record, requeued = ended(slurm, code, terminate=terminate, **more)
    assert (got, requeued) == (code, again), (slurm / "log").read_text()
    assert (record["exit_code"], record["requeued"]) == (code, again)
    assert record["restarts"] == int(more.get("SLURM_RESTART_COUNT", "0"))


def test_the_jobs_folder_has_its_output_and_a_summary_with_the_trainings_figures(slurm: Path) -> None:
    (slurm / "run").mkdir()
    rows = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "time/total": 3.0, "reward/mean": 0.5, "generation/tokens_per_second": 90.0, "eval/accuracy": 0.5},
        {"step": 2, "time/total": 5.0, "reward/mean": 0.6, "generation/tokens_per_second": 70.0, "eval/accuracy": 0.5},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (slurm / "run" / "run.json").touch()
    (slurm / "run" / "metrics.jsonl").write_text(text + '{"step": 3, "ti')
    command = ["bash", slurm / "slurm_script", *flags(slurm)]
    env = environment(slurm / "bin", **job(slurm, FAKE_CODE="75", FAKE_SHORT="yes", PORT="29777"))
    done = run(command, env, cwd=slurm)
    assert done.returncode == 75
    record, head = summary(slurm / "run"), ["git", "-C", ROOT, "rev-parse", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    assert record["git_commit"].removesuffix("+changes") == commit
    assert record["nodes"] == ["localhost", "node-b"]
    assert record["command"] == ["launch.stand_in", *flags(slurm)]
    assert (record["job_id"], record["job_name"]) == ("4242", "grpo")
    assert record["start"] <= record["end"]
    assert record["training"] == {
        "steps": 2,
        "seconds_a_step": 4.0,
        "steps_an_hour": 900.0,
        "tokens_a_second": 70.0,
        "reward": 0.6,
        "best_accuracy": 0.5,
        "best_step": 1,
    }
    folder = slurm / "logs" / "grpo-4242"
    said = (folder / "training_output.log").read_text()
    assert "MASTER_ADDR=localhost MASTER_PORT=29777 is where the nodes meet" in said
    assert sorted(said.splitlines()) == sorted((done.stdout + done.stderr).splitlines())
    lines = dict(line.split(maxsplit=1) for line in (folder / "job_summary.txt").read_text().splitlines())
    assert (lines["steps"], lines["best_step"], lines["exit_code"]) == ("2", "1", "75")
    (slurm / "run" / "metrics.jsonl").write_text("[]\n" + text)
    assert run(command, env, cwd=slurm).returncode == 75
    assert "metrics.jsonl" in summary(slurm / "run")["training"]["error"]


def test_the_record_is_written_though_slurm_repeats_its_signal(slurm: Path) -> None:
    hurried = "if [[ $1 == *job_summary.py ]]; then kill -TERM $$; fi"
    python = program(slurm, "python", f'#!/usr/bin/env bash\n{hurried}\nexec "{environment()["PYTHON"]}" "$@"\n')
    assert ended(slurm, 75, terminate=True, PYTHON=str(python))[2]


@settings(max_examples=10)
@given(args)
def test_every_argument_arrives_on_every_node_as_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, given: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("slurm")
    install(folder / "bin")
    env = environment(folder / "bin", **job(folder, nodes="node-a", FAKE_GPUS="2"))
    env |= {"PYTHON": str(listening_python(folder)), "RUN_DIR": str(folder / "run")}
    done = run(["bash", LAUNCH / "slurm.sbatch", "--gin_file", "f", *given], env, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert agent_arguments(folder) == [
        *("tools/launch/agent.py", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=node-a:24242", "--rdzv-id=4242"),
        *("--rdzv-conf=is_host=1,join_timeout=600,read_timeout=300", "-m", "launch.stand_in"),
        *("--gin_file", "f", *given, "--run_dir", str(folder / "run")),
    ]


def test_the_run_folder_is_the_jobs_unless_one_is_given(slurm: Path) -> None:
    def folder_of(*given: str, **more: str) -> list[str]:
        env = environment(slurm / "bin", **job(slurm, nodes="node-a", **more))
        done = run(["bash", slurm / "slurm_script", "--gin_file=f", *given], env | {"PYTHON": str(python)}, cwd=slurm)
        assert done.returncode == 0, done.stderr
        return agent_arguments(slurm)[agent_arguments(slurm).index("--gin_file=f") + 1 :]

    python, given = listening_python(slurm), str(slurm / "given")
    assert folder_of(RUN_DIR=given) == ["--run_dir", given]
    assert folder_of("--run_dir", given) == ["--run_dir", given]
    assert folder_of(f"--run_dir={given}", RUN_DIR="x") == [f"--run_dir={given}"]
    (slurm / "repo" / "tools").mkdir(parents=True)
    (slurm / "repo" / "tools" / "launch").symlink_to(LAUNCH)
    for restart in ("0", "1"):
        here = folder_of(SLURM_SUBMIT_DIR=str(slurm / "repo"), SLURM_RESTART_COUNT=restart)
        assert here == ["--run_dir", "runs/grpo-4242"]


@pytest.mark.parametrize(
    ("given", "more", "complaint"),
    [
        ([], {}, "got no --gin_file, expected one, as in --gin_file run/gsm8k.gin"),
        (["--gin_file=f"], {"SLURM_SUBMIT_DIR": "/"}, "got / to start in, expected the repository's root: call sbatch"),
        (
            ["--gin_file=f"],
            {"SLURM_NNODES": "3"},
            "got 2 names for SLURM_JOB_NODELIST=node-[a-b], expected SLURM_NNODES=3",
        ),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    slurm: Path, given: list[str], more: dict[str, str], complaint: str
) -> None:
    done = run(["bash", slurm / "slurm_script", *given], environment(slurm / "bin", **job(slurm) | more), cwd=slurm)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {complaint}")
    assert done.stderr.count("\n") == 1
    assert not calls(slurm, "srun")


def test_a_stop_that_comes_before_the_step_reaches_it(slurm: Path) -> None:
    slow = (slurm / "bin" / "srun").read_text().replace("pids=()\n", "pids=()\ntouch $FAKE/early; sleep 1\n", 1)
    (slurm / "bin" / "srun").write_text(slow)
    env = environment(slurm / "bin", **job(slurm, FAKE_CODE="75", FAKE_SHORT=""))
    with Started(["bash", slurm / "slurm_script", *flags(slurm)], env, slurm / "log", cwd=slurm) as launch:
        launch.until((slurm / "early").exists)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.code() == 75, launch.log.read_text()
    assert len(calls(slurm, "scancel")) > 1
    assert "requeue 4242" in calls(slurm, "scontrol")


@pytest.mark.slow
def test_a_preempted_job_saves_and_goes_on_where_it_stopped(slurm: Path) -> None:
    command = ["bash", slurm / "slurm_script", *flags(slurm, STEPS=60, SAVE=0.5)]
    env = environment(slurm / "bin", **job(slurm), PORT=free_port())
    with Started(command, env, slurm / "log", cwd=slurm) as launch:
        launch.until(lambda: len(steps(slurm / "run")) >= 2)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.code() == 75, launch.log.read_text()
    assert calls(slurm, "scancel") == ["--signal=TERM 4242.0"]
    assert calls(slurm, "scontrol")[-1] == "requeue 4242"
    assert 2 <= len(steps(slurm / "run")) < 60
    done = run(command, env | {"SLURM_RESTART_COUNT": "1", "PORT": free_port()}, cwd=slurm)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert steps(slurm / "run", rank) == list(range(1, 61))
    assert {(line["size"], line["run_id"]) for line in trace(slurm / "run")} == {(2, "4242")}
    assert trace(slurm / "run")[0]["argv"] == flags(slurm, STEPS=60, SAVE=0.5)
    assert [summary(slurm / "run", n)["exit_code"] for n in (0, 1)] == [75, 0]
    assert [summary(slurm / "run", n)["requeued"] for n in (0, 1)] == [True, False]
