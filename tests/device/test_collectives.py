"""Ranks of a group call the same collectives in the same order, of the same shapes: 64 of them, each traced alone."""

from collections.abc import Sequence
from typing import Any

import pytest
from compare_traces import Call, Trace, calls_of, collectives, differences
from meshes import MESHES, RANKS, mesh_files

pytestmark = pytest.mark.xdist_group("fake_device")  # which one process builds, and the others wait for
SUMS = ("reduce", "all_gather", "allgather")
WHOLE = ("no_shard",)  # meshes whose ranks each have all weights and gradients: an update is a rank's own
FOUR = (0, 1, 2, 3)


def calls_by_rank(found: dict[str, Any]) -> dict[int, list[Call]]:
    return {int(rank): calls_of(one) for rank, one in found.items()}


def traced(rehearse, mesh: str, *asked: str) -> dict[int, list[Call]]:
    """By rank; each has made an update of several micro-batches, and spoken to others before it and, mostly, in it."""
    found = rehearse("trace_collectives.py", mesh, *asked)
    calls = calls_by_rank(found)
    for rank, one in found.items():
        assert one["micro_batches"] > 1
        names = [call.name for call in calls[int(rank)]]
        update = names.index(Trace.UPDATE)
        for part, wanted in ((calls[int(rank)][:update], True), (calls[int(rank)][update:], mesh not in WHOLE)):
            assert any(word in call.name for call in collectives(part) for word in SUMS) == wanted
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_all_ranks_of_a_mesh_call_the_same_collectives_in_the_same_order(rehearse, mesh: str) -> None:
    calls = traced(rehearse, mesh, "all")
    assert set(calls) == set(range(RANKS))
    assert list(differences(calls)) == []


def test_some_ranks_of_three_dimensions_call_the_same_collectives(rehearse) -> None:
    """A sample: the slow test has all ranks of every mesh. Of each dimension there are two that differ in it alone."""
    asked = [0, 1, 2, 8, RANKS - 1]
    calls = traced(rehearse, "hybrid_shard+tensor_parallel", *map(str, asked))
    assert sorted(calls) == asked
    assert list(differences(calls)) == []
    assert len({(len(call.group), call.kind()[2]) for call in collectives(calls[0])}) >= 4, "three dimensions, and data"


def test_ranks_that_look_at_their_own_rows_are_seen(rehearse) -> None:
    """As FSDPPolicy's pullback would be if it asked for this rank's part of the signal, not for all of it."""
    calls = calls_by_rank(rehearse("trace_collectives.py", "full_shard", "0", "1", str(RANKS - 1), "--own_rows"))
    first, second = differences(calls)  # only the last has a micro-batch in which it has no row
    assert first.startswith(f"rank {RANKS - 1}, call ")
    assert "over all groups: got ('_c10d_functional::all_reduce', 64, 1), wanted ('c10d::_allgather_base_'" in first
    assert second.startswith(f"rank {RANKS - 1}, call ")


@pytest.mark.slow
def test_under_offload_the_norm_is_summed_on_the_host(rehearse) -> None:
    calls = traced(rehearse, "offload", "0")[0]
    after = calls[[call.name for call in calls].index(Trace.UPDATE) :]
    sums = [call.of for call in after if "all_reduce" in call.name]
    assert sums
    assert all(" cpu" in of for of in sums), "gloo has to be in that group"


def test_every_file_that_changes_the_mesh_is_in_one_that_is_traced() -> None:
    assert mesh_files() <= {name for names in MESHES.values() for name in names}
    assert {"full_shard", "tensor_parallel", "offload"} <= mesh_files()


def calls(*given: tuple[str, Sequence[int]], of: str = "(3,)") -> list[Call]:
    return [Call(name, tuple(group), of) for name, group in given]


RIGHT = [("gather", FOUR), ("sum", FOUR), ("gather", FOUR)]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (calls(*RIGHT), []),
        (calls(*RIGHT, ("the update", (2,))), []),  # no other takes part
        (calls(*RIGHT[:2]), ["call 2 over all groups", "call 2 of 4 ranks"]),
        (calls(*RIGHT, ("sum", FOUR)), ["call 3 over all groups", "call 3 of 4 ranks"]),
        (calls(*RIGHT[::-1], of="(4,)"), ["call 0 of 4 ranks"]),
        (calls(RIGHT[1], RIGHT[0], RIGHT[2]), ["call 0 over all groups", "call 0 of 4 ranks"]),
        ([], ["call 0 over all groups", "call 0 of 4 ranks"]),
    ],
)
def test_what_one_rank_of_four_does_otherwise_is_named(odd: list[Call], said: list[str]) -> None:
    found = list(differences({**dict.fromkeys((0, 1, 3), calls(*RIGHT)), 2: odd}))
    assert [line.split(": ")[0].removeprefix("rank 2, ") for line in found] == [
        f"{line} from 0" if "ranks" in line else line for line in said
    ]


def test_groups_may_differ_in_shapes_but_not_in_the_order_between_them() -> None:
    """Pairs have rows of their own, and so other shapes; which group comes first is the same everywhere."""
    low, high, across = (0, 1), (2, 3), {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    right = {
        rank: [Call("sum", pair, f"{pair}"), Call("sum", across[rank], "(3,)")] for pair in (low, high) for rank in pair
    }
    assert list(differences(right)) == []
    swapped = {**right, 2: right[2][::-1], 3: right[3][::-1]}  # in each group all is as it should be
    assert [line.split(":")[0] for line in differences(swapped)] == [
        f"rank {rank}, call 0 over all groups" for rank in (2, 3)
    ]


def test_a_rank_in_a_group_without_it_is_named() -> None:
    (line,) = differences({0: calls(("sum", (1, 2)))})
    assert "wanted one that it is in" in line
