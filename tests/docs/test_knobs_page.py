"""docs/configuration/knobs.md lists every knob, and nothing that a gin file cannot bind."""

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import page_tables
import pytest

from grpo_fn import train
from grpo_fn.config import load_config, parse_gin
from grpo_fn.config.resolve import Node, bad_names, functions, used_macros

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration" / "knobs.md"
FILES = PAGE.with_name("gin_files.md")
RUNS = sorted((ROOT / "gin" / "run").glob("*.gin"))
LAYERS = [path for path in sorted((ROOT / "gin").glob("*/*.gin")) if path not in RUNS]
# What the program passes: no function has a knob of these names, nor these functions one of those.
DATA = {"algo", "batch", "completion", "context", "encode", "gains", "problem", "rollout", "score", "span", "totals"}
PASSED = {
    "sampling.categorical": ["temperature"],
    "sampling.nucleus": ["temperature"],
    "logprob_model.LogprobModel": ["model", "temperature", "logits_chunk_elements"],
    "group_sampling.dynamic": ["prompts"],
    "step.grpo_step": ["key"],
    "supervised.supervised_step": ["key"],
    "local_sampler.local": ["options"],
    "vllm_sampler.colocated_sampler": ["options"],
    "vllm_sampler.dedicated_sampler": ["options"],
    "vllm_servers.DedicatedEngine": ["world", "dtype"],
}


class Row(NamedTuple):
    """A row of the page."""

    target: Any
    scope: str
    name: str  # as a gin file binds it, without a scope
    knob: str
    meaning: str


@cache
def rows() -> list[Row]:
    """Those of the page, each with the function of its heading."""
    read: list[Row] = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading, (module,) = section.partition("\n")[0], re.findall(r"\(`(grpo_fn\.[\w.]+)`\)\n", section)[:1]
        target = getattr(importlib.import_module(module), heading.rpartition(".")[2])
        for whole, meaning in re.findall(r"^\| `([\w./]+)` \|.*\| (.*) \|$", section, re.MULTILINE):
            scope, _, name = whole.rpartition("/")
            assert name.rpartition(".")[0] == heading
            read.append(Row(target, scope, name, name.rpartition(".")[2], meaning))
    return read


def root_of(*paths: Path) -> Node:
    """The root of the run of these files, with a dummy for each macro that a user has to bind. Raises ValueError."""
    bindings = parse_gin([str(path) for path in paths], [])
    macros = used_macros(bindings) - bindings.macros.keys() - train.MACROS.keys()
    return load_config([str(path) for path in paths], [f"{name}='dummy'" for name in sorted(macros)]).root


def nodes_of(value: object) -> Iterator[Node]:
    """All functions of the package with their knobs in a resolved value."""
    if isinstance(value, Node):
        yield from [value] * value.target.__module__.startswith("grpo_fn.")
        yield from nodes_of(value.knobs)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from nodes_of(item)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_knob_that_a_run_file_resolves_to_has_a_row(path: Path) -> None:
    pairs = {(row.target, row.knob) for row in rows()}
    knobs = [(node.target, knob) for node in nodes_of(root_of(path)) for knob in node.knobs]
    assert len(knobs) > 100
    assert not [one for one in knobs if one not in pairs]


def test_every_knob_that_a_file_binds_has_a_row() -> None:
    pairs = {(row.target, row.knob) for row in rows()}
    for path in [*RUNS, *LAYERS]:
        bindings = parse_gin([str(path)], [])
        knobs = {
            (target, knob)
            for (_, target), values in bindings.knobs.items()
            for knob in values
            if target.__module__.startswith("grpo_fn.")
        }
        assert knobs <= pairs


def test_every_knob_of_the_catalogue_has_a_row() -> None:
    names = {row.name for row in rows()}
    page = (ROOT / "docs" / "algorithms" / "catalogue.md").read_text()
    tables = re.findall(r"^<!-- functions: (\w+) (.*?)^<!-- end -->$", page, re.MULTILINE | re.DOTALL)
    assert len(tables) > 10
    for module, table in tables:
        for function, knobs in re.findall(r"^\| `(\w+)\(([\w, ]+)\)` \|", table, re.MULTILINE):
            passed = {*DATA, *PASSED.get(f"{module}.{function}", ())}
            assert {f"{module}.{function}.{knob}" for knob in knobs.split(", ") if knob not in passed} <= names


def test_a_gin_file_may_bind_every_knob_of_the_page() -> None:
    assert not [text for row in rows() for text in bad_names(row.name, row.target, [row.knob])]
    assert not [row for row in rows() if not row.meaning.strip()]


def test_no_row_is_what_the_program_passes() -> None:
    assert not [row.name for row in rows() if row.knob in DATA]
    passed = {f"{function}.{knob}" for function, knobs in PASSED.items() for knob in knobs}
    assert not [row.name for row in rows() if row.name in passed and not row.scope]


@pytest.mark.slow
def test_a_run_refuses_no_knob_of_the_page_as_one_that_the_program_passes(tmp_path: Path) -> None:
    """A file binds each that nothing binds yet, and is laid over a run that reaches the function."""
    laid, reached, refused = tmp_path / "laid.gin", set(), []
    for paths in [*((run,) for run in RUNS), *((RUNS[0], layer) for layer in LAYERS)]:
        if {*functions(parse_gin([str(paths[-1])], []))} <= reached:
            continue
        try:
            nodes = {node.target: node for node in nodes_of(root_of(*paths)) if node.target not in reached}
        except ValueError:  # a layer for another run
            continue
        reached |= nodes.keys()
        unbound = [row for row in rows() if row.target in nodes and row.knob not in nodes[row.target].knobs]
        if not unbound:
            continue
        lines = ["from __gin__ import dynamic_registration"]
        for row in unbound:
            package, _, module = row.target.__module__.rpartition(".")
            alias = row.target.__module__.replace(".", "_")
            lines += [f"from {package} import {module} as {alias}"]
            lines += [f"{row.scope}/{alias}.{row.target.__name__}.{row.knob} = None".lstrip("/")]
        laid.write_text("\n".join(lines))
        try:
            root_of(*paths, laid)
        except ValueError as error:  # None is of no type that is expected
            refused += [line for line in str(error).splitlines() if "program passes" in line or "is data" in line]
    assert not refused
    assert len(reached) > 150


def test_the_pages_are_what_the_code_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert page_tables.main([str(PAGE), str(FILES), "--check"]) == 0, capsys.readouterr().out


def test_every_gin_file_is_on_the_page() -> None:
    listed = re.findall(r"^\| `([\w/]+\.gin)` \|", FILES.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "gin")) for path in (ROOT / "gin").rglob("*.gin"))


def test_a_row_has_the_type_the_default_and_the_meaning_of_the_code() -> None:
    text = PAGE.read_text()
    by_comment = "most logits that live at once in the head; fewer where the device is small"
    assert f"| `sections.Compute.logits_chunk_elements` | `int` | `268435456` | {by_comment} |" in text
    assert "| `train.train.seed` | `int` | `%SEED` | of everything random. |" in text
    assert "| `sections.Health.stop` | `Sequence[str \\| health.Rule]` | `['not_finite']` |" in text


@pytest.mark.slow
def test_a_page_that_is_old_is_named_and_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("by hand\n<!-- gin files: eval -->\nold\n<!-- end -->\n")
    assert page_tables.main([str(page), "--check"]) == 1
    assert f"run python tools/tables {page}" in capsys.readouterr().out
    assert page_tables.main([str(page)]) == 0
    (table,) = re.findall(r"^<!-- gin files: eval -->.*?<!-- end -->$", FILES.read_text(), re.MULTILINE | re.DOTALL)
    assert page.read_text() == f"by hand\n{table}\n"
    assert page_tables.main([str(tmp_path / "none.md")]) == 2
    assert "expected pages with a place for a table" in capsys.readouterr().err
