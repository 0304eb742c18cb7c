"""The embedded default learns with vLLM as it does with the local sampler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def started(folder: Path, *flags: str) -> list[dict]:
    """The metrics of `python -m grpo_fn.run --gin_file run/arithmetic_vllm.gin`."""
    argv = [sys.executable, "-m", "grpo_fn.run", "--gin_file", "run/arithmetic_vllm.gin", "--run_dir", str(folder)]
    subprocess.run([*argv, *flags], check=True, cwd=ROOT, timeout=900)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_few_steps_as_a_user_starts_them(tmp_path: Path) -> None:
    """Of a smaller model that has learnt little, paid for whatever it is paid for; engine and policy agree."""
    small = ["STEPS=2", "models.TinyModel.steps=60", "step.Algorithm.prompts=8", "models.TinyModel.layers=1"]
    small += ["models.TinyModel.hidden=64", "models.TinyModel.heads=2", "models.TinyModel.kv_heads=1", "MAX_VALUE=3"]
    small += ["OPERATIONS=1", "TEST_SIZE=8", "MAX_NEW_TOKENS=12", f"models.TinyModel.cache={str(tmp_path)!r}"]
    rows = started(tmp_path / "run", *(part for one in small for part in ("--gin_param", one)))
    for row in rows[1:]:
        assert row["engine/verified"] == 1
        assert row["engine/probe_gap_max"] < 1e-3
        assert row.get("loss/logprob_diff_max", 0.0) < 1e-3
        assert row["generation/rows"] == 128
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.slow
def test_the_embedded_default_gains_thirty_points(tmp_path: Path) -> None:
    """As with the local sampler (tests/e2e/test_learning.py)."""
    cache = f"models.TinyModel.cache={str(tmp_path / 'cache')!r}"
    started(tmp_path / "run", "--gin_param", cache)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.30
