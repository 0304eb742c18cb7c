"""What a person sees, and how a person stops a run."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.display_text import CONTROL
from grpo_fn.shell.logging.console import Console, format_number, step_line
from grpo_fn.shell.process import EXIT_STOPPED, StopRequest

METRICS = {
    "generation/prompts": 32,
    "generation/group_size": 16.0,
    "generation/rows": 512.0,
    "time/generate": 0.41,
    "reward/mean": 0.3125,
    "reward/std": 0.4635,
    "loss/objective": 0.0421,
    "loss/kl": 0.0031,
    "loss/grad_norm": 1.2349,
    "time/total": 0.94,
}
LINE = (
    "step 12/100  [generate] 32 prompts x 16 = 512 (0.4s)  [reward] mean 0.31 std 0.46  "
    "[train] loss 0.042 kl 0.003 grad 1.23  [time] 0.9s"
)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_step_reads_as_promised():
    assert step_line(12, 100, METRICS) == LINE
    assert step_line(12, 100, {**METRICS, "eval/accuracy": 0.85}) == LINE + "  [eval] accuracy 0.850"


def test_what_was_not_measured_shows_as_a_dash():
    shown = step_line(1, 2, {name: value for name, value in METRICS.items() if name != "loss/kl"})
    assert "kl - grad" in shown
    assert step_line(1, 2, {}).count("-") == 10


@given(st.floats(-1e300, 1e300) | st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.integers(1, 4))
def test_a_number_is_short_and_never_shows_something_as_nothing(value, digits):
    shown = format_number(value, digits)
    assert len(shown) <= 13
    if value == value and abs(value) != float("inf"):
        assert abs(float(shown) - value) <= max(0.51 * 10**-digits, 0.51 * abs(value))
        assert (float(shown) == 0) == (value == 0)


def test_lines_go_to_the_stream_and_with_a_time_to_the_log(tmp_path):
    stream = io.StringIO()
    with Console(tmp_path / "log.txt", 100, 11, stream=stream) as console:
        console.line("two\nlines")
        console.step(METRICS)
    with Console(tmp_path / "log.txt", 100, 12, stream=stream) as console:  # a resumed run appends
        console.step(METRICS)
    shown = ["two", "lines", LINE, LINE.replace("12/", "13/")]
    assert stream.getvalue().splitlines() == shown
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in logged] == shown
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in logged)


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_stream_that_takes_no_more_is_given_up_once_and_the_log_goes_on(tmp_path, kind):
    class Full(kind):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    with Console(tmp_path / "log.txt", 3, 0, stream=Full()) as console:
        console.line("one")
        console.step(METRICS)
    log = (tmp_path / "log.txt").read_text()
    assert log.count("the console takes no more ([Errno 32] Broken pipe)") == 1
    assert " one\n" in log
    assert "step 1/3" in log


@pytest.mark.parametrize("output", ["| true", ">/dev/full", ">&-"])
def test_standard_output_that_is_gone_ends_no_program(tmp_path, output):
    code = "import sys, time; from pathlib import Path; from grpo_fn.shell.logging.console import Console\n"
    code += "time.sleep(0.2); console = Console(Path(sys.argv[1]), 1, 0); console.line('one'); console.line('two')"
    shell = f"set -o pipefail; {shlex.join([sys.executable, '-c', code, str(tmp_path / 'log.txt')])} {output}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log.txt").read_text().endswith(" two\n")


def test_a_terminal_gets_a_bar_with_the_time_left_as_well(tmp_path):
    stream = Terminal()
    with Console(tmp_path / "log.txt", 3, 1, stream=stream) as console:
        console.step(METRICS)
        console.step(METRICS)
    shown = stream.getvalue()
    assert LINE.replace("12/100", "2/3") in shown
    assert re.search(r"3/3 \[\d\d:\d\d<\d\d:\d\d", shown)
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 2  # the bar stays out of the log


@given(st.text())
def test_no_text_drives_the_terminal_or_breaks_the_encoding(tmp_path_factory, text):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="")
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with Console(log, 1, 0, stream=stream) as console:
        console.line(text)
    shown = raw.getvalue().decode("ascii")
    assert shown.endswith("\n")
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert not CONTROL.search(log.read_text())
    assert shown.count("\n") == text.count("\n") + 1
    logged = log.read_bytes().decode("utf-8").split("\n")
    assert len(logged) == text.count("\n") + 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_the_handlers_come_back(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == number.name  # the first one is the reason
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


def test_the_second_interrupt_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_the_exit_code_says_try_again():
    assert EXIT_STOPPED == os.EX_TEMPFAIL
