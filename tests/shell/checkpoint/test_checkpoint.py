"""A checkpoint is absent, as it was, or complete; and whatever is wrong with one is named."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.shell import atomic_io
from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.checkpoint import async_saver, store, tensor_shards
from grpo_fn.shell.checkpoint.async_saver import AsyncSaver
from grpo_fn.shell.checkpoint.store import latest_verified, prune, steps
from grpo_fn.shell.world import alone

ALONE = alone(torch.device("cpu"))
PIECES = "__0_0.distcp"  # the tensors of rank 0


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensor(draw: st.DrawFn) -> torch.Tensor:
    """Any bits of any dtype: NaN payloads, signed zeros and infinities among them."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=dtype).reshape(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def bits(t: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def all_bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: bits(t) for name, t in tensors.items()}


def refuse(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """A killed process loses nothing that was not flushed; that flushes happen is tested by making them fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


class Contents(NamedTuple):
    """All of a checkpoint."""

    tensors: dict[str, torch.Tensor]
    blobs: dict[str, Any]
    meta: dict[str, Any]


def save(root: Path, step: int, **what: Any) -> Path:
    """One checkpoint, waited for."""
    with AsyncSaver(root, ALONE) as writer:
        writer.save(step, **{"tensors": {}, "blobs": {}, "meta": {}, **what})
    return root / f"step_{step}"


def load(path: Path) -> Contents:
    """All of a checkpoint that verifies."""
    store.verify(path)
    return Contents(store.read_tensors(path, ""), store.blobs(path), store.meta(path))


def state(n: float) -> dict:
    return {
        "tensors": {"w": torch.full((3, 2), n), "b": torch.arange(4.0) * n},
        "blobs": {"optimizer": {"state": {0: {"step": torch.tensor(n), "exp_avg": torch.full((5,), n)}}, "lr": n}},
        "meta": {"seed": 7, "metrics": {"eval/accuracy": n}},
    }


def assert_state(contents: Contents, n: float) -> None:
    expected = state(n)
    assert all_bits(contents.tensors) == all_bits(expected["tensors"])
    inner, expected_inner = contents.blobs["optimizer"], expected["blobs"]["optimizer"]
    assert inner["lr"] == n
    assert all_bits(inner["state"][0]) == all_bits(expected_inner["state"][0])
    assert contents.meta == expected["meta"]


@given(st.dictionaries(names, tensor(), max_size=4), st.lists(tensor(), max_size=3), plain, st.integers(0, 10**9))
def test_loaded_tensors_are_bitwise_the_saved_ones(tensors, listed, extra, step):
    with TemporaryDirectory() as folder:
        meta = {"extra": extra}
        path = save(Path(folder), step, tensors=tensors, blobs={"blob": {"ts": listed, 3: (extra,)}}, meta=meta)
        found = latest_verified(Path(folder), warn=refuse)
        assert (found.path, found.step) == (path, step)
        contents = load(path)
        assert all_bits(contents.tensors) == all_bits(tensors)
        assert [bits(t) for t in contents.blobs["blob"]["ts"]] == [bits(t) for t in listed]
        assert contents.blobs["blob"][3] == (extra,)
        assert contents.meta == found.meta == atomic_io.finite_or_none(meta)
        assert tensor_shards.folder_tensors(path) == {k: (tuple(v.shape), v.dtype) for k, v in tensors.items()}
        for prefix in {name[:1] for name in tensors}:
            some = {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
            assert all_bits(store.read_tensors(path, prefix)) == all_bits(some)


@given(st.dictionaries(names, tensor(), min_size=1, max_size=4), st.data())
def test_loading_changes_tensors_in_place_and_wholly_or_not_at_all(tensors, data):
    with TemporaryDirectory() as folder:
        path = save(Path(folder), 0, tensors=tensors)
        into = {k: torch.zeros_like(v) for k, v in tensors.items()}
        places, odd = {k: v.data_ptr() for k, v in into.items()}, data.draw(st.sampled_from(list(tensors)))
        others = {k: v for k, v in into.items() if k != odd}
        wrong = [{f"{odd}!": into[odd]}, {odd: torch.zeros(5, 5, 5, 5)}, {odd: into[odd].to(torch.complex64)}]
        with pytest.raises(ValueError, match=r"got .* expected"):
            store.load_into(path, others | data.draw(st.sampled_from(wrong)), ALONE)
        with pytest.raises(ValueError, match="expected none that the policy lacks"):
            store.load_into(path, others, ALONE, exact=True)
        assert all(not v.any() for v in into.values())
        store.load_into(path, into, ALONE, exact=True)
        assert all_bits(into) == all_bits(tensors)
        assert {k: v.data_ptr() for k, v in into.items()} == places


class Evil:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("broken_into",)


class Dotted:
    def __reduce__(self) -> tuple:
        return getattr, (torch.distributed.checkpoint.metadata.Metadata, "__init__")


MODULE = b"torch.distributed.checkpoint.filesystem"
SYSTEM = b"\x80\x04\x8c" + bytes([len(MODULE)]) + MODULE + b"\x8c\x09os.system\x93."


@pytest.mark.parametrize("index", [*map(pickle.dumps, (Evil(), Dotted(), torch.nn.Linear)), SYSTEM])
def test_an_index_that_would_run_something_is_refused(root, index, monkeypatch):
    path = save(root, 0, **state(1.0))
    monkeypatch.chdir(root)
    (path / tensor_shards.INDEX).write_bytes(index)
    with pytest.raises(pickle.UnpicklingError, match="expected nothing but descriptions"):
        tensor_shards.folder_tensors(path)
    assert not Path("broken_into").exists()


# -- beside the training


def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Each release lets one save be written."""
    go, real = threading.Semaphore(0), tensor_shards.write_shards

    def late(*args: Any) -> Any:
        assert go.acquire(timeout=60)
        return real(*args)

    monkeypatch.setattr(tensor_shards, "write_shards", late)
    return go


def test_save_returns_before_anything_is_written_and_what_it_was_given_may_change(root, monkeypatch):
    go, given = held_back(monkeypatch), state(1.0)
    with AsyncSaver(root, ALONE) as writer:
        writer.save(1, **given)
        for value in (*given["tensors"].values(), given["blobs"]["optimizer"]["state"][0]["exp_avg"]):
            value.zero_()
        given["blobs"]["optimizer"]["lr"] = 9
        given["meta"]["metrics"]["eval/accuracy"] = 9
        assert steps(root) == []
        assert writer.newly_saved() is None
        go.release()
        writer.wait()
        assert (writer.newly_saved(), writer.newly_saved()) == (1, None)
        assert_state(load(root / "step_1"), 1.0)


def test_the_next_save_waits_for_the_one_before(root, monkeypatch):
    go, real = held_back(monkeypatch), AsyncSaver.wait

    def wait(writer: AsyncSaver) -> None:
        go.release()  # not before it is waited for
        real(writer)

    with AsyncSaver(root, ALONE) as writer:
        writer.save(1, **state(1.0))
        monkeypatch.setattr(AsyncSaver, "wait", wait)
        writer.save(2, **state(2.0))
        assert steps(root) == [1]
    assert steps(root) == [1, 2]
    assert_state(load(root / "step_1"), 1.0)


def broken(*args: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_an_error_of_the_writing_thread_is_raised_by_the_next_call_and_once(root, monkeypatch):
    with AsyncSaver(root, ALONE) as writer:
        monkeypatch.setattr(tensor_shards, "write_shards", broken)
        writer.save(1, **state(1.0))
        with pytest.raises(OSError, match="Input/output error"):
            writer.save(2, **state(2.0))
        monkeypatch.undo()
        assert list(root.iterdir()) == []
        assert writer.newly_saved() is None
        writer.save(2, **state(2.0))
    assert steps(root) == [2]
    assert writer.newly_saved() == 2


def fail_after_save(root: Path, step: int) -> None:
    with AsyncSaver(root, ALONE) as writer:
        writer.save(step, **state(1.0))
        raise KeyError("of the training")


def test_an_error_in_the_training_finishes_the_save_and_is_not_hidden_by_an_error_beside_it(root, monkeypatch):
    with pytest.raises(KeyError):
        fail_after_save(root, 1)
    assert_state(load(root / "step_1"), 1.0)
    monkeypatch.setattr(tensor_shards, "write_shards", broken)
    with pytest.raises(KeyError) as caught:
        fail_after_save(root, 2)
    assert "Input/output error" in caught.value.__notes__[0]


def test_no_two_savers_ever_write_into_one_folder(root):
    owners = [AsyncSaver(root, ALONE)._owner for _ in range(3)]
    assert len({store.temporary_name(root, "tmp", 1, owner) for owner in owners}) == 3
    assert all(owner.startswith(f"{os.getpid()}-") for owner in owners)


def test_a_folder_that_a_dying_process_would_rename_is_gone_before_it_is_deleted(root, monkeypatch):
    save(root, 1, **state(1.0))
    building = root / ".tmp-step_2-999999999-abc"
    shutil.copytree(root / "step_1", building)
    real = shutil.rmtree

    def in_this_moment(path: Path, **how: Any) -> None:
        with pytest.raises(FileNotFoundError):
            os.rename(building, root / "step_2")
        real(path, **how)

    monkeypatch.setattr(shutil, "rmtree", in_this_moment)
    store.clean_up_unfinished(root)
    assert [p.name for p in root.iterdir()] == ["step_1"]


@pytest.mark.parametrize(
    ("blobs", "message"),
    [
        ({"optimizer": {"groups": [Evil()]}}, r"Evil at optimizer\['groups'\]\[0\]"),
        ({"optimizer": {frozenset(): 1}}, "got a frozenset at optimizer"),
        ({"../x": 1}, "expected identifiers"),
    ],
)
def test_values_that_would_not_come_back_are_refused_before_anything_is_written(root, blobs, message):
    with pytest.raises(ValueError, match=message):
        save(root, 0, blobs=blobs)
    assert not root.exists()


@given(st.data())
def test_damage_to_any_file_at_any_place_is_named_and_the_one_before_is_taken(data):
    with TemporaryDirectory() as folder:
        root = Path(folder)
        save(root, 10, **state(1.0))
        path = save(root, 20, **state(2.0))
        target = data.draw(st.sampled_from(sorted(path.iterdir())), label="file")
        content = bytearray(target.read_bytes())
        damage = data.draw(st.sampled_from(["flip", "cut", "grow", "remove"]), label="damage")
        at = data.draw(st.integers(0, len(content) - 1), label="byte")
        if damage == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        target.write_bytes(content[:at] if damage == "cut" else content + b"!" * (damage == "grow"))
        if damage == "remove":
            target.unlink()
        with pytest.raises(ValueError, match=target.name):
            load(path)
        said: list[str] = []
        found = latest_verified(root, warn=said.append)
        assert found.step == 10
        assert_state(load(found.path), 1.0)
        (text,) = said
        assert str(path) in text
        assert target.name in text
        assert latest_verified(root, warn=refuse) == found  # it was set aside and is not met again
        save(root, 20, **state(3.0))
        assert_state(load(latest_verified(root, warn=refuse).path), 3.0)


def test_a_checkpoint_under_another_steps_name_is_broken(root):
    shutil.copytree(save(root, 1, **state(1.0)), root / "step_2")
    said: list[str] = []
    assert latest_verified(root, warn=said.append).step == 1
    assert "step 1" in said[0]


def test_a_checkpoint_of_another_format_is_refused_and_kept(root, monkeypatch):
    monkeypatch.setattr(store, "FORMAT", 3)
    path = save(root, 1, **state(1.0))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"got .* format 3, expected 2"):
        latest_verified(root, warn=refuse)
    assert path.exists()


def test_nothing_there_is_none(root):
    assert latest_verified(root, warn=refuse) is None
    (root / "step_3x").mkdir(parents=True)
    (root / "step_4").write_text("a file")
    assert latest_verified(root, warn=refuse) is None


def test_a_permission_error_is_no_proof_of_damage(root, monkeypatch):
    path = save(root, 1, **state(1.0))

    def denied(path: Path) -> str:
        raise PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(store, "_sha256", denied)
    with pytest.raises(PermissionError):
        latest_verified(root, warn=refuse)
    assert path.exists()


# -- a process that dies ---------------------------------------------------------------------------------------------


def on_each_line(action: Callable[[], object], tick: Callable[[], None]) -> None:
    """Run the action and call `tick` before every line of our own code."""
    ours = {module.__file__ for module in (store, atomic_io, async_saver, tensor_shards)}

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in ours:
            return None
        if event == "line":
            tick()
        return trace

    before = sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_saver.BackgroundWorker, "submit", at_once)
        sys.settrace(trace)
        try:
            action()
        finally:
            sys.settrace(before)


def at_once(worker: BackgroundWorker, fn: Callable[..., object], *args: object, what: str) -> Future:
    """`submit` without a thread."""
    future = Future()
    future.set_result(fn(*args))
    return future


def places(action: Callable[[], object]) -> list[int]:
    """Lines to die at: every few while files are written, every single one at the end, where names change."""
    lines: list[None] = []
    on_each_line(action, lambda: lines.append(None))
    return [*range(0, len(lines) - 40, 15), *range(max(0, len(lines) - 40), len(lines))]


def die_at(line: int, action: Callable[[], object]) -> None:
    """Run the action in a forked child that takes SIGKILL before that line."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        left = iter(range(line))
        try:
            on_each_line(action, lambda: None if next(left, None) is not None else os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("replacing", [False, True])
def test_sigkill_at_any_line_of_save_leaves_the_old_or_the_new(tmp_path, replacing):
    def before(root: Path) -> Path:
        save(root, 10, **state(1.0))
        if replacing:
            save(root, 20, **state(2.0))
        return root

    rehearsal = before(tmp_path / "rehearsal")
    seen = []
    for line in places(lambda: save(rehearsal, 20, **state(3.0))):
        root = before(tmp_path / str(line))
        die_at(line, lambda root=root: save(root, 20, **state(3.0)))
        found = latest_verified(root, warn=refuse)
        value = found.meta["metrics"]["eval/accuracy"]
        assert (found.step, value) in {(20, 2.0) if replacing else (10, 1.0), (20, 3.0)}
        assert_state(load(found.path), value)
        assert {p.name for p in root.iterdir()} <= {"step_10", "step_20"}  # leftovers are gone
        seen.append(value)
        save(root, 20, **state(4.0))  # and the next save is none the worse
        assert_state(load(root / "step_20"), 4.0)
    assert seen == sorted(seen)  # once the new one shows, it stays
    assert len(set(seen)) == 2


@pytest.mark.slow
def test_sigkill_at_any_line_of_prune_leaves_the_kept_ones_whole(tmp_path):
    def fill() -> None:
        for step in {1, 2, 3} - {*steps(tmp_path)}:
            save(tmp_path, step, **state(float(-step)))

    def cut() -> None:
        prune(tmp_path, keep_last=1, keep_best=1, metric="eval/accuracy")

    fill()
    seen = set()
    for line in places(cut):
        fill()
        die_at(line, cut)
        found = latest_verified(tmp_path, warn=refuse)
        assert found is not None
        assert found.step == 3
        for step in steps(tmp_path):
            assert_state(load(tmp_path / f"step_{step}"), float(-step))
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        seen.add(tuple(steps(tmp_path)))
    assert seen == {(1, 2, 3), (1, 3)}


def test_a_checkpoint_half_deleted_no_longer_bears_its_name(root, monkeypatch):
    for step in (1, 2):
        save(root, step, **state(float(step)))

    def cut_short(path: Path) -> None:
        (path / PIECES).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", cut_short)
    with pytest.raises(KeyboardInterrupt):
        prune(root, keep_last=1, keep_best=0, metric="eval/accuracy")
    monkeypatch.undo()
    assert steps(root) == [2]
    assert latest_verified(root, warn=refuse) is not None
    assert [p.name for p in root.iterdir()] == ["step_2"]


def test_leftovers_of_the_living_stay_and_of_the_dead_go(root):
    save(root, 1, **state(1.0))
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        busy = root / f".tmp-step_2-{living.pid}"
        busy.mkdir()
        assert latest_verified(root, warn=refuse) is not None
        assert busy.exists()
    finally:
        living.communicate(b"\n")
    assert latest_verified(root, warn=refuse) is not None
    assert not busy.exists()


# -- a disk that is full ---------------------------------------------------------------------------------------------


def test_too_little_space_is_seen_before_anything_is_written(root, monkeypatch):
    save(root, 1, **state(1.0))
    monkeypatch.setattr(atomic_io, "free_bytes", lambda path: 2**20)
    save(root, 1, **state(1.0))
    with pytest.raises(atomic_io.NoSpace, match=r"no space left: got 1,048,576 bytes free, expected 2,\d\d\d,\d\d\d"):
        save(root, 2, tensors={"x": torch.ones(2**19)})
    assert [p.name for p in root.iterdir()] == ["step_1"]


FLUSHES = 6  # tensors, index, blobs, manifest, the folder, and the folder it is renamed in


@given(st.integers(0, FLUSHES + 1), st.sampled_from([errno.ENOSPC, errno.EDQUOT, errno.EIO]), st.booleans())
def test_any_failing_flush_leaves_the_checkpoints_as_they_were(nth, code, replacing):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root, real, calls = Path(folder), os.fsync, 0
        for step in (1, 2) if replacing else (1,):
            save(root, step, **state(float(step)))

        def failing(fd: int) -> None:
            nonlocal calls
            calls += 1
            if calls > nth:
                raise OSError(code, os.strerror(code))
            real(fd)

        patch.setattr(os, "fsync", failing)
        kind = OSError if code == errno.EIO else atomic_io.NoSpace
        with nullcontext() if nth >= FLUSHES else pytest.raises(kind) as caught:
            save(root, 2, **state(3.0))
        patch.undo()
        assert calls == min(nth + 1, FLUSHES)
        assert caught is None or caught.value.errno == (errno.EIO if code == errno.EIO else errno.ENOSPC)
        done = calls == FLUSHES  # the last flush is that of the rename, which has happened
        assert {p.name for p in root.iterdir()} == {"step_1", "step_2"} if done or replacing else {"step_1"}
        assert_state(load(latest_verified(root, warn=refuse).path), 3.0 if done else 2.0 if replacing else 1.0)


# -- which ones stay -------------------------------------------------------------------------------------------------

scores = st.none() | st.sampled_from([0.0, 0.5, 1.0]) | st.floats(allow_nan=True)


@given(st.dictionaries(st.integers(0, 200), scores, min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 4))
def test_prune_keeps_the_last_and_the_best_and_nothing_else(found, keep_last, keep_best):
    with TemporaryDirectory() as folder:
        root, how = Path(folder), {"keep_last": keep_last, "keep_best": keep_best, "metric": "m"}
        for step, score in found.items():
            save(root, step, meta={"metrics": {} if score is None else {"m": score}})
        deleted, left = prune(root, **how), steps(root)
        assert sorted([*left, *deleted]) == sorted(found)
        assert {p.name for p in root.iterdir()} == {f"step_{step}" for step in left}
        rated = {s: v for s, v in found.items() if v is not None and v - v == 0}  # finite
        best = sorted(rated, key=lambda s: (rated[s], s))[::-1][:keep_best]
        assert {*left} == {*best, *sorted(found)[-keep_last:]}
        assert prune(root, **how) == []


def test_a_visibly_broken_folder_never_displaces_a_whole_one_and_the_newest_is_always_kept(root):
    for step in (1, 2):
        save(root, step, **state(float(step)))
    (root / "step_2" / PIECES).write_bytes(b"")
    assert prune(root, keep_last=1, keep_best=0, metric="eval/accuracy") == []
    assert latest_verified(root, warn=lambda text: None).step == 1
    for last, best in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match=f"got keep_last {last}, keep_best {best}; expected"):
            prune(root, keep_last=last, keep_best=best, metric="m")


def test_writing_needs_no_stream_of_a_card(root, monkeypatch):
    """In the thread that saves, asking for one takes a context on the first card, on every rank."""

    def refuse(*args):
        raise AssertionError("a stream was asked for")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", refuse)
    path = save(root, 1, **state(1.0))
    monkeypatch.undo()
    assert_state(load(path), 1.0)


@given(st.lists(st.integers(0, 5000), max_size=30))
def test_blocks_of_staged_pieces_are_powers_of_two_and_no_two_pieces_share_a_byte(sizes: list[int]) -> None:
    blocks, places = tensor_shards.block_layout(sizes)
    taken = sorted((block, at, at + size) for size, (block, at) in zip(sizes, places, strict=True))
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in pairwise(taken))
    assert all(end <= blocks[block] for block, _, end in taken)
    assert all(at % tensor_shards.ALIGNMENT == 0 for _, at in places)
    assert all(size & (size - 1) == 0 for size in blocks)
