"""Runs of episodes that are killed, anywhere, and on two ranks: started again, they end as if nothing had been."""

import signal
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import resume_check
from e2e import faults
from e2e.faults import KILL, Doom, Job, job
from e2e.running import SMALL, AtPhase, Forked, command, finish, metrics, outcome
from e2e.test_episodes import EPISODES, run_of

pytestmark = pytest.mark.slow
SAME = ("model", "tensors", "eval", "metrics", "rollouts")  # where the configuration differs, which checkpoints record


@pytest.fixture(scope="module")
def calm(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is left alone."""
    return run_of(cache, tmp_path_factory.mktemp("calm") / "run")


@pytest.fixture(scope="module")
def calm_pair(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that is left alone."""
    return over(job(folder := tmp_path_factory.mktemp("pair"), 2, command(cache, folder / "run", *EPISODES)))


def over(made: Job) -> Path:
    """The run folder of a job that went well."""
    assert made.code == 0, made.everything()
    return made.folder / "run"


def kills_once(folder: Path, *, after: int) -> dict[str, object]:
    """Changes: the process that asks for an environment's step gets SIGKILL in the midst of the call, once."""
    folder.mkdir()
    return {
        "environment__Environment__step": "@environment_fakes.kills_the_run_once",
        "environment_fakes__kills_the_run_once__folder": repr(str(folder)),
        "environment_fakes__kills_the_run_once__after": after,
    }


IN_MIDST = {
    "generate": partial(faults.generating, 4, KILL),
    "score": partial(faults.scoring, 3, KILL),
    "train": AtPhase("train", 2, signal.SIGKILL),
    "checkpoint": AtPhase("checkpoint", 2, signal.SIGKILL),
}


@pytest.mark.parametrize("place", IN_MIDST)
def test_one_process(cache: Path, calm: Path, tmp_path: Path, place: str) -> None:
    argv = command(cache, tmp_path / "run", *EPISODES)
    assert finish(argv, tmp_path / "out", IN_MIDST[place]) == -signal.SIGKILL
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert outcome(tmp_path / "run") == outcome(calm)


def test_one_process_inside_a_tool(cache: Path, calm: Path, tmp_path: Path) -> None:
    argv = command(cache, tmp_path / "run", *EPISODES, **kills_once(tmp_path / "calls", after=20))
    assert finish(argv, tmp_path / "out") == -signal.SIGKILL
    assert (tmp_path / "calls" / "killed").exists()
    assert 0 < metrics(tmp_path / "run")[-1]["step"] < 6  # in the middle of the run
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    one, other = outcome(tmp_path / "run"), outcome(calm)
    for name in SAME:
        assert one[name] == other[name], name


def test_twenty_five_random_moments(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Of one run: each start goes on from where the last was killed, and the moments are later and later in it."""
    monkeypatch.setattr(resume_check, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))
    argv = ["--gin_file", "run/arithmetic.gin", "--gin_file", str(SMALL), *EPISODES, "--out", str(tmp_path / "out")]
    argv += ["--gin_param", f"models.TinyModel.cache={str(cache)!r}", "--gin_param", "STEPS=12"]
    assert resume_check.main([*argv, "--kills", "25", "--seed", "6", "--timeout", "240"]) == 0, capsys.readouterr()
    assert "identical after 25 kills" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["generate", "score"])
def test_a_rank_of_two(cache: Path, calm_pair: Path, tmp_path: Path, place: str) -> None:
    doom = Doom(1, {"generate": partial(faults.generating, 4), "score": partial(faults.scoring, 3)}[place], KILL)
    run = over(made := job(tmp_path, 2, command(cache, tmp_path / "run", *EPISODES), doom=doom, restarts=1))
    assert made.codes(0)[1] == -signal.SIGKILL
    assert outcome(run) == outcome(calm_pair)


def test_a_rank_of_two_inside_a_tool(cache: Path, calm_pair: Path, tmp_path: Path) -> None:
    argv = command(cache, tmp_path / "run", *EPISODES, **kills_once(tmp_path / "calls", after=20))
    run = over(made := job(tmp_path, 2, argv, restarts=1))
    assert -signal.SIGKILL in made.codes(0).values()
    one, other = outcome(run), outcome(calm_pair)
    for name in SAME:
        assert one[name] == other[name], name
