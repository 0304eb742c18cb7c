"""What a run leaves behind: every file that is promised, saying the same things, and enough to launch it again."""

import importlib
import json
import re
import shlex
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from e2e.running import TESTS, board, command, finish, metrics, outcome
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_fn import run
from grpo_fn.config import load_config
from grpo_fn.shell.logging import rollout_store

EVERY_STEP = {
    "loss": "objective approx_kl entropy grad_norm clip_low clip_high ratio_min ratio_mean ratio_max logprob_diff_mean",
    "reward": "mean std min max correct_rate invalid named digits",
    "advantage": "mean std min max zero_variance_groups",
    "generation": "rows tokens length_mean length_min length_max truncated tokens_per_second",
    "time": "generate score train sync log other total",
    "optimizer": "lr step",
    "system": "memory_gb",
}
KEYS = {f"{group}/{name}" for group, names in EVERY_STEP.items() for name in names.split()}


def test_metrics_are_one_object_a_step_with_the_documented_names(whole: Path) -> None:
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    for row in rows[1:]:
        assert row.keys() >= KEYS
        assert ("eval/accuracy" in row) == (row["step"] % 2 == 0)
        assert ("time/checkpoint" in row) == (row["step"] in (3, 5))  # written when the step is over: the next's time
    assert "eval/accuracy" in rows[0]
    promised = "config.gin metrics.jsonl tensorboard rollouts checkpoints model summary.json log.txt"
    assert {path.name for path in whole.iterdir()} >= {*promised.split(" ")}
    assert {path.name for path in (whole / "checkpoints").iterdir()} >= {"step_4", "step_6"}
    assert rollout_store.rollout_steps(whole / "rollouts") == [1, 2, 3, 4, 5, 6]
    assert "%|" not in (whole.parent / "out").read_text()  # no bar of a library


def explained() -> set[str]:
    """The metrics in the first column of their page's table; a name without a group has that of the one before it."""
    names, group = set(), ""
    page = (TESTS.parent / "docs" / "monitoring" / "metrics.md").read_text()
    for row in re.findall(r"^\| (`[a-z]+/.*?) \|", page, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            group = name.partition("/")[0] if "/" in name else group
            names.add(name if "/" in name else f"{group}/{name}")
    return names


def test_every_metric_is_explained(whole: Path) -> None:
    own_rewards = {"reward/named", "reward/digits"}  # reward/<part> in the table
    seen = {key for row in metrics(whole) for key in row} - {"step"} - own_rewards
    assert {key for key in seen if not re.match(r"system/gpu\d", key)} <= explained()


def test_tensorboard_holds_the_same_names_and_numbers(whole: Path) -> None:
    events = board(whole)
    seen = {(e.step, tag): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    expected = {(row["step"], tag): value for row in metrics(whole) for tag, value in row.items() if tag != "step"}
    assert seen == pytest.approx(expected, rel=1e-6)
    assert (whole / "config.gin").read_text() in texts(events, "config")[0]
    assert len(texts(events, "samples")) == 3
    assert "completion" in texts(events, "samples")[0]
    assert len(texts(events, "eval/samples")) == 4


def texts(events: EventAccumulator, tag: str) -> list[str]:
    return [e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"{tag}/text_summary")]


def test_the_phases_of_a_step_add_up_to_its_time(whole: Path) -> None:
    rows = metrics(whole)
    for row in rows:
        parts = sum(v for k, v in row.items() if k.startswith("time/") and k != "time/total")
        assert parts == pytest.approx(row["time/total"], abs=1e-6)
    other, total = (sum(row[name] for row in rows[1:]) for name in ("time/other", "time/total"))
    assert other <= 0.1 * total + 0.02 * len(rows), "too much of a step's time is in no phase"


def test_completions_are_stored_with_their_rewards(whole: Path) -> None:
    rows = rollout_store.load_rows(whole / "rollouts" / "step_000003.jsonl.gz")
    assert len(rows) == 16
    measured = metrics(whole)[3]
    assert sum(row["reward"] for row in rows) / 16 == pytest.approx(measured["reward/mean"])
    assert sum(row["length"] for row in rows) == measured["generation/tokens"]


def test_the_summary_and_the_log_hold_the_results(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    assert summary.keys() >= {"accuracy_before", "accuracy_after", "wall_seconds", "steps", "seed"}
    rows = metrics(whole)
    assert summary["accuracy_before"] == rows[0]["eval/accuracy"]
    assert summary["accuracy_after"] == rows[-1]["eval/accuracy"]
    assert (summary["steps"], summary["seed"]) == (6, 0)
    assert summary["wall_seconds"] >= sum(row["time/total"] for row in rows)
    log = (whole / "log.txt").read_text()
    for said in ("problems drawn        24 in 6 steps", "step 6/6  reward ", "step 6/6  held-out", "accuracy by named"):
        assert said in log


def test_the_written_configuration_is_that_of_the_run(whole: Path) -> None:
    config = str(whole / "config.gin")
    assert load_config([config], []).fingerprint == json.loads((whole / "run.json").read_text())["fingerprint"]


def test_every_shape_holds_through_a_run(cache: Path, whole: Path, tmp_path: Path) -> None:
    """In this process, where jaxtyping looks at every annotated call."""
    assert run.main(command(cache, tmp_path / "run")) == 0
    assert outcome(tmp_path / "run") == outcome(whole)


def test_a_dry_run_says_what_would_be_and_makes_nothing(tmp_path: Path) -> None:
    argv = command(tmp_path / "cache", tmp_path / "run")
    assert finish([*argv, "--dry_run", "--show_config"], tmp_path / "out") == 0
    said = (tmp_path / "out").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "a dry run made something"
    ready = said.splitlines()[-1].partition("ready: python -m grpo_fn.run ")[2]
    assert run.flags().parse_args(shlex.split(ready)) == run.flags().parse_args(argv)
    assert "step.Algorithm.prompts = 4" in said
    assert "from __gin__ import dynamic_registration" in said
    for line in (
        "4 prompts x 4 samples = 16",
        "1 epochs x 1 minibatches = 1 a step, 6 in all",
        "24 in 6 steps",
        "parameters            17,",
        "memory, each of 1",
        "disk, one checkpoint",
    ):
        assert line in said


def test_every_command_says_its_version_and_has_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("run", "eval.__main__", "score.__main__", "replay", "redteam", "doctor"):
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"grpo_fn.{module}").flags().parse_args(["--version"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.split() == ["grpo_fn", version("grpo-fn")]
    scripts = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == {"grpo_fn"}
    for target in scripts.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
