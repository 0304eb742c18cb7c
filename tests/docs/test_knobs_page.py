"""docs/configuration/knobs.md lists every knob of the configurations, and nothing that a gin file cannot bind."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import page_tables
import pytest

from grpo_fn.config import load_config, parse_gin
from grpo_fn.config.resolve import Node, bad_names, used_macros
from grpo_fn.train import MACROS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration" / "knobs.md"
FILES = PAGE.with_name("gin_files.md")
# What the program passes, and a gin file may not bind.
DATA = {"algo", "batch", "completion", "context", "encode", "gains", "problem", "rollout", "score", "span", "totals"}


def rows() -> Iterator[tuple[object, str, str]]:
    """(function, its name and the knob, meaning) of each row of the page, scopes left out."""
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading, (module,) = section.partition("\n")[0], re.findall(r"\(`(grpo_fn\.[\w.]+)`\)\n", section)[:1]
        target = getattr(importlib.import_module(module), heading.rpartition(".")[2])
        for name, meaning in re.findall(r"^\| `(?:[\w/]+/)?([\w.]+)` \|.*\| (.*) \|$", section, re.MULTILINE):
            assert name.rpartition(".")[0] == heading
            yield target, name, meaning


def nodes_of(value: object) -> Iterator[Node]:
    """All functions of the package with their knobs in a resolved value."""
    if isinstance(value, Node):
        yield from [value] * value.target.__module__.startswith("grpo_fn.")
        yield from nodes_of(value.knobs)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from nodes_of(item)


def test_every_knob_that_a_run_resolves_to_has_a_row() -> None:
    pairs, knobs = {(target, name.rpartition(".")[2]) for target, name, _ in rows()}, []
    for path in sorted((ROOT / "gin" / "run").glob("*.gin")):
        bindings = parse_gin([str(path)], [])
        macros = used_macros(bindings) - bindings.macros.keys() - MACROS.keys()
        root = load_config([str(path)], [f"{name}='dummy'" for name in sorted(macros)]).root
        knobs += [(node.target, knob) for node in nodes_of(root) for knob in node.knobs]
    assert len(knobs) > 1000
    assert not [pair for pair in knobs if pair not in pairs]


def test_a_gin_file_may_bind_every_knob_of_the_page_and_each_says_what_it_means() -> None:
    for target, name, meaning in rows():
        knob = name.rpartition(".")[2]
        assert not [*bad_names(name, target, [knob])]
        assert knob not in DATA
        assert meaning.strip(), name


def test_the_pages_are_what_the_code_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert page_tables.main([str(PAGE), str(FILES), "--check"]) == 0, capsys.readouterr().out
    by_comment = "most logits that live at once in the head; fewer where the device is small"
    assert f"| `sections.Compute.logits_chunk_elements` | `int` | `268435456` | {by_comment} |" in PAGE.read_text()
    assert "| `train.train.seed` | `int` | `%SEED` | of everything random. |" in PAGE.read_text()
    listed = re.findall(r"^\| `([\w/]+\.gin)` \|", FILES.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "gin")) for path in (ROOT / "gin").rglob("*.gin"))
