"""Ranks that die, hang or fail under torchrun: the others say so and leave, and the job ends as if nothing had been."""

import signal
from functools import partial
from pathlib import Path

import pytest
from e2e import faults
from e2e.faults import KILL, STOP, Doom, Job, full_disk, job, nothing, undisturbed, worker_killed
from e2e.running import command, metrics, outcome

from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.world import EXIT_LOST, GRACE

pytestmark = pytest.mark.xdist_group("torchrun")  # with test_ranks: undisturbed runs are made once
LATE = 5.0  # seconds beyond what is promised that a loaded machine may take

# The small run decodes once a rank in a step and once in an evaluation, steps back once a step, saves after 2, 4 and 6:
# these come in step 3 or later, so that there is a checkpoint to go on from, or one being written.
PLANS = {
    "generate": partial(faults.generating, 4),
    "backward": partial(faults.backward, 4),
    "staging": partial(faults.before, faults.STAGING, 2),
    "writing": partial(faults.writing, 2),
    "sealing": partial(faults.before, faults.SEALING, 2),
}


def doomed(cache: Path, folder: Path, ranks: int, doom: Doom, *, deadline: float = 30.0) -> Job:
    """The small run under `torchrun --max-restarts 1`, one of its ranks doomed in the first attempt."""
    calm = outcome(undisturbed(cache, ranks))
    argv = command(cache, folder / "run", mesh__Parallelism__collective_timeout=deadline)
    over = job(folder, ranks, argv, doom=doom, restarts=1)
    assert over.code == 0, over.everything()
    assert over.codes(1) == dict.fromkeys(range(ranks), 0)
    assert over.struck
    ended = outcome(folder / "run")
    assert [key for key in calm if ended[key] != calm[key]] == [], over.everything()
    assert not [path.name for path in (folder / "run" / "checkpoints").glob(".*")]
    return over


def survivors_said_so(over: Job, doom: Doom, within: float) -> None:
    """Every other rank left in time, with EXIT_LOST and one message that has its step, phase and rank."""
    codes = over.codes(0)
    assert codes.pop(doom.rank) == -signal.SIGKILL
    assert set(codes.values()) == {EXIT_LOST}, over.everything()
    for rank in codes:
        said = over.said(0, rank)
        assert f"rank {rank} of {len(codes) + 1}" in said, over.everything()
        assert any(f"step {n}, phase " in said for n in range(2, 7)), said
        assert f", rank {rank}" in said
        assert "the same command resumes from the newest checkpoint" in said
        assert "Traceback" not in said, said
        assert over.lasted(rank) < within + LATE, f"{over.lasted(rank):.1f} s; {over.everything()}"


def resumed_after(over: Job) -> int:
    """The step of the checkpoint that the second attempt went on from."""
    log = (over.folder / "run" / "log.txt").read_text()
    return int(log.partition("resumed after step ")[2].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rank", "place"),
    [(2, 1, "generate"), (2, 0, "backward"), (2, 1, "staging"), (4, 2, "writing"), (2, 0, "sealing")],
)
def test_the_others_leave_when_a_rank_is_killed_and_the_job_ends_as_if_undisturbed(
    cache: Path, tmp_path: Path, ranks: int, rank: int, place: str
) -> None:
    doom = Doom(rank, PLANS[place], KILL)
    over = doomed(cache, tmp_path, ranks, doom)
    survivors_said_so(over, doom, within=GRACE)  # a dead rank is noticed at once: no rank waits for the deadline
    if place in ("staging", "writing", "sealing"):
        assert resumed_after(over) == 2  # and not after 4, which was never complete


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank", "place"), [(2, 1, "generate"), (4, 0, "backward")])
def test_a_rank_that_hangs_is_waited_for_until_the_deadline(
    cache: Path, tmp_path: Path, ranks: int, rank: int, place: str
) -> None:
    doom, deadline = Doom(rank, PLANS[place], STOP), 6.0
    over = doomed(cache, tmp_path, ranks, doom, deadline=deadline)
    survivors_said_so(over, doom, within=deadline + GRACE)
    assert min(over.lasted(other) for other in range(ranks) if other != rank) > deadline / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("doom", "said", "code"),
    [
        (Doom(1, partial(faults.spoilt, 4), nothing), ("gradient norm of nan at optimizer step 3", "phase train"), 1),
        (Doom(1, PLANS["writing"], full_disk), ("rank 1: no space left", "step_4", ", phase "), 74),
    ],
    ids=["NaN, before the weights are touched", "a full disk"],
)
def test_an_error_of_one_rank_is_reported_by_all(
    cache: Path, tmp_path: Path, doom: Doom, said: tuple[str, ...], code: int
) -> None:
    over = doomed(cache, tmp_path, 2, doom)
    assert over.codes(0) == {0: code, 1: code}, over.everything()
    for rank in (0, 1):
        for text in (*said, f", rank {rank}"):
            assert text in over.said(0, rank), over.everything()
        assert over.lasted(rank) < GRACE + LATE
    assert resumed_after(over) == 2


@pytest.mark.slow
def test_a_reward_worker_killed_between_two_calls_costs_nothing(cache: Path, tmp_path: Path) -> None:
    doom = Doom(1, partial(faults.before, faults.SCORING, 5), worker_killed)
    over = job(tmp_path, 2, command(cache, tmp_path / "run"), doom=doom)
    assert over.code == 0, over.everything()
    assert over.struck
    assert outcome(tmp_path / "run") == outcome(undisturbed(cache, 2))


@pytest.mark.slow
def test_a_reward_that_always_kills_its_worker_is_counted_and_the_run_goes_on(cache: Path, tmp_path: Path) -> None:
    changes = {
        "combine__combine__parts": "[@rewards.named, @rewards.deadly]",
        "step__Algorithm__prompts": 2,
        "step__Algorithm__group_size": 2,
        "STEPS": 2,
    }
    over = job(tmp_path, 2, command(cache, tmp_path / "run", **changes))
    assert over.code == 0, over.everything()
    rows = metrics(tmp_path / "run")
    for row in rows[1:]:
        stored = rollout_store.load_rows(tmp_path / "run" / "rollouts" / f"step_{row['step']:06d}.jsonl.gz")
        halves = (stored[:2], stored[2:])  # each rank scores one, and a text that comes twice only once
        assert row["reward/worker_crashes"] == sum(len({x["text"] for x in half}) for half in halves)
        assert (row["reward/invalid"], row["train/skipped_step"]) == (1.0, 1.0)
    log = (tmp_path / "run" / "log.txt").read_text()
    for rank in (0, 1):
        assert f"rank {rank}: e2e.rewards.deadly lost problem" in log
    assert "worker died" in log
    assert "step 1 is not trained on: got too few groups with signal, none of its rows could be scored" in log
    (said,) = [line for line in log.splitlines() if "health, invalid_high: reward/invalid was at least 1.00" in line]
    assert "at step 1, at least 0.5" in said
    assert "worker_crashes" in said
    assert ". The first: rank 0: e2e.rewards.deadly lost problem " in said
    assert "worker died" in said.split(". The first: ")[1]
