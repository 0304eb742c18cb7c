"""What is written beside the training is what would have been written at once, in its order, or the run fails."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from grpo_fn.shell.logging import metrics_writer
from grpo_fn.shell.logging.metrics_writer import AsyncWriter, MetricsWriter
from grpo_fn.shell.world import alone
from grpo_fn.trainer import recording

SOON = 20.0  # seconds


def opened(folder: Path, *, deadline: float = SOON) -> AsyncWriter:
    return AsyncWriter(MetricsWriter(folder, start_step=0), deadline=deadline)


def events(folder: Path) -> list[object]:
    (path,) = (folder / "tensorboard").iterdir()
    return [(event.step, event.summary) for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]


CALLS: list[Callable[[int], tuple]] = [
    lambda i: (MetricsWriter.text, i, "samples", f"text {i}"),
    lambda i: (MetricsWriter.histogram, i, "advantage", torch.arange(float(i + 1))),
    lambda i: (MetricsWriter.scalars, i, {"loss/kl": i / 3}),
    lambda i: (scalars_and_more, i, {"eval/accuracy": 0.5}),
    lambda i: (MetricsWriter.layout, {"Health": {"KL": ("Multiline", ["loss/kl"])}}),
    lambda i: (MetricsWriter.hparams, {"lr": 1.0}, ["loss/kl"]),
    lambda i: (MetricsWriter.finish,),
]


def scalars_and_more(writer: MetricsWriter, step: int, more: dict[str, float]) -> None:
    writer.scalars(step, {})
    writer.amend(step, more)


@given(st.lists(st.sampled_from(CALLS), max_size=40))
def test_the_async_writer_writes_what_a_writer_writes_in_the_same_order(calls: list[Callable]) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time", lambda: 1e9)  # in events and in the names of their files
        found = []
        for name, make in (("now", partial(MetricsWriter, start_step=0)), ("later", opened)):
            (Path(folder) / name).mkdir()
            with make(Path(folder) / name) as writer:
                for i, call in enumerate(calls):
                    method, *arguments = call(i)
                    method(writer, *arguments) if name == "now" else writer.write(method, *arguments)
            found.append(((Path(folder) / name / "metrics.jsonl").read_bytes(), events(Path(folder) / name)))
    assert found[0] == found[1]


def test_writes_happen_in_a_thread_and_wait_waits_for_them(tmp_path: Path) -> None:
    gate, done, figures = threading.Event(), [], {"a": 1.0}
    with opened(tmp_path) as writer:
        writer.do("a gate", partial(gate.wait, SOON))
        writer.write(MetricsWriter.scalars, 0, figures)
        figures.clear()  # what was handed over is as it was
        writer.do("a note", lambda: done.append(threading.current_thread()))
        assert (tmp_path / "metrics.jsonl").read_text() == ""
        gate.set()
        writer.wait()
        assert done[0] is not threading.current_thread()
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "a": 1.0}\n'


def broken() -> None:
    raise OSError(28, "No space left on device")


def test_after_what_could_not_be_written_nothing_is_and_the_next_step_raises_it(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    writer.write(MetricsWriter.scalars, 0, {})
    writer.do("the rollout of step 1", broken)
    writer.write(MetricsWriter.scalars, 1, {})
    for end in (writer.wait, writer.wait, partial(writer.__exit__, None, None, None)):
        with pytest.raises(OSError, match="No space left") as caught:
            end()
        assert caught.value.__notes__ == ["while writing the rollout of step 1"]
        assert writer.failed
        for step in range(2, 2 + 2 * metrics_writer.MAX_PENDING):  # it does not wait
            writer.write(MetricsWriter.scalars, step, {})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


def crash(folder: Path, *works: Callable[[], object]) -> None:
    with opened(folder) as writer:
        for work in works:
            writer.do("the metrics", work)
        writer.write(MetricsWriter.scalars, 0, {})
        raise RuntimeError("the crash")


def test_a_crash_and_a_full_disk_are_both_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the crash") as caught:
        crash(tmp_path, broken)
    assert "the log could not be written: [Errno 28] No space left" in caught.value.__notes__[0]


def test_the_training_waits_when_too_much_is_waiting(tmp_path: Path) -> None:
    gate, asked = threading.Event(), []

    def ask(writer: AsyncWriter) -> None:
        for i in range(metrics_writer.MAX_PENDING + 1):
            writer.do(f"work {i}", partial(gate.wait, SOON))
            asked.append(i)

    with opened(tmp_path) as writer:
        thread = threading.Thread(target=ask, args=(writer,))
        thread.start()
        thread.join(0.2)
        assert len(asked) == metrics_writer.MAX_PENDING
        gate.set()
        thread.join(SOON)
        assert len(asked) == metrics_writer.MAX_PENDING + 1


def test_a_run_that_is_alone_has_a_deadline_for_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LOG", 0.05)
    gate = threading.Event()
    with recording.open_writer(tmp_path, alone(torch.device("cpu")), None, start_step=0) as writer:
        writer.do("the rollout of step 3", partial(gate.wait, SOON))
        with pytest.raises(TimeoutError, match=r"got no result of writing the rollout of step 3 within 0\.05 s"):
            writer.wait()
        gate.set()
