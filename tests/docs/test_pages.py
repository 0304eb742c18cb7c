"""Pages that quote the program itself: their Python runs, messages, files and tests that they name are there."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FOREIGN = {"CUDA out of memory", "torch._inductor.exc.InductorError"}  # messages of others that our pages explain
# Modules whose public functions docs/concepts/library.md has.
LIBRARY = [
    f"grpo_fn.{name}"
    for name in (
        *("algo.advantage", "algo.corrections", "algo.credit", "algo.group_sampling"),
        *("algo.losses", "algo.masking", "algo.objective", "algo.step"),
        *("rewards.code", "rewards.combine", "rewards.format", "rewards.math", "rewards.wrappers"),
        *("tasks.mixture", "tasks.rows", "tasks.task", "trainer.sections"),
    )
]


@pytest.mark.parametrize("page", ["README.md", "docs/concepts/library.md"])
def test_the_python_of_a_page_runs_from_its_first_block_to_its_last(page: str, capsys) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {"__name__": page})


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows() -> None:
    """In a process of its own: in this one the types of arguments are checked before the functions see them."""
    cells = json.loads((DOCS / "concepts" / "library.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    script = "\n".join("".join(cell["source"]) for cell in code)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(line for cell in code for out in cell["outputs"] for line in out["text"])


@pytest.mark.slow
def test_the_site_builds_and_warns_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="NOT TESTED: the site needs mkdocs-material: pip install 'grpo-fn[test]'")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "concepts" / "library" / "index.html").read_text()
    for module in LIBRARY:
        for name, value in vars(importlib.import_module(module)).items():
            if getattr(value, "__module__", "") == module and name[:1] != "_":
                assert f'id="{module}.{name}"' in reference


def test_the_step_of_the_readme_is_the_step_of_the_program() -> None:
    blocks = re.findall(r"^```py\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (excerpt,) = (block for block in blocks if "def update" in block)
    program = iter((ROOT / "grpo_fn" / "algo" / "step.py").read_text().splitlines())
    absent = [line for line in excerpt.splitlines() if line.strip() != "..." and line not in program]
    assert not absent  # `in` on an iterator also holds the order


def test_the_files_tests_and_links_that_pages_name_exist() -> None:
    texts = {path: path.read_text() for path in [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"]}
    texts[ROOT / ".github" / "CONTRIBUTING.md"] = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    missing = []
    for path, text in texts.items():
        links = re.findall(r"\]\(([^)\s:#]+)[)#]", text)
        missing += [(path.name, link) for link in links if not (path.parent / link).exists()]
        if path.name != "CHANGELOG.md":  # which names what went
            gin = re.findall(r"`((?:scale|algo|run|task|eval)/\w+\.gin)`", text)
            missing += [(path.name, name) for name in gin if not (ROOT / "gin" / name).exists()]
            tools = re.findall(r"\b(tools/[\w/]+\.py)\b", text)
            missing += [(path.name, name) for name in tools if not (ROOT / name).exists()]
    for name in set(re.findall(r"\b((?:\w+/)+\w+\.py)\b", texts[DOCS / "concepts" / "concepts.md"])):
        missing += [] if any((ROOT / top / name).exists() for top in ("", "grpo_fn")) else [("concepts.md", name)]
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", texts[DOCS / "troubleshooting.md"])
    missing += [("troubleshooting.md", name) for path, name in tests if f"def {name}(" not in (ROOT / path).read_text()]
    assert len(tests) > 10
    assert not missing


def test_names_of_the_design_page_are_defined_in_the_files_that_it_names() -> None:
    rows = re.findall(r"^\| \.\.\. .*? \| (`.+`) \| (`.+`) \|$", (DOCS / "design.md").read_text(), re.MULTILINE)
    assert len(rows) >= 20
    for files, names in rows:
        texts = [(ROOT / "grpo_fn" / file).read_text() for file in re.findall(r"`(.+?)`", files)]
        for name in re.findall(r"`(.+?)`", names):
            assert any(re.search(rf"(def|class) {name}\b", text) for text in texts), (files, name)


def test_every_page_is_in_the_site() -> None:
    named = set(re.findall(r"([\w/]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert named == {str(path.relative_to(DOCS)) for path in PAGES}


@pytest.mark.parametrize("name", ["sections.Sampling.max_rows", "loss/kl"])
def test_the_search_of_the_site_finds_a_name_by_each_of_its_parts(name: str) -> None:
    (separator,) = re.findall(r"separator: '(.+)'", (ROOT / "mkdocs.yml").read_text())
    assert re.split(separator, name) == re.findall(r"[A-Za-z0-9]+", name)


def test_the_messages_that_are_explained_are_those_that_are_given() -> None:
    quoted = [line[2:].strip() for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line[:2] == "> "]
    assert len(quoted) > 10
    paths = [*(ROOT / "grpo_fn").rglob("*.py"), *(ROOT / "experiments" / "tiny").glob("*.py")]
    paths += (ROOT / "tools" / "launch").glob("*.sh")
    source = "\n".join(path.read_text() for path in paths)
    source = re.sub(r"\"\s*\n\s*f?\"", "", source)  # the seams of strings over several lines
    for message in set(quoted) - FOREIGN:
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip(" ,:;")]
        assert re.search(r"[^\n]{0,200}".join(parts), source), f"nothing in grpo_fn says {message!r}"


def test_the_workflow_is_the_check_and_the_citation_has_our_version() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["check"]["steps"][-1] == {"run": ".ci/run"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


# Phrases that readers of these pages had to read twice: name the thing, or use the field's verb (resume, continue).
TWICE = (
    r"\bof (its|their|your|our|his) own\b(?! \w)|\b(goes|go|going) on\b|\b(of|than|from) (ours|yours)\b"
    r"|\bas (it|they) stands?\b"
)


def test_no_page_has_a_phrase_that_readers_had_to_read_twice() -> None:
    for page in [ROOT / "README.md", *PAGES]:
        prose = re.sub(r"```.*?```|`[^`\n]*`|^    .*$|^\|.*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert not re.search(TWICE, prose), (page.name, re.search(TWICE, prose))
