"""docs/tasks/environment.md, block by block: the module, what it prints, its test and its gin file."""

import re
import sys
from pathlib import Path

import pytest
from profiles import profile

from grpo_fn.config import freeze, load_config
from grpo_fn.core.environment import Message, play_script
from grpo_fn.core.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tasks" / "environment.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


@pytest.fixture
def countdown(tmp_path, monkeypatch):
    """The page's module, found by its name here and in the processes that the checks start."""
    (tmp_path / "countdown.py").write_text(PYTHON[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("countdown", None)


@pytest.mark.usefixtures("countdown")
def test_the_example_prints_what_the_page_says(capsys):
    exec(compile(PYTHON[1], "docs/tasks/environment.md", "exec"), {})
    assert capsys.readouterr().out == BLOCKS[2][1]


@pytest.mark.usefixtures("countdown")
def test_the_test_of_the_page_passes():
    names = {}
    exec(compile(PYTHON[2], "docs/tasks/environment.md", "exec"), names)
    with profile(max_examples=10):
        names["test_countdown_is_fit_for_a_run"]()


@pytest.mark.usefixtures("countdown")
def test_the_gin_file_of_the_page_resolves(tmp_path):
    (tmp_path / "countdown.gin").write_text(BLOCKS[4][1], encoding="utf-8")
    episodes = freeze(load_config([str(tmp_path / "countdown.gin")], []).root.knobs["episodes"], {})
    assert episodes.environment.pure


def test_the_gin_file_of_an_adapter_makes_its_environment(tmp_path):
    pytest.importorskip("gymnasium", reason="NOT TESTED without gymnasium: the page's adapter")
    (tmp_path / "lake.gin").write_text(BLOCKS[6][1], encoding="utf-8")
    environment = freeze(load_config([str(tmp_path / "lake.gin")], []).root.knobs["episodes"], {}).environment
    start, (step,) = play_script(environment, Problem(0, "", "", {}), [Message("assistant", "down")], 0)
    assert start.messages[0].content.endswith("You are on field 0.")
    assert step.state["actions"] == [1]
    assert not environment.pure
