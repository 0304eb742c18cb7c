"""Every gin file of the project says what exists, and every run file is whole, documented and relaunchable."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_fn.config import freeze, load_config, parse_gin
from grpo_fn.config.resolve import Node

PROJECT = Path(__file__).resolve().parents[2]
FILES = sorted([*(PROJECT / "gin").rglob("*.gin"), *(PROJECT / "experiments").rglob("*.gin")])
# What starts a run: the ready ones, and an experiment's own.
RUNS = [p for p in FILES if PROJECT / "gin" / "run" in p.parents or p.name == "run.gin"]
DUMMIES = {"MODEL": "some/model", "DATA": "some/data", "REWARD": "@grpo_fn.rewards.math.correct"}


def named(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def dummies(path: Path) -> list[str]:
    """MODEL, DATA and REWARD, if the file uses them and has no value for them."""
    bindings = parse_gin([str(path)], [])
    return [f"{name}={value}" for name, value in DUMMIES.items() if name in bindings.used_at.keys() - bindings.macros]


def uncalled(value: object) -> object:
    """The resolved value with `@f()` left as `@f`: data and models of dummy paths cannot be opened."""
    match value:
        case Node():
            return Node(value.target, {k: uncalled(v) for k, v in value.knobs.items()}, call=False)
        case dict():
            return {k: uncalled(v) for k, v in value.items()}
        case list() | tuple():
            return type(value)(uncalled(v) for v in value)
    return value


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_gin_file_names_only_what_exists(path: Path) -> None:
    bindings = parse_gin([str(path)], [])
    assert bindings.knobs or bindings.macros


@pytest.mark.parametrize("path", RUNS, ids=named)
def test_every_run_file_knows_steps_and_seed_freezes_and_its_dump_relaunches(path: Path, tmp_path: Path) -> None:
    assert RUNS
    config = load_config([str(path)], [*dummies(path), "STEPS=12345", "SEED=54321"])
    assert (config.root.knobs["steps"], config.root.knobs["seed"]) == (12345, 54321)
    kwargs = freeze(uncalled(config.root.knobs), {})
    pickle.dumps(kwargs)
    (tmp_path / "config.gin").write_text(config.text, encoding="utf-8")
    again = load_config([str(tmp_path / "config.gin")], [])
    assert (again.text, again.fingerprint) == (config.text, config.fingerprint)


def test_more_steps_alone_are_the_same_run_and_another_seed_is_not() -> None:
    base, longer, other = (
        load_config(["run/arithmetic.gin"], params) for params in ([], ["train.train.steps=12345"], ["SEED=12345"])
    )
    assert longer.root.knobs["steps"] == other.root.knobs["seed"] == 12345
    assert longer.fingerprint == base.fingerprint != other.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("program", [["grpo_fn.run"], ["grpo_fn.lab.sweep", "--out", "S", "--grid", "SEED=0"]])
def test_a_module_in_the_working_folder_is_found_by_every_program(program: list[str], tmp_path: Path) -> None:
    """`-P` is how a console script begins: without the working folder."""
    (tmp_path / "mine.py").write_text("def reward(problem, completion):\n    return 1.0\n")
    (tmp_path / "mine.gin").write_text(
        "from __gin__ import dynamic_registration\nimport mine\nfrom grpo_fn.rewards import combine\n"
        'include "run/arithmetic.gin"\ncombine.combine.parts = [@mine.reward]\ncombine.combine.weights = [1.0]\n'
    )
    argv = [sys.executable, "-P", "-m", *program, "--gin_file", "mine.gin", "--dry_run"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ready: python -m grpo_fn.run mine.gin" in done.stdout or "SEED=0" in done.stdout
