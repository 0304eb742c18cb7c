"""tools/resume_check: a killed and resumed run is compared with one that was left alone, file by file."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import resume_check
from e2e.running import SMALL, Forked


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are forked from a server that has everything imported."""
    monkeypatch.setattr(resume_check, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))


def check(cache: Path, out: Path, *flags: str) -> int:
    files = ["--gin_file", "run/arithmetic.gin", "--gin_file", str(SMALL)]
    return resume_check.main(
        [*files, "--gin_param", f"models.TinyModel.cache={str(cache)!r}", "--out", str(out), *flags]
    )


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_one_left_alone(cache: Path, tmp_path: Path, forked, capsys) -> None:
    # Steps 1.7 and 5.9 of 12. Step 4 is not over before the checkpoint of step 2 is whole: its own waits for that.
    flags = ["--kills", "2", "--seed", "82", "--gin_param", "STEPS=12"]
    assert check(cache, tmp_path / "out", *flags) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "after step 1\n" in said
    assert "after step 5\n" in said
    assert "identical after 2 kills" in said
    assert "resumed after step" in (tmp_path / "out" / "killed" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("model/model.safetensors", "model/model.safetensors: differs"),
        ("digests.jsonl", "digests.jsonl: differs"),
    ],
)
def test_a_byte_that_differs_is_named(whole: Path, tmp_path: Path, name: str, line: str) -> None:
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    assert resume_check.differences(whole, other) == []
    data = bytearray((other / name).read_bytes())
    data[len(data) // 2] ^= 1
    (other / name).write_bytes(data)
    assert resume_check.differences(whole, other) == [line]
    (other / name).unlink()
    assert resume_check.differences(whole, other) == [f"{name}: not in {other}"]


def test_the_first_figure_that_differs_is_named_and_seconds_are_none(whole: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["time/total"] += 1.0
    lines[3]["reward/mean"] += 1.0
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    odd, missing = resume_check.differences(whole, other)
    assert odd.startswith("metrics.jsonl, step 3, reward/mean: ")
    assert missing.startswith("metrics.jsonl, step 6, ")


def test_bad_input_is_one_line_and_a_run_that_fails_is_shown(cache: Path, tmp_path: Path, forked, capsys) -> None:
    assert check(cache, tmp_path) == 2
    assert f"error: --out: got {tmp_path}, which exists, expected a new folder" in capsys.readouterr().err
    assert check(cache, tmp_path / "a", "--ranks", "0") == 2
    assert "--ranks: got 0, expected at least 1" in capsys.readouterr().err
    assert check(cache, tmp_path / "b", "--gin_param", "STEPS=-1") == 2
    said = capsys.readouterr().err
    assert f"got exit code 2 of the run {tmp_path / 'b' / 'undisturbed'}, expected 0" in said
    assert "STEPS" in said or "steps" in said
