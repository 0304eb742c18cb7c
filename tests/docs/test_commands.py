"""Every command that is written down is one that its program takes: its own parser reads the flags, files exist.

A configuration that a command names resolves. What other programs are given of ours, extras and paths, is there. The
tutorial and what looks at a finished run are run as they stand.
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from docs.pages import ROOT, SHELL, blocks, commands, head_commands, is_program, joined, pages, programs
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from torch.distributed import run as torchrun

from grpo_fn.__main__ import command_module
from grpo_fn.command_line import COMMANDS
from grpo_fn.config import load_config, parse_gin
from grpo_fn.config.resolve import used_macros
from grpo_fn.train import MACROS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GIN = [*sorted((ROOT / "gin").rglob("*.gin")), *sorted((ROOT / "experiments").glob("*/*.gin"))]
SCRIPTS = [path for form in ("tools/launch/*.s*", "experiments/*/*.sh") for path in sorted(ROOT.glob(form))]
HEADS = [*GIN, *SCRIPTS, *sorted((ROOT / "tools").glob("*.py"))]
NOT_OURS = {"torch-tb-profiler", "lm_eval"}  # packages for environments of their own
READERS = ("mine.gin", "F", "runs/x/config.gin", "RUN/config.gin")  # gin files of the reader's
MODULE_OF = {each.word: each.module for group in COMMANDS.values() for each in group}
MODULES = ("pip", "venv", "pytest", "vllm.entrypoints.launchers.api_server.entry")  # that `python -m` runs, not ours


def check(text: str, page_text: str = "") -> None:
    """Raise AssertionError or SystemExit when a command is none that its programs would take."""
    for argv in programs(text):
        check_program(argv, page_text)


def check_program(argv: Sequence[str], page_text: str) -> None:
    """Of ours the flags are parsed; of others all that is named of ours exists."""
    name, words = argv[0].rsplit("/", 1)[-1], ["2" if word == "N" else word for word in argv[1:]]
    assert is_program(argv[0]), f"no rule for {argv[0]}: tests/docs/pages.py has the PROGRAMS"
    if name == "srun":
        check_program([word for word in words if word[:2] != "--" or word == "--json"], page_text)
    elif name == "torchrun" or words[:1] == ["tools/launch/agent.py"]:
        parsed = torchrun.get_args_parser().parse_args(words[words[:1] == ["tools/launch/agent.py"] :])
        assert parsed.module
        check_flags(parsed.training_script, parsed.training_script_args)
    elif name.startswith("python"):
        check_python(words, page_text)
    elif name == "grpo_fn":
        assert words[0] in MODULE_OF or words == ["completion", "bash"], f"got {words[0]}, expected a command"
        check_flags(MODULE_OF[words[0]], words[1:])
    elif name == "sbatch" or name.endswith(".sh"):
        check_launcher([*argv] if name != "sbatch" else [word for word in words if word[:2] != "--" or "gin" in word])
    elif name == "make":
        targets = {word for word in words if "=" not in word}
        assert targets <= {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    elif name == "pip" and words[0] == "install":
        for word in words[1:]:
            check_requirement(word)
    for flag, word in zip(["", *words], words, strict=False):
        if flag != "--out" and re.match(r"(docs|experiments|gin|grpo_fn|tests|tools)/[\w/.:-]+$", word):
            assert (ROOT / word.partition("::")[0]).exists(), f"got {word}, expected a path of the repository"


def check_python(words: list[str], page_text: str) -> None:
    """A module, a text, or a file: of the repository, or one that the page has the reader write."""
    if words[0] == "-m":
        if words[1] not in MODULES:
            check_flags(words[1], words[2:])
    elif words[0] == "-c":
        compile(words[1], "<page>", "exec")
    elif (ROOT / words[0]).exists():
        if len(words) > 1:
            check_flags(words[0], words[1:])
    else:
        assert f"this in `{words[0]}`" in page_text, f"got {words[0]}, expected a file of the repository or the page"


@cache
def parser_of(name: str) -> argparse.ArgumentParser | None:
    """That of a module or of a path; None for a program without `flags`."""
    if "/" in name:
        return runpy.run_path(str(ROOT / name)).get("flags", lambda: None)()
    return command_module(name).flags()


def check_flags(name: str, words: list[str]) -> None:
    """Its own parser takes the words; a run's configuration resolves. A module that is only named has no words."""
    parser = parser_of(name)
    if not words or parser is None:
        return
    with redirect_stderr(errors := StringIO()):
        try:
            args = parser.parse_args(words)
        except SystemExit:
            raise AssertionError(f"{name} {' '.join(words)}: {errors.getvalue()[-500:]}") from None
    files = [file for file in getattr(args, "gin_file", None) or [] if file not in READERS]
    paths = [str(next((r / file for r in (ROOT, ROOT / "gin") if (r / file).exists()), file)) for file in files]
    assert all(map(os.path.exists, paths)), f"got {files}, expected gin files of the repository"
    if name == "grpo_fn.run" and files and len(files) == len(args.gin_file):
        args.gin_param = [re.sub(r"@mine\.\w+", "@math.correct", param) for param in args.gin_param]  # the reader's
        bindings = parse_gin(paths, args.gin_param)
        unbound = used_macros(bindings) - bindings.macros.keys() - MACROS.keys()
        load_config(paths, [*args.gin_param, *(f"{macro}='x'" for macro in sorted(unbound))])


def check_launcher(argv: list[str]) -> None:
    """The script exists, by its last part in a recipe, and what its ranks are asked for are flags of a run."""
    path = next((p for p in [ROOT / argv[0], *(ROOT / "experiments").glob(f"*/{argv[0]}")] if p.is_file()), None)
    assert path is not None, f"got {argv[0]}, expected a script of the repository"
    if flags := [i for i, word in enumerate(argv) if word.startswith("--gin_")]:
        own = path.with_name("run.gin")
        files = ["--gin_file", str(own.relative_to(ROOT))] if own.exists() else []
        check_flags("grpo_fn.run", [*files, *argv[flags[0] :]])


def check_requirement(word: str) -> None:
    """This project with extras that it has, one of its dependencies within its range, or a file."""
    if word.startswith("-"):
        return
    if word.endswith(".txt"):
        assert (ROOT / word).is_file()
        return
    requirement = Requirement(word.replace(".", PROJECT["name"], 1) if word.startswith(".") else word)
    if requirement.name == PROJECT["name"]:
        assert requirement.extras <= PROJECT["optional-dependencies"].keys(), f"got {word}, expected extras that exist"
    elif requirement.name not in NOT_OURS:
        (range_,) = (each for each in map(Requirement, PROJECT["dependencies"]) if each.name == requirement.name)
        (version,) = {spec.version.removesuffix(".*") for spec in requirement.specifier}
        assert range_.specifier.contains(f"{version}.0"), f"got {word}, expected {range_}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_taken_and_its_blocks_say_what_they_are(page: Path) -> None:
    text = page.read_text()
    for each in commands(page):
        check(each.text, text)
    for block in blocks(text):
        starts = [line for line in block.lines if line[:1].strip() and line.split()[0] in ("python", "make", "pip")]
        assert block.language in SHELL or not starts, f"commands in a block of {block.language}: {starts}"
        assert block.language is not None or all(is_program(command) for _, command in joined(block)), block


def test_the_commands_in_the_heads_of_gin_files_launchers_and_tools_are_taken() -> None:
    found = [each for path in HEADS for each in head_commands(path)]
    for each in found:
        check(each.text)
    runs = [path for path in GIN if path.parent.name == "run" or path.name == "run.gin"]
    with_head = {each.page for each in found}
    assert not [name for path in (*runs, *SCRIPTS) if (name := str(path.relative_to(ROOT))) not in with_head]


words = st.text("abc./-", min_size=1, max_size=6).filter(lambda word: word.strip("./-") and word not in ("-m", "-c"))


@given(st.lists(words, min_size=1, max_size=4), st.sampled_from(["    {}\n", "```sh\n{}\n```\n", "text `{}` text\n"]))
def test_a_command_is_found_wherever_it_stands(
    tmp_path_factory: pytest.TempPathFactory, given_words: list[str], form: str
) -> None:
    command = " ".join(["python", *given_words])
    page = tmp_path_factory.getbasetemp() / "page.md"
    page.write_text(f"Title\n\n{form.format(command)}\nEnd.\n")
    assert [each.text for each in commands(page)] == [command]


@pytest.mark.parametrize(
    "text",
    [
        "trainer --go",
        "python tools/no_such.py",
        "python -m grpo_fn.run --gin_flie run/arithmetic.gin",
        "python -m grpo_fn.run --gin_file run/no_such.gin",
        "python -m grpo_fn.run --gin_file run/arithmetic.gin --gin_param sections.Sampling.temperatur=1.0",
        "grpo_fn sweep --out x --girds SEED=0",
        "grpo_fn ran run/arithmetic.gin",
        "grpo_fn run run/no_such.gin",
        "tools/launch/torchrun.sh --gin_file run/no_such.gin",
        "pip install -e '.[no_such]'",
        "pip install 'torch==1.0.*'",
        "kubectl apply -f tools/launch/no_such.yaml",
        "python tools/bench --no_such",
        "make no_such",
    ],
)
def test_a_wrong_command_is_refused(text: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(text)


# -- run as they stand


def execute(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell, with this Python and its `grpo_fn` first on the PATH; it has to end well."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "OMP_NUM_THREADS": "1"}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))
    command = f'grpo_fn() {{ python -m grpo_fn "$@"; }}; {text}'  # an environment may be older than the command
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{text}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.mark.slow
def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """By a reader who has done all that it says."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    for name, source in re.findall(r"this in `(\w+\.\w+)`\n\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(source)
    for each in commands(ROOT / "docs" / "tutorial.md"):
        if not each.text.startswith("tensorboard"):
            execute(tmp_path, each.text)
    assert (tmp_path / "runs" / "mine" / "model" / "config.json").exists()
    assert (tmp_path / "signal.html").read_text().startswith("<!DOCTYPE html>")


FINISHED = [
    "grpo_fn score --reward math < rows.jsonl | grpo_fn score --reward lenient --field_suffix _lenient > both.jsonl",
    "grpo_fn report A B",
    "grpo_fn compare A B",
    "grpo_fn replay RUN --step N --set 'losses.clipped_ratio.clip_high=0.28'",
    "grpo_fn export RUN --out DIR",
    'python -c "from grpo_fn.algo import advantage; help(advantage.group_normalized)"',
]


@pytest.mark.slow
@pytest.mark.parametrize("text", FINISHED, ids=range(len(FINISHED)))
def test_a_command_that_looks_at_a_finished_run_ends_well_as_a_page_has_it(
    text: str, whole: Path, tmp_path: Path
) -> None:
    assert text in {each.text for page in pages() for each in commands(page)}
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    for name in ("RUN", "A", "B"):
        shutil.copytree(whole, tmp_path / name)
    (tmp_path / "rows.jsonl").write_text('{"completion": "\\\\boxed{7}", "answer": "7"}\n')
    execute(tmp_path, re.sub(r"\bN\b", "2", text))
