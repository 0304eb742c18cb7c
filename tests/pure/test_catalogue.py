"""The finder the other tests rest on: it misses nothing and does not guess."""

from types import ModuleType

import catalogue
import pytest

from grpo_fn import advantage, kl, objective, weights

ROOMS = [
    (advantage, ("reward", "valid"), {"group_normalized", "centered", "leave_one_out"}),
    (kl, ("logp", "row"), {"k1_ratio", "k2", "k3", "k3_ratio"}),
    (objective, ("logp", "row"), {"clipped_ratio", "reinforce"}),
    (weights, ("mask", "totals"), {"token_mean", "sequence_mean", "constant_length"}),
]


@pytest.mark.parametrize(("room", "positional", "known"), ROOMS, ids=[r[0].__name__ for r in ROOMS])
def test_every_public_function_of_a_room_has_its_signature(room, positional, known):
    found = set(catalogue.functions(room, *positional))
    assert known <= found
    assert set(catalogue.public(room)) - found == ({"policy_objective"} if room is objective else set())


@pytest.mark.parametrize("room", [r[0] for r in ROOMS], ids=[r[0].__name__ for r in ROOMS])
def test_knobs_have_no_default(room):
    for f in catalogue.public(room).values():
        assert not f.__defaults__
        assert not f.__kwdefaults__


def test_an_unknown_knob_is_refused_by_name():
    room = ModuleType("room")

    def novel(reward, valid, *, sharpness):
        return reward

    novel.__module__ = "room"
    room.novel = novel
    with pytest.raises(LookupError, match=r"sharpness.*tests/catalogue\.py"):
        catalogue.bound(room, "reward", "valid")
