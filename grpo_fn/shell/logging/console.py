"""The console of a run: a table and progress bars on a terminal, plain lines elsewhere, whole lines in log.txt."""

import io
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from tqdm import tqdm

from grpo_fn.core.display_text import escape_control
from grpo_fn.shell.logging.metrics_writer import OF_REWARD

RECENT = 10  # steps whose time says how long the others take
TITLES_EVERY = 20  # lines of the table
TICK = 1.0  # seconds between two looks of the bar at the clock
PART = re.compile(f"reward/(?!(?:{OF_REWARD})$)(.+)")
ROUNDING = 1e-6  # nats: KL and loss of equal policies are the rounding of their log-probs

Metrics = Mapping[str, float | int]


class Console(AbstractContextManager):
    """Lines for people, and the count of steps done. Everything is appended to `log_path` with the local time.

    A stream that takes no more (`| head`, a closed terminal, a full disk) is given up with a line in the log.

    Args:
        log_path: log.txt of the run.
        steps: of the run.
        start: steps that were taken before.
        grader: name of the grader that decides the held-out accuracy.
        stream: standard output by default.
        phase: the phase of the step, for the bar of a terminal.
        first_step: what makes the first step long, for the bar; "" for nothing.
    """

    def __init__(
        self,
        log_path: Path,
        steps: int,
        start: int,
        *,
        grader: str,
        stream: io.TextIOBase | None = None,
        phase: Callable[[], str] = str,
        first_step: str = "",
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._log = open(log_path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._steps, self._start, self._done, self._grader = steps, start, start, grader
        self._seconds: deque[float] = deque(maxlen=RECENT)  # of the newest steps, without the first of this process
        self._phase, self._note, self._left = phase, first_step, ""
        self._table: list[Column] = []  # on a terminal, as wide as that was at the first step
        self._bar: tqdm | None = None
        self._terminal: _Terminal | None = None
        self._closed, self._clock = Event(), Thread(target=self._tick, name="console", daemon=True)
        if self._stream is not None:  # None: standard output was closed before Python began
            self._attempt(self._open_bar)

    def line(self, text: str) -> None:
        """Show and log a text. Control characters appear as escapes: what a model wrote must not drive a terminal."""
        text = escape_control(text)
        self._record(text)
        self._attempt(partial(self._show, text))

    def step(self, metrics: Metrics) -> None:
        """Count one more step as done and show its line, and one more where the policy was evaluated after it."""
        self._done += 1
        if "time/total" in metrics and self._done > self._start + 1:  # the first step compiles and warms up
            self._seconds.append(metrics["time/total"])
        left = self._steps - self._done
        eta = left * sum(self._seconds) / len(self._seconds) if left and self._seconds else None
        self._note, self._left = "", "" if eta is None else short_time(eta)
        whole = escape_control(step_line(self._done, self._steps, metrics, eta))
        self._record(whole)
        self._attempt(partial(self._show_step, metrics, whole))
        if "eval/accuracy" in metrics:
            self.line(f"step {self._done}/{self._steps}  held-out {evaluation_line(metrics, self._grader)}")

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[int], None] | None]:
        """Show how many of `total` are done by a bar, on a terminal; what it gives counts some more, None elsewhere."""
        if self._bar is None:
            yield None
            return
        with tqdm(total=total, file=self._terminal, desc=text, leave=False, dynamic_ncols=True) as bar:
            yield lambda count: self._attempt(partial(bar.update, count))

    def close(self) -> None:
        """Leave the terminal in order and let go of the log."""
        self._closed.set()
        if self._clock.is_alive():
            self._clock.join()
        if self._bar is not None:
            self._bar.set_postfix_str("", refresh=False)
            self._attempt(self._bar.close)
        self._log.close()

    def _open_bar(self) -> None:
        if not self._stream.isatty():
            return
        shape = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}{postfix}]"
        counts, self._terminal = {"total": self._steps, "initial": self._done}, _Terminal(self._stream)
        self._bar = tqdm(**counts, file=self._terminal, dynamic_ncols=True, bar_format=shape)
        self._clock.start()

    def _tick(self) -> None:
        """Keep the bar's clock and phase moving while a step works."""
        while not self._closed.wait(TICK):
            self._attempt(self._refresh)

    def _refresh(self) -> None:
        if (bar := self._bar) is not None:
            left = f"{self._left} left" if self._left else ""
            bar.set_postfix_str(", ".join(filter(None, (left, self._phase(), self._note))))

    def _show_step(self, metrics: Metrics, whole: str) -> None:
        if self._bar is None:
            self._show(whole)
            return
        count, width = f"{self._done}/{self._steps}", max(4, len(f"{self._steps}/{self._steps}"))
        if not self._table:
            columns = self._bar.ncols or shutil.get_terminal_size().columns
            self._table = choose_columns(metrics, columns - width - 1)
        if (self._done - self._start - 1) % TITLES_EVERY == 0:
            self._show(" ".join([f"{'step':>{width}}", *(f"{c.title:>{c.width}}" for c in self._table)]))
        self._show(" ".join([f"{count:>{width}}", *(f"{c.text(metrics):>{c.width}}" for c in self._table)]))
        self._bar.update(1)
        self._refresh()

    def _record(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.writelines(f"{stamp} {part}\n" for part in _encodable(text, "utf-8").split("\n"))
        self._log.flush()

    def _show(self, text: str) -> None:
        text = _encodable(text, self._stream.encoding or "utf-8")
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._terminal)

    def _attempt(self, act: Callable[[], object]) -> None:
        """Do something with the stream, or give it up."""
        if self._stream is None:
            return
        try:
            act()
            if self._terminal is not None and self._terminal.error is not None:
                raise self._terminal.error
        except (OSError, ValueError) as error:  # ValueError: it was closed
            stream, self._stream, bar, self._bar = self._stream, None, self._bar, None
            if bar is not None:
                bar.close()
            if stream is sys.stdout:  # else Python fails at its end, as what waits there cannot be written
                with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), stream.fileno())
            self._record(f"the console takes no more ({error}): nothing is shown from here on, this log continues")

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Terminal:
    """A terminal whose errors are kept: tqdm, which threads share, does not release its lock if a write raises."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self._stream = stream
        self.error: OSError | ValueError | None = None

    def write(self, text: str) -> None:
        self._keep_error(partial(self._stream.write, text))

    def flush(self) -> None:
        self._keep_error(self._stream.flush)

    def _keep_error(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ValueError) as error:
            self.error = self.error or error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)


# -- a step as a line of a log, whole, and as a row of a table that fits a terminal


class Column(NamedTuple):
    """A figure of a step: its name in a line, its width and title in a table, and how metrics become its text."""

    name: str
    title: str
    width: int
    text: Callable[[Metrics], str]


def _of(name: str, width: int, names: Sequence[str], show: Callable[[float], str], title: str = "") -> Column:
    """A column of the first of these metrics that a step has; "-" of a step that has none."""

    def text(metrics: Metrics) -> str:
        value = next((metrics[name] for name in names if name in metrics), None)
        return "-" if value is None else show(value)

    title = title or name
    return Column(name, title, max(width, len(title)), text)


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: format_number(value, digits)


def _nats(value: float) -> str:
    return format_number(0.0 if abs(value) < ROUNDING else value, 4)


def _rate(metrics: Metrics) -> str:
    """Tokens a second of the whole step: training, scoring and waiting included."""
    tokens = metrics.get("generation/tokens", metrics.get("sft/tokens"))
    total = metrics.get("time/total")
    return short_count(tokens / total) if tokens is not None and total else "-"


def _seconds(phase: str, title: str = "") -> Column:
    return _of(phase, 6, [f"time/{phase}"], lambda value: f"{value:.1f}s", title)


SPEED = Column("tok/s", "tok/s", 5, _rate)
GRADIENT = _of("grad", 6, ["loss/grad_norm"], _number(2))
SAMPLED = [  # a step that samples always has these
    _of("reward", 6, ["reward/mean"], _number(2)),
    _of("loss", 7, ["loss/objective"], _nats),
    _of("kl", 6, ["loss/kl", "loss/approx_kl"], _nats),
    GRADIENT,
    _of("length", 5, ["generation/length_mean"], _number(0), "len"),
    SPEED,
    *(_seconds("generate", "gen"), _seconds("score"), _seconds("train"), _seconds("sync")),
]
TRUNCATED = _of("truncated", 4, ["generation/truncated"], lambda share: f"{share:.0%}", "trunc")
GIVEN = [_of("loss", 7, ["sft/loss"], _number(4)), GRADIENT, SPEED, _seconds("train")]  # of a supervised stage


def step_columns(metrics: Metrics) -> tuple[list[Column], list[Column]]:
    """The columns that a step always has, and more, the most useful ones first."""
    total = _seconds("total")
    if "sft/loss" in metrics and "reward/mean" not in metrics:
        return GIVEN, [total]
    parts = [match[1] for name in metrics if (match := PART.fullmatch(name))]
    more = [_of(name, 5, [f"reward/{name}"], _number(2)) for name in parts if len(parts) > 1]  # one is the reward
    more += [_of("sft", 6, ["sft/loss"], _number(3))] if "sft/loss" in metrics else []
    return SAMPLED, [TRUNCATED, total, *more]


def step_line(step: int, steps: int, metrics: Metrics, eta: float | None) -> str:
    """One step with all of its figures, each behind its name, in places that do not move from step to step."""
    always, more = step_columns(metrics)
    figures = [f"{column.name} {column.text(metrics):<{column.width}}" for column in (*always, *more)]
    count = f"step {step}/{steps}".ljust(len(f"step {steps}/{steps}"))
    return "  ".join([count, *figures, *([] if eta is None else [f"eta {short_time(eta)}"])]).rstrip()


def choose_columns(metrics: Metrics, width: int) -> list[Column]:
    """As many columns as fit so many characters, a blank before each: those that a step always has come first."""
    chosen = []
    for column in [column for columns in step_columns(metrics) for column in columns]:
        if (width := width - column.width - 1) < 0:
            break
        chosen.append(column)
    return chosen


def evaluation_line(metrics: Metrics, grader: str) -> str:
    """The held-out accuracy of a step, with the name of the grader that decides it and the 95 % interval."""
    low, high = metrics.get("eval/accuracy_low"), metrics.get("eval/accuracy_high")
    interval = "" if low is None or high is None else f" (95 %: {low:.3f} to {high:.3f})"
    loss = f", loss {format_number(metrics['eval/loss'], 3)}" if "eval/loss" in metrics else ""
    return f"accuracy {metrics['eval/accuracy']:.3f}{interval} by {grader}{loss}"


def format_number(value: float | int, digits: int) -> str:
    """Fixed point, unless that would show a small number as zero or a large one as a row of digits."""
    if value != 0 and digits and (abs(value) < 0.5 * 10**-digits or abs(value) >= 1e6):
        return f"{value:.0e}"
    return f"{value:.{digits}f}"


def short_count(value: float) -> str:
    """A count in three digits: 940, 3.1k, 18k, 1.2M."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.{1 if value < 10 * unit else 0}f}{name}"
    return f"{value:.0f}"


def short_time(seconds: float) -> str:
    """Seconds as 40s, 3m20s, 2h05m or 3d04h."""
    whole = round(seconds)
    for unit, name, below, lesser in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name}{whole % unit // below:02d}{lesser}"
    return f"{whole}s"
