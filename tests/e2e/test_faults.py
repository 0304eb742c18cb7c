"""Ranks that die, hang or fail under torchrun: the others say so and leave, and the job ends as if nothing had been."""

import signal
from collections.abc import Callable
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
    "staging": partial(faults.staging, 2),
    "writing": partial(faults.writing, 2),
    "sealing": partial(faults.sealing, 2),
}


def doomed(cache: Path, folder: Path, ranks: int, doom: Doom, *, deadline: float = 30.0, executed: bool = False) -> Job:
    """The small run under `torchrun --max-restarts 1`, one of its ranks doomed in the first attempt."""
    calm = outcome(undisturbed(cache, ranks))
    argv = command(cache, folder / "run", mesh__Parallelism__collective_timeout=deadline)
    over = job(folder, ranks, argv, doom=doom, restarts=1, executed=executed)
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


def killed(cache: Path, folder: Path, ranks: int, rank: int, place: str, executed: bool = False) -> None:
    doom = Doom(rank, PLANS[place], KILL)
    over = doomed(cache, folder, ranks, doom, executed=executed)
    survivors_said_so(over, doom, within=GRACE)  # a dead rank is noticed at once: no rank waits for the deadline
    if place in ("staging", "writing", "sealing"):
        assert resumed_after(over) == 2  # and not after 4, which was never complete


def hung(cache: Path, folder: Path, ranks: int, rank: int, place: str, executed: bool = False) -> None:
    doom, deadline = Doom(rank, PLANS[place], STOP), 15.0 if executed else 6.0
    over = doomed(cache, folder, ranks, doom, deadline=deadline, executed=executed)
    survivors_said_so(over, doom, within=deadline + GRACE)
    assert min(over.lasted(other) for other in range(ranks) if other != rank) > deadline / 2


def failed(cache: Path, folder: Path, ranks: int, doom: Doom, *said: str, code: int = 1) -> Job:
    """What a rank can say before it goes is said on all of them, and none was lost."""
    over = doomed(cache, folder, ranks, doom)
    assert over.codes(0) == dict.fromkeys(range(ranks), code), over.everything()
    for rank in range(ranks):
        for text in (*said, f", rank {rank}"):
            assert text in over.said(0, rank), over.everything()
        assert over.lasted(rank) < GRACE + LATE
    return over


@pytest.mark.slow
def test_a_rank_killed_in_the_middle_of_backward(cache: Path, tmp_path: Path) -> None:
    killed(cache, tmp_path, 2, 1, "backward")


@pytest.mark.slow
def test_a_rank_that_hangs_in_generate_is_waited_for_until_the_deadline(cache: Path, tmp_path: Path) -> None:
    hung(cache, tmp_path, 2, 1, "generate")


@pytest.mark.slow
def test_nan_on_one_rank_stops_all_before_the_weights_are_touched(cache: Path, tmp_path: Path) -> None:
    doom = Doom(1, partial(faults.spoilt, 4), nothing)
    over = failed(cache, tmp_path, 2, doom, "got a gradient norm of nan at optimizer step 3", "step 4, phase train")
    assert resumed_after(over) == 2


def full(cache: Path, folder: Path, ranks: int, rank: int) -> None:
    doom = Doom(rank, PLANS["writing"], full_disk)
    over = failed(cache, folder, ranks, doom, f"rank {rank}: no space left", "step_4", ", phase ", code=74)
    assert resumed_after(over) == 2


@pytest.mark.slow
def test_a_disk_full_on_another_rank_is_said_by_all(cache: Path, tmp_path: Path) -> None:
    full(cache, tmp_path, 2, 1)


def test_a_reward_worker_killed_between_two_calls_costs_nothing(cache: Path, tmp_path: Path) -> None:
    doom = Doom(1, partial(faults.scoring, 5), worker_killed)
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
        stored = rollout_store.load_rollouts(tmp_path / "run" / "rollouts" / f"step_{row['step']:06d}.jsonl.gz")
        halves = (stored[:2], stored[2:])  # each rank scores one, and a text that comes twice only once
        assert row["reward/worker_crashes"] == sum(len({x["text"] for x in half}) for half in halves)
        assert (row["reward/invalid"], row["train/skipped_step"]) == (1.0, 1.0)
    log = (tmp_path / "run" / "log.txt").read_text()
    for rank in (0, 1):
        assert f"rank {rank}: e2e.rewards.deadly lost problem" in log
    assert "worker died" in log
    assert "step 1 is not trained on: got too few groups with signal, none of its rows could be scored" in log
    (said,) = [line for line in log.splitlines() if "health, invalid_high: reward/invalid was at least 1.00" in line]
    assert "for 1 steps at step 1" in said
    assert "worker_crashes" in said
    assert ". The first: rank 0: e2e.rewards.deadly lost problem " in said
    assert "worker died" in said.split(". The first: ")[1]


# -- the whole matrix

SIZES = [(2, 0), (2, 1), (4, 0), (4, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank"), SIZES)
@pytest.mark.parametrize("place", ["generate", "backward", "staging", "writing"])
def test_a_rank_killed_anywhere(cache: Path, tmp_path: Path, ranks: int, rank: int, place: str) -> None:
    killed(cache, tmp_path, ranks, rank, place)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_main_rank_killed_before_a_checkpoint_has_its_manifest(cache: Path, tmp_path: Path, ranks: int) -> None:
    killed(cache, tmp_path, ranks, 0, "sealing")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank"), SIZES)
@pytest.mark.parametrize("place", ["generate", "backward", "writing"])
def test_a_rank_that_hangs_anywhere(cache: Path, tmp_path: Path, ranks: int, rank: int, place: str) -> None:
    hung(cache, tmp_path, ranks, rank, place)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank"), SIZES)
def test_a_full_disk_anywhere(cache: Path, tmp_path: Path, ranks: int, rank: int) -> None:
    full(cache, tmp_path, ranks, rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_nan_on_one_of_four(cache: Path, tmp_path: Path, rank: int) -> None:
    failed(cache, tmp_path, 4, Doom(rank, partial(faults.spoilt, 4), nothing), "got a gradient norm of nan")


@pytest.mark.slow
@pytest.mark.parametrize(("fate", "place"), [(killed, "backward"), (killed, "writing"), (hung, "generate")])
def test_ranks_that_torchrun_executes(cache: Path, tmp_path: Path, fate: Callable[..., None], place: str) -> None:
    """As above, but Python from its beginning to its end, and torchrun's own patience with a rank that hangs."""
    fate(cache, tmp_path, 2, 1, place, executed=True)
