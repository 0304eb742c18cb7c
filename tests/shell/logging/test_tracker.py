"""Weights & Biases holds what TensorBoard holds, offline, as one run however often it resumes; without it, nothing."""

import importlib.util
import json
import struct
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_fn.shell.logging import tensorboard_layout, tracker
from grpo_fn.shell.logging.metrics_writer import MetricsWriter

BLOCK, HEAD, OPENING = 32768, 7, 7  # of the record files: bytes of a block, before each record, before the first


@pytest.fixture
def package() -> Any:
    """wandb, where it is installed."""
    if importlib.util.find_spec("wandb") is None:
        missing = "no wandb here, the mirror is not tested: pip install 'grpo-fn[wandb]'"
        warnings.warn(missing, stacklevel=1)
        pytest.skip(missing)
    import wandb

    return wandb


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


def mirrored(run_dir: Path, start: int, stop: int) -> None:
    with tracker.wandb(project="tests", mode="offline")(run_dir), MetricsWriter(run_dir, start_step=start) as writer:
        if start == 0:
            tensorboard_layout.write_run_header(writer, run_dir)
        for step in range(start, stop):
            writer.scalars(step, {"loss/kl": step / 4, "eval/accuracy": 0.5})


def test_offline_files_hold_every_scalar_and_resuming_goes_on_as_the_same_run(package: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    (run_dir / "config.gin").write_text("optimizer.adamw.lr = 1e-05\n")
    (run_dir / "run.json").write_text('{"hparams": {"optimizer.adamw.lr": 1e-05}}')
    mirrored(run_dir, 0, 3)
    time.sleep(1.1)  # their folders are named by the second
    mirrored(run_dir, 3, 5)
    found = kept(run_dir)
    history = [{"/".join(i.nested_key) or i.key: i.value_json for i in r.history.item} for r in found]
    rows = [{k: json.loads(v) for k, v in row.items()} for row in history if row]
    assert [(row["global_step"], row["loss/kl"], row["eval/accuracy"]) for row in rows] == [
        (step, step / 4, 0.5) for step in range(5)
    ]
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (tracker.run_id(run_dir), "tests", "first")
    }
    config = {update.key: json.loads(update.value_json) for update in runs[0].config.update}
    assert config["optimizer.adamw.lr"] == 1e-5
    assert exits(found) == [0, 0]


def test_a_run_that_fails_is_failed_there_and_the_writers_are_as_before(package: Any, tmp_path: Path) -> None:
    import torch.utils.tensorboard.writer as theirs

    before = theirs.EventFileWriter
    (tmp_path / "run.json").write_text("{}")
    opened = tracker.wandb(project="tests", mode="offline")(tmp_path)
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
        names.append(tracker.run_id(tmp_path / folder))
        assert tracker.run_id(tmp_path / folder) == names[-1]
    assert len({*names}) == 2
    assert all(name.isalnum() for name in names)


def test_what_is_missing_or_unknown_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"tracker\.wandb\.mode: got 'shared', wanted one of offline, online"):
        tracker.wandb(project="tests", mode="shared")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"without the package wandb, wanted it .*pip install 'grpo-fn\[wandb\]'"):
        tracker.wandb(project="tests", mode="offline")


def test_no_mirror_leaves_nothing(tmp_path: Path) -> None:
    with tracker.none()(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
