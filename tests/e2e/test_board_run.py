"""What TensorBoard's own readers find in the events of real runs: charts for every metric, and none without one."""

import re
import signal
from pathlib import Path

import pytest
from e2e.running import command, ended, metrics, signal_after_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as BoardView
from tensorboard.plugins.custom_scalar import layout_pb2

from grpo_fn.shell.logging.metrics_writer import LAYOUT

# Charts of what this run does not measure: no reference, no compiler, no dynamic sampling, problems of one kind.
ELSEWHERE = {
    "KL to the reference",
    "from the policy to its teacher, nats a token",
    "share of the rows that are taught",
    "share of the teacher's part that a step takes",
    *{"given tokens: loss and perplexity", "given tokens: how many, what one weighs"},
    *{"compiled graphs", "held-out accuracy by kind", "dynamic sampling", "dynamic sampling, share accepted"},
    *{"evaluation beside the training, steps late", "seconds of an evaluation beside the training"},
    "share of sampling that waits for environments",
    *{"curriculum: share of the problems", "curriculum: pass rate", "curriculum: level, pool"},
    *{"judges: questions without an answer or a verdict", "judges: requests, those sent again", "judges: tokens"},
    *{"engine", "engine against policy after a push, nats", "seconds of the engine"},
}


@pytest.fixture(scope="module")
def rich(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that also draws samples in its evaluation, killed after step 5, which it took again."""
    folder = tmp_path_factory.mktemp("rich")
    more = {"sections__Evaluation__samples": 2, "sections__Evaluation__ks": "(1, 2)"}
    more["sections__Evaluation__graders"] = "[@rewards.named, @rewards.digits]"
    more["sections__Logging__start_kl_every"] = 2
    argv = command(cache, folder / "run", **more)
    assert ended(argv, folder / "out", [signal_after_step(5, signal.SIGKILL)]) == [-9, 0]
    assert "resumed after step " in (folder / "out").read_text()
    return folder / "run"


def board(run_dir: Path) -> EventAccumulator:
    """Scalars and histograms as they were written."""
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def pages(run_dir: Path) -> BoardView:
    """What the plugins behind TensorBoard's pages read."""
    return BoardView(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()


def charts(run_dir: Path) -> dict[str, list[str]]:
    """The patterns of every chart in the event file, by title."""
    (event,) = pages(run_dir).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    found = {}
    for chart in (chart for category in layout.category for chart in category.chart):
        exact = [tag for one in chart.margin.series for tag in (one.value, one.lower, one.upper)]
        found[chart.title] = [*chart.multiline.tag, *(f"{re.escape(tag)}$" for tag in exact)]
    return found


def test_every_chart_has_lines_and_every_metric_is_in_a_chart(rich: Path) -> None:
    tags = board(rich).Tags()["scalars"]
    shown = charts(rich)
    assert list(shown) == [title for charts in LAYOUT.values() for title in charts]
    for title, patterns in shown.items():
        if title not in ELSEWHERE:
            for pattern in patterns:
                assert any(re.match(pattern, tag) for tag in tags), f"{title}: {pattern} shows nothing"
    anywhere = [pattern for patterns in shown.values() for pattern in patterns]
    assert [tag for tag in tags if not any(re.match(pattern, tag) for pattern in anywhere)] == []
    assert shown.keys() >= ELSEWHERE


def test_a_resumed_run_has_nothing_twice(rich: Path) -> None:
    events = pages(rich)
    for tag in ("custom_scalars__config__", "config/text_summary"):
        assert len(events.Tensors(tag)) == 1
    for tag in {key for row in metrics(rich) for key in row} - {"step"}:
        assert [e.step for e in events.Tensors(tag)] == [row["step"] for row in metrics(rich) if tag in row], tag
    for tag in ("advantage/distribution", "generation/length", "loss/ratio"):
        assert [event.step for event in events.Tensors(tag)] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Tensors("samples/text_summary")] == [2, 4, 6]
