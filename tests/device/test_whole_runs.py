"""Whole runs on the fake device, one for every file of gin/scale and of gin/algo: they end well, and on the device.

A file that one rank cannot run has a reason in MANY_RANKS, which a quick test checks; its collectives are traced.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from meshes import MESHES

from grpo_fn import run
from grpo_fn.config.parse import GIN_FOLDER

TESTS = Path(__file__).resolve().parents[1]
SMALL = TESTS / "e2e" / "small.gin"
# Files of gin/scale that a single rank cannot run, and how it refuses them.
MANY_RANKS = {"tensor_parallel": "parallelism: got dp_replicate 1 x dp_shard rest x tp 2 for 1 ranks"}
Laid = tuple[list[str], list[str]]  # files and knobs
DEMONSTRATION = "arithmetic.demonstration_task"
TEACHER: Laid = (["scale/teacher.gin"], ["TEACHER=@tiny_model.Recipe()"])
# What a preset needs of the run file, as its header says.
NEEDS: dict[str, Laid] = {
    **dict.fromkeys(("opd", "mopd", "iw_opd", "rlsd"), TEACHER),
    "sdft": (["scale/self_teacher.gin"], []),
    "sdpo": (["scale/sibling_teacher.gin"], []),
    "gdpo": ([], ["credit.per_part.weights={'named': 1.0, 'digits': 1.0}"]),  # the small run's parts
    "echo": ([str(TESTS / "e2e" / "episodes.gin")], []),
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


def scale_runs(cache: Path, folder: Path) -> dict[str, list[str]]:
    """Arguments of a run for every file of gin/scale but those in MANY_RANKS."""
    laid = {name: OVER.get(name, NOTHING) for name in names("scale") if name not in MANY_RANKS}
    return {
        name: arguments(cache, folder / name, [f"scale/{name}.gin", *files], knobs)
        for name, (files, knobs) in laid.items()
    }


def algo_runs(cache: Path, folder: Path) -> dict[str, list[str]]:
    """Arguments of a run for every file of gin/algo."""
    laid = {name: NEEDS.get(name, NOTHING) for name in names("algo")}
    return {
        name: arguments(cache, folder / name, [*files, f"algo/{name}.gin"], knobs)
        for name, (files, knobs) in laid.items()
    }


def test_every_file_has_a_run_or_a_reason(tmp_path: Path) -> None:
    """And no name in the lists above is of a file that is gone."""
    runs = {"scale": scale_runs(tmp_path, tmp_path), "algo": algo_runs(tmp_path, tmp_path)}
    assert {*runs["scale"], *MANY_RANKS} == set(names("scale"))
    assert runs["scale"].keys().isdisjoint(MANY_RANKS)
    assert set(runs["algo"]) == set(names("algo"))
    assert OVER.keys() <= runs["scale"].keys()
    assert NEEDS.keys() <= runs["algo"].keys()
    for folder, made in runs.items():
        assert made, f"gin/{folder} has no file"
        for name, argv in made.items():
            assert f"{folder}/{name}.gin" in argv


@pytest.mark.parametrize("name", MANY_RANKS)
def test_a_file_without_a_run_is_refused_by_one_rank_and_traced_on_many(name: str, cache, tmp_path, capsys) -> None:
    argv = arguments(cache, tmp_path / "run", [f"scale/{name}.gin"])
    assert run.main([*argv, "--dry_run"]) == 2
    assert f"error: {MANY_RANKS[name]}" in capsys.readouterr().err
    assert any(name in files for files in MESHES.values())


@pytest.mark.slow
def test_every_way_to_spread_and_to_save_trains(rehearse, cache: Path, tmp_path: Path) -> None:
    assert not ended(rehearse, tmp_path, scale_runs(cache, tmp_path))


@pytest.mark.slow
def test_every_algorithm_trains(rehearse, cache: Path, tmp_path: Path) -> None:
    assert not ended(rehearse, tmp_path, algo_runs(cache, tmp_path))


@pytest.mark.slow
def test_a_run_on_the_second_card_uses_no_other(rehearse, cache: Path, tmp_path: Path) -> None:
    argv = arguments(cache, tmp_path / "run", [], ["sections.Compute.device='cuda:1'"])
    found = rehearse("rehearse.py", "run", "grpo_fn.run", *argv)
    assert found["code"] == 0
    assert found["devices"] == [1], "checkpoints, rewards and figures are made in threads, whose card is the first"
