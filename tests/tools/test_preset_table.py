"""The table of presets: which ones run, which are refused and why."""

from pathlib import Path

import preset_table
import pytest

NEED = {
    **dict.fromkeys(("opd", "mopd", "iw_opd", "rlsd", "sdft", "sdpo"), "train.train.teacher: got None"),
    "chord": "train.train.demonstrations: got None",
    "echo": "train.train.episodes: got None",
    "m2po": "wanted step.Algorithm.old_logp = @step.from_trainer",
}


def test_a_parameter_that_serves_a_preset_lets_it_run() -> None:
    param = "step.Algorithm.old_logp = @step.from_trainer"
    assert set(preset_table.refusals(["m2po", "grpo", "echo"], [param])) == {"echo"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every run that would be started, in the place of starting it."""
    runs: list[tuple[str, int]] = []

    def run(preset: str, seed: int, args: object) -> int:
        runs.append((preset, seed))
        return 0

    monkeypatch.setattr(preset_table, "run", run)
    return runs


def test_every_other_preset_is_run_and_those_left_out_are_said(
    tmp_path: Path, started: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert preset_table.main(["--runs", str(tmp_path), "--seeds", "0", "1"]) == 0
    assert set(started) == {(name, seed) for name in {*preset_table.presets()} - {*NEED} for seed in (0, 1)}
    said = capsys.readouterr().err.splitlines()
    reasons = dict(line.split(": left out, refused: ") for line in said)
    assert set(reasons) == set(NEED)
    assert all(words in reasons[name] for name, words in NEED.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--presets", "grpo", "echo"], "got ['echo'], wanted some that the run does not refuse"),
        (["--presets", "novel"], "--presets: got ['novel'], wanted some of ["),
        (["--gin_param", "STEPS=0"], "steps"),
    ],
)
def test_what_cannot_run_at_all_starts_nothing(
    given: list[str],
    words: str,
    tmp_path: Path,
    started: list[tuple[str, int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert preset_table.main(["--runs", str(tmp_path), *given]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert words in said
    assert not started
