"""The console of a run: a progress bar on a terminal, plain lines elsewhere, all of them in log.txt with the time."""

import io
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

from tqdm import tqdm

from grpo_fn.core.display_text import escape_control
from grpo_fn.shell.logging.step_line import Metrics, evaluation_line, step_line

RECENT = 10  # steps whose time says how long the others take


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
            self._record(f"the console takes no more ({error}): nothing is shown from here on, this log goes on")

    def __exit__(self, *exc: object) -> None:
        self.close()


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)
