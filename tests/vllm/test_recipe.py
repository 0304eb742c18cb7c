"""The recipe of experiments/ that samples with vLLM, made small: the engine is real."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from e2e.running import metrics
from e2e.test_recipes import SIGNAL, TINY, data_of, flags, instructions, learnt

from grpo_fn.shell.model.tiny import Qwen2Sizes, make_random

__all__ = ["instructions"]  # a fixture that data_of asks for
pytestmark = pytest.mark.xdist_group("vllm")
PROJECT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0  # seconds; a process that imports vLLM, and two steps
SMALLER = {"vllm_sampler.colocated_sampler.enforce_eager": True, "vllm_sampler.colocated_sampler.kv_cache_bytes": 2**26}
# A problem of MATH in bytes; heads of 32, the narrowest of vLLM's.
SHAPE = Qwen2Sizes(vocabulary=300, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=96, positions=8192)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_random(SHAPE, tmp_path / "model", seed=0, chat=True)
    return tmp_path / "model"


def ran(bindings: Mapping[str, Any], folder: Path) -> str:
    """What a run of the recipe with these bindings said; its folder is `folder`/run."""
    (folder / "signal.gin").write_text(SIGNAL.format(verdict="@math.correct"))
    first, file, *params = flags("math_k8s_16gpu", bindings)
    argv = [first, file, "--gin_file", str(folder / "signal.gin"), *params, "--run_dir", str(folder / "run")]
    path = os.pathsep.join(map(str, (PROJECT, PROJECT / "tests")))
    done = subprocess.run(
        [sys.executable, "-m", "grpo_fn.run", *argv],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_two_steps_of_math_k8s_16gpu(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> None:
    ran(data_of("math_k8s_16gpu", request) | TINY | SMALLER | {"MODEL": model}, tmp_path)
    learnt(tmp_path / "run", overflows=False)
    steps = metrics(tmp_path / "run")[1:]
    assert all(row["engine/verified"] == 1 for row in steps)
    assert all(row["engine/tokens"] > 0 and row["engine/probe_gap_mean"] < 0.05 for row in steps)
    assert (tmp_path / "run" / "adapter").exists()
