"""A wheel has gin files, templates and nothing of an earlier build, and needs a clone for the toys alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "grpo_fn", "gin")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the project in which an earlier build has left a module behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in BUILT_FROM:
        copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
        copy(PROJECT / name, source / name)
    stale = source / "build" / "lib" / "grpo_fn" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder), "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("grpo_fn-*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_every_gin_file_template_and_module_and_no_other(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    gin = {f"grpo_fn/{path.relative_to(PROJECT)}" for path in (PROJECT / "gin").rglob("*.gin")}
    code = (path for path in (PROJECT / "grpo_fn").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert inside == gin | {str(path.relative_to(PROJECT)) for path in code}


@pytest.mark.slow
def test_the_wheel_runs_the_default_in_a_clone_and_names_the_fix_elsewhere(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    where = "import grpo_fn.config.parse as p; print(p.GIN_FOLDER)"
    found = subprocess.run([sys.executable, "-c", where], cwd=elsewhere, env=env, capture_output=True, text=True)
    assert found.stdout.strip() == str(tmp_path / "site" / "grpo_fn" / "gin"), found.stderr
    command = [sys.executable, "-m", "grpo_fn.run", "--gin_file", "run/arithmetic.gin", "--dry_run"]
    refused = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "No module named 'experiments': toy models and tasks are in experiments/ of a clone" in refused.stderr
    assert not [*elsewhere.iterdir()]
    (elsewhere / "experiments").symlink_to(PROJECT / "experiments")
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ready: python -m grpo_fn.run run/arithmetic.gin"
