"""tools/oracle.py names the first quantity of a run that differs, and refuses the record of another machine."""

import copy
import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import save_file

HERE = {"torch": "2.13.0", "cpu": "a processor", "threads": 1}


def step_rows(loss: float, seconds: float) -> list[dict[str, Any]]:
    return [
        {"step": n, "loss/objective": loss + n, "time/total": seconds, "generation/tokens_per_second": seconds}
        for n in (1, 2)
    ]


def run_folder(folder: Path, loss: float = 0.5, seconds: float = 1.0, host: str = "cpu") -> Path:
    """A run folder of two steps, as far as the tool reads it."""
    (folder / "model").mkdir(parents=True)
    checksums = [{"step": n, "tokens": f"a{n}", "weights": f"b{n}", "ranks": 1, "device": host} for n in (1, 2)]
    for name, rows in (("digests", checksums), ("metrics", step_rows(loss, seconds))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"head": torch.ones(2), "body": torch.zeros(3)}, folder / "model" / "model.safetensors")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    return oracle.outcome(run_folder(tmp_path / "run"))


def verdict(before: Any, now: Any) -> tuple[list[str], bool]:
    return oracle.compare_runs({"grpo": before}, {"grpo": now})


def test_a_run_that_only_took_longer_on_another_device_is_identical(run: dict[str, Any], tmp_path: Path) -> None:
    other = oracle.outcome(run_folder(tmp_path / "other", seconds=9.0, host="cuda"))
    assert verdict(run, other) == (["grpo: identical"], True)
    assert run["metrics"]["2"] == {"loss/objective": 2.5}
    assert run["checksums"]["2"] == {"tokens": "a2", "weights": "b2"}
    assert run["weights"].keys() == {"model/head", "model/body"}


def test_the_first_quantity_that_differs_is_named(run: dict[str, Any]) -> None:
    other = copy.deepcopy(run)
    del other["weights"]["model/body"]
    assert "step end, weight model/body: recorded" in verdict(run, other)[0][0]
    other["checksums"]["2"]["weights"] = "x"
    assert verdict(run, other) == (['grpo: step 2, checksum weights: recorded "b2", now "x"'], False)
    other["metrics"]["1"]["loss/objective"] = 0.25
    assert verdict(run, other) == (["grpo: step 1, metric loss/objective: recorded 1.5, now 0.25"], False)
    assert verdict(run, "exit code 2\n    error") == (["grpo: failed: exit code 2\n    error"], False)


def test_metrics_that_are_new_or_gone_are_listed_and_are_no_difference(run: dict[str, Any]) -> None:
    other = copy.deepcopy(run)
    for row in other["metrics"].values():
        row["loss/kl"] = 0.0
    del other["metrics"]["2"]["loss/objective"]
    lines = ["grpo: identical", "    new: metric loss/kl, step 1, 2", "    gone: metric loss/objective, step 2"]
    assert verdict(run, other) == (lines, True)


def test_nan_equals_itself_and_minus_zero_is_not_zero(run: dict[str, Any]) -> None:
    other = copy.deepcopy(run)
    for table in (run, other):
        table["metrics"]["1"]["loss/kl"] = float("nan")
    assert verdict(run, other)[1]
    run["metrics"]["1"]["loss/kl"], other["metrics"]["1"]["loss/kl"] = 0.0, -0.0
    assert not verdict(run, other)[1]


@pytest.mark.parametrize("name", ["torch", "threads"])
def test_the_record_of_another_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(oracle, "machine", lambda: HERE)
    monkeypatch.setattr(oracle, "make_runs", lambda names: pytest.fail("made runs"))
    file = tmp_path / "record.json"
    file.write_text(json.dumps({**HERE, name: "another", "revision": "abc", "runs": {}}))
    assert oracle.main(["compare", str(file)]) == 2
    message = capsys.readouterr().err
    assert f"{name} 'another', here {HERE[name]!r}: first run `python tools/oracle.py record {file}` in a" in message
    assert message.endswith("worktree of abc\n")
    assert message.count("\n") == 1


def test_a_record_is_compared_with_the_runs_of_the_working_tree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, run: dict[str, Any]
) -> None:
    monkeypatch.setattr(oracle, "make_runs", lambda names: dict.fromkeys(names, run))
    file = tmp_path / "record.json"
    assert oracle.main(["record", str(file), "--only", "grpo,maze"]) == 0
    assert {*json.loads(file.read_text())} == {"torch", "cpu", "threads", "cores", "revision", "date", "runs"}
    capsys.readouterr()
    assert oracle.main(["compare", str(file), "--only", "maze"]) == 0
    assert capsys.readouterr().out == "maze: identical\n"
    monkeypatch.setattr(oracle, "make_runs", lambda names: dict.fromkeys(names, "exit code 2"))
    assert oracle.main(["compare", str(file)]) == 1
    assert oracle.main(["compare", str(file), "--only", "otb"]) == 2
    assert oracle.main(["record", str(tmp_path / "none.json"), "--only", "maze"]) == 2
    assert not (tmp_path / "none.json").exists()


def test_a_run_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert oracle.main(["record", str(tmp_path / "record.json"), "--only", "grpo,groop"]) == 2
    assert "--only: got groop, expected some of arithmetic, " in capsys.readouterr().err
