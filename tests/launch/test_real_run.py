"""The trainer itself behind the launcher: two ranks, a SIGTERM, the same command again."""

import signal
from pathlib import Path

import pytest
from e2e.running import command, metrics
from launch.launching import LAUNCH, Started, environment, run


@pytest.mark.slow
def test_a_real_run_on_two_ranks_stops_and_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launch = [LAUNCH / "torchrun.sh", "--nproc=2", *command(tmp_path / "cache", run_dir, STEPS=12)]
    env = environment(MODULE="grpo_fn.run")
    with Started(launch, env, tmp_path / "log") as started:
        started.until(lambda: (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) > 2)
        started.process.send_signal(signal.SIGTERM)
        assert started.code() == 75, started.log.read_text()
    assert 2 <= max(row["step"] for row in metrics(run_dir)) < 12
    done = run(launch, env)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(run_dir)] == list(range(13))
    assert (run_dir / "model" / "config.json").exists()
