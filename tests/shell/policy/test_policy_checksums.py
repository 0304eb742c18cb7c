"""A digest is a matter of every bit, its place, name, shape and dtype, and of nothing else: not of who holds what."""

import json
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from crew import crew
from hypothesis import given
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from grpo_fn.core import checksums
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.checksums import (
    BITS,
    GAMMA,
    QUANTITIES,
    block_digest,
    digest,
    mix,
    seed_of,
    to_int64,
    total_digest,
)
from grpo_fn.core.json_lines import DIGESTS, digests_by_step
from grpo_fn.core.types import Batch, CurriculumState, Reward, Rollout, Scores
from grpo_fn.shell.atomic_io import append_json
from grpo_fn.shell.policy.fsdp import block_digests, combine_ranks

pytestmark = pytest.mark.xdist_group("digest")
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]


@st.composite
def tensors(draw: st.DrawFn, least: int = 0) -> Tensor:
    """Any bits of any dtype and of any shape up to three axes."""
    shape = draw(st.lists(st.integers(least, 5), min_size=least, max_size=3))
    dtype, generator = draw(st.sampled_from(DTYPES)), torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    words = torch.randint(-(2**62), 2**62, shape, generator=generator)
    return words.to(BITS[dtype.itemsize]).view(dtype)


@given(tensors(least=1), st.data())
def test_a_flipped_bit_and_two_elements_that_change_places_change_the_checksum(x: Tensor, data: st.DataObject) -> None:
    width, before = 8 * x.element_size(), digest(x)
    flat = x.clone().view(BITS[x.element_size()])
    place, other = (tuple(data.draw(st.integers(0, n - 1)) for n in x.shape) for _ in range(2))
    first, second = int(flat[place]), int(flat[other])
    bit = 0 if x.dtype == torch.bool else data.draw(st.integers(0, width - 1))
    word = (first ^ (1 << bit)) % 2**width
    flat[place] = word if flat.dtype == torch.uint8 else (word + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)
    assert digest(flat.view(x.dtype)) != before
    flat[place], flat[other] = second, first
    assert (digest(flat.view(x.dtype)) != before) == (first != second)


@given(tensors())
def test_dtype_and_shape_enter(x: Tensor) -> None:
    same_bits = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bool: torch.uint8}
    if x.dtype in same_bits:
        assert digest(x.view(same_bits[x.dtype])) != digest(x)
    assert digest(x[None]) != digest(x)
    assert digest(x.flatten()) != digest(x) or x.ndim == 1


def test_the_mixing_function_is_splitmix64s() -> None:
    """The first outputs of the generator with the seed 1234567, as its author's program prints them."""
    state = torch.tensor([to_int64(1234567 + i * GAMMA) for i in range(1, 6)])
    assert [int(z) % 2**64 for z in mix(state)] == [
        *(6457827717110365317, 3203168211198807973, 9817491932198370423),
        *(4593380528125082431, 16408922859458223821),
    ]


@given(tensors(least=1), st.data())
def test_any_cut_into_blocks_adds_up(x: Tensor, data: st.DataObject) -> None:
    seed = seed_of("name", x.shape, x.dtype)
    blocks = [(tuple(0 for _ in x.shape), x)]
    for axis in range(x.ndim):
        cut = data.draw(st.integers(0, x.shape[axis]))
        blocks = [
            ((*offset[:axis], offset[axis] + start, *offset[axis + 1 :]), part)
            for offset, block in blocks
            for start, part in ((0, block.narrow(axis, 0, cut)), (cut, block.narrow(axis, cut, x.shape[axis] - cut)))
        ]
    blocks = data.draw(st.permutations(blocks))
    whole = total_digest(seed, [block_digest(x, [0] * x.ndim, x.shape, seed)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "CHUNK", data.draw(st.integers(1, 9)))
        assert total_digest(seed, [block_digest(part, offset, x.shape, seed) for offset, part in blocks]) == whole


# -- over ranks


@given(tensors(), tensors())
def test_names_enter_and_their_order_does_not(x: Tensor, y: Tensor) -> None:
    one = combine_ranks([block_digests({"a": x, "b": y})])
    assert combine_ranks([block_digests({"b": y, "a": x})]) == one
    assert combine_ranks([block_digests({"a": x}), block_digests({"b": y})]) == one, "of tensors on different ranks"
    assert combine_ranks([block_digests({"a": x, "c": y})]) != one


PLACEMENTS = {
    "columns": ((2,), [Shard(1)]),
    "copies": ((2,), [Replicate()]),
    "four": ((4,), [Shard(0)]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "both axes": ((2, 2), [Shard(0), Shard(1)]),
    "same axis": ((2, 2), [Shard(0), Shard(0)]),
}


SHAPES = [(8, 6), (7, 5), (1, 3), (3, 2), (5, 1)]
MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def spread(world, shape: tuple[int, ...], placements: list, tensors: list[Tensor]) -> list:
    """In a rank: its shares of the tensors, placed so."""
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh("cpu", shape)
    placed = {str(i): distribute_tensor(x, MESHES[shape], placements) for i, x in enumerate(tensors)}
    assert all(isinstance(x, DTensor) for x in placed.values())
    return world.exchange(block_digests(placed), what="digests")


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_tensor_over_ranks_has_the_digest_of_the_whole(name: str) -> None:
    shape, placements = PLACEMENTS[name]
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(size, generator=generator) for size in SHAPES]
    whole += [torch.randn(SHAPES[0], generator=generator).bfloat16()]
    expected = combine_ranks([block_digests({str(i): x for i, x in enumerate(whole)})])
    for brought in crew(prod(shape)).run(spread, shape, placements, whole):
        assert combine_ranks(brought) == expected


# -- of a step


def step(seed: int, rows: int = 6, width: int = 9) -> tuple[Rollout, Reward, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    column, length = torch.arange(width), torch.randint(1, width - 2, (rows, 1), generator=generator)
    mask = (column >= 2) & (column < 2 + length)
    tokens = torch.randint(0, 50, (rows, width), generator=generator)
    values = torch.randn(5, rows, width, generator=generator)
    rollout = Rollout(tokens, mask, -values[0].abs(), torch.zeros(rows, dtype=torch.bool), ("",) * rows)
    value = torch.randn(2, rows // 2, generator=generator)
    reward = outcome_reward(value, torch.ones_like(value, dtype=torch.bool), {"a": value / 2, "b": value / 3})
    return rollout, reward, values[1].reshape(2, rows // 2, width), values[2]


def sent(rollout: Rollout, signal: Tensor, cuts: list[int]) -> list[tuple[Batch, Scores]]:
    """The rows in micro-batches that end at the cuts."""
    bounds = [0, *cuts, len(signal)]
    found = []
    for i, j in pairwise(bounds):
        rows = [x[i:j] for x in (rollout.tokens, rollout.mask, *([signal] * 5), rollout.mask, rollout.mask.long())]
        found += [(Batch(*rows), Scores(signal[i:j], 2 * signal[i:j]))] if i < j else []
    return found


@given(st.integers(0, 2**32), st.integers(0, 3), st.lists(st.integers(0, 6), max_size=3).map(sorted))
def test_padding_and_micro_batches_change_no_checksum(seed: int, extra: int, cuts: list[int]) -> None:
    rollout, reward, adv, old = step(seed)
    expected = checksums.of_step(rollout, reward, adv, old, sent(rollout, old, []))
    pad = partial(torch.nn.functional.pad, pad=(0, extra), value=3)
    mask = torch.nn.functional.pad(rollout.mask, (0, extra))
    wide = rollout._replace(tokens=pad(rollout.tokens), mask=mask, logp_sampled=pad(rollout.logp_sampled))
    garbage = torch.where(mask, pad(old), torch.nan)
    found = checksums.of_step(wide, reward, pad(adv), garbage, sent(wide, garbage, cuts))
    assert found == expected
    assert set(expected) | {"gradients", "weights", "curriculum"} == set(QUANTITIES)


@given(st.integers(0, 2**32), st.data())
def test_a_changed_quantity_has_another_checksum_and_no_other_has(seed: int, data: st.DataObject) -> None:
    rollout, reward, adv, old = step(seed)
    b = data.draw(st.integers(0, 5))
    t = data.draw(st.sampled_from(rollout.mask[b].nonzero()[:, 0].tolist()))
    p, g = divmod(b, 3)
    changed = {
        "tokens": [rollout._replace(tokens=bumped(rollout.tokens, (b, t))), reward, adv, old, old],
        "rewards": [rollout, reward._replace(value=bumped(reward.value, (p, g))), adv, old, old],
        "advantages": [rollout, reward, bumped(adv, (p, g, t)), old, old],
        "logp_old": [rollout, reward, adv, bumped(old, (b, t)), old],
        "signal": [rollout, reward, adv, old, bumped(old, (b, t))],
    }
    expected = checksums.of_step(rollout, reward, adv, old, sent(rollout, old, []))
    name = data.draw(st.sampled_from(sorted(changed)))
    *parts, signal = changed[name]
    assert checksums.differing_quantities(expected, checksums.of_step(*parts, sent(rollout, signal, []))) == [name]


def bumped(x: Tensor, place: tuple[int, ...]) -> Tensor:
    """The tensor with one element changed."""
    x = x.clone()
    x[place] += 1
    return x


# -- the file


def test_lines_come_back_a_torn_one_does_not_and_one_that_is_none_is_reported(tmp_path: Path) -> None:
    assert digests_by_step(tmp_path) == {}
    for number in (1, 2):
        append_json(tmp_path / DIGESTS, {"step": number, "tokens": f"{number:016x}"})
    both = {n: {"step": n, "tokens": f"{n:016x}"} for n in (1, 2)}
    whole = (tmp_path / DIGESTS).read_text()
    for torn in ("", json.dumps({"step": 3, "tokens": "0"})[:-4]):
        (tmp_path / DIGESTS).write_text(whole + torn)
        assert digests_by_step(tmp_path) == both
    for line in ("{", "[1]", '{"tokens": "0"}'):
        (tmp_path / DIGESTS).write_text(f"{line}\n{whole}")
        with pytest.raises(ValueError, match=r"digests.jsonl:1: got .*, expected a JSON object with a step"):
            digests_by_step(tmp_path)


def test_every_array_of_a_curriculum_counts_with_its_name_and_its_turns() -> None:
    arrays = {"asked": torch.arange(4), "rate": torch.linspace(0, 1, 4)}
    state = CurriculumState(torch.tensor([1, 0, 2, 0]), arrays)
    others = [
        state._replace(turns=state.turns + 1),
        state._replace(arrays={**arrays, "rate": -arrays["rate"]}),
        state._replace(arrays={"asked": arrays["rate"], "rate": arrays["asked"]}),
        state._replace(arrays={"asked": arrays["asked"], "share": arrays["rate"]}),
        state._replace(arrays={"asked": arrays["asked"]}),
    ]
    found = [checksums.of_curriculum(one)["curriculum"] for one in (state, *others)]
    assert len({*found}) == len(found)
    assert checksums.of_curriculum(state._replace(arrays=dict(reversed(arrays.items()))))["curriculum"] == found[0]
    assert checksums.of_curriculum(None) == {}
