"""The learning signal as a run leaves it behind."""

from pathlib import Path

import compare_algorithms as tool
from e2e.running import board, command, finish
from test_token_page import Reader

from grpo_fn.shell.logging import rollout_store


def test_a_run_shows_its_signal_and_learns_the_same(cache: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {"sections__Logging__token_report_every": 3, "sections__Logging__token_report_rows": 5}
    assert finish(command(cache, run, **changes), tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert sorted(path.name for path in (run / "signal").iterdir()) == ["step_3.html", "step_6.html"]
    page = Reader((run / "signal" / "step_3.html").read_text())
    rows = rollout_store.load_rollouts(run / "rollouts" / "step_000003.jsonl.gz")
    assert sum(found.get("class") == "row" for _, found in page.tags) == 5
    assert f"{sum(row['length'] for row in rows):,}" in page.text
    events = board(run)
    assert [e.step for e in events.Images("signal/rows")] == [3, 6]
    text = events.Tensors("signal/strongest/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "dlogp" in text
    assert "ratio" in text
    weights = [path / "model" / "model.safetensors" for path in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()  # looking changes nothing


def test_the_lens_shows_the_signal_with_other_weights(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "signal.html"
    argv = [str(whole), "--step", "4", "--out", str(tmp_path / "lens.html"), "--token_report", str(out)]
    assert tool.main(argv) == 0
    page = Reader(out.read_text())
    rows = rollout_store.load_rollouts(whole / "rollouts" / "step_000004.jsonl.gz")
    assert len(page.tokens) == sum(row["length"] for row in rows)
    assert "entropy, nats" in {found.get("data-name") for _, found in page.tags}
