"""docs/rewards/custom_reward.md, block by block: what it quotes is in the tested files, and the rest runs."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import rewards_on_trial
from profiles import profile, quarter

from experiments.custom_reward import test_idea
from grpo_fn import testing
from grpo_fn.config import freeze, load_config
from grpo_fn.rewards.combine import part_names

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "experiments" / "custom_reward"
PAGE = (PROJECT / "docs" / "rewards" / "custom_reward.md").read_text(encoding="utf-8")
BLOCKS = [(kind, text) for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)]
QUOTED = [(FOLDER / name).read_text(encoding="utf-8") for name in ("idea.py", "test_idea.py")]
IMPORTS = """
from __gin__ import dynamic_registration
from experiments.custom_reward import idea
from grpo_fn import train
from grpo_fn.rewards import combine
from grpo_fn.rewards import format
from grpo_fn.rewards import format
from grpo_fn.rewards import wrappers
from grpo_fn.rewards import math
from grpo_fn.shell.reward_workers import reward_pool
from grpo_fn.trainer import sections
include "run/arithmetic.gin"
"""


# The tests that the page shows; pytest collects them under these names.
test_right_steps_is_fit_for_a_run = pytest.mark.slow(test_idea.test_right_steps_is_fit_for_a_run)
test_steps_count_once_and_from_the_start = test_idea.test_steps_count_once_and_from_the_start


def blocks(kind: str) -> list[str]:
    return [text for name, text in BLOCKS if name == kind]


def test_the_page_has_no_block_that_is_not_tested():
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert {kind for kind, _ in BLOCKS} == {"python", "gin", "sh", "text"}


def test_python_is_quoted_from_the_files_or_runs():
    ran = 0
    for text in blocks("python"):
        if not any(text in file for file in QUOTED):
            with profile(max_examples=quarter()):
                exec(compile(text, "docs/rewards/custom_reward.md", "exec"), {})
            ran += 1
    assert ran == 1


@pytest.mark.parametrize(("place", "names"), [(0, 3), (1, 2), (2, 2)])
def test_gin_says_what_exists_and_uses_all_that_it_binds(place, names, tmp_path):
    """Laid over the embedded run; unknown and unused names are refused by load."""
    bindings = [line for line in blocks("gin")[place].splitlines() if not line.startswith("from ")]
    (tmp_path / "page.gin").write_text("\n".join([IMPORTS, *bindings, ""]), encoding="utf-8")
    reward = freeze(load_config([str(tmp_path / "page.gin")], []).root.knobs["rewards"].knobs["reward"], {})
    assert len(reward.keywords["parts"]) == len(reward.keywords["weights"]) == names
    assert len(part_names(reward.keywords["parts"])) == names


def commands() -> list[str]:
    lines = "".join(blocks("sh")).replace("|\n", "| ").splitlines()
    return [line for line in lines if line.strip()]


def test_a_row_is_scored_as_the_page_says():
    """Of three steps one is right, and the second is wrong."""
    (line,) = [line for line in commands() if "grpo_fn score" in line]
    (row,) = re.findall(r"echo '(.*?)'", line)
    argv = shlex.split(line.partition("|")[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", *argv], input=row, capture_output=True, text=True, timeout=120, check=True, env=env
    )
    assert json.loads(done.stdout)["score"] == pytest.approx(1 / 3)


def test_the_complaint_on_the_page_is_the_one_that_comes():
    with pytest.raises(AssertionError) as caught:
        testing.check_reward(rewards_on_trial.backtracks, deadline=1.0)
    assert str(caught.value) + "\n" in blocks("text")
