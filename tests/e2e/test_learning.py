"""The program makes a model better at what it is rewarded for."""

import subprocess
import sys
from pathlib import Path
from typing import Any

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


def from_nothing(tmp_path: Path, file: str, steps: int, seed: int) -> list[dict[str, Any]]:
    """The metrics of a run file with fewer steps, its model made anew, in a process of its own as a user starts it.

    It is evaluated before the first step and after the last one.
    """
    argv = [sys.executable, "-m", "grpo_fn.run", "--gin_file", file, "--run_dir", str(tmp_path / "run")]
    params = [f"SEED={seed}", f"STEPS={steps}", f"sections.Evaluation.every={steps}"]
    params += [f"models.TinyModel.cache={str(tmp_path / 'cache')!r}"]
    subprocess.run([*argv, *(x for param in params for x in ("--gin_param", param))], check=True, cwd=TESTS.parent)
    return metrics(tmp_path / "run")


def gain(rows: list[dict[str, Any]]) -> float:
    """What held-out accuracy rose by."""
    return rows[-1]["eval/accuracy"] - rows[0]["eval/accuracy"]


# Fewer steps than the run files take, and the seed that gained least of those in experiments/: most comes early.


@pytest.mark.slow
def test_the_embedded_default_gains_thirty_points(tmp_path: Path) -> None:
    assert gain(from_nothing(tmp_path, "run/arithmetic.gin", steps=16, seed=1)) >= 0.30


@pytest.mark.slow
def test_the_calculator_gains_thirty_points_by_its_tool(tmp_path: Path) -> None:
    rows = from_nothing(tmp_path, "run/calculator.gin", steps=12, seed=0)
    assert gain(rows) >= 0.30
    assert rows[0]["eval/used_tool"] < 0.2  # the warm start has not decided it
    assert rows[-1]["eval/right_with_tool"] > 0.9


@pytest.mark.slow
def test_the_maze_gains_fifteen_points(tmp_path: Path) -> None:
    """Measured: 0.281 to 0.500, 28 of 128 held-out mazes gained and none lost."""
    assert gain(from_nothing(tmp_path, "run/maze.gin", steps=9, seed=1)) >= 0.15


@pytest.mark.slow
def test_five_procedural_kinds_are_learnt_in_one_mixture(tmp_path: Path) -> None:
    """More boxes are right, and as many answers are in boxes as before: it is not the form that is learnt."""
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    first, *_, last = rows = from_nothing(tmp_path, "run/procedural.gin", steps=12, seed=1)
    assert len([name for name in first if name.startswith("eval/task/")]) == 5
    assert min(first["eval/boxed"], last["eval/boxed"]) >= 0.95
    assert gain(rows) >= 0.15
