"""The documentation builds without a warning, and says of the program what the program says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# What other programs say, which our pages explain.
FOREIGN = {"CUDA out of memory"}


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
    metrics = (tmp_path / "site" / "metrics" / "index.html").read_text()
    assert all(f"<code>{name}</code>" in metrics for name in ("loss/kl", "eval/accuracy", "system/memory_gb"))


def test_every_page_is_in_the_site() -> None:
    named = set(re.findall(r"([\w/]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert named == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def literals() -> str:
    """All source of the package and its launchers, with the seams of strings that go over several lines closed."""
    paths = [*sorted((ROOT / "grpo_fn").rglob("*.py")), *sorted((ROOT / "tools" / "launch").glob("*.sh"))]
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
    text = text.replace((DOCS / "renamed.md").read_text(), "")
    missing = [
        name
        for name in re.findall(r"`((?:scale|algo|run|task|eval)/\w+\.gin)`", text)
        if not (ROOT / "gin" / name).exists()
    ]
    assert not missing
