"""A run that was interrupted, however often and wherever, ends as one that was not: same weights, same metrics."""

import re
import shlex
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from e2e.faults import after, full_disk
from e2e.running import AtFileEvent, AtPhase, board, command, ended, finish, metrics, outcome, signal_after_step
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_fn.run import flags
from grpo_fn.shell.logging import rollout_store

Doom = Callable[[], None]
Planned = Callable[[Path], Doom]  # a doom, once the run folder is known
KILL = signal.SIGKILL
PHASES = ("evaluate", "generate", "score", "train", "log", "checkpoint")


def at_phase(phase: str, n: int, number: int = KILL, later: float = 0.0) -> Planned:
    return lambda run_dir: AtPhase(phase, n, number, later)


def at_file(n: int, within: str = "", number: int = KILL) -> Planned:
    return lambda run_dir: AtFileEvent(run_dir / within, n, number)


def full_disk_at_the_fourth_rollout() -> None:
    """Doom: the rollout of step 4, which is written beside the training, finds the disk full."""
    after(4, rollout_store, "store_rollouts", lambda *_, **__: full_disk())


def interrupted(cache: Path, folder: Path, dooms: Sequence[Planned], **changes: object) -> tuple[Path, list[int]]:
    """Start the same command once for every doom, then to the end; the run folder and the exit codes."""
    run = folder / "run"
    return run, ended(command(cache, run, **changes), folder / "out", [doom(run) for doom in dooms])


DOOMS = st.one_of(
    st.builds(at_file, st.integers(1, 250)),
    st.builds(partial(at_file, within="checkpoints"), st.integers(1, 60)),
    st.builds(at_phase, st.sampled_from(PHASES), st.integers(1, 6), st.just(KILL), st.sampled_from([0, 1e-3, 1e-2])),
)


@pytest.mark.slow
@settings(max_examples=max(4, settings.default.max_examples // 12))
@given(dooms=st.lists(DOOMS, min_size=1, max_size=2))
@example(dooms=[at_file(3, within="checkpoints")])
@example(dooms=[at_file(20, within="checkpoints")])
def test_a_run_killed_at_any_moment_ends_as_undisturbed(cache: Path, whole: Path, dooms: list[Planned]) -> None:
    with TemporaryDirectory() as folder:
        run, codes = interrupted(cache, Path(folder), dooms)
        assert set(codes) <= {0, -KILL}
        assert outcome(run) == outcome(whole)
        assert not [path.name for path in (run / "checkpoints").glob(".*")]


@pytest.mark.slow
def test_a_log_that_cannot_be_written_ends_the_run_before_a_checkpoint_claims_it(
    cache: Path, whole: Path, tmp_path: Path
) -> None:
    """Step 4 has a checkpoint, which waits for the log; what a resume has undone TensorBoard forgets."""
    argv = command(cache, tmp_path / "run")
    assert finish(argv, tmp_path / "out", full_disk_at_the_fourth_rollout) == 74
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_2"]
    run, _ = interrupted(cache, tmp_path, [])
    assert outcome(run) == outcome(whole)
    expected = [(row["step"], row["reward/mean"]) for row in metrics(run)[1:]]
    assert [(e.step, pytest.approx(e.value, rel=1e-6)) for e in board(run).Scalars("reward/mean")] == expected


def test_a_polite_signal_finishes_the_step_saves_and_says_so(cache: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert finish(command(cache, run), tmp_path / "out", at_phase("generate", 3, signal.SIGTERM)(run)) == 75
    said = "stopped by SIGTERM after step 3. To resume from here: python -m grpo_fn.run "
    log = (run / "log.txt").read_text()
    assert said in log
    assert finish(shlex.split(log.partition(said)[2].splitlines()[0]), tmp_path / "out") == 0, (
        "the command that it says, as it says it"
    )
    assert "resumed after step 3" in (run / "log.txt").read_text()
    assert outcome(run) == outcome(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("doom", "codes", "said"),
    [
        # it needed no checkpoint before
        (lambda run: signal_after_step(3, signal.SIGTERM), [75, 0], "resumed after step 3"),
        (at_phase("evaluate", 1, signal.SIGTERM), [75, 0], "after step 0"),
        (lambda run: AtPhase("generate", 4, signal.SIGINT, times=2), [130, 0], "resumed after step 2"),
    ],
    ids=["between two steps", "before the first step", "twice, which ends it at once"],
)
def test_a_signal_at_any_moment_loses_no_step(
    cache: Path, whole: Path, tmp_path: Path, doom: Planned, codes: list[int], said: str
) -> None:
    run, found = interrupted(cache, tmp_path, [doom])
    assert found == codes
    assert said in (run / "log.txt").read_text()
    assert {**outcome(run), "kept": None} == {**outcome(whole), "kept": None}  # that of step 0 may be among the best


def test_an_interrupt_during_the_set_up_is_not_a_crash(cache: Path, whole: Path, tmp_path: Path) -> None:
    run, codes = interrupted(cache, tmp_path, [at_file(1, within="log.txt", number=signal.SIGINT)])
    assert codes == [130, 0]
    said = (tmp_path / "out").read_text()
    assert "Traceback" not in said
    again = re.search(r"^interrupted; .* from the start: python -m grpo_fn.run (.*)$", said, re.MULTILINE)[1]
    words = shlex.split(again), command(cache, run)
    assert flags().parse_args(words[0]) == flags().parse_args(words[1])


def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# Every harm to any file: tests/shell/checkpoint/test_checkpoint.py, without runs.
def test_a_broken_checkpoint_is_named_and_skipped(cache: Path, whole: Path, tmp_path: Path) -> None:
    run, name = copied(whole, tmp_path), "__0_0.distcp"
    flip(run / "checkpoints" / "step_6" / name)
    interrupted(cache, tmp_path, [])
    log = (run / "log.txt").read_text()
    assert f"skipped checkpoint {run / 'checkpoints' / 'step_6'}: {name}" in log
    assert "resumed after step 4" in log
    assert outcome(run) == outcome(whole)


def broken(run: Path) -> None:
    for path in (run / "checkpoints").glob("step_*"):
        flip(path / "__0_0.distcp")


def gone(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (broken, ["broken-step_4, broken-step_6", "sha256", "--force"]),
        (gone, ["got no checkpoint in", "expected one to resume from", "metrics.jsonl goes to step 6"]),
    ],
)
def test_checkpoints_that_are_broken_or_gone_are_missed_until_a_forced_start(
    cache: Path, whole: Path, tmp_path: Path, harm: Callable[[Path], None], said: list[str]
) -> None:
    run = copied(whole, tmp_path)
    before = [(run / name).read_bytes() for name in ("metrics.jsonl", "digests.jsonl")]
    harm(run)
    for _ in range(2):  # moving them aside must not make the next start think that there was nothing
        assert finish(command(cache, run), tmp_path / "out") == 2
        assert [(run / name).read_bytes() for name in ("metrics.jsonl", "digests.jsonl")] == before
    assert all(text in (tmp_path / "out").read_text() for text in said)
    assert finish(command(cache, run, "--force"), tmp_path / "out") == 0
    assert outcome(run) == outcome(whole)


def test_holes_in_the_record_of_a_run_are_named(cache: Path, whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:2], *lines[3:5], *lines[4:]]).removesuffix(b"\n"))
    (run / "digests.jsonl").unlink()
    interrupted(cache, tmp_path, [])
    log = (run / "log.txt").read_text()
    assert f"{run / 'metrics.jsonl'}: got 0 of step 2, 2 of step 4, expected one line each" in log
    assert f"{run / 'digests.jsonl'}: got 0 of step 1, 0 of step 2" in log
    assert (run / "metrics.jsonl").read_bytes() == b"".join([*lines[:2], *lines[3:]])


def test_a_finished_run_is_exported_again_and_may_be_killed_in_that(cache: Path, whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path)
    shutil.rmtree(run / "model")
    before = (run / "metrics.jsonl").read_bytes()
    _, codes = interrupted(cache, tmp_path, [at_file(9, within=".model-")])
    assert codes == [-KILL, 0]
    assert not [*run.glob(".model-*")]
    assert (run / "metrics.jsonl").read_bytes() == before
    assert outcome(run) == outcome(whole)


def test_another_configuration_is_refused_and_goes_on_when_forced(cache: Path, whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path)
    before = outcome(run)
    assert finish(command(cache, run, STEPS=8), tmp_path / "out") == 2
    said = (tmp_path / "out").read_text()
    assert "-STEPS = 6" in said
    assert "+STEPS = 8" in said
    assert "read by: optimizer.linear_decay.total = %STEPS, train.train.steps = %STEPS" in said
    assert outcome(run) == before
    assert finish(command(cache, run, "--force", STEPS=8), tmp_path / "out") == 0
    assert [row["step"] for row in metrics(run)] == list(range(9))
    assert outcome(run)["summary"]["steps"] == 8


@pytest.mark.slow
def test_more_steps_alone_go_on_and_end_as_if_they_had_been_asked_for_at_first(cache: Path, tmp_path: Path) -> None:
    constant = {"sections__PolicyUpdate__schedule": "@optimizer.constant"}  # no other knob reads STEPS then
    for name, asked in (("run", (4, 6)), ("whole", (6,))):
        for steps in asked:
            argv = command(cache, tmp_path / name, STEPS=steps, **constant)
            assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    rows, expected = (metrics(tmp_path / name) for name in ("run", "whole"))
    assert [row["loss/objective"] for row in rows[1:]] == [row["loss/objective"] for row in expected[1:]]
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert finish(command(cache, tmp_path / "run", STEPS=3, **constant), tmp_path / "out") == 2
    assert (
        f"steps: got 3 for {tmp_path / 'run'}, expected 6 or more, which it has made" in (tmp_path / "out").read_text()
    )


@pytest.mark.slow
def test_another_model_is_refused_even_when_forced_and_the_folder_stays_as_it_was(cache: Path, tmp_path: Path) -> None:
    run, _ = interrupted(cache, tmp_path, [], STEPS=2, models__TinyModel__layers=2)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "run.lock"}
    changes = {"models__TinyModel__layers": 2, "models__TinyModel__intermediate": 48}
    assert finish(command(cache, run, "--force", STEPS=2, **changes), tmp_path / "out") == 2
    said = (tmp_path / "out").read_text()
    assert f"in checkpoint {run / 'checkpoints' / 'step_2'}, expected" in said
    assert "Traceback" not in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path in before} == before
    interrupted(cache, tmp_path, [], STEPS=2, models__TinyModel__layers=2)  # the original command is not refused


DYNAMIC = {
    "step__Algorithm__group_sampling": "@group_sampling.dynamic",
    "group_sampling__dynamic__max_gen_batches": 8,
    "combine__combine__parts": "[@rewards.named]",  # leaves many groups without signal, and at times one waiting
    "combine__combine__weights": "[1.0]",
}


@pytest.mark.slow
def test_groups_that_wait_for_the_next_step_survive_a_kill(cache: Path, tmp_path: Path) -> None:
    calm = tmp_path / "calm"
    calm.mkdir()
    undisturbed, _ = interrupted(cache, calm, [], **DYNAMIC)
    assert any(row["generation/carried_over_groups"] for row in metrics(undisturbed)[1:])
    assert any(row["generation/accepted"] < 1 for row in metrics(undisturbed)[1:])
    run, codes = interrupted(cache, tmp_path, [at_phase("train", 3), at_phase("log", 4)], **DYNAMIC)
    assert codes == [-KILL, -KILL, 0]
    assert outcome(run) == outcome(undisturbed)
