"""Whole runs on the fake device, one for every file of gin/scale and of gin/algo: they end well, and on the device."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from grpo_fn.config.parse import GIN_FOLDER

pytestmark = pytest.mark.slow

SMALL = Path(__file__).resolve().parents[1] / "e2e" / "small.gin"
# Files of gin/scale that a single rank cannot run, and why; test_collectives.py has them for many.
MANY_RANKS = {"tensor_parallel": "shares every product between two ranks"}
# Files of gin/algo that the small run, which has no episodes, cannot take; tests/e2e/test_episodes.py runs them.
OF_EPISODES = {"echo"}
Laid = tuple[list[str], list[str]]  # files and knobs
DEMONSTRATION = "arithmetic.demonstration_task"
TEACHER: Laid = (["scale/teacher.gin"], ["TEACHER=@tiny_model.Recipe()"])
# What a preset needs of the run file, as its header says.
NEEDS: dict[str, Laid] = {
    **dict.fromkeys(("opd", "mopd", "iw_opd", "rlsd"), TEACHER),
    "sdft": (["scale/self_teacher.gin"], []),
    "sdpo": (["scale/sibling_teacher.gin"], []),
    "gdpo": ([], ["credit.per_part.weights={'named': 1.0, 'digits': 1.0}"]),  # the small run's parts
    "m2po": ([], ["step.Algorithm.old_logp=@step.from_trainer"]),
    "chord": (
        ["task/demonstrations.gin"],
        [
            f"sections.Demonstrations.task=@{DEMONSTRATION}",
            *(f"{DEMONSTRATION}.{knob}" for knob in ("max_value=5", "operations=3", "test_size=8", "worked_share=0.5")),
        ],
    ),
}
# And the other way round.
OVER: dict[str, Laid] = {
    "self_teacher": (["algo/sdft.gin"], []),
    "sibling_teacher": (["algo/sdpo.gin"], []),
    "teacher": (["algo/opd.gin"], TEACHER[1]),
}
NOTHING: Laid = ([], [])


def names(folder: str) -> list[str]:
    """Of the files there."""
    return sorted(path.stem for path in (GIN_FOLDER / folder).glob("*.gin"))


def arguments(cache: Path, run_dir: Path, files: Iterable[str], knobs: Iterable[str] = ()) -> list[str]:
    """The small run, of two steps, with these files over it; in bfloat16, as runs on a card are."""
    files = ["run/arithmetic.gin", str(SMALL), "scale/bf16.gin", *files]
    knobs = [f"tiny_model.Recipe.cache={str(cache)!r}", "STEPS=2", *knobs]
    laid = [part for file in files for part in ("--gin_file", file)]
    return [*laid, *(part for knob in knobs for part in ("--gin_param", knob)), "--run_dir", str(run_dir)]


def ended(rehearse: Any, folder: Path, runs: dict[str, list[str]]) -> dict[str, Any]:
    """What became of the runs that did not end well, or launched nothing."""
    listed = folder / "runs.json"
    listed.write_text(json.dumps(runs))
    found = rehearse("rehearse.py", "runs", str(listed), seconds=3600)
    assert found.keys() == runs.keys()
    return {name: one for name, one in found.items() if one["ended"] != 0 or one["launches"] < 1000}


def test_every_way_to_spread_and_to_save_trains(rehearse, cache: Path, tmp_path: Path) -> None:
    runs = {}
    for name in names("scale"):
        if name not in MANY_RANKS:
            files, knobs = OVER.get(name, NOTHING)
            runs[name] = arguments(cache, tmp_path / name, [f"scale/{name}.gin", *files], knobs)
    assert not ended(rehearse, tmp_path, runs)


def test_every_algorithm_trains(rehearse, cache: Path, tmp_path: Path) -> None:
    runs = {}
    for name in set(names("algo")) - OF_EPISODES:
        files, knobs = NEEDS.get(name, NOTHING)
        runs[name] = arguments(cache, tmp_path / name, [*files, f"algo/{name}.gin"], knobs)
    assert not ended(rehearse, tmp_path, runs)


def test_a_run_on_the_second_card_uses_no_other(rehearse, cache: Path, tmp_path: Path) -> None:
    argv = arguments(cache, tmp_path / "run", [], ["sections.Compute.device='cuda:1'"])
    found = rehearse("rehearse.py", "run", "grpo_fn.run", *argv)
    assert found["code"] == 0
    assert found["devices"] == [1], "checkpoints, rewards and figures are made in threads, whose card is the first"
