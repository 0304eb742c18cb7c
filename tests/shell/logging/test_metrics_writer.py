"""One line a step, valid JSON, rewound exactly; the same in TensorBoard; and what a model writes stays text."""

import gzip
import html.parser
import importlib.util
import json
import math
import re
import shutil
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as BoardView
from tensorboard.plugin_util import markdown_to_safe_html

from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.shell.atomic_io import to_json
from grpo_fn.shell.logging import metrics_writer, rollout_store, stopwatch, tracker
from grpo_fn.shell.logging.metrics_writer import LAYOUT, AsyncWriter, MetricsWriter, markdown_table, rewind
from grpo_fn.shell.logging.rollout_store import rollout_steps
from grpo_fn.shell.world import World, alone
from grpo_fn.trainer import recording


def lines(run_dir: Path) -> list[dict]:
    def strict(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=strict) for line in text.split("\n")[:-1]]


def events(run_dir: Path) -> EventAccumulator:
    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    board.Reload()
    return board


def test_the_same_names_and_numbers_go_to_both(tmp_path):
    with MetricsWriter(tmp_path, start_step=0) as writer:
        writer.scalars(0, {"loss/kl": 0.25, "optimizer/step": 1})
        writer.scalars(1, {"loss/kl": math.nan, "hi": math.inf, "lo": -math.inf})
        writer.text(0, "samples", "hello \ud800")
        writer.histogram(0, "adv", torch.tensor([[0.0, math.nan], [1.0, math.inf]]))
        writer.histogram(0, "none", torch.tensor([math.nan]))
    assert lines(tmp_path) == [
        {"step": 0, "loss/kl": 0.25, "optimizer/step": 1},
        {"step": 1, "loss/kl": None, "hi": None, "lo": None},
    ]
    board = events(tmp_path)
    assert set(board.Tags()["scalars"]) == {"loss/kl", "optimizer/step", "hi", "lo"}
    kl = board.Scalars("loss/kl")
    assert [(e.step, e.value) for e in kl[:1]] == [(0, 0.25)]
    assert math.isnan(kl[1].value)
    assert board.Histograms("adv")[0].histogram_value.num == 2
    assert board.Tags()["histograms"] == ["adv"]
    assert board.Tensors("samples/text_summary")[0].tensor_proto.string_val[0] == b"hello ?"


def test_a_step_is_on_the_disk_when_scalars_returns(tmp_path):
    with MetricsWriter(tmp_path, start_step=0) as writer:
        for step in range(3):
            writer.scalars(step, {"a": 1.0})
            assert lines(tmp_path)[step] == {"step": step, "a": 1.0}
            assert [event.step for event in events(tmp_path).Scalars("a")] == list(range(step + 1))
        with pytest.raises(ValueError, match=r"got scalars of step 2, expected .* 3 or later"):
            writer.scalars(2, {})


def test_a_tensorboard_folder_that_is_deleted_is_made_anew(tmp_path):
    calls = [
        lambda writer: writer.text(1, "t", "text"),
        lambda writer: writer.histogram(1, "h", torch.ones(2)),
        lambda writer: writer.layout({"all": {"a": ("Multiline", ["a"])}}),
        lambda writer: writer.hparams({"lr": 0.1}, ["a"]),
        lambda writer: writer.amend(0, {"b": 1.0}),
        lambda writer: writer.scalars(1, {"a": 2.0}),
    ]
    with MetricsWriter(tmp_path, start_step=0) as writer:
        writer.scalars(0, {"a": 1.0})
        for call in calls:
            shutil.rmtree(tmp_path / "tensorboard")
            call(writer)
        assert [event.step for event in events(tmp_path).Scalars("a")] == [1]
        shutil.rmtree(tmp_path / "tensorboard")
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


def test_resuming_at_any_step_equals_an_uninterrupted_run(tmp_path, monkeypatch):
    clock = time.time

    def run(run_dir: Path, pieces: list[tuple[int, int]]) -> None:
        for i, (start, stop) in enumerate(pieces):
            # TensorBoard orders its files by the second they were opened in; processes do not restart that fast.
            monkeypatch.setattr(time, "time", lambda i=i: clock() + 2 * i)
            with MetricsWriter(run_dir, start_step=start) as writer:
                for step in range(start, stop):
                    writer.scalars(step, {"a": step / 3})
                    writer.histogram(step, "h", torch.ones(step + 1))
                    writer.text(step, "t", f"text {step}")

    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    run(tmp_path / "whole", [(0, 6)])
    run(tmp_path / "broken", [(0, 4), (0, 5), (2, 3), (3, 6)])
    assert (tmp_path / "broken/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    whole, broken = (BoardView(str(tmp_path / name / "tensorboard")) for name in ("whole", "broken"))
    for one in (whole.Reload(), broken.Reload()):  # what TensorBoard's own pages read
        for tag in ("a", "h", "t/text_summary"):
            assert [event.step for event in one.Tensors(tag)] == list(range(6))
        scalars = [float(event.tensor_proto.float_val[0]) for event in one.Tensors("a")]
        assert scalars == [pytest.approx(step / 3) for step in range(6)]
        texts = [event.tensor_proto.string_val[0] for event in one.Tensors("t/text_summary")]
        assert texts == [f"text {step}".encode() for step in range(6)]


@given(st.integers(0, 8), st.integers(0, 9), st.data())
def test_rewind_keeps_exactly_the_whole_lines_below_the_step(count, start, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        whole = [to_json({"step": step, "text": "a\u2028b\r"}) + "\n" for step in range(count)]
        torn = to_json({"step": count, "loss": 0.5})
        torn = torn[: data.draw(st.integers(0, len(torn) - 1), label="cut")]
        path.write_text("".join(whole) + torn, newline="")
        rewind(path, start)
        assert path.read_bytes().decode() == "".join(whole[:start])
        assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_of_zeros_is_torn_and_a_broken_line_inside_is_not_ours(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n\x00\x00\x00\n')
    rewind(path, 5)
    assert path.read_bytes() == b'{"step": 0}\n'
    path.write_bytes(b'{"step": 0}\n{"step": 1, "a": 1}\n{"step": 1, "a": 2}\n{"step": 2}')
    rewind(path, 5)  # the newline alone was lost, and a line came twice
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1, "a": 2}\n{"step": 2}\n'
    for bad in (b"no json", b"[1]", b'{"loss": 1}', b'{"step": null}'):
        path.write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 2}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: got .*, expected a JSON object with a step"):
            rewind(path, 5)


class Page(html.parser.HTMLParser):
    """Tags and the text of every cell of a rendered page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.cells, self.inside = set(), [], False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        assert not attrs, (tag, attrs)
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")
            self.inside = True

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag not in ("td", "th")


HOSTILE = [
    "a | b |\n| --- |",
    "<script>alert(1)</script><img src=x onerror=y>",
    "![x](http://example.com/t.png) [l](javascript:x) <http://example.com>",
    "```\ncode\n```\n# head\n- item\n    indented",
    "\x02klzzwxh:0000\x03 \x02amp\x03 &lt; &#60;",
    "\\| \\<b\\> `a|b` $x_1$ **b** __c__ ~~d~~",
    "\x1b[2Ja\x00b\r\nc\u2028d\ud800\u202e",
]
words = st.sampled_from(HOSTILE) | st.text(st.sampled_from("|\\`*_{}[]()<>#+-.!&;\"'\n a1é漢"), max_size=30) | st.text()


@given(st.lists(st.builds(lambda a, b: {"text": a, "reward|": b}, words, st.floats()), min_size=1, max_size=3))
def test_a_table_shows_every_text_as_it_is_and_nothing_comes_alive(rows):
    page = Page(markdown_to_safe_html(markdown_table(rows)))
    assert page.tags <= {"table", "thead", "tbody", "tr", "th", "td", "br"}
    expected = [str(value) for row in rows for value in row.values()]
    shown = page.cells[2:]
    assert page.cells[:2] == ["text", "reward|"]
    assert len(shown) == len(expected)
    for got, text in zip(shown, expected, strict=True):
        # White space may collapse; invisible characters may show as U+FFFD; everything else is there, in order.
        visible = [c for c in text if c.isprintable() and not c.isspace()]
        assert [c for c in got if c.isprintable() and not c.isspace() and (c != "\ufffd" or c in text)] == visible


# -- the layout of TensorBoard's pages


@pytest.mark.parametrize(
    ("tag", "titles"),
    [
        ("loss/kl", ["KL to the reference"]),  # a prefix of loss/kl_coef_multiplier
        ("loss/kl_coef_multiplier", ["gains of the controllers"]),
        ("reward/mean_length", ["reward by part"]),
        ("eval/accuracy", []),  # only in the chart with its interval
    ],
)
def test_a_tag_is_drawn_where_it_belongs_and_nowhere_else(tag: str, titles: list[str]) -> None:
    charts = [(title, *chart) for some in LAYOUT.values() for title, chart in some.items()]
    drawn = [
        title
        for title, kind, tags in charts
        if kind == "Multiline" and any(re.match(pattern, tag) for pattern in tags)  # as the plugin looks for them
    ]
    assert drawn == titles


# -- rollouts --------------------------------------------------------------------------------------------------------


def rollout_of(P: int, G: int, T: int, seed: int, text: str) -> tuple[list[Problem], Rollout, Reward, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(P * G, T, generator=g) < 0.5
    logp = torch.where(mask, torch.randn(P * G, T, generator=g), torch.nan)
    rollout = Rollout(
        torch.randint(0, 1000, (P * G, T), generator=g),
        mask,
        logp,
        torch.rand(P * G, generator=g) < 0.5,
        tuple(f"{text}{b}" for b in range(P * G)),
    )
    value = torch.randn(P, G, generator=g, dtype=torch.float64)
    reward = outcome_reward(value, torch.rand(P, G, generator=g) < 0.5, {"math": value.round()})
    problems = [Problem(100 + p, f"{text}?", text, {}) for p in range(P)]
    return problems, rollout, reward, torch.randn(P, G, generator=g)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 99), st.text(max_size=9))
def test_a_stored_step_can_be_replayed(P, G, T, seed, text):
    problems, rollout, reward, adv = rollout_of(P, G, T, seed, text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step_000012.jsonl.gz"
        written = []
        for _ in range(2):
            rollout_store.store_rollouts(Path(folder), 12, problems, G, rollout, reward, adv, keep=1)
            written.append(path.read_bytes())
        assert [*Path(folder).iterdir()] == [path]
        rows = rollout_store.load_rows(path)
    assert written[0] == written[1]  # no clock in it
    assert gzip.decompress(written[0]).isascii()
    assert [(row["uid"], row["g"]) for row in rows] == [(100 + p, g) for p in range(P) for g in range(G)]
    for b, row in enumerate(rows):
        p, g = divmod(b, G)
        mask = torch.tensor(row["mask"], dtype=torch.bool)
        n = len(mask)
        assert torch.equal(mask, rollout.mask[b, :n])
        assert not rollout.mask[b, n:].any()
        assert torch.equal(torch.tensor(row["logp_sampled"]), rollout.logp_sampled[b][rollout.mask[b]])
        expected = {"tokens": rollout.tokens[b, :n].tolist(), "length": int(rollout.mask[b].sum())}
        expected |= {
            "truncated": bool(rollout.truncated[b]),
            "text": f"{text}{b}",
            "prompt": f"{text}?",
            "answer": text,
        }
        expected |= {"reward": float(reward.value[p, g]), "parts": {"math": float(reward.parts["math"][p, g])}}
        expected |= {"valid": bool(reward.valid[p, g]), "advantage": float(adv[p, g])}
        assert {name: row[name] for name in expected} == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_the_newest_steps_are_kept_and_an_undone_future_is_not(visited, keep):
    problems, rollout, reward, adv = rollout_of(1, 1, 1, 0, "x")
    with tempfile.TemporaryDirectory() as folder:
        alive: list[int] = []
        for step in visited:  # a step that is not larger than the last one is a resume
            rollout_store.store_rollouts(Path(folder), step, problems, 1, rollout, reward, adv, keep=keep)
            alive = sorted({s for s in alive if s < step} | {step})[-keep:]
            assert rollout_steps(Path(folder)) == alive


class TwoCards(World):
    """Rank 0 of two, each with a card; the other one has twice the memory in use."""

    def __init__(self, device):
        self.rank, self.size, self.device = 0, 2, device

    def exchange(self, mine, *, what):
        return [mine, {name: 2 * value for name, value in mine.items()}]


@pytest.mark.parametrize("measured", [True, False])
def test_usage_has_one_set_of_gauges_for_the_card_of_every_rank(monkeypatch, measured):
    asked = []

    def utilization(device):
        asked.append(device)
        if not measured:
            raise ModuleNotFoundError("pynvml")
        return 40

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3e9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5e9)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    found = stopwatch.usage(TwoCards(torch.device("cuda", 1)))
    cards = {name.removeprefix("system/"): value for name, value in found.items() if name.startswith("system/gpu")}
    memory = {"gpu0_memory_gb": 3.0, "gpu0_memory_peak_gb": 5.0, "gpu1_memory_gb": 6.0, "gpu1_memory_peak_gb": 10.0}
    assert cards == memory | ({"gpu0_utilization": 40.0, "gpu1_utilization": 80.0} if measured else {})
    assert asked == [torch.device("cuda", 1)]


# -- in a thread beside the training


SOON = 20.0  # seconds


def opened(folder: Path, *, deadline: float = SOON) -> AsyncWriter:
    return AsyncWriter(MetricsWriter(folder, start_step=0), deadline=deadline)


def all_events(folder: Path) -> list[object]:
    (path,) = (folder / "tensorboard").iterdir()
    return [(event.step, event.summary) for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]


CALLS: list[Callable[[int], tuple]] = [
    lambda i: (MetricsWriter.text, i, "samples", f"text {i}"),
    lambda i: (MetricsWriter.histogram, i, "advantage", torch.arange(float(i + 1))),
    lambda i: (MetricsWriter.scalars, i, {"loss/kl": i / 3}),
    lambda i: (MetricsWriter.layout, {"Health": {"KL": ("Multiline", ["loss/kl"])}}),
    lambda i: (MetricsWriter.finish,),
]


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
            found.append(((Path(folder) / name / "metrics.jsonl").read_bytes(), all_events(Path(folder) / name)))
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


def crash(writer: AsyncWriter) -> None:
    with writer:
        writer.do("the metrics", broken)
        raise RuntimeError("the crash")


def test_a_crash_and_a_full_disk_are_both_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the crash") as caught:
        crash(opened(tmp_path))
    assert "the log could not be written: [Errno 28] No space left" in caught.value.__notes__[0]


def test_the_training_waits_when_too_much_is_waiting(tmp_path: Path) -> None:
    gate = threading.Event()
    with opened(tmp_path, deadline=0.05) as writer:
        for i in range(metrics_writer.MAX_PENDING):
            writer.do(f"work {i}", partial(gate.wait, SOON))
        with pytest.raises(TimeoutError, match="work 0"):
            writer.do("one more", int)
        gate.set()


def test_a_run_that_is_alone_has_a_deadline_for_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LOG", 0.05)
    gate = threading.Event()
    with recording.open_writer(tmp_path, alone(torch.device("cpu")), None, start_step=0) as writer:
        writer.do("the rollout of step 3", partial(gate.wait, SOON))
        with pytest.raises(TimeoutError, match=r"got no result of writing the rollout of step 3 within 0\.05 s"):
            writer.wait()
        gate.set()


# -- mirrors: Weights & Biases and trackio


BLOCK, HEAD, OPENING = 32768, 7, 7  # of the record files: bytes of a block, before each record, before the first


TABLE = [{"prompt": "1 + 1", "reward": 1, "text": "2"}, {"prompt": "2 + 2", "reward": 0.5}]


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of trackio's databases; skips, saying so, where trackio is not installed."""
    need("trackio")
    from trackio import sqlite_storage, utils

    folder = tmp_path / "trackio"
    for module in (utils, sqlite_storage):  # each has the folder of the environment as it was imported
        for name in ("TRACKIO_DIR", "MEDIA_DIR"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, folder if name == "TRACKIO_DIR" else folder / "media")
    return folder


def need(package: str) -> None:
    """Skip, saying so, where the package is not installed."""
    if importlib.util.find_spec(package) is None:
        missing = f"no {package} here, the mirror is not tested: pip install 'grpo-fn[{package}]'"
        warnings.warn(missing, stacklevel=1)
        pytest.skip(missing)


@pytest.fixture
def wandb() -> None:
    need("wandb")


def records(path: Path) -> Iterator[Any]:
    """The records of a run's file."""
    from wandb.proto import wandb_internal_pb2

    raw, at, whole = path.read_bytes(), OPENING, b""
    while at + HEAD <= len(raw):
        left = BLOCK - at % BLOCK
        if left < HEAD:
            at += left
            continue
        size, kind = struct.unpack("<HB", raw[at + 4 : at + HEAD])
        whole, at = whole + raw[at + HEAD : at + HEAD + size], at + HEAD + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def kept(run_dir: Path) -> list[Any]:
    """All records of all starts, when the last start has been written out: that happens in a process of theirs."""
    end = time.monotonic() + 30
    while True:
        starts = [[*records(path)] for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))]
        if starts and all(exits(start) for start in starts):
            return [record for start in starts for record in start]
        assert time.monotonic() < end, f"no record of an end in {run_dir / 'wandb'}"
        time.sleep(0.1)


def exits(found: list[Any]) -> list[int]:
    """The exit codes among the records."""
    return [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"]


def mirrored(mirror: tracker.Mirror, run_dir: Path, start: int, stop: int) -> None:
    """Take the steps of a run folder that is one, its figures by step and a table at the first."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.gin").write_text("optimizer.adamw.lr = 1e-05\n")
    (run_dir / "run.json").write_text('{"hparams": {"optimizer.adamw.lr": 1e-05}}')
    with mirror(run_dir) as opened, MetricsWriter(run_dir, start_step=start, mirror=opened) as writer:
        writer.table(start, "samples", TABLE)
        writer.table(start, "health", [])  # of no rows there is no table
        writer.histogram(start, "generation/length", torch.tensor([3, 4, 4]))
        if start == 0:
            metrics_writer.write_run_header(writer, run_dir)
        for step in range(start, stop):
            writer.scalars(step, {"loss/kl": step / 4, "eval/accuracy": 0.5})


@pytest.mark.slow
def test_offline_files_hold_every_scalar_and_resuming_goes_on_as_the_same_run(wandb: None, tmp_path: Path) -> None:
    run_dir, mirror = tmp_path / "first", tracker.wandb(destination="tests:offline")
    mirrored(mirror, run_dir, 0, 3)
    time.sleep(1.01 - time.time() % 1)  # to the next second, by which their folders are named
    mirrored(mirror, run_dir, 3, 5)
    found = kept(run_dir)
    history = [{"/".join(i.nested_key) or i.key: i.value_json for i in r.history.item} for r in found]
    rows = [{k: json.loads(v) for k, v in row.items()} for row in history if row]
    assert [(row["global_step"], row["loss/kl"], row["eval/accuracy"]) for row in rows if "loss/kl" in row] == [
        (step, step / 4, 0.5) for step in range(5)
    ]
    tables = {row["global_step"]: table_file(run_dir, row) for row in rows if "samples/path" in row}
    columns, data = ["prompt", "reward", "text"], [["1 + 1", 1, "2"], ["2 + 2", 0.5, None]]
    assert {*tables} == {0, 3}
    assert all((found["columns"], found["data"]) == (columns, data) for found in tables.values())
    assert not any("health/path" in row for row in rows)
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (tracker.run_id(run_dir, "wandb"), "tests", "first")
    }
    config = {update.key: json.loads(update.value_json) for update in runs[0].config.update}
    assert config["optimizer.adamw.lr"] == 1e-5
    assert exits(found) == [0, 0]


def table_file(run_dir: Path, row: dict[str, Any]) -> dict[str, Any]:
    """The columns and rows of a table that a row of the history refers to."""
    texts = {path.read_text() for path in run_dir.glob(f"wandb/offline-run-*/files/{row['samples/path']}")}
    (text,) = texts  # of each start, which numbers its tables anew
    return json.loads(text)


@pytest.mark.slow
def test_a_run_that_fails_is_failed_there_and_the_writers_are_as_before(wandb: None, tmp_path: Path) -> None:
    import torch.utils.tensorboard.writer as theirs

    before = theirs.EventFileWriter
    (tmp_path / "run.json").write_text("{}")
    opened = tracker.wandb(destination="tests:offline")(tmp_path)
    opened.__enter__()
    assert theirs.EventFileWriter is not before
    error = RuntimeError("broken")
    assert opened.__exit__(RuntimeError, error, None) is False  # it is raised to the caller
    assert theirs.EventFileWriter is before
    assert exits(kept(tmp_path)) == [1]


def test_a_name_is_drawn_once_a_folder(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        names.append(tracker.run_id(tmp_path / folder, "wandb"))
        assert tracker.run_id(tmp_path / folder, "wandb") == names[-1]
    assert len({*names}) == 2
    assert all(name.isalnum() for name in names)


def test_a_missing_package_or_unknown_destination_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bad in WRONG:
        expected = rf"tracker\.{name}\.destination: got '{re.escape(bad)}', expected PROJECT:offline"
        with pytest.raises(ValueError, match=expected):
            getattr(tracker, name)(destination=bad)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "trackio"):
        missing = rf"@tracker\.{name}\(\) without the package {name}, expected it .*pip install 'grpo-fn\[{name}\]'"
        with pytest.raises(ValueError, match=missing):
            getattr(tracker, name)(destination="tests:offline")


WRONG = [
    *(("wandb", bad) for bad in ("tests", "/:offline", "tests:online:now")),
    *(("trackio", bad) for bad in ("tests", "tests:online", "tests:user/", "tests:a/b/c")),
]


def test_a_project_may_be_a_team_s_and_a_run_may_be_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is asked of the packages: there is no account to send to in a test."""
    asked: list[dict[str, Any]] = []
    run = SimpleNamespace(finish=lambda exit_code=0: None)
    board = SimpleNamespace(patch=lambda **given: None, unpatch=lambda: None)
    module = SimpleNamespace(init=lambda **given: asked.append(given) or run, finish=run.finish, tensorboard=board)
    module.Settings = SimpleNamespace
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: module)
    (tmp_path / "run.json").write_text("{}")
    for name, destination, expected in (
        ("wandb", "team/math:online", {"entity": "team", "project": "math", "mode": "online"}),
        ("trackio", "math:user/space", {"project": "math", "space_id": "user/space"}),
        ("trackio", "math:http://host:7860", {"project": "math", "server_url": "http://host:7860"}),
    ):
        with getattr(tracker, name)(destination=destination)(tmp_path):
            assert asked[-1].items() >= expected.items()
    assert ["space_id" in given for given in asked[1:]] == [True, False]


def test_trackio_holds_every_scalar_and_table_and_resuming_goes_on_as_the_same_run(
    trackio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    run_dir, mirror = tmp_path / "first", tracker.trackio(destination="tests:offline")
    mirrored(mirror, run_dir, 0, 3)
    mirrored(mirror, run_dir, 3, 5)
    assert capsys.readouterr().out == ""
    assert [path.name for path in trackio.glob("*.db")] == ["tests.db"]
    name = f"first-{tracker.run_id(run_dir, 'trackio')[:6]}"
    assert SQLiteStorage.get_runs("tests") == [name]
    lines = SQLiteStorage.get_logs("tests", name)
    figures = [(line["step"], line["loss/kl"], line["eval/accuracy"]) for line in lines if "loss/kl" in line]
    assert sorted(figures) == [(step, step / 4, 0.5) for step in range(5)]
    assert {line["step"]: line["samples"]["_value"] for line in lines if "samples" in line} == {0: TABLE, 3: TABLE}
    assert {line["step"] for line in lines if "generation/length" in line} == {0, 3}
    assert SQLiteStorage.get_run_config("tests", name)["optimizer.adamw.lr"] == 1e-5
