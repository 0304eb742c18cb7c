"""The commands in the heads of gin files, launchers and tools: each program's own parser reads the flags, files exist.

They are the commands of the pages, or variants of them, which test_commands executes; here nothing runs.
"""

import ast
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from docs.desk import Things
from docs.launchers import ranks
from docs.pages import ROOT, Block, Command, first, is_program, joined, pipelines

from docs import desk, doing

GIN = [*sorted((ROOT / "gin").rglob("*.gin")), *sorted((ROOT / "experiments").glob("*/*.gin"))]
SCRIPTS = [path for form in ("tools/launch/*.s*", "experiments/*/*.sh") for path in sorted(ROOT.glob(form))]
TOOLS = sorted((ROOT / "tools").glob("*.py"))


def head(path: Path) -> list[str]:
    """The lines of a file's first comment or docstring."""
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#!")]
    return [line[2:] for line in lines[: next((i for i, line in enumerate(lines) if line[:1] != "#"), len(lines))]]


def commands(path: Path) -> Iterator[Command]:
    """Lines that begin with a program, indented in a comment; two spaces part it from what is said about it."""
    lines = head(path)
    for i, line in enumerate(lines):
        if not is_program(first(line)) or (path.suffix != ".py" and line[:2] != "  "):
            continue
        end = next((j for j in range(i, len(lines)) if not lines[j].endswith("\\")), i)
        texts = [re.sub(r"(?<=\S)\s{2,}.*", "", text.strip()) for text in lines[i : end + 1]]
        ((_, said),) = joined(Block(i + 1, "sh", texts))
        plain = re.sub(r"\[(?:[A-Z]+ \.\.\.|further [^]]*|[a-z|]+ \.\.\.)\]|,\.\.\.", "", said)
        yield Command(str(path.relative_to(ROOT)), i + 1, re.sub(r"[\[\]](?![\"'])", "", plain), True)


ALL = [each for path in (*GIN, *SCRIPTS, *TOOLS) for each in commands(path)]


def asked(argv: list[str]) -> list[str]:
    """The file or module that reads the flags, with them; nothing where there are none, or another program's."""
    name = Path(argv[0]).name
    if name == "python":
        path = ROOT / argv[1]
        path = path / f"{path.name}.py" if path.is_dir() else path  # a package with a __main__
        return argv[1:] if argv[1] == "-m" or "def flags(" in path.read_text() else []
    if name == "torchrun":
        return ranks(argv[1:])
    if name in ("sbatch", "torchrun.sh", "launch.sh"):
        at = next(i for i, word in enumerate(argv) if word in ("--gin_file", "--gin_param"))
        given = [] if "--gin_file" in argv else ["--gin_file", str(Path(argv[0]).parent / "run.gin")]
        return ["-m", "grpo_fn.run", *given, *argv[at:]]
    return []


def test_every_run_file_and_launcher_has_its_command() -> None:
    heads = {each.page for each in ALL}
    runs = [path for path in GIN if path.parent.name == "run" or path.name == "run.gin"]
    assert [name for path in (*runs, *SCRIPTS) if (name := str(path.relative_to(ROOT))) not in heads] == []


@pytest.mark.xdist_group("commands")
def test_the_flags_are_those_of_the_programs(things: Things, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    place = doing.Place(desk.desk(things, tmp_path / "desk", ""), things, tmp_path / "notes")
    found = []
    for each in ALL:
        (((stage,),),) = [pipelines(each.text)]
        argv = desk.filled(stage.argv, things)
        named = [word for flag, word in pairwise(argv) if flag == "--gin_file"]
        missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "gin" / name).exists()]
        assert not missing, each
        found += [json.dumps(words)] if (words := asked(argv)) else []
    assert len(found) > 30
    site = place.site({}, Path("/dev/null"), place.notes / "out")
    doing.well(doing.forked(doing.all_parsed, found, things=things, site=site), "the heads' commands")
