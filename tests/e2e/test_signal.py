"""The learning signal as a run leaves it behind."""

from functools import partial
from pathlib import Path

import compare_algorithms as tool
import pytest
from e2e.running import board, command, finish, start
from test_token_page import Reader

from grpo_fn.shell.logging import rollout_store
from grpo_fn.trainer import recording


def test_a_run_shows_its_signal_and_learns_the_same(cache: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = command(cache, run, sections__Logging__token_report_every=3)
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert sorted(path.name for path in (run / "signal").iterdir()) == ["step_3.html", "step_6.html"]
    page = Reader((run / "signal" / "step_3.html").read_text())
    rows = rollout_store.load_rollouts(run / "rollouts" / "step_000003.jsonl.gz")
    assert sum(found.get("class") == "row" for _, found in page.tags) == min(64, len(rows))
    assert f"{sum(row['length'] for row in rows):,}" in page.text
    events = board(run)
    assert [e.step for e in events.Images("signal/rows")] == [3, 6]
    text = events.Tensors("signal/strongest/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "dlogp" in text
    assert "ratio" in text
    weights = [path / "model" / "model.safetensors" for path in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()  # looking changes nothing


def test_a_run_shows_the_signal_of_its_last_step_and_says_where(whole: Path) -> None:
    assert [path.name for path in (whole / "signal").iterdir()] == ["step_6.html"]
    end = (whole / "log.txt").read_text().splitlines()[-1]
    assert end.endswith(
        f"model in {whole / 'model'}; its last step token by token in {whole / 'signal' / 'step_6.html'}"
    )


def break_view(place: str) -> None:
    """In the run's process: a view with a bug."""

    def broken(*args: object, **knobs: object) -> None:
        raise KeyError("a bug of the view")

    setattr(recording, place, broken)


@pytest.mark.parametrize("place", ["token_signals", "write_signal_page", "compare_presets"])
def test_a_view_that_fails_is_left_out_and_ends_no_run(place: str, cache: Path, tmp_path: Path, whole: Path) -> None:
    argv = command(cache, tmp_path / "run", sections__Logging__compare_presets_every=3)
    process = start(argv, tmp_path / "out", partial(break_view, place))
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "out").read_text()
    view = "the lens" if place == "compare_presets" else "the token page"
    assert f"step 6: {view} is left out: KeyError: 'a bug of the view'" in (tmp_path / "run" / "log.txt").read_text()
    weights = [path / "model" / "model.safetensors" for path in (tmp_path / "run", whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_lens_shows_the_signal_with_other_weights(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "signal.html"
    argv = [str(whole), "--step", "4", "--out", str(tmp_path / "lens.html"), "--token_report", str(out)]
    assert tool.main(argv) == 0
    page = Reader(out.read_text())
    rows = rollout_store.load_rollouts(whole / "rollouts" / "step_000004.jsonl.gz")
    assert len(page.tokens) == sum(row["length"] for row in rows)
    assert "entropy, nats" in {found.get("data-name") for _, found in page.tags}
