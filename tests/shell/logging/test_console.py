"""What a person sees, and how a person stops a run."""

import io
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.display_text import CONTROL
from grpo_fn.shell.logging.console import Console, format_number, short_count, short_time, step_line
from grpo_fn.shell.process import StopRequest

METRICS = {
    "generation/length_mean": 31.4,
    "generation/truncated": 0.016,
    "generation/tokens": 2914.0,
    "generation/tokens_per_second": 7107.0,
    "reward/mean": 0.3125,
    "reward/min": 0.0,
    "reward/max": 1.1,
    "reward/invalid": 0.0,
    "reward/correct": 0.25,
    "reward/boxed": 0.625,
    "loss/objective": -0.0123,
    "loss/kl": 0.0031,
    "loss/grad_norm": 1.2349,
}
TIMES = {"time/generate": 0.41, "time/score": 0.02, "time/train": 0.5, "time/sync": 0.01, "time/total": 0.94}
opened = partial(Console, grader="correct")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_line_has_every_figure_of_a_step_behind_its_name_and_tokens_a_second_of_the_whole_step():
    shown = step_line(12, 100, METRICS | TIMES, 83.0)
    assert " ".join(shown.split()) == (
        "step 12/100 reward 0.31 loss -0.0123 kl 0.0031 grad 1.23 length 31 tok/s 3.1k generate 0.4s score 0.0s "
        "train 0.5s sync 0.0s truncated 2% total 0.9s correct 0.25 boxed 0.62 eta 1m23s"
    )
    one_part = {name: value for name, value in METRICS.items() if name != "reward/boxed"}
    assert "correct" not in step_line(12, 100, one_part, None), "one part is the reward"
    given = {"sft/loss": 1.5, "sft/tokens": 100.0, "loss/grad_norm": 2.0, "time/train": 1.0, "time/total": 2.0}
    shown = " ".join(step_line(1, 9, given, None).split())
    assert shown == "step 1/9 loss 1.5000 grad 2.00 tok/s 50 train 1.0s total 2.0s"
    assert "kl 0.0000" in step_line(1, 2, {"reward/mean": 1.0, "loss/approx_kl": 3e-14}, None), "rounding"
    assert [*map(short_time, (0.4, 59.6, 7500.0, 273_600.0))] == ["0s", "1m00s", "2h05m", "3d04h"]
    assert [*map(short_count, (940.2, 3140.0, 18_049.0, 1.25e6))] == ["940", "3.1k", "18k", "1.2M"]


def test_figures_keep_their_places_from_step_to_step_and_one_that_is_missing_is_a_dash():
    skipped = {name: value for name, value in METRICS.items() if name != "loss/grad_norm"} | {"reward/mean": -10.25}
    first, second = step_line(9, 100, METRICS | TIMES, None), step_line(10, 100, skipped | TIMES, None)
    assert "  grad -  " in second
    for name in ("reward ", "loss ", "kl ", "grad ", "length ", "tok/s ", "sync ", "boxed "):
        assert first.index(name) == second.index(name), name


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_a_table_has_the_columns_that_fit_the_terminal_as_it_was_at_the_first_step(columns, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    with opened(tmp_path / "log.txt", 100, 0, stream=stream) as console:
        console.step(METRICS | TIMES)
        monkeypatch.setenv("COLUMNS", "200")
        console.step(METRICS | TIMES)
    rows = [line for line in re.split(r"[\r\n]+", stream.getvalue()) if "steps [" not in line and line.strip()]
    titles, first, second = rows
    assert len(titles) == len(first) == len(second) < columns
    always = ["step", "reward", "loss", "kl", "grad", "len", "tok/s", "gen", "score", "train", "sync"]
    more = ["trunc", "total", "correct", "boxed"]
    assert titles.split() == {40: always[:5], 80: always, 160: [*always, *more]}[columns]
    assert second.split()[:3] == ["2/100", "0.31", "-0.0123"]
    assert step_line(2, 100, METRICS | TIMES, None)[:40] in (tmp_path / "log.txt").read_text(), "the log has all of it"


def test_an_evaluation_has_a_line_with_its_grader_and_the_time_left_is_that_of_recent_steps(tmp_path):
    stream, accuracy = io.StringIO(), {"eval/accuracy": 0.85, "eval/accuracy_low": 0.8, "eval/accuracy_high": 0.9}
    with opened(tmp_path / "log.txt", 100, 0, stream=stream) as console:
        for seconds in (1000.0, *[2.0] * 10):  # the first one compiled
            console.step({"time/total": seconds, **accuracy})
    first, _, second, *_, step, measured = stream.getvalue().splitlines()
    assert "eta" not in first, "the first step says nothing of the others"
    assert second.endswith("eta 3m16s")
    assert step.endswith("total 2.0s    eta 2m58s")
    assert measured == "step 11/100  held-out accuracy 0.850 (95 %: 0.800 to 0.900) by correct"


@given(st.floats(-1e300, 1e300) | st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.integers(1, 4))
def test_a_number_is_short_and_never_shows_something_as_nothing(value, digits):
    shown = format_number(value, digits)
    assert len(shown) <= 13
    if value == value and abs(value) != float("inf"):
        assert abs(float(shown) - value) <= max(0.51 * 10**-digits, 0.51 * abs(value))
        assert (float(shown) == 0) == (value == 0)


def test_lines_go_to_the_stream_and_with_a_time_to_the_log(tmp_path):
    stream = io.StringIO()
    with opened(tmp_path / "log.txt", 100, 11, stream=stream) as console:
        console.line("two\nlines")
        console.step(METRICS)
    with opened(tmp_path / "log.txt", 100, 12, stream=stream) as console:  # a resumed run appends
        console.step(METRICS)
    line = step_line(12, 100, METRICS, None)
    shown = ["two", "lines", line, step_line(13, 100, METRICS, None)]
    assert stream.getvalue().splitlines() == shown
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in logged] == shown
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in logged)


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_stream_that_takes_no_more_is_given_up_once_and_the_log_goes_on(tmp_path, kind):
    class Full(kind):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    with opened(tmp_path / "log.txt", 3, 0, stream=Full()) as console:
        console.line("one")
        console.step(METRICS)
    log = (tmp_path / "log.txt").read_text()
    assert log.count("the console takes no more ([Errno 32] Broken pipe)") == 1
    assert " one\n" in log
    assert "step 1/3" in log


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
def test_standard_output_that_is_gone_ends_no_program(tmp_path, closed):
    code = "import sys; from pathlib import Path; from grpo_fn.shell.logging.console import Console\n"
    code += "console = Console(Path(sys.argv[1]), 1, 0, grader='correct'); console.line('one'); console.line('two')"
    reader, writer = os.pipe()
    os.close(reader)
    close = partial(os.close, 1) if closed else None
    command = [sys.executable, "-c", code, str(tmp_path / "log.txt")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, preexec_fn=close)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log.txt").read_text().endswith(" two\n")


def test_a_terminal_gets_a_bar_with_the_phase_and_the_time_left_and_one_for_a_long_phase(tmp_path):
    stream, ticks = Terminal(), Event()

    def phase() -> str:
        ticks.set()
        return "generate"

    with opened(tmp_path / "log.txt", 4, 1, stream=stream, phase=phase, first_step="compiling") as console:
        assert ticks.wait(30), "the bar looks at the phase while a step works"
        with console.progress("evaluating", 8) as count:
            count(8)
        for _ in range(3):
            console.step(METRICS | TIMES)
    shown = stream.getvalue()
    assert re.search(r"1/4 steps \[\d\d:\d\d, generate, compiling\]", shown)
    assert re.search(r"evaluating: +0%.*0/8", shown)
    assert re.search(r"3/4 steps \[\d\d:\d\d, 1s left, generate\]", shown)
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 3  # bars and titles stay out of the log
    with opened(tmp_path / "log.txt", 4, 1, stream=io.StringIO()).progress("evaluating", 8) as count:
        assert count is None


@given(st.text())
def test_no_text_drives_the_terminal_or_breaks_the_encoding(text):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="")
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        with opened(log, 1, 0, stream=stream) as console:
            console.line(text)
        logged = log.read_bytes().decode("utf-8")
    shown = raw.getvalue().decode("ascii")
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert not CONTROL.search(logged)
    assert shown.count("\n") == logged.count("\n") == text.count("\n") + 1
    assert shown[-1] == logged[-1] == "\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_the_second_interrupt_interrupts_and_the_handlers_come_back(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == number.name  # the first one is the reason
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_lost_terminal_is_noted_unless_nohup_has_it_ignored(before):
    ours = signal.signal(signal.SIGHUP, before)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested == (None if before == signal.SIG_IGN else "SIGHUP")
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, ours)
