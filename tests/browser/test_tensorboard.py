"""The real TensorBoard, in a real browser, on what our writer writes: headings in order, lines in the charts."""

from collections.abc import Iterator

import pytest
from browser.chrome import Chrome
from browser.tensorboard_page import headings, lines, opened, served

from grpo_fn.shell.logging import metrics_writer
from grpo_fn.shell.logging.metrics_writer import MetricsWriter

FIGURES = {
    "loss/kl": 0.1,
    "loss/kl_coef_multiplier": 1.0,
    "loss/ratio_mean": 1.0,
    "loss/ratio_min": 0.9,
    "loss/ratio_max": 1.1,
}
FIGURES |= {
    "eval/accuracy": 0.5,
    "eval/accuracy_low": 0.4,
    "eval/accuracy_high": 0.6,
    "advantage/zero_variance_groups": 0.25,
}
TEXT = "train.train.steps = 4\noptimizer.adamw.lr = 1e-05\n"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    run_dir.mkdir()
    (run_dir / "config.gin").write_text(TEXT)
    (run_dir / "run.json").write_text('{"hparams": {"train.train.steps": 4, "optimizer.adamw.lr": 1e-05}}')
    with MetricsWriter(run_dir, start_step=0) as writer:
        metrics_writer.write_run_header(writer, run_dir)
        for step in range(5):
            writer.scalars(step, {name: value + step / 100 for name, value in FIGURES.items()})
    with served(run_dir.parent) as where:
        yield where


def test_the_page_shows_health_first_and_each_chart_its_own_lines(chrome: Chrome, address: str) -> None:
    opened(chrome, address, height=1240)
    assert headings(chrome) == ["Health", "Learning", "Generation", "Time"]
    drawn = lines(chrome)
    assert drawn["ratio to the sampling policy"] == 3
    assert drawn["KL to the reference"] == 1  # and not its gain
    assert drawn["groups without signal, steps refused"] == 1
    assert drawn["gradient norm before clipping"] == 0
    wrong = [entry for entry in chrome.logged("browser") if entry["level"] == "SEVERE"]
    assert not wrong, wrong
