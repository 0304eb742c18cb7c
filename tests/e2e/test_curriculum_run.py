"""Runs whose problems follow pass rates: killed anywhere, on any number of ranks and taken again, they ask the same."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.faults import job
from e2e.running import SMALL, AtPhase, command, ended, finish, metrics, outcome, refusal
from e2e.test_ranks import same_run

from grpo_fn import replay

KILL = signal.SIGKILL
FILE = str(SMALL.parent / "curriculum.gin")


def arguments(cache: Path, run: Path | None, *flags: str, **changes: Any) -> list[str]:
    return [*command(cache, run, "--gin_file", FILE, *flags, **changes)]


@pytest.fixture(scope="module")
def pool(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    ended(arguments(cache, folder / "run"), folder / "out")
    return folder / "run"


def test_problems_leave_the_pool_and_others_come_and_metrics_say_so(pool: Path) -> None:
    rows = metrics(pool)[1:]
    assert all(row["curriculum/pool_size"] == 6 for row in rows)
    assert sum(row["curriculum/retired"] + row["curriculum/set_aside"] for row in rows) > 0
    assert [row["curriculum/admitted"] for row in rows] == [
        row["curriculum/retired"] + row["curriculum/set_aside"] for row in rows
    ]
    assert any(row["generation/carried_over_groups"] for row in rows), "no group waited: expected the harder case"
    assert all(row["curriculum/share/rows"] == 1.0 and 0 <= row["curriculum/pass_rate/rows"] <= 1 for row in rows)


def test_a_killed_run_asks_what_it_would_have_asked(cache: Path, pool: Path, tmp_path: Path) -> None:
    codes = ended(arguments(cache, tmp_path / "run"), tmp_path / "out", [AtPhase("train", 4, KILL)])
    assert codes == [-KILL, 0]
    assert outcome(tmp_path / "run") == outcome(pool)


def test_a_replayed_step_begins_with_the_state_before_it(
    pool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 4 from the checkpoint of step 2 or 4; with the state of another step it would ask other problems."""
    assert replay.main([str(pool), "--step", "6"]) == 0
    assert "step 6 of" in capsys.readouterr().out
    newest = torch.load(pool / "checkpoints" / "step_6" / "carried.pt", weights_only=True)["curriculum"]
    before = torch.load(pool / "checkpoints" / "step_4" / "carried.pt", weights_only=True)["curriculum"]
    assert newest["turns"].sum() > before["turns"].sum() > 0
    assert not torch.equal(newest["arrays"]["asked"], before["arrays"]["asked"])


@pytest.mark.slow
def test_the_number_of_ranks_does_not_matter(cache: Path, pool: Path, tmp_path: Path) -> None:
    over = job(tmp_path, 2, arguments(cache, tmp_path / "run"))
    assert over.code == 0, over.everything()
    same_run(tmp_path / "run", pool)


# -- bad input


REFUSED = {
    "no part": (
        {
            "curricula__pool_in_band__pass_rate": "@curricula.part_at_least",
            "curricula__part_at_least__part": '"right"',
            "curricula__part_at_least__threshold": 1.0,
        },
        "part: got 'right', expected one of named",
    ),
    "ahead": (
        {
            "sections__Sampling__max_staleness": 1,
            "step__Algorithm__old_logp": "@step.from_trainer",
            "objective__policy_objective__importance_correction": "@corrections.truncated_weight",
        },
        "got one with sections.Sampling.max_staleness 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_curriculum_that_does_not_fit_is_refused_before_a_model_is_made(cache: Path, name: str) -> None:
    changes, message = REFUSED[name]
    assert message in refusal(arguments(cache, None, **changes))


def test_the_state_of_another_curriculum_is_refused_when_a_run_goes_on(cache: Path, pool: Path, tmp_path: Path) -> None:
    argv = arguments(cache, pool, "--force", STEPS=8, **{"mixture__rows__size": 12})
    before = outcome(pool)
    assert finish(argv, tmp_path / "out") == 2
    assert "checkpoint, curriculum: got arrays" in (tmp_path / "out").read_text()
    assert outcome(pool)["model"] == before["model"]
