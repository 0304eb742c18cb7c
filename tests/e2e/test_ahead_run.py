"""Runs that sample ahead: no staler than they may be, and interrupted they end as they would have."""

import signal
from pathlib import Path
from typing import Any

import pytest
from e2e.running import AtPhase, command, ended, finish, metrics, outcome, refusal

KILL, TERM = signal.SIGKILL, signal.SIGTERM
AHEAD: dict[str, Any] = {
    "sections__Sampling__sampler": "@engines.apart",
    "sections__Sampling__max_rows": 64,
    "sections__Sampling__max_staleness": 2,
    "step__Algorithm__old_logp": "@step.from_trainer",
    "objective__policy_objective__importance_correction": "@corrections.truncated_weight",
    "optimizer__adamw__lr": 3e-2,
}
IMPORTS = "from __gin__ import dynamic_registration\nfrom e2e import engines\n"


def arguments(cache: Path, folder: Path, *flags: str, **changes: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "engines.gin").write_text(IMPORTS)
    return [*command(cache, folder / "run", *flags, **{**AHEAD, **changes}), "--gin_file", str(folder / "engines.gin")]


def run_ahead(cache: Path, folder: Path, *flags: str, doom: AtPhase | None = None) -> Path:
    """The run, started again when a doom has ended it."""
    codes = ended(arguments(cache, folder, *flags), folder / "out", [doom] if doom else [])
    assert doom is None or codes[0] in (-KILL, 75)
    return folder / "run"


@pytest.fixture(scope="module")
def ahead(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_ahead(cache, tmp_path_factory.mktemp("ahead"))


def test_batches_are_as_stale_as_they_may_be_and_the_weights_differ_from_the_sampled_ones(ahead: Path) -> None:
    rows = metrics(ahead)[1:]
    assert [row["generation/staleness"] for row in rows] == [0, 1, 2, 2, 2, 2]
    assert [row["loss/logprob_diff_max"] > 1e-3 for row in rows] == [False, True, True, True, True, True]
    assert all(row["loss/mismatch_ess"] < 1 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.parametrize("doom", [AtPhase("train", 4, KILL), AtPhase("train", 3, TERM)])
def test_an_interrupted_run_learns_from_the_same_batches(
    cache: Path, ahead: Path, tmp_path: Path, doom: AtPhase
) -> None:
    ours, theirs = outcome(run_ahead(cache, tmp_path / "broken", doom=doom)), outcome(ahead)
    same = ours if doom.number == KILL else ("model", "metrics", "rollouts", "eval")  # TERM saves one checkpoint more
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


def test_runs_that_cannot_sample_ahead_are_refused(cache: Path, tmp_path: Path) -> None:
    """An objective that does not use the sampler's log-probs, and a sampler on the device that trains."""
    uncorrected = {"objective__policy_objective__importance_correction": None}
    said = refusal(arguments(cache, tmp_path / "none", **uncorrected))
    assert "max_staleness: got 2 with an objective that does not use" in said
    argv = arguments(cache, tmp_path / "local", sections__Sampling__sampler="@local_sampler.local")
    assert finish(argv, tmp_path / "out") == 2
    assert "max_staleness: got 2 with LocalSampler" in (tmp_path / "out").read_text()
