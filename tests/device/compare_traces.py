"""Whether ranks that call these collectives would meet: pure, of traces that trace_collectives.py makes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A collective, the ranks of its group and what of: shapes, dtypes and devices."""

    name: str
    group: tuple[int, ...]
    of: str

    def kind(self) -> tuple[str, int, int]:
        """The same on every rank: its name, how many ranks its group has and how far apart they are."""
        return self.name, len(self.group), self.group[1] - self.group[0] if len(self.group) > 1 else 0


class Trace:
    """The calls of one rank, in their order."""

    UPDATE = "the update"  # a mark, no collective

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.micro_batches = 0

    def add(self, name: str, group: Sequence[int], of: str) -> None:
        """Note a call."""
        self.calls.append(Call(name, tuple(group), of))

    def plain(self) -> dict[str, Any]:
        """For JSON: each group once."""
        groups = list(dict.fromkeys(call.group for call in self.calls))
        calls = [[call.name, groups.index(call.group), call.of] for call in self.calls]
        return {"micro_batches": self.micro_batches, "groups": groups, "calls": calls}


def calls_of(plain: Mapping[str, Any]) -> list[Call]:
    """The calls of `Trace.plain`."""
    return [Call(name, tuple(plain["groups"][group]), of) for name, group, of in plain["calls"]]


def collectives(calls: Sequence[Call]) -> list[Call]:
    """The calls in which others take part."""
    return [call for call in calls if len(call.group) > 1]


def differences(traces: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """A line for every rank that would not meet another one of these; none where all do.

    Two things have to hold. In each group, its ranks call the same collectives of the same shapes in the same order.
    And the order over all groups is one for all ranks: else each of two may wait for the other in another group.
    """
    ranks = sorted(traces)
    for rank in ranks[1:]:
        mine, wanted = ([call.kind() for call in collectives(traces[one])] for one in (rank, ranks[0]))
        if at := first_difference(mine, wanted):
            yield f"rank {rank}, call {at[0]} over all groups: got {at[1]}, wanted {at[2]} as rank {ranks[0]} has"
    for group in sorted({call.group for calls in traces.values() for call in collectives(calls)}):
        members = [rank for rank in group if rank in traces]
        for rank in members[1:]:
            mine, wanted = ([(c.name, c.of) for c in traces[one] if c.group == group] for one in (rank, members[0]))
            if at := first_difference(mine, wanted):
                yield (
                    f"rank {rank}, call {at[0]} of {len(group)} ranks from {group[0]}: got {at[1]}, wanted {at[2]} as "
                    f"rank {members[0]} has"
                )
    for rank, calls in traces.items():
        for call in calls:
            if rank not in call.group:
                yield f"rank {rank}: got a call of {call.name} in a group of {call.group}, wanted one that it is in"


def first_difference(mine: Sequence[Any], wanted: Sequence[Any]) -> tuple[int, Any, Any] | None:
    """Where two sequences part, and what each has there; "no call" behind an end."""
    for i in range(max(len(mine), len(wanted))):
        pair = tuple(one[i] if i < len(one) else "no call" for one in (mine, wanted))
        if pair[0] != pair[1]:
            return i, *pair
    return None
