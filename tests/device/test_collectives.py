"""Ranks of a group call the same collectives in the same order, of the same shapes: 64 of them, each traced alone."""

import pytest
from meshes import MESHES

pytestmark = pytest.mark.slow

SUMS = ("reduce", "all_gather", "allgather")


@pytest.mark.parametrize("mesh", MESHES)
def test_the_ranks_of_a_mesh_call_the_same_collectives_in_the_same_order(rehearse, mesh: str) -> None:
    size, changed = MESHES[mesh]
    together = [[0, 1], [size - 2, size - 1]] if "tp" in changed else [[0, 1, size - 1]]  # pairs have rows of their own
    for ranks in together:
        first, *others = (rehearse("trace_collectives.py", mesh, str(rank)) for rank in ranks)
        assert first["micro_batches"] > 1
        calls = [name for name, _ in first["calls"]]
        assert any(word in name for name in calls for word in SUMS), "a mesh without a word between its ranks"
        for rank, other in zip(ranks[1:], others, strict=True):
            apart = [pair for pair in zip(first["calls"], other["calls"], strict=False) if pair[0] != pair[1]]
            assert not apart, f"rank {ranks[0]} and rank {rank} of {mesh}: {apart[0]}"
            assert len(first["calls"]) == len(other["calls"])


def test_under_offload_the_norm_is_summed_on_the_host(rehearse) -> None:
    calls = rehearse("trace_collectives.py", "offload", "0")["calls"]
    after = calls[calls.index(["the update", ""]) :]
    assert [of for name, of in after if "all_reduce" in name]
    assert all(" cpu" in of for name, of in after if "all_reduce" in name), "gloo has to be in that group"
