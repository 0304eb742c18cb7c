"""The program makes a model better at what it is rewarded for."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.running import TESTS, command, finish, metrics


def test_the_rewarded_behaviour_becomes_common(cache: Path, tmp_path: Path) -> None:
    """A model that has learnt next to nothing, paid for digits, comes to write digits."""
    changes = {"STEPS": 40, "combine__combine__weights": [0.0, 1.0], "sections__Evaluation__every": 0}
    changes |= {"step__Algorithm__group_size": 16, "optimizer__adamw__lr": 5e-3}
    code = finish(command(cache, tmp_path / "run", **changes), tmp_path / "out")
    assert code == 0, (tmp_path / "out").read_text()
    reward = [row["reward/mean"] for row in metrics(tmp_path / "run")[1:]]
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_embedded_default_gains_thirty_points_within_four_minutes(seed: int, tmp_path: Path) -> None:
    """The whole of it, as the README says it: warm start, training and evaluation, on an idle machine."""
    argv = [sys.executable, "-m", "grpo_fn.run", "--gin_file", "run/arithmetic.gin", "--run_dir", str(tmp_path / "run")]
    argv += ["--gin_param", f"SEED={seed}", "--gin_param", f"tiny_model.Recipe.cache={str(tmp_path / 'cache')!r}"]
    began = time.monotonic()
    subprocess.run(argv, check=True, cwd=TESTS.parent)
    seconds = time.monotonic() - began
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.30
    assert seconds <= 240


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_five_procedural_kinds_are_learnt_in_one_mixture(seed: int, tmp_path: Path) -> None:
    """run/procedural.gin, as docs/tasks/procedural.md reports it: more held-out questions are right afterwards."""
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    argv = [sys.executable, "-m", "grpo_fn.run", "--gin_file", "run/procedural.gin", "--run_dir", str(tmp_path / "run")]
    cache = f"tiny_task_model.TaskRecipe.cache={str(tmp_path / 'cache')!r}"
    argv += ["--gin_param", f"SEED={seed}", "--gin_param", cache]
    subprocess.run(argv, check=True, cwd=TESTS.parent)
    first, *_, last = metrics(tmp_path / "run")
    kinds = [name for name in first if name.startswith("eval/task/")]
    assert len(kinds) == 5
    assert last["eval/accuracy"] - first["eval/accuracy"] >= 0.15
