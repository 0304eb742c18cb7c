"""Pages that quote the program itself: their Python runs, and the tests that they name are there."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/concepts/library.md"])
def test_the_python_of_a_page_runs_from_its_first_block_to_its_last(page: str, capsys) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {"__name__": page})


def test_the_step_of_the_readme_is_the_step_of_the_program() -> None:
    (excerpt,) = re.findall(r"^```py\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    program = iter((ROOT / "grpo_fn" / "algo" / "step.py").read_text().splitlines())
    absent = [line for line in excerpt.splitlines() if line.strip() != "..." and line not in program]
    assert not absent  # `in` on an iterator also holds the order


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows() -> None:
    """In a process of its own: here the types of arguments are checked before the functions see them."""
    path = ROOT / "docs" / "concepts" / "library.ipynb"
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    script = "\n".join("".join(cell["source"]) for cell in code)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(line for cell in code for out in cell["outputs"] for line in out["text"])


PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_says_what_it_is_for_before_its_first_command_table_or_section(path: Path) -> None:
    title, *rest = path.read_text().splitlines()
    assert title.startswith("# ")
    first = next(line for line in rest if line.strip())
    assert re.match(r"[`\w]", first), first


def test_the_tests_that_a_page_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "issues.md").read_text())
    assert len(named) >= 17
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert not missing


def test_the_files_of_the_step_exist() -> None:
    text = (ROOT / "docs" / "concepts" / "one_step.md").read_text()
    named = set(re.findall(r"\b((?:\w+/)+\w+\.py)\b", text))
    assert len(named) > 25
    assert not [name for name in named if not any((ROOT / top / name).exists() for top in ("", "grpo_fn"))]


def test_the_workflow_is_the_check_and_the_citation_has_our_version() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["check"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("page", [".github/CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_links_of_a_page_exist_and_so_do_the_tools_of_the_contributors_page(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    assert not [link for link in links if not ((ROOT / page).parent / link).exists()]
    named = "" if page == "CHANGELOG.md" else text  # a changelog names what went
    tools = re.findall(r"`?(?:python )?(tools/[\w/.]+\.py)", named)
    assert not [tool for tool in tools if not (ROOT / tool).exists()]
