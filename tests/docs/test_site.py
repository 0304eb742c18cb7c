"""The documentation builds without a warning, and says of the program what the program says."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# What other programs say, which our pages explain.
FOREIGN = {"CUDA out of memory", "torch._inductor.exc.InductorError"}


# Modules whose public functions docs/concepts/api.md has.
LIBRARY = [
    f"grpo_fn.{name}"
    for name in (
        *("algo.advantage", "algo.corrections", "algo.credit", "algo.group_sampling"),
        *("algo.losses", "algo.masking", "algo.objective", "algo.step"),
        *("rewards.code", "rewards.combine", "rewards.format", "rewards.math", "rewards.wrappers"),
        *("tasks.mixture", "tasks.rows", "tasks.task", "trainer.sections"),
    )
]


def public_functions(module: str) -> list[str]:
    """Functions and classes that a module defines."""
    found = vars(importlib.import_module(module)).items()
    return [name for name, value in found if getattr(value, "__module__", "") == module and name[:1] != "_"]


@pytest.mark.slow
def test_the_site_builds_and_warns_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="NOT TESTED: the site needs mkdocs-material: pip install 'grpo-fn[test]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "troubleshooting" / "index.html").exists()
    metrics = (tmp_path / "site" / "monitoring" / "metrics" / "index.html").read_text()
    assert all(f"<code>{name}</code>" in metrics for name in ("loss/kl", "eval/accuracy", "system/memory_gb"))
    reference = (tmp_path / "site" / "concepts" / "api" / "index.html").read_text()
    of_page = set(re.findall(r"^::: (\S+)", (DOCS / "concepts" / "api.md").read_text(), re.MULTILINE))
    named = {f"{module}.{name}" for module in LIBRARY for name in public_functions(module)}
    assert len(named) > 100
    assert not [name for name in named if name.rpartition(".")[0] not in of_page and name not in of_page]
    assert not [name for name in named if f'id="{name}"' not in reference]


@pytest.mark.parametrize("name", ["sections.Sampling.max_rows", "loss/kl", "advantage.group_normalized", "grpo_fn.run"])
def test_the_search_finds_a_name_by_each_of_its_parts_and_whole(name: str) -> None:
    """The index and a query are cut at the same separator, so a whole name is found as its parts beside each other."""
    text = (ROOT / "mkdocs.yml").read_text()
    (separator,) = re.findall(r"separator: '(.+)'", text)
    parts = re.split(separator, name)
    assert parts == re.findall(r"[A-Za-z0-9]+", name)
    words = [word for page in DOCS.rglob("*.md") for word in re.split(separator, page.read_text())]
    assert any(words[i : i + len(parts)] == parts for i in range(len(words)))


def test_every_page_is_in_the_site() -> None:
    named = set(re.findall(r"([\w/]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert named == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def literals() -> str:
    """All source of the package and its launchers, with the seams of strings that go over several lines closed."""
    paths = [*sorted((ROOT / "grpo_fn").rglob("*.py")), *sorted((ROOT / "experiments" / "tiny").glob("*.py"))]
    paths += sorted((ROOT / "tools" / "launch").glob("*.sh"))
    source = "\n".join(path.read_text() for path in paths)
    return re.sub(r"\"\s*\n\s*f?\"", "", source)


def test_the_messages_that_are_explained_are_those_that_are_given() -> None:
    quoted = [line[2:].strip() for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line[:2] == "> "]
    assert len(quoted) > 10
    source = literals()
    for message in set(quoted) - FOREIGN:
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip(" ,:;")]
        assert re.search(r"[^\n]{0,200}".join(parts), source), f"nothing in grpo_fn says {message!r}"


def test_the_knobs_and_files_that_are_named_exist() -> None:
    text = "\n".join(path.read_text() for path in sorted(DOCS.rglob("*.md"))) + (ROOT / "README.md").read_text()
    missing = [
        name
        for name in re.findall(r"`((?:scale|algo|run|task|eval)/\w+\.gin)`", text)
        if not (ROOT / "gin" / name).exists()
    ]
    assert not missing
