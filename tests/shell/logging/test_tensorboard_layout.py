"""The charts are those that TensorBoard's own plugin draws; all knobs are there, as numbers or strings."""

import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata

from grpo_fn.shell.logging import metrics_writer
from grpo_fn.shell.logging.metrics_writer import MetricsWriter

HPARAMS = {"train.train.steps": 7, "optimizer.adamw.lr": 1e-5, "some.f.yes": "True", "some.f.text": 'a %STEPS = "b"'}


def seen(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()


def begun(run_dir: Path) -> EventAccumulator:
    (run_dir / "config.gin").write_text("train.train.steps = 7\n")
    (run_dir / "run.json").write_text(json.dumps({"hparams": HPARAMS}))
    with MetricsWriter(run_dir, start_step=0) as writer:
        metrics_writer.write_run_header(writer, run_dir)
        writer.finish()
    return seen(run_dir)


def test_the_layout_is_read_back_as_it_was_written_health_first(tmp_path: Path) -> None:
    (event,) = begun(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["Health", "Learning", "Generation", "Time"]
    for category in layout.category:
        assert [chart.title for chart in category.chart] == list(metrics_writer.LAYOUT[category.title])
        for chart in category.chart:
            kind, tags = metrics_writer.LAYOUT[category.title][chart.title]
            if kind == "Margin":
                (one,) = chart.margin.series
                assert [one.value, one.lower, one.upper] == tags
            else:
                assert list(chart.multiline.tag) == tags


def test_a_run_that_starts_over_has_one_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)
    events = begun(tmp_path)
    assert len(events.Tensors("custom_scalars__config__")) == 1
    assert len(events.Tensors("config/text_summary")) == 1


@pytest.mark.parametrize(
    ("tag", "titles"),
    [
        ("loss/kl", ["KL to the reference"]),  # a prefix of loss/kl_coef_multiplier
        ("loss/kl_coef_multiplier", ["gains of the controllers"]),
        ("generation/tokens", ["tokens"]),
        ("reward/mean", ["reward"]),
        ("reward/mean_length", ["reward by part"]),
        ("eval/accuracy", []),  # only in the chart with its interval
        ("eval/lenient", ["held-out, other judges"]),
        ("eval/pass@8", ["held-out, of several samples"]),
        ("eval/level/5", ["held-out accuracy by kind"]),
        ("time/total", ["seconds a step"]),
        ("system/gpu0_memory_gb", ["memory and devices"]),
    ],
)
def test_a_tag_is_drawn_where_it_belongs_and_nowhere_else(tag: str, titles: list[str]) -> None:
    drawn = [
        title
        for charts in metrics_writer.LAYOUT.values()
        for title, (kind, tags) in charts.items()
        if kind == "Multiline" and any(re.match(pattern, tag) for pattern in tags)  # as the plugin looks for them
    ]
    assert drawn == titles


def test_a_run_from_before_has_no_table_of_knobs(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"fingerprint": "f"}')
    assert metrics_writer.read_hparams(tmp_path) == {}


def test_the_tab_hparams_has_the_knobs_the_measures_and_the_end(tmp_path: Path) -> None:
    content = begun(tmp_path).PluginTagToContent("hparams")
    started = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert started.hparams["train.train.steps"].number_value == 7
    assert started.hparams["some.f.yes"].string_value == "True"
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    assert [info.name.tag for info in experiment.metric_infos] == metrics_writer.MEASURES
    assert {info.name for info in experiment.hparam_infos} == HPARAMS.keys()
    ended = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
    assert ended.status == 1  # STATUS_SUCCESS
