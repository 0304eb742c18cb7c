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

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.display_text import CONTROL
from grpo_fn.shell.logging.console import LINE as LONGEST
from grpo_fn.shell.logging.console import Console, format_number, short_count, short_time, step_line
from grpo_fn.shell.process import StopRequest

METRICS = {
    "generation/length_mean": 31.4,
    "generation/truncated": 0.016,
    "generation/tokens_per_second": 3140.0,
    "reward/mean": 0.3125,
    "reward/min": 0.0,
    "reward/max": 1.1,
    "reward/invalid": 0.0,
    "reward/correct": 0.25,
    "reward/boxed": 0.625,
    "loss/kl": 0.0031,
    "loss/grad_norm": 1.2349,
}
LINE = "step 12/100  reward 0.31 [0.00, 1.10]  correct 0.25 boxed 0.62  len 31 trunc 2%  kl 0.003 grad 1.23  3.1k tok/s"
TIMES = {"time/generate": 0.41, "time/score": 0.02, "time/train": 0.5, "time/total": 0.94}
opened = partial(Console, grader="correct")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_step_reads_as_promised():
    assert step_line(12, 100, METRICS, None) == LINE.replace("  kl 0.003 grad 1.23", "")  # 111 characters with it
    few = {name: value for name, value in METRICS.items() if name not in ("reward/correct", "reward/boxed")}
    assert step_line(12, 100, few, 83.0) == LINE.replace("  correct 0.25 boxed 0.62", "") + "  eta 1m23s"
    assert step_line(12, 100, TIMES, None) == "step 12/100  gen 0.4 score 0.0 train 0.5 of 0.9s"
    assert step_line(12, 100, {}, None) == "step 12/100"
    for kl, shown in ((3e-14, ""), (2e-4, "kl 2e-04 ")):  # between equal policies it is no number
        figures = {"loss/approx_kl": kl, "loss/grad_norm": 0.5}
        assert step_line(1, 2, figures, None) == f"step 1/2  {shown}grad 0.50"
    assert [*map(short_time, (0.4, 59.6, 7500.0, 273_600.0))] == ["0s", "1m00s", "2h05m", "3d04h"]
    assert [*map(short_count, (940.2, 3140.0, 18_049.0, 1.25e6))] == ["940", "3.1k", "18k", "1.2M"]


@given(
    st.dictionaries(st.text("abc_", min_size=1, max_size=40), st.floats(0, 1), max_size=12),
    st.floats(0, 1e7),
    st.floats(-1e9, 1e9),
)
def test_a_step_fits_a_line_and_keeps_what_moves(parts, eta, mean):
    named = {f"reward/{name}": value for name, value in parts.items()}
    shown = step_line(99_999, 100_000, {**METRICS, **TIMES, **named, "reward/mean": mean}, eta)
    assert len(shown) <= LONGEST
    assert all(said in shown for said in ("step 99999/100000  reward ", "len 31 trunc 2%", "3.1k tok/s", "eta "))


def test_an_evaluation_has_a_line_with_its_grader_and_the_time_left_is_that_of_recent_steps(tmp_path):
    stream, accuracy = io.StringIO(), {"eval/accuracy": 0.85, "eval/accuracy_low": 0.8, "eval/accuracy_high": 0.9}
    with opened(tmp_path / "log.txt", 100, 0, stream=stream) as console:
        for seconds in (1000.0, *[2.0] * 10):  # the first one compiled
            console.step({"time/total": seconds, **accuracy})
    *_, step, measured = stream.getvalue().splitlines()
    assert step == "step 11/100  of 2.0s  eta 2m58s"
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
    shown = ["two", "lines", line, line.replace("12/", "13/")]
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


def test_a_terminal_gets_a_bar_with_the_time_left_as_well(tmp_path):
    stream = Terminal()
    with opened(tmp_path / "log.txt", 3, 1, stream=stream) as console:
        console.step(METRICS)
        console.step(METRICS)
    shown = stream.getvalue()
    assert step_line(2, 3, METRICS, None) in shown
    assert re.search(r"3/3 \[\d\d:\d\d<\d\d:\d\d", shown)
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 2  # the bar stays out of the log


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
