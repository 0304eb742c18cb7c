"""The report says what the run folders hold, shows hostile text as text, and works while a run is running."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
from e2e.running import metrics
from test_html_page import Reader

from grpo_fn.core.problem import Turn
from grpo_fn.lab import report as tool
from grpo_fn.shell.logging import rollout_store

HOSTILE = "<script>alert(1)</script>\x1b[2J\ud800 | ![x](http://example.com/t.png)"


class Page(Reader):
    """Tables as rows of texts, beside all of the text and every tag."""

    def __init__(self, path: Path) -> None:
        self.rows: list[list[str]] = []
        super().__init__(path.read_text())
        self.text = "".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        super().handle_starttag(tag, attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data

    def under(self, head: str) -> list[dict[str, str]]:
        """The rows of the table whose first column has this name, each by the names of its columns."""
        start = next(i for i, row in enumerate(self.rows) if row and row[0] == head)
        width, rows = len(self.rows[start]), []
        for row in self.rows[start + 1 :]:
            if len(row) != width or row[0] in ("knob", "prompt"):
                break
            rows.append({name: value.strip() for name, value in zip(self.rows[start], row, strict=True)})
        return rows


@pytest.fixture
def other(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run that has come to step 4, with another learning rate, a warning, and hostile samples."""
    path = tmp_path / "other"
    shutil.copytree(whole, path, ignore=shutil.ignore_patterns("checkpoints", "model", "summary.json"))
    lines = (whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:40])
    text = (path / "run.json").read_text()
    assert '"optimizer.adamw.lr": 0.001' in text
    (path / "run.json").write_text(text.replace('"optimizer.adamw.lr": 0.001', '"optimizer.adamw.lr": 0.002'))
    with open(path / "log.txt", "a") as log:
        log.write("2026-01-31 12:00:00 health, kl_high: loss/kl is 0.7 at step 4, above 0.5: <b>look</b>\n")
    return path


def report(runs: list[Path], tmp_path: Path, *flags: str) -> Page:
    assert tool.main([*map(str, runs), "--out", str(tmp_path / "out" / "page.html"), *flags]) == 0
    return Page(tmp_path / "out" / "page.html")


def test_the_summary_is_that_of_the_run_folders(whole: Path, other: Path, tmp_path: Path) -> None:
    first, second = report([whole, other], tmp_path).under("run")[:2]
    summary, rows = json.loads((whole / "summary.json").read_text()), metrics(whole)
    assert (first["state"], first["steps"], first["ranks"], first["seed"]) == ("finished", "6 of 6", "1", "0")
    assert first["held-out before"] == f"{summary['accuracy_before']:.3f}"
    assert first["after"] == f"{summary['accuracy_after']:.3f}"
    assert first["95 %"] == f"{rows[6]['eval/accuracy_low']:.3f} to {rows[6]['eval/accuracy_high']:.3f}"
    assert first["reward, first steps"] == f"{rows[1]['reward/mean']:.3f}"
    assert first["problems"] == "16"
    assert (second["state"], second["steps"]) == ("stopped after step 4", "4 of 6")
    assert second["after"] == f"{rows[4]['eval/accuracy']:.3f}"
    assert second["last steps"] == f"{rows[4]['reward/mean']:.3f}"


def test_knobs_that_differ_are_listed_and_no_others(whole: Path, other: Path, tmp_path: Path) -> None:
    page = report([whole, other], tmp_path)
    assert page.under("knob") == [{"knob": "optimizer.adamw.lr", "run": "0.001", "other": "0.002"}]
    assert "optimizer.adamw.lr" in [row["knob"] for row in report([whole], tmp_path).under("knob")]


def test_lines_of_health_are_on_the_page_as_text(whole: Path, other: Path, tmp_path: Path) -> None:
    page = report([whole, other], tmp_path)
    assert "12:00:00 health, kl_high: loss/kl is 0.7 at step 4, above 0.5: <b>look</b>" in page.text
    for line in (whole / "log.txt").read_text().splitlines():
        assert (line in page.text) == (" health, " in line)
    (other / "log.txt").write_text("2026-01-31 12:00:00 step 1/6 [reward] health, warning: no rule said this\n")
    assert "None in other." in report([other], tmp_path).text
    assert "b" not in page.tags


def test_hostile_samples_are_text_and_nothing_is_fetched(
    whole: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": HOSTILE, "text": HOSTILE * 99, "answer": "1", "reward": None, "advantage": None}]
    monkeypatch.setattr(rollout_store, "load_rows", lambda path: rows)
    page = report([other], tmp_path)
    assert "<script>alert(1)</script>" in page.text
    assert "script" not in page.tags
    assert "more characters" in page.text
    assert "\x1b" not in page.text


def test_samples_are_those_with_the_largest_and_smallest_advantages(whole: Path, tmp_path: Path) -> None:
    step, rows = tool.newest_samples(whole / "rollouts")
    shown = [float(row["advantage"]) for row in report([whole], tmp_path).under("prompt")]
    adv = sorted((row["advantage"] for row in rows), reverse=True)
    assert step == 6
    assert shown == pytest.approx([*adv[:2], *adv[-2:]], abs=1e-3)


def test_of_an_episode_every_turn_is_shown() -> None:
    long = "x" * (tool.SHOWN + 7)
    turns = [Turn("a tool", 1, long, 0.0, "s")._asdict(), Turn("the end", 1, "", 1.0, "t")._asdict()]
    assert tool.written_text({"text": "the end", "turns": turns}) == (
        f"a tool\n> {'x' * tool.SHOWN}… (7 more characters)\nthe end"
    )
    assert tool.written_text({"text": "the end"}) == "the end"


def test_a_run_that_has_only_begun_has_a_page(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    shutil.copy(whole / "run.json", tmp_path / "new")
    page = report([tmp_path / "new"], tmp_path)
    assert page.under("run")[0]["steps"] == "0 of 6"


def test_a_folder_that_a_process_works_in_is_running(other: Path, tmp_path: Path) -> None:
    import multiprocessing

    ready, done = multiprocessing.Event(), multiprocessing.Event()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(other / "run.lock", ready, done))
    process.start()
    try:
        assert ready.wait(30)
        assert report([other], tmp_path).under("run")[0]["state"] == "running"
    finally:
        done.set()
        process.join(30)


def _hold(lock: Path, ready, done) -> None:
    with open(lock, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        ready.set()
        done.wait(60)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["nowhere"], "got nowhere without run.json, expected a run folder"),
        (["RUN", "RUN"], "got 2 runs of which some are the same, expected each once"),
    ],
)
def test_bad_input_is_one_line(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture, argv: list[str], complaint: str
) -> None:
    out = ["--out", str(tmp_path / "page.html")]
    assert tool.main([word.replace("RUN", str(whole)) for word in argv] + out) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_broken_line_inside_is_refused_and_a_torn_last_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": null}\n{"st')
    assert [row["step"] for row in tool.metric_lines(tmp_path)] == [0.0]
    path.write_bytes(b'{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: got .*, expected a JSON object with a step"):
        tool.metric_lines(tmp_path)
