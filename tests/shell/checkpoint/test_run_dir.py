"""A run folder has one configuration and one process in it, and nothing else is ever taken for one."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.shell import atomic_io
from grpo_fn.shell.checkpoint import run_dir
from grpo_fn.shell.checkpoint.run_dir import open_run

CONFIG = "".join(f"train.knob_{i} = {i}\n" for i in range(30))


def enter(path: Path, *, config: str = CONFIG, fingerprint: str = "f1", force: bool = False, need: int = 0) -> bool:
    knobs = {"optimizer.adamw.lr": 1e-5}
    return open_run(path, config_text=config, fingerprint=fingerprint, hparams=knobs, force=force, need_bytes=need)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


def test_a_new_folder_is_laid_out_and_the_second_time_it_is_resumed(folder):
    assert enter(folder) is False
    assert (folder / "config.gin").read_text() == CONFIG
    assert all((folder / name).is_dir() for name in ("tensorboard", "rollouts", "checkpoints"))
    (folder / "metrics.jsonl").write_text("kept\n")
    assert enter(folder) is True
    assert (folder / "metrics.jsonl").read_text() == "kept\n"


@pytest.mark.parametrize(("there", "now"), [("f1", "f1/f2"), ("f1/f2", "f1/f3")])
def test_a_run_is_the_same_where_a_fingerprint_is_shared(folder: Path, there: str, now: str) -> None:
    enter(folder, fingerprint=there)
    assert enter(folder, fingerprint=now) is True
    with pytest.raises(ValueError, match="another configuration"):
        enter(folder, fingerprint="f3/f4" if "f3" not in now else "f4")


def test_another_configuration_is_refused_with_the_lines_that_differ_unless_forced(folder):
    enter(folder)
    other = CONFIG.replace("knob_3 = 3\n", "knob_3 = 99\n")
    with pytest.raises(ValueError, match="another configuration") as caught:
        enter(folder, config=other, fingerprint="f2")
    text = str(caught.value)
    with pytest.raises(ValueError, match="the same text; fingerprint f1, now f2"):
        enter(folder, fingerprint="f2")
    with pytest.raises(ValueError, match=r"(?s)(knob.*){10}and 20 more"):
        enter(folder, config="", fingerprint="f2")
    assert "-train.knob_3 = 3\n" in text
    assert "+train.knob_3 = 99\n" in text
    assert "knob_4" not in text
    assert "--force" in text
    assert (folder / "config.gin").read_text() == CONFIG
    assert enter(folder, config=other, fingerprint="f2", force=True) is True
    assert (folder / "config.gin").read_text() == CONFIG, "replaced before anything was restored"
    run_dir.write_config(folder, other, "f2", {})
    assert (folder / "config.gin").read_text() == other
    assert enter(folder, config=other, fingerprint="f2") is True


@pytest.mark.parametrize("text", ["{", "null", "\xff"])
def test_a_marker_that_is_no_runs_is_named_and_replaced_when_forced(folder, text):
    enter(folder)
    (folder / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"got .*run\.json that names no fingerprint .*, expected a run's own"):
        enter(folder)
    assert enter(folder, force=True) is True


def test_a_folder_of_something_else_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for force in (False, True):
        with pytest.raises(ValueError, match=r"got run folder .*thesis\.tex.*expected an empty one"):
            enter(tmp_path, force=force)
        with pytest.raises(ValueError, match="a file; expected a folder"):
            enter(tmp_path / "thesis.tex", force=force)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_whose_making_was_cut_short_is_made_again(folder, monkeypatch):
    def die(path: Path, obj: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_dir, "write_json", die)
    with pytest.raises(KeyboardInterrupt):
        enter(folder)
    monkeypatch.undo()
    assert enter(folder) is False


@pytest.mark.parametrize("there", [False, True])
def test_leftovers_of_a_process_killed_in_the_export_are_put_right(folder, there):
    enter(folder)
    for name in (".model-new-1", ".model-old-2", *(["model"] if there else [])):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(name)
    enter(folder)
    assert [path.name for path in folder.glob("*model*")] == ["model"]
    assert (folder / "model" / "config.json").read_text() == ("model" if there else ".model-old-2")


def test_too_few_bytes_and_no_inode_are_refused_before_anything_is_made(folder, monkeypatch):
    with pytest.raises(atomic_io.NoSpace, match=r"got [\d,]+ bytes free, expected 1,000,000,000,000,000,000"):
        enter(folder, need=10**18)
    disk = SimpleNamespace(f_blocks=10**6, f_bfree=10**6, f_bavail=10**6, f_frsize=4096, f_favail=0, f_files=20)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    with pytest.raises(atomic_io.NoSpace, match=r"no space left: got 4,096,000,000 bytes and no inode free"):
        enter(folder, need=1)
    assert not folder.parent.exists()


def test_space_that_the_folder_holds_already_counts(folder, monkeypatch):
    enter(folder)
    for name in ("checkpoints/step_2", "checkpoints/.tmp-step_4-1", "model"):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").write_bytes(bytes(1000))
    monkeypatch.setattr(atomic_io, "free_bytes", lambda path: 500)
    enter(folder, need=3500)
    with pytest.raises(atomic_io.NoSpace, match="got 500 bytes free, expected 501"):
        enter(folder, need=3501)


ENTER = """
import sys
from pathlib import Path
from grpo_fn.shell.checkpoint.run_dir import open_run
open_run(Path(sys.argv[1]), config_text="", fingerprint="", hparams={}, force=True, need_bytes=0)
print("entered", flush=True)
sys.stdin.read()
"""


def entering(folder: Path) -> subprocess.Popen:
    """Another process that enters the folder, and stays until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", ENTER, folder], text=True, **pipes)


def test_a_lock_that_is_deleted_is_taken_anew_or_the_folder_is_given_up(folder):
    run_dir.keep_lock(folder)  # in no folder yet
    enter(folder)
    (folder / "run.lock").unlink()
    for _ in range(2):
        run_dir.keep_lock(folder)
    with entering(folder) as second:
        assert f"which process {os.getpid()} is working in" in second.communicate()[1]
    (folder / "run.lock").unlink()
    with entering(folder) as second:
        assert second.stdout.readline() == "entered\n", "nothing is there that it could see"
        with pytest.raises(ValueError, match=f"which process {second.pid} is working in"):
            run_dir.keep_lock(folder)
        second.communicate()


def hold(path: Path, ready) -> None:
    enter(path)
    child = os.fork()  # a worker that outlives its parent must not keep the folder
    if child == 0:
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    ready.send(child)
    signal.pause()


def test_two_processes_never_share_a_folder_and_a_killed_one_lets_go(folder):
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(folder, theirs))
    holder.start()
    orphan = ours.recv()
    try:
        for force in (False, True):
            with pytest.raises(ValueError, match=f"which process {holder.pid} is working in"):
                enter(folder, force=force)
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        for _ in range(2):
            assert enter(folder) is True
    finally:
        holder.kill()
        holder.join()
        os.kill(orphan, signal.SIGKILL)
    with entering(folder) as refused:  # entering it twice did not lose the lock
        assert f"which process {os.getpid()} is working in" in refused.communicate()[1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(json_values)
def test_json_is_strict_and_comes_back_with_null_for_what_json_cannot_say(value):
    text = atomic_io.to_json(value)
    assert text.isascii()
    assert "\n" not in text
    assert json.loads(text, parse_constant=pytest.fail) == atomic_io.finite_or_none(value)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    atomic_io.write_json(tmp_path / "summary.json", {"a": 1})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_io.write_json(tmp_path / "summary.json", {"a": 2})
    monkeypatch.undo()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
