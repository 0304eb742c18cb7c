"""The published GSM8K and MBPP through the whole program with a small random model, tools and sandbox included."""

import json
from pathlib import Path

import pytest
from e2e.running import finish, metrics
from published import published

from grpo_fn import sandbox
from grpo_fn.config import load_config
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.model import tiny

TRAIN = 7473
SHORT = {"STEPS": 2, "PROMPTS": 2, "EVAL_PROBLEMS": 4, "step.Algorithm.group_size": 2}
SHORT |= {"sections.Checkpoints.every": 1, "sections.Evaluation.every": 1}
# A run file: its data, what makes it small, and how many turns and sampled tokens it leaves when it is not.
RUNS = {
    "gsm8k": ("gsm8k", {"MAX_NEW_TOKENS": 4}),
    "mbpp_code": ("mbpp", {"MAX_NEW_TOKENS": 8}),
    "python_tool": ("gsm8k", {"MAX_NEW_TOKENS": 16}),
    "mbpp_retry": ("mbpp", {"MAX_NEW_TOKENS": 24, "MAX_TURN_TOKENS": 8}),
}
LIMITS = {"python_tool": (8, 1024), "mbpp_retry": (3, 1152)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.Qwen2Sizes(vocabulary=259, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, positions=4096)
    path = tmp_path_factory.mktemp("published") / "model"
    tiny.make_random(shape, path, seed=0, chat=True)
    return path


def needs_sandbox() -> None:
    if all(sandbox.available()[kind] for kind in ("bubblewrap", "namespaces")):
        pytest.skip(f"NOT TESTED: no sandbox on this machine: {sandbox.available()}")


def arguments(name: str, model: Path, run_dir: Path) -> list[str]:
    """Of a run file made small; where it judges programs, the test needs a sandbox."""
    data, limits = RUNS[name]
    if name != "gsm8k":
        needs_sandbox()
    given = {"MODEL": model, "DATA": published(data), **SHORT, **limits}
    flags = [part for key, value in given.items() for part in ("--gin_param", f"{key}={value}")]
    return ["--gin_file", f"run/{name}.gin", *flags, "--run_dir", str(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "mbpp_code"])
def test_a_run_file_takes_its_steps_on_the_real_files(name: str, model: Path, tmp_path: Path) -> None:
    assert finish(arguments(name, model, tmp_path / "run"), tmp_path / "out") == 0, (tmp_path / "out").read_text()
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["reward/invalid"] == row["reward/timeouts"] == 0 for row in rows[1:])
    assert all(0 <= row["eval/accuracy"] <= 1 for row in rows)
    assert name != "gsm8k" or f"epochs of {TRAIN}" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("name", [pytest.param("python_tool", marks=pytest.mark.slow), "mbpp_retry"])
def test_episodes_of_a_run_file_go_through_two_steps(name: str, model: Path, tmp_path: Path) -> None:
    assert finish(arguments(name, model, tmp_path / "run"), tmp_path / "out") == 0, (tmp_path / "out").read_text()
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["episode/environment_failures"] == row["reward/invalid"] == 0 for row in rows[1:])
    assert all(0 <= row["eval/accuracy"] <= 1 for row in rows)
    stored = rollout_store.load_rows(tmp_path / "run" / "rollouts" / "step_000001.jsonl.gz")
    assert len(stored) == 4
    assert all(row["turns"] for row in stored), json.dumps(stored)[:500]
    kwargs = load_config([f"run/{name}.gin"], ["MODEL='x'", "DATA='x'"]).kwargs()
    episodes, sampling = kwargs["episodes"], kwargs["sampling"]
    assert (episodes.max_turns, sampling.max_new_tokens) == LIMITS[name]
    assert sampling.max_new_tokens <= episodes.max_turns * episodes.max_turn_tokens
    assert sampling.max_total_tokens > sampling.max_new_tokens
