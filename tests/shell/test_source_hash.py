"""The hash of sources: it follows imports within a package, and statements count where comments do not."""

import ast
import sys
from pathlib import Path

import pytest

from grpo_fn.shell import source_hash
from grpo_fn.shell.source_hash import hash_of_sources, imported_sources

FILES = {
    "__init__.py": "",
    "first.py": '"""Doc."""\nfrom hashed_package import second\n\n\ndef f():\n    """Doc."""\n    return second.g()\n',
    "second.py": "def g():\n    from .third import THREE\n\n    return THREE\n",
    "third.py": "import json\n\nTHREE = json.loads('3')\n",
    "other.py": "from hashed_package import first\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hashed_package"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


def test_imports_are_followed_within_the_package_alone(package: Path):
    names = {"hashed_package", *(f"hashed_package.{name}" for name in ("first", "second", "third"))}
    assert set(imported_sources(["hashed_package.first"])) == names


def hash_with(package: Path, name: str, old: str, new: str) -> str:
    text = (package / name).read_text()
    assert old in text
    (package / name).write_text(text.replace(old, new))
    found = hash_of_sources(["hashed_package.first"])
    (package / name).write_text(text)
    return found


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("first.py", "g()", "g() + 0"), ("third.py", "'3'", "'4'"), ("second.py", "return", "return 1 +")],
)
def test_another_statement_of_what_is_imported_is_another_hash(package: Path, name: str, old: str, new: str):
    assert hash_with(package, name, old, new) != hash_of_sources(["hashed_package.first"])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("first.py", "Doc", "Docs"), ("second.py", "\n\n", "  # why\n"), ("other.py", "first", "third")],
)
def test_docstrings_comments_and_other_modules_do_not_count(package: Path, name: str, old: str, new: str):
    assert hash_with(package, name, old, new) == hash_of_sources(["hashed_package.first"])


def test_a_module_without_source_is_named():
    with pytest.raises(ValueError, match="got the module sys without a source file"):
        imported_sources(["sys"])


def test_a_text_is_parsed_once_by_a_process(package: Path, monkeypatch: pytest.MonkeyPatch):
    parsed: list[ast.Module] = []
    statements_of = source_hash.statements_of

    def counted(tree: ast.Module) -> str:
        parsed.append(tree)
        return statements_of(tree)

    source_hash.parse_source.cache_clear()
    monkeypatch.setattr(source_hash, "statements_of", counted)
    found = hash_of_sources(["hashed_package.first"])
    assert len(parsed) == 4
    assert hash_of_sources(["hashed_package.first"]) == found
    assert len(parsed) == 4
    (package / "third.py").write_text(FILES["third.py"].replace("'3'", "'4'"))
    assert hash_of_sources(["hashed_package.first"]) != found
    assert len(parsed) == 5
