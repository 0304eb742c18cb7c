"""One line a step, valid JSON, rewound exactly; the same in TensorBoard; and what a model writes stays text."""

import gzip
import html.parser
import json
import math
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as BoardView
from tensorboard.plugin_util import markdown_to_safe_html

from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Reward, Rollout
from grpo_fn.shell.atomic_io import to_json
from grpo_fn.shell.logging import rollout_store, stopwatch
from grpo_fn.shell.logging.metrics_writer import LAYOUT, MetricsWriter, markdown_table, rewind
from grpo_fn.shell.logging.rollout_store import rollout_steps
from grpo_fn.shell.world import World


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
        lambda writer: writer.scalars(1, {"a": 2.0}),
        lambda writer: writer.text(1, "t", "text"),
        lambda writer: writer.histogram(1, "h", torch.ones(2)),
        lambda writer: writer.layout({"all": {"a": ("Multiline", ["a"])}}),
        lambda writer: writer.hparams({"lr": 0.1}, ["a"]),
        lambda writer: writer.finish(),
        lambda writer: writer.amend(1, {"b": 1.0}),
    ]
    with MetricsWriter(tmp_path, start_step=0) as writer:
        writer.scalars(0, {"a": 1.0})
        for call in calls:
            shutil.rmtree(tmp_path / "tensorboard")
            call(writer)
        writer.scalars(2, {"a": 3.0})
        shutil.rmtree(tmp_path / "tensorboard")
        writer.scalars(3, {"a": 4.0})
        assert [event.step for event in events(tmp_path).Scalars("a")] == [3]
        shutil.rmtree(tmp_path / "tensorboard")
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]


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
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        assert not attrs, (tag, attrs)
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")
            self.inside = True
        if tag == "br":
            self.cells[-1] += "\n"

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
        ("reward/mean", ["reward"]),
        ("reward/mean_length", ["reward by part"]),
        ("eval/accuracy", []),  # only in the chart with its interval
        ("eval/lenient", ["held-out, other judges"]),
        ("eval/pass@8", ["held-out, of several samples"]),
        ("system/gpu0_memory_gb", ["memory and devices"]),
    ],
)
def test_a_tag_is_drawn_where_it_belongs_and_nowhere_else(tag: str, titles: list[str]) -> None:
    drawn = [
        title
        for charts in LAYOUT.values()
        for title, (kind, tags) in charts.items()
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
        root = Path(folder)
        rollout_store.store_rollouts(root, 12, problems, G, rollout, reward, adv, keep=1)
        assert [p.name for p in root.iterdir()] == ["step_000012.jsonl.gz"]
        first = (root / "step_000012.jsonl.gz").read_bytes()
        rows = rollout_store.load_rows(root / "step_000012.jsonl.gz")
        rollout_store.store_rollouts(root, 12, problems, G, rollout, reward, adv, keep=1)
        assert (root / "step_000012.jsonl.gz").read_bytes() == first  # no clock in it
        assert gzip.decompress(first).isascii()
    assert [(row["uid"], row["g"]) for row in rows] == [(100 + p, g) for p in range(P) for g in range(G)]
    for b, row in enumerate(rows):
        p, g = divmod(b, G)
        mask = torch.tensor(row["mask"], dtype=torch.bool)
        n = len(mask)
        assert torch.equal(mask, rollout.mask[b, :n])
        assert not rollout.mask[b, n:].any()
        assert row["tokens"] == rollout.tokens[b, :n].tolist()
        assert torch.equal(torch.tensor(row["logp_sampled"]), rollout.logp_sampled[b][rollout.mask[b]])
        assert row["length"] == int(rollout.mask[b].sum())
        assert row["truncated"] == bool(rollout.truncated[b])
        assert (row["text"], row["prompt"], row["answer"]) == (f"{text}{b}", f"{text}?", text)
        assert row["reward"] == float(reward.value[p, g])
        assert row["parts"] == {"math": float(reward.parts["math"][p, g])}
        assert row["valid"] == bool(reward.valid[p, g])
        assert row["advantage"] == float(adv[p, g])


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
