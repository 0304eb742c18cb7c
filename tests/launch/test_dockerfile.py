"""tools/launch/Dockerfile, checked without docker: what it names is there, and what it copies is small."""

import re
import tomllib

from launch.launching import LAUNCH, ROOT

TEXT = (LAUNCH / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_its_python_and_its_extras_are_those_of_the_package() -> None:
    (python,) = re.findall(r"^FROM python:(\d+\.\d+)-slim$", TEXT, re.MULTILINE)
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    assert int(low) <= int(python.partition(".")[2]) < int(high)
    (extras,) = re.findall(r"pip install .*-e '\.\[([\w,]+)\]'", TEXT)
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()


def test_its_vllm_is_one_that_the_extra_takes() -> None:
    (pinned,) = re.findall(r"'vllm==0\.(\d+)\.\*'", TEXT)
    (extra,) = PROJECT["optional-dependencies"]["vllm"]
    low, high = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", extra).groups()
    assert int(low) <= int(pinned) < int(high)


def test_environments_runs_and_caches_are_not_copied_and_the_commit_is() -> None:
    """Job summaries ask git for the commit, so `.git` is copied."""
    left_out = {*(ROOT / ".dockerignore").read_text().split()}
    assert left_out == {*(ROOT / ".gitignore").read_text().split()}
    assert ".git" not in {name.strip("/") for name in left_out}
    assert "COPY . ." in TEXT
