"""Ranks that exchange objects: all get the same, an error on one is an error on all, and no rank waits for ever."""

import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from crew import CPU, crew
from hypothesis import given, settings

from grpo_fn.shell import world
from grpo_fn.shell.model import blocks
from grpo_fn.shell.policy.mesh import HOST, REST, Parallelism
from grpo_fn.shell.world import (
    EXIT_LOST,
    Elsewhere,
    LostRank,
    World,
    alone,
    find_device,
    join_world,
)

pytestmark = pytest.mark.xdist_group("world")
EXAMPLES = settings.default.max_examples
QUICK = settings(max_examples=max(10, EXAMPLES // 2))
SIZES = [2, 4]
sizes = st.sampled_from(SIZES)


def outcome_of(world: World, f: Any) -> tuple[str, str, Any]:
    """The result, an error as its type's name and its text."""
    try:
        return "", "", f()
    except (ValueError, OSError, RuntimeError) as error:
        return type(error).__name__, str(error), None


# -- exchange


def exchanging(world: World, brought: Sequence[Any]) -> tuple[Any, str]:
    found = world.exchange(brought[world.rank], what="objects")
    return found, str(found[0].device) if isinstance(found[0], torch.Tensor) else ""


objects = st.one_of(st.none(), st.text(max_size=300), st.lists(st.integers(), max_size=9), st.binary(max_size=2000))


@QUICK
@given(st.data(), sizes)
def test_every_rank_gets_what_each_brought_in_their_order(data, size):
    brought = data.draw(st.lists(objects, min_size=size, max_size=size))
    for found, _ in crew(size).run(exchanging, brought):
        assert found == brought


@pytest.mark.parametrize("size", SIZES)
def test_tensors_come_bit_for_bit_whatever_their_shape_on_the_ranks_own_device(size):
    brought = [torch.randn(rank, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    for found, device in crew(size).run(exchanging, brought):
        assert device == "cpu"
        assert all(torch.equal(x, y) for x, y in zip(found, brought, strict=True))
        assert [x.shape for x in found] == [x.shape for x in brought]


# -- agree, together, any, same


def raising(world: World, how: str, bad: set[int]) -> tuple[str, str, Any]:
    ran = []

    def f() -> int:
        ran.append(world.rank)
        if world.rank in bad:
            raise ValueError(f"bad weather at {world.rank}")
        return 10 * world.rank

    outcome = outcome_of(world, partial(getattr(world, how), f, what="looking out"))
    world.exchange(None, what="the next thing")  # whatever the outcome, they are still in step
    return *outcome, ran


@QUICK
@given(sizes, st.sets(st.integers(0, 3)))
def test_together_returns_each_its_own_unless_any_raised(size, bad):
    bad = {rank for rank in bad if rank < size}
    everyone = "; ".join(f"rank {r}: ValueError: bad weather at {r}" for r in sorted(bad))
    for rank, found in enumerate(crew(size).run(raising, "together", bad)):
        if not bad:
            assert found == ("", "", 10 * rank, [rank])
        elif rank in bad:
            assert found == ("ValueError", f"bad weather at {rank}", None, [rank])
        else:
            assert found == (Elsewhere.__name__, f"looking out: {everyone}", None, [rank])


@QUICK
@given(sizes, st.booleans())
def test_agree_asks_the_main_rank_alone_and_all_get_its_answer(size, raises):
    first, *others = crew(size).run(raising, "agree", {0} if raises else {1})
    if raises:
        assert first == ("ValueError", "bad weather at 0", None, [0])
        assert others == [(Elsewhere.__name__, "rank 0: bad weather at 0", None, [])] * (size - 1)
    else:
        assert [first, *others] == [("", "", 0, [0]), *[("", "", 0, [])] * (size - 1)]


def same_as(world: World, brought: Sequence[Any]) -> tuple[str, str, Any]:
    return outcome_of(world, partial(world.same, brought[world.rank], what="the seed"))


@QUICK
@given(st.data(), sizes)
def test_same_raises_on_all_and_names_the_first_that_differs(data, size):
    brought = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    odd = next((rank for rank, x in enumerate(brought) if x != brought[0]), None)
    text = f"the seed: got {brought[odd or 0]} on rank {odd}, expected {brought[0]} as on rank 0"
    expected = ("", "", None) if odd is None else ("RuntimeError", text, None)
    assert crew(size).run(same_as, brought) == [expected] * size


def test_alone_no_other_rank_is_asked():
    one = alone(CPU)
    assert (one.rank, one.size, one.main) == (0, 1, True)
    assert one.exchange("x", what="") == ["x"]
    one.same(1, what="")
    assert [ask(int, what="") for ask in (one.agree_at_length, one.agree, one.together)] == [0] * 3
    for ask in (one.agree, one.together):
        with pytest.raises(ArithmeticError):
            ask(partial(divmod, 1, 0), what="")
    one.leave()


# -- deadlines


def late(world: World, sleeper: int, deadline: float) -> tuple[str, str, Any, float]:
    """One rank comes too late; in its own world, whose deadline is short."""
    small = World(world.rank, world.size, CPU, deadline=deadline)
    small.exchange(None, what="the first, in time")
    if world.rank == sleeper:
        time.sleep(3 * deadline)
        return "", "", None, 0.0
    begun = time.monotonic()
    outcome = outcome_of(small, partial(small.exchange, None, what="the verdicts"))
    return *outcome, time.monotonic() - begun


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("size", "sleeper"), [(2, 0), (4, 3)])
def test_a_rank_that_waits_for_a_sleeping_one_reports_it_in_time(size, sleeper):
    ranks = crew(size)
    outcomes = ranks.run(late, sleeper, 1.0)
    ranks.dismiss()
    for rank, (error, text, _, waited) in enumerate(outcomes):
        if rank != sleeper:
            assert error == LostRank.__name__
            assert re.match(rf"rank {rank} of {size} lost another rank after \d\.\d s in the verdicts: ", text)
            assert waited > 0.5  # and not until it had come: that would be no loss


def gone(world: World, dead: int) -> None:
    """One rank dies; who finds out goes, too, as a run does, which is how those that do not talk to it find out."""
    if world.rank == dead:
        os._exit(3)
    error, text, _ = outcome_of(world, partial(world.exchange, None, what="the verdicts"))
    os.write(2, f"{error}: {text}".encode())
    os._exit(EXIT_LOST)


def test_a_rank_that_waits_for_a_lost_one_reports_it_at_once():
    size, begun = 4, time.monotonic()
    outcomes = crew(size).outcomes(gone, 1, grace=20.0)
    assert time.monotonic() - begun < 20.0  # the crew's own deadline is a minute
    assert [outcome.status for outcome in outcomes] == [EXIT_LOST, 3, EXIT_LOST, EXIT_LOST]
    for rank in (0, 2, 3):
        lost = rf"{LostRank.__name__}: rank {rank} of {size} lost another rank after \d+\.\d s in the verdicts: "
        assert re.search(lost, outcomes[rank].said)


def at_length(world: World, deadline: float, raises: bool) -> tuple[str, str, Any]:
    """The main rank is at it for longer than the deadline of its own world."""
    small = World(world.rank, world.size, CPU, deadline=deadline)
    ran = []

    def f() -> int:
        ran.append(world.rank)
        time.sleep(3 * deadline)
        if raises:
            raise ValueError("got no disk")
        return 10 + world.rank

    outcome = outcome_of(small, partial(small.agree_at_length, f, what="making"))
    small.exchange(None, what="the next thing")
    return *outcome, ran


@pytest.mark.slow
def test_work_of_the_main_rank_may_outlast_the_deadline():
    size = 2
    for rank, (error, _, value, ran) in enumerate(crew(size).run(at_length, 1.0, False)):
        assert (error, value, ran) == ("", 10, [0] * (rank == 0))
    first, *others = crew(size).run(at_length, 1.0, True)
    assert first[:2] == ("ValueError", "got no disk")
    assert [other[:2] for other in others] == [(Elsewhere.__name__, "rank 0: got no disk")] * (size - 1)


def stuck(here: World, rank: int, deadline: float) -> None:
    """Waits for something that raises nothing; the watching thread alone can end it."""
    world.GRACE = 0.2
    small = World(here.rank, here.size, CPU, deadline=deadline)
    small.where = place
    if here.rank == rank:
        with small.talking("something without an end"):
            threading.Event().wait()


def place() -> str:
    return "step 4, phase train"


def test_a_rank_that_waits_where_nothing_raises_is_ended_and_says_where_it_was():
    other, outcome = crew(2).outcomes(stuck, 1, 0.5, patience=20.0)
    assert not other.failed
    assert outcome.status == EXIT_LOST
    waited = "rank 1 of 2 at step 4, phase train: waited 1 s for the other ranks in something without an end, expected"
    assert f"{waited} at most 0.5; the same command resumes from the newest checkpoint" in outcome.said
    assert "in stuck" in outcome.said  # where every thread was


class Queue:
    """An event of a GPU, whose queue stands still or is done at once."""

    def __init__(self, done: bool) -> None:
        self.query = lambda: done

    def record(self) -> None: ...


def queued(here: World, rank: int, deadline: float) -> int:
    """Collectives that are queued at once; on one rank they are never done, which no call there shows."""
    torch.cuda.Event = partial(Queue, here.rank != rank)
    torch.cuda.set_device = lambda device: None
    small = World(here.rank, here.size, torch.device("cuda", 0), deadline=deadline)
    small.where = place
    for _ in range(3):
        with small.talking("forward"):
            pass
    if here.rank == rank:
        threading.Event().wait()
    return len(small._queued)


def test_collectives_that_a_gpu_has_queued_and_never_does_end_the_rank_with_step_and_phase():
    other, outcome = crew(2).outcomes(queued, 1, 0.5, patience=20.0)
    assert other.value == 1, "those that are done are forgotten at the next talk"
    assert outcome.status == EXIT_LOST
    assert "rank 1 of 2 at step 4, phase train: waited" in outcome.said
    assert "for the other ranks in forward, expected at most 0.5" in outcome.said


def own_fault(world: World) -> tuple[str, str, Any]:
    def wrong() -> None:
        with world.talking("a product"):
            torch.ones(2, 3) @ torch.ones(2, 3)

    return outcome_of(world, wrong)


def test_an_error_of_the_program_is_not_taken_for_a_lost_rank():
    for error, text, _ in crew(2).run(own_fault):
        assert error == "RuntimeError"
        assert "lost" not in text


def test_a_deadline_that_is_none_and_a_device_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match=r"deadline: got 0\.0 s, expected more than 0"):
        World(0, 1, CPU, deadline=0.0)
    for name in ("cuda:77", "abacus"):
        with pytest.raises(ValueError, match=f"got device {name!r}, expected one that exists here: auto, cpu"):
            find_device(name, 0)


# -- joining


def described(rank: int, size: int, port: int) -> None:
    """What torchrun says, in place of the group that the crew has."""
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def alone_in_a_world_of_two(world: World, port: int, rank: int) -> tuple[str, str, Any]:
    """Torchrun said that there would be another; there is none."""
    described(rank, 2, port)
    return outcome_of(world, partial(join_world, "cpu", deadline=1.0))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_ranks_that_do_not_come_are_not_waited_for_for_ever():
    one = crew(1)
    [outcome] = one.outcomes(alone_in_a_world_of_two, free_port(), 1, patience=30.0)
    one.dismiss()
    error, text, _ = outcome.value
    assert error == LostRank.__name__
    assert text.startswith("rank 1 of 2 did not find the others within 1 s: ")
    assert outcome.seconds < 10.0


def joined(world: World, port: int) -> tuple[int, int, bool, str, list[int]]:
    described(world.rank, world.size, port)
    mine = join_world("cpu", deadline=20.0)
    met = mine.exchange(mine.rank, what="who is there")
    mine.leave()
    return mine.rank, mine.size, mine.main, str(mine.device), met


def test_ranks_that_torchrun_describes_find_each_other_and_part_in_peace():
    size = 2
    ranks = crew(size)
    found = ranks.run(joined, free_port())
    ranks.dismiss()
    assert found == [(rank, size, rank == 0, "cpu", list(range(size))) for rank in range(size)]


# -- the mesh


def scale(replicate: int | str, shard: int | str, tensor: int) -> Parallelism:
    return Parallelism(
        **{"dp_replicate": replicate, "dp_shard": shard, "tp": tensor, "collective_timeout": 1.0},
        **{"reshard_after_forward": True, "offload": False, "offload_reference": False},
        **{"activation_checkpointing": blocks.no_checkpointing, "compile": blocks.eager},
    )


few = st.integers(1, 4)


@given(few, few, few)
def test_the_shape_multiplies_to_the_ranks_rest_is_what_is_left_and_host_what_is_left_of_this_host(
    replicate, shard, tensor
):
    expected, ranks, on_host = (replicate, shard, tensor), replicate * shard * tensor, shard * tensor
    for first, second in ((replicate, shard), (REST, shard), (replicate, REST), (REST, HOST), (replicate, HOST)):
        assert scale(first, second, tensor).shape(ranks, on_host) == expected
    assert scale(HOST, REST, tensor).shape(ranks, on_host) == (shard, replicate, tensor)


sizes_of_mesh = st.one_of(st.integers(-1, 5), st.sampled_from([REST, HOST, "all"]))


@given(sizes_of_mesh, sizes_of_mesh, st.integers(0, 4), st.integers(1, 12), st.integers(1, 4))
def test_a_shape_is_right_or_refused(replicate, shard, tensor, ranks, on_host):
    error, text, shape = outcome_of(alone(CPU), partial(scale(replicate, shard, tensor).shape, ranks, on_host))
    if error:
        assert (error, bool(re.match(r"parallelism: got .*, expected ", text))) == ("ValueError", True)
        return
    assert prod(shape) == ranks
    assert all(n >= 1 for n in shape)
    for got, asked in zip(shape, (replicate, shard, tensor), strict=True):
        assert asked in (REST, HOST) or got == asked


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((0, REST, 1), "got {'dp_replicate': 0}"),
        ((REST, REST, 1), "got dp_replicate and dp_shard both 'rest'"),
        ((3, REST, 1), "got dp_replicate 3 x dp_shard rest x tp 1 for 4 ranks (2 on this host)"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        scale(*wrong).shape(4, 2)
