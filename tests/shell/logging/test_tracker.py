"""Weights & Biases and trackio hold what TensorBoard holds, offline, as one run however often it resumes."""

import importlib.util
import json
import re
import struct
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fn.shell.logging import metrics_writer, tracker
from grpo_fn.shell.logging.metrics_writer import MetricsWriter

BLOCK, HEAD, OPENING = 32768, 7, 7  # of the record files: bytes of a block, before each record, before the first


TABLE = [{"prompt": "1 + 1", "reward": 1, "text": "2"}, {"prompt": "2 + 2", "reward": 0.5}]


@pytest.fixture
def wandb() -> None:
    """Skips, saying so, where wandb is not installed."""
    skip_without("wandb")


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of trackio's databases; skips, saying so, where trackio is not installed."""
    skip_without("trackio")
    from trackio import sqlite_storage, utils

    folder = tmp_path / "trackio"
    for module in (utils, sqlite_storage):  # each has the folder of the environment as it was imported
        for name in ("TRACKIO_DIR", "MEDIA_DIR"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, folder if name == "TRACKIO_DIR" else folder / "media")
    return folder


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        missing = f"no {package} here, the mirror is not tested: pip install 'grpo-fn[{package}]'"
        warnings.warn(missing, stacklevel=1)
        pytest.skip(missing)


def records(path: Path) -> Iterator[Any]:
    """The records of a run's file."""
    from wandb.proto import wandb_internal_pb2

    raw, at, whole = path.read_bytes(), OPENING, b""
    while at + HEAD <= len(raw):
        left = BLOCK - at % BLOCK
        if left < HEAD:
            at += left
            continue
        size, kind = struct.unpack("<HB", raw[at + 4 : at + HEAD])
        whole, at = whole + raw[at + HEAD : at + HEAD + size], at + HEAD + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def kept(run_dir: Path) -> list[Any]:
    """All records of all starts, when the last start has been written out: that happens in a process of theirs."""
    end = time.monotonic() + 30
    while True:
        starts = [[*records(path)] for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))]
        if starts and all(exits(start) for start in starts):
            return [record for start in starts for record in start]
        assert time.monotonic() < end, f"no record of an end in {run_dir / 'wandb'}"
        time.sleep(0.1)


def exits(found: list[Any]) -> list[int]:
    """The exit codes among the records."""
    return [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"]


def mirrored(mirror: tracker.Mirror, run_dir: Path, start: int, stop: int) -> None:
    """Take the steps of a run folder that is one, its figures by step and a table at the first."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.gin").write_text("optimizer.adamw.lr = 1e-05\n")
    (run_dir / "run.json").write_text('{"hparams": {"optimizer.adamw.lr": 1e-05}}')
    with mirror(run_dir) as opened, MetricsWriter(run_dir, start_step=start, mirror=opened) as writer:
        writer.table(start, "samples", TABLE)
        writer.table(start, "health", [])  # of no rows there is no table
        writer.histogram(start, "generation/length", torch.tensor([3, 4, 4]))
        if start == 0:
            metrics_writer.write_run_header(writer, run_dir)
        for step in range(start, stop):
            writer.scalars(step, {"loss/kl": step / 4, "eval/accuracy": 0.5})


@pytest.mark.slow
def test_offline_files_hold_every_scalar_and_resuming_goes_on_as_the_same_run(wandb: None, tmp_path: Path) -> None:
    run_dir, mirror = tmp_path / "first", tracker.wandb(destination="tests:offline")
    mirrored(mirror, run_dir, 0, 3)
    time.sleep(1.01 - time.time() % 1)  # to the next second, by which their folders are named
    mirrored(mirror, run_dir, 3, 5)
    found = kept(run_dir)
    history = [{"/".join(i.nested_key) or i.key: i.value_json for i in r.history.item} for r in found]
    rows = [{k: json.loads(v) for k, v in row.items()} for row in history if row]
    assert [(row["global_step"], row["loss/kl"], row["eval/accuracy"]) for row in rows if "loss/kl" in row] == [
        (step, step / 4, 0.5) for step in range(5)
    ]
    tables = {row["global_step"]: table_file(run_dir, row) for row in rows if "samples/path" in row}
    columns, data = ["prompt", "reward", "text"], [["1 + 1", 1, "2"], ["2 + 2", 0.5, None]]
    assert {*tables} == {0, 3}
    assert all((found["columns"], found["data"]) == (columns, data) for found in tables.values())
    assert not any("health/path" in row for row in rows)
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (tracker.run_id(run_dir, "wandb"), "tests", "first")
    }
    config = {update.key: json.loads(update.value_json) for update in runs[0].config.update}
    assert config["optimizer.adamw.lr"] == 1e-5
    assert exits(found) == [0, 0]


def table_file(run_dir: Path, row: dict[str, Any]) -> dict[str, Any]:
    """The columns and rows of a table that a row of the history refers to."""
    texts = {path.read_text() for path in run_dir.glob(f"wandb/offline-run-*/files/{row['samples/path']}")}
    (text,) = texts  # of each start, which numbers its tables anew
    return json.loads(text)


@pytest.mark.slow
def test_a_run_that_fails_is_failed_there_and_the_writers_are_as_before(wandb: None, tmp_path: Path) -> None:
    import torch.utils.tensorboard.writer as theirs

    before = theirs.EventFileWriter
    (tmp_path / "run.json").write_text("{}")
    opened = tracker.wandb(destination="tests:offline")(tmp_path)
    opened.__enter__()
    assert theirs.EventFileWriter is not before
    error = RuntimeError("broken")
    assert opened.__exit__(RuntimeError, error, None) is False  # it is raised to the caller
    assert theirs.EventFileWriter is before
    assert exits(kept(tmp_path)) == [1]


def test_a_name_is_drawn_once_a_folder(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        names.append(tracker.run_id(tmp_path / folder, "wandb"))
        assert tracker.run_id(tmp_path / folder, "wandb") == names[-1]
    assert len({*names}) == 2
    assert all(name.isalnum() for name in names)


def test_a_missing_package_or_unknown_destination_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bad in WRONG:
        expected = rf"tracker\.{name}\.destination: got '{re.escape(bad)}', expected PROJECT:offline"
        with pytest.raises(ValueError, match=expected):
            getattr(tracker, name)(destination=bad)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "trackio"):
        missing = rf"@tracker\.{name}\(\) without the package {name}, expected it .*pip install 'grpo-fn\[{name}\]'"
        with pytest.raises(ValueError, match=missing):
            getattr(tracker, name)(destination="tests:offline")


WRONG = [
    *(("wandb", bad) for bad in ("tests", "/:offline", "tests:online:now")),
    *(("trackio", bad) for bad in ("tests", "tests:online", "tests:user/", "tests:a/b/c")),
]


def test_a_project_may_be_a_team_s_and_a_run_may_be_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is asked of the packages: there is no account to send to in a test."""
    asked: list[dict[str, Any]] = []
    run = SimpleNamespace(finish=lambda exit_code=0: None)
    module = SimpleNamespace(
        init=lambda **given: asked.append(given) or run,
        finish=lambda: None,
        tensorboard=SimpleNamespace(patch=lambda **given: None, unpatch=lambda: None),
        Settings=SimpleNamespace,
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: module)
    (tmp_path / "run.json").write_text("{}")
    for name, destination in (
        ("wandb", "team/math:online"),
        ("trackio", "math:user/space"),
        ("trackio", "math:http://host:7860"),
    ):
        with getattr(tracker, name)(destination=destination)(tmp_path):
            pass
    sent, space, server = asked
    assert (sent["entity"], sent["project"], sent["mode"]) == ("team", "math", "online")
    assert (space["project"], space["space_id"]) == ("math", "user/space")
    assert (server["project"], server["server_url"]) == ("math", "http://host:7860")
    assert {"server_url", "space_id"} & {*space} == {"space_id"}
    assert {"server_url", "space_id"} & {*server} == {"server_url"}


def test_trackio_holds_every_scalar_and_table_and_resuming_goes_on_as_the_same_run(
    trackio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    run_dir, mirror = tmp_path / "first", tracker.trackio(destination="tests:offline")
    mirrored(mirror, run_dir, 0, 3)
    mirrored(mirror, run_dir, 3, 5)
    assert capsys.readouterr().out == ""
    assert [path.name for path in trackio.glob("*.db")] == ["tests.db"]
    name = f"first-{tracker.run_id(run_dir, 'trackio')[:6]}"
    assert SQLiteStorage.get_runs("tests") == [name]
    lines = SQLiteStorage.get_logs("tests", name)
    figures = [(line["step"], line["loss/kl"], line["eval/accuracy"]) for line in lines if "loss/kl" in line]
    assert sorted(figures) == [(step, step / 4, 0.5) for step in range(5)]
    assert {line["step"]: line["samples"]["_value"] for line in lines if "samples" in line} == {0: TABLE, 3: TABLE}
    assert {line["step"] for line in lines if "generation/length" in line} == {0, 3}
    assert SQLiteStorage.get_run_config("tests", name)["optimizer.adamw.lr"] == 1e-5
