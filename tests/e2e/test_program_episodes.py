"""The run files of episodes that take the reader's model: two steps each with a small random one, tools included."""

import json
from pathlib import Path

import pytest
from e2e.running import finish, metrics
from e2e.test_mbpp_code import SHORT
from published import published

from experiments.tiny import models
from grpo_fn import sandbox
from grpo_fn.config import load_config
from grpo_fn.shell.logging import rollout_store

RUNS = {
    "python_tool": ("gsm8k", {"MAX_NEW_TOKENS": 16}),
    "mbpp_retry": ("mbpp", {"MAX_NEW_TOKENS": 24, "MAX_TURN_TOKENS": 8}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = models.Sizes(vocabulary=259, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, positions=4096)
    path = tmp_path_factory.mktemp("episodes") / "model"
    models.make_random(shape, path, seed=0, chat=True)
    return path


@pytest.mark.parametrize("name", [pytest.param("python_tool", marks=pytest.mark.slow), "mbpp_retry"])
def test_a_run_file_goes_through_two_steps(name: str, model: Path, tmp_path: Path) -> None:
    data, limits = RUNS[name]
    if all(sandbox.available()[kind] for kind in ("bubblewrap", "namespaces")):
        pytest.skip(f"NOT TESTED: no sandbox on this machine: {sandbox.available()}")
    given = {"MODEL": model, "DATA": published(data), **SHORT, **limits}
    flags = [part for key, value in given.items() for part in ("--gin_param", f"{key}={value}")]
    argv = ["--gin_file", f"run/{name}.gin", *flags, "--run_dir", str(tmp_path / "run")]
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["episode/environment_failures"] == row["reward/invalid"] == 0 for row in rows[1:])
    assert all(0 <= row["eval/accuracy"] <= 1 for row in rows)
    stored = rollout_store.load_rollouts(tmp_path / "run" / "rollouts" / "step_000001.jsonl.gz")
    assert len(stored) == 4
    assert all(row["turns"] for row in stored), json.dumps(stored)[:500]


LIMITS = {"python_tool": (8, 1024), "mbpp_retry": (3, 1152)}  # turns, sampled tokens


@pytest.mark.parametrize("name", RUNS)
def test_limits_leave_tokens_for_every_turn(name: str) -> None:
    kwargs = load_config([f"run/{name}.gin"], ["MODEL='x'", "DATA='x'"]).kwargs()
    episodes, sampling = kwargs["episodes"], kwargs["sampling"]
    assert (episodes.max_turns, sampling.max_new_tokens) == LIMITS[name]
    assert sampling.max_new_tokens <= episodes.max_turns * episodes.max_turn_tokens
    assert sampling.max_total_tokens > sampling.max_new_tokens
