"""The program makes a model better at what it is rewarded for."""

import json
import resource
import subprocess
import sys
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


def from_nothing(tmp_path: Path, file: str, seed: int) -> tuple[Path, float]:
    """The run folder and the processor seconds of a run file as it is, its model made anew."""
    argv = [sys.executable, "-m", "grpo_fn.run", "--gin_file", file, "--run_dir", str(tmp_path / "run")]
    argv += ["--gin_param", f"SEED={seed}", "--gin_param", f"models.TinyModel.cache={str(tmp_path / 'cache')!r}"]
    began = processor_seconds()
    subprocess.run(argv, check=True, cwd=TESTS.parent)
    return tmp_path / "run", processor_seconds() - began


def processor_seconds() -> float:
    """What the children of this process have used: two idle cores give two of them a second, a busy machine fewer."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def gain(run: Path) -> float:
    """What held-out accuracy rose by."""
    summary = json.loads((run / "summary.json").read_text())
    return summary["accuracy_after"] - summary["accuracy_before"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_embedded_default_gains_thirty_points_within_four_minutes(seed: int, tmp_path: Path) -> None:
    """The whole of it, as the README says it: warm start, training and evaluation, on two idle cores."""
    run, seconds = from_nothing(tmp_path, "run/arithmetic.gin", seed)
    assert gain(run) >= 0.30
    assert seconds <= 2 * 240


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_calculator_gains_thirty_points_by_its_tool_within_four_minutes(seed: int, tmp_path: Path) -> None:
    """On two idle cores, as above."""
    run, seconds = from_nothing(tmp_path, "run/calculator.gin", seed)
    assert gain(run) >= 0.30
    before, *_, after = [row for row in metrics(run) if "eval/used_tool" in row]
    assert before["eval/used_tool"] < 0.2  # the warm start has not decided it
    assert after["eval/right_with_tool"] > 0.9
    assert seconds <= 2 * 240


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_maze_gains_twenty_points(seed: int, tmp_path: Path) -> None:
    run, _ = from_nothing(tmp_path, "run/maze.gin", seed)
    assert gain(run) >= 0.20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_five_procedural_kinds_are_learnt_in_one_mixture(seed: int, tmp_path: Path) -> None:
    """run/procedural.gin, as docs/tasks/procedural.md reports it: boxes before and after, more of them right."""
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    argv = [sys.executable, "-m", "grpo_fn.run", "--gin_file", "run/procedural.gin", "--run_dir", str(tmp_path / "run")]
    cache = f"models.TinyModel.cache={str(tmp_path / 'cache')!r}"
    argv += ["--gin_param", f"SEED={seed}", "--gin_param", cache]
    subprocess.run(argv, check=True, cwd=TESTS.parent)
    first, *_, last = metrics(tmp_path / "run")
    kinds = [name for name in first if name.startswith("eval/task/")]
    assert len(kinds) == 5
    assert min(first["eval/boxed"], last["eval/boxed"]) >= 0.95  # it is not the form that is learnt
    assert last["eval/accuracy"] - first["eval/accuracy"] >= 0.15
