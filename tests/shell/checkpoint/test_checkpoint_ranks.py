"""Checkpoints of several ranks: every reader gets every bit, and no rank's death leaves half of one."""

import errno
import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import crew
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from grpo_fn.shell import atomic_io
from grpo_fn.shell.checkpoint import async_saver, store, tensor_shards
from grpo_fn.shell.checkpoint.async_saver import AsyncSaver
from grpo_fn.shell.checkpoint.store import latest_verified, load_into, read_tensors
from grpo_fn.shell.world import World

CPU = torch.device("cpu")
SHAPES = [(7, 5), (8, 4), (3, 2, 2), (6,), (1,), (2, 0), ()]
DTYPES = [torch.float32, torch.bfloat16]


def bits(t: Tensor) -> bytes:
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def truth(shape: tuple[int, ...], dtype: torch.dtype, n: int = 0) -> Tensor:
    raw = torch.randint(-(2**7), 2**7, shape, generator=torch.Generator().manual_seed(len(shape) * 100 + n))
    return raw.to(dtype) / 3 if dtype.is_floating_point else raw


# -- any ranks read what any ranks wrote


def placements(size: int) -> dict[str, tuple[DeviceMesh, list[Placement]] | None]:
    """Every way to lay a tensor out over that many ranks; None is a plain one, the same on all."""
    line = init_device_mesh("cpu", (size,))
    ways: dict[str, Any] = {"plain": None, "rows": (line, [Shard(0)]), "columns": (line, [Shard(1)])}
    ways["copies"] = (line, [Replicate()])
    if size == 4:
        grid = init_device_mesh("cpu", (2, 2))
        pairs = {"hybrid": [Replicate(), Shard(0)], "both": [Shard(0), Shard(1)], "twice": [Shard(0), Shard(0)]}
        ways |= {name: (grid, pair) for name, pair in pairs.items()}
    return ways


def laid_out(tensor: Tensor, way: tuple[DeviceMesh, list[Placement]] | None) -> Tensor:
    return tensor.clone() if way is None else distribute_tensor(tensor.clone(), *way)


def fits(shape: tuple[int, ...], way: tuple[DeviceMesh, list[Placement]] | None) -> bool:
    return way is None or all(not p.is_shard() or p.dim < len(shape) for p in way[1])


def everything(size: int) -> dict[str, Tensor]:
    """A tensor of every shape and dtype in every layout, named after what it is."""
    ways = placements(size) if size > 1 else {"plain": None}
    return {
        f"{way}.{i}.{j}": laid_out(truth(shape, dtype), place)
        for (way, place), (i, shape), (j, dtype) in product(ways.items(), enumerate(SHAPES), enumerate(DTYPES))
        if fits(shape, place)
    }


def write_everything(world: World, root: Path) -> list[str]:
    tensors = everything(world.size)
    with AsyncSaver(root, world) as writer:
        writer.save(3, tensors=tensors, blobs={"who": [world.rank]}, meta={"size": world.size})
    return list(tensors)


def read_everything(world: World, path: Path, found: list[str]) -> None:
    """Each tensor that was saved, into every layout that this many ranks have for it."""
    for way, place in (placements(world.size) if world.size > 1 else {"plain": None}).items():
        expected, into = {}, {}
        for name in found:
            _, i, j = name.split(".")
            shape, dtype = SHAPES[int(i)], DTYPES[int(j)]
            if fits(shape, place):
                expected[name] = laid_out(truth(shape, dtype), place)
                into[name] = laid_out(torch.full(shape, 99, dtype=dtype), place)
        load_into(path, into, world)
        for name, tensor in into.items():
            mine, right = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, expected[name]))
            assert bits(mine) == bits(right), (name, way)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_ranks_in_any_layout_read_the_bits_that_any_ranks_wrote(tmp_path: Path, size: int) -> None:
    root = tmp_path / "checkpoints"
    found = crew(size).run(write_everything, root)[0]
    saved = latest_verified(root, warn=pytest.fail)
    assert saved is not None
    assert saved.meta == {"size": size}
    assert store.blobs(saved.path) == {"who": [0]}
    whole = read_tensors(saved.path, "")
    assert list(whole) == sorted(found, key=list(whole).index)
    for name, (shape, dtype) in tensor_shards.folder_tensors(saved.path).items():
        right = truth(SHAPES[int(name.split(".")[1])], DTYPES[int(name.split(".")[2])])
        assert (shape, dtype) == (tuple(right.shape), right.dtype)
        assert bits(whole[name]) == bits(right), name
    for readers in {1, 2, 4} - {size}:
        crew(readers).run(read_everything, saved.path, found)


def mixed(world: World) -> nn.Module:
    """A layer sharded by rows among tensor-parallel ranks, and each part by rows again: placements that interleave."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(5, 8))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(layer, grid["tensor"], {"0": ColwiseParallel()})
    return fully_shard(layer, mesh=grid["shard"])


def write_mixed(world: World, root: Path) -> None:
    with AsyncSaver(root, world) as writer:
        writer.save(1, tensors=mixed(world).state_dict(), blobs={}, meta={})


def test_fully_sharded_tensor_parallel_weights_come_back_whole(tmp_path: Path) -> None:
    crew(4).run(write_mixed, tmp_path / "checkpoints")
    torch.manual_seed(0)
    right = nn.Sequential(nn.Linear(5, 8)).state_dict()
    found = read_tensors(tmp_path / "checkpoints" / "step_1", "")
    assert {name: bits(t) for name, t in found.items()} == {name: bits(t) for name, t in right.items()}


def write_copies(world: World, root: Path) -> list[int]:
    line = init_device_mesh("cpu", (world.size,))
    plain = {f"p{i}": torch.ones(2**14) for i in range(4)}
    copied = {f"c{i}": laid_out(torch.ones(2**14), (line, [Replicate()])) for i in range(4)}
    with AsyncSaver(root, world) as writer:
        writer.save(1, tensors=plain | copied, blobs={}, meta={})
        return [buffer.nbytes for buffer in writer._buffers.values()]


def test_tensors_that_all_ranks_hold_are_copied_and_written_once(tmp_path: Path) -> None:
    copied = crew(4).run(write_copies, tmp_path / "checkpoints")
    assert [sum(sizes) for sizes in copied] == [2 * 2**16] * 4
    files = list((tmp_path / "checkpoints" / "step_1").glob("*.distcp"))
    assert len(files) == 4
    assert 8 * 2**16 < sum(file.stat().st_size for file in files) < 8 * (2**16 + async_saver.OVERHEAD)


# -- beside the training


def state(world: World, n: int) -> dict[str, Tensor]:
    line = init_device_mesh("cpu", (world.size,))
    return {"sharded": laid_out(torch.full((6, 3), float(n)), (line, [Shard(0)])), "plain": torch.full((4,), float(n))}


def assert_state(path: Path, n: int) -> None:
    found = read_tensors(path, "")
    assert torch.equal(found["sharded"], torch.full((6, 3), float(n)))
    assert torch.equal(found["plain"], torch.full((4,), float(n)))


def save_many(world: World, root: Path) -> None:
    with AsyncSaver(root, world) as writer:
        for n in range(1, 5):
            prune = partial(store.prune, root, keep_last=2, keep_best=0, metric="m")
            writer.save(n, tensors=state(world, n), blobs={}, meta={}, prune=prune)
        writer.save(5, tensors={"only": torch.ones(world.size)}, blobs={}, meta={})  # another set, shared out anew


def test_saves_one_after_another_are_each_whole_and_those_not_kept_go(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    crew(2).run(save_many, root)
    assert sorted(p.name for p in root.iterdir()) == ["step_3", "step_4", "step_5"]
    assert_state(root / "step_3", 3)
    assert_state(root / "step_4", 4)
    assert read_tensors(root / "step_5", "")["only"].tolist() == [1.0, 1.0]


# -- ranks that die, hang or fail

WRITE, SEAL, COMMIT, AFTER = "write", "seal", "commit", "after"


def harmed(patch: pytest.MonkeyPatch, harm: Callable[[], None], place: str) -> None:
    """Let the harm come at that place of the next save."""
    places = {WRITE: (tensor_shards, "write_shards"), SEAL: (async_saver, "seal")}
    module, name = places.get(place, (store, "commit"))
    real = getattr(module, name)

    def then(*args: Any) -> Any:
        if place == AFTER:
            real(*args)
        if place == WRITE:  # half of it is there
            (args[0] / "__1_0.distcp").write_bytes(b"half")
        harm()
        return real(*args)

    patch.setattr(module, name, then)


def save_two(world: World, root: Path, deadline: float, rank: int, place: str, harm: Callable[[], None]) -> None:
    """The second one meets with harm on that rank."""
    before, world.deadline = world.deadline, deadline
    with pytest.MonkeyPatch.context() as patch, AsyncSaver(root, world) as writer:
        writer.save(1, tensors=state(world, 1), blobs={}, meta={})
        writer.wait()
        if world.rank == rank:
            harmed(patch, harm, place)
        writer.save(2, tensors=state(world, 2), blobs={}, meta={})
        try:
            writer.wait()
        finally:
            world.deadline = before


def signalled(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "rank", "place"),
    [(2, 1, WRITE), (4, 0, WRITE), (2, 0, SEAL), (2, 0, COMMIT), (2, 0, AFTER)],
)
def test_a_killed_rank_leaves_the_newest_whole_and_the_others_say_so(
    tmp_path: Path, size: int, rank: int, place: str
) -> None:
    root = tmp_path / "checkpoints"
    kill = partial(signalled, signal.SIGKILL)
    outcomes = crew(size).outcomes(save_two, root, 5.0, rank, place, kill)
    assert outcomes[rank].status == -signal.SIGKILL
    for other in (o for i, o in enumerate(outcomes) if i != rank):
        assert other.error == "LostRank"
        assert "checkpoint of step 2" in other.text
        assert other.seconds < 10.0
    found = latest_verified(root, warn=pytest.fail)
    assert found.step == (2 if place == AFTER else 1)
    assert_state(found.path, found.step)
    assert {p.name for p in root.iterdir()} <= {"step_1", "step_2"}
    crew(2).run(save_many, root)  # and the next job saves


@pytest.mark.slow
def test_a_hanging_rank_is_waited_for_no_longer_than_the_deadline(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    stop = partial(signalled, signal.SIGSTOP)
    outcomes = crew(4).outcomes(save_two, root, 2.0, 3, WRITE, stop, grace=5.0)
    assert [o.error for o in outcomes] == ["LostRank"] * 3 + ["Hung"]
    assert all(o.seconds < 8.0 for o in outcomes[:3])
    found = latest_verified(root, warn=pytest.fail)
    assert found.step == 1


def raising(error: Exception) -> None:
    raise error


def fail_then_save(world: World, root: Path, rank: int, place: str, error: Exception) -> tuple[str, str]:
    with pytest.raises((OSError, RuntimeError)) as caught:
        save_two(world, root, 30.0, rank, place, partial(raising, error))
    world.exchange(None, what="looking at once")
    left = sorted(p.name for p in root.iterdir())
    assert left == ["step_1"], left
    with AsyncSaver(root, world) as writer:
        writer.save(2, tensors=state(world, 7), blobs={}, meta={})
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(("rank", "place", "code"), [(1, WRITE, errno.EIO), (0, SEAL, errno.ENOSPC)])
def test_a_disk_that_fails_one_rank_is_named_on_all_and_stops_none(
    tmp_path: Path, rank: int, place: str, code: int
) -> None:
    root = tmp_path / "checkpoints"
    error = OSError(code, os.strerror(code))
    found = crew(2).run(fail_then_save, root, rank, place, error)
    if code == errno.ENOSPC:
        assert {kind for kind, _ in found} == {atomic_io.NoSpace.__name__}
        assert all(f"rank {rank}: no space left" in text and str(root / "step_2") in text for _, text in found)
    else:
        assert [kind for kind, _ in found] == ["Elsewhere", "OSError"]
        assert f"rank {rank}" in found[0][1]
        assert os.strerror(code) in found[0][1]
    newest = latest_verified(root, warn=pytest.fail)
    assert newest.step == 2
    assert_state(newest.path, 7)


def offer_sum(world: World, root: Path) -> str:
    line = init_device_mesh("cpu", (world.size,))
    odd = DTensor.from_local(torch.ones(2), line, [Partial()]) if world.rank == 1 else torch.ones(2)
    with AsyncSaver(root, world) as writer:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            writer.save(1, tensors={"odd": odd}, blobs={}, meta={})
        writer.save(1, tensors=state(world, 1), blobs={}, meta={})
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_value_that_one_rank_cannot_save_is_refused_on_all(tmp_path: Path) -> None:
    outcomes = crew(2).run(offer_sum, tmp_path / "checkpoints")
    assert outcomes[0].startswith("Elsewhere: rank 1: ValueError: got odd placed")
    assert outcomes[1].startswith("ValueError: got odd placed")
    assert_state(tmp_path / "checkpoints" / "step_1", 1)
