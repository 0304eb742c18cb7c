"""The console of a run: a progress bar on a terminal, plain lines elsewhere, all of them in log.txt with the time."""

import io
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

from tqdm import tqdm

from grpo_fn.core.display_text import escape_control
from grpo_fn.shell.logging.metrics_writer import OF_REWARD

RECENT = 10  # steps whose time says how long the others take
LINE = 110  # characters of a step's line
PHASES = {"generate": "gen", "score": "score", "train": "train"}
PART = re.compile(f"reward/(?!(?:{OF_REWARD})$)(.+)")
ROUNDING = 1e-6  # nats: the KL between equal policies is the rounding of their log-probs

Metrics = Mapping[str, float | int]


class Console(AbstractContextManager):
    """Lines for people, and the count of steps done. Everything is appended to `log_path` with the local time.

    A stream that takes no more (`| head`, a closed terminal, a full disk) is given up with a line in the log.
    """

    def __init__(
        self, log_path: Path, steps: int, start: int, *, grader: str, stream: io.TextIOBase | None = None
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._log = open(log_path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._steps, self._done, self._grader = steps, start, grader
        self._seconds: deque[float] = deque(maxlen=RECENT)  # of the newest steps
        self._bar: tqdm | None = None
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
        if "time/total" in metrics:
            self._seconds.append(metrics["time/total"])
        left = self._steps - self._done
        eta = left * sum(self._seconds) / len(self._seconds) if left and self._seconds else None
        self.line(step_line(self._done, self._steps, metrics, eta))
        if "eval/accuracy" in metrics:
            self.line(f"step {self._done}/{self._steps}  held-out {evaluation_line(metrics, self._grader)}")
        if self._bar is not None:
            self._attempt(partial(self._bar.update, 1))

    def close(self) -> None:
        """Leave the terminal in order and let go of the log."""
        if self._bar is not None:
            self._attempt(self._bar.close)
        self._log.close()

    def _open_bar(self) -> None:
        if self._stream.isatty():
            self._bar = tqdm(total=self._steps, initial=self._done, file=self._stream, unit="step", dynamic_ncols=True)

    def _record(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.writelines(f"{stamp} {part}\n" for part in _encodable(text, "utf-8").split("\n"))
        self._log.flush()

    def _show(self, text: str) -> None:
        text = _encodable(text, self._stream.encoding or "utf-8")
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def _attempt(self, act: Callable[[], object]) -> None:
        """Do something with the stream, or give it up."""
        if self._stream is None:
            return
        try:
            act()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            stream, self._stream, bar, self._bar = self._stream, None, self._bar, None
            if bar is not None:
                bar.disable = True
            if stream is sys.stdout:  # else Python fails at its end, as what waits there cannot be written
                with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), stream.fileno())
            self._record(f"the console takes no more ({error}): nothing is shown from here on, this log continues")

    def __exit__(self, *exc: object) -> None:
        self.close()


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)


# -- a step in at most LINE characters: what moves, numbers without noise


def step_line(step: int, steps: int, metrics: Metrics, eta: float | None) -> str:
    """One step in a line: reward, its parts, length, loss, rate, time left and seconds by phase."""
    head = f"step {step}/{steps}"
    rate = metrics.get("generation/tokens_per_second")
    lengths, parts, phases, loss = _lengths(metrics), [*_parts(metrics)], _phases(metrics), _loss(metrics)
    speed = "" if rate is None else f"{short_count(rate)} tok/s"
    left = "" if eta is None else f"eta {short_time(eta)}"

    def whole(shown: int, *rest: str) -> str:
        return "  ".join(filter(None, (head, _reward(metrics), " ".join(parts[:shown]), lengths, *rest, speed, left)))

    fitting = [whole(len(parts), loss, phases), whole(len(parts), loss)]
    fitting += [whole(shown) for shown in range(len(parts), -1, -1)]
    return next((line for line in fitting if len(line) <= LINE), fitting[-1][:LINE])


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


def _reward(metrics: Metrics) -> str:
    if "reward/mean" not in metrics:
        return ""
    ends = [format_number(metrics[name], 2) for name in ("reward/min", "reward/max") if name in metrics]
    return f"reward {format_number(metrics['reward/mean'], 2)}" + (f" [{', '.join(ends)}]" if ends else "")


def _parts(metrics: Metrics) -> Iterator[str]:
    values = {match[1]: value for name, value in metrics.items() if (match := PART.fullmatch(name))}
    if len(values) > 1:  # one part is the reward
        yield from (f"{name} {format_number(value, 2)}" for name, value in values.items())


def _lengths(metrics: Metrics) -> str:
    if "generation/length_mean" not in metrics:
        return ""
    return f"len {metrics['generation/length_mean']:.0f} trunc {metrics.get('generation/truncated', 0.0):.0%}"


def _loss(metrics: Metrics) -> str:
    kl = next((name for name in ("loss/kl", "loss/approx_kl") if name in metrics), None)
    shown = [f"sft loss {format_number(metrics['sft/loss'], 3)}"] if "sft/loss" in metrics else []
    shown += [] if kl is None or abs(metrics[kl]) < ROUNDING else [f"kl {format_number(metrics[kl], 3)}"]
    if "loss/grad_norm" in metrics:
        shown.append(f"grad {format_number(metrics['loss/grad_norm'], 2)}")
    return " ".join(shown)


def _phases(metrics: Metrics) -> str:
    shown = [f"{short} {metrics[f'time/{name}']:.1f}" for name, short in PHASES.items() if f"time/{name}" in metrics]
    total = [f"of {metrics['time/total']:.1f}s"] if "time/total" in metrics else []
    return " ".join(shown + total)
