"""AsyncWriter: the metrics log written in a thread, which makes the calls of a MetricsWriter in their order.

What a call is given is kept until it is made. Tensors are brought to the CPU at once, so that the thread never talks to
a device that the training is busy with.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.logging.metrics_writer import MetricsWriter

MAX_PENDING = 24  # calls not yet made, those of a few steps; the training waits when there are more


class AsyncWriter(AbstractContextManager):
    """Stands in for a `MetricsWriter`, whose calls it makes later, and takes other work for its thread (`do`).

    Once something raises there, nothing more is written: `failed` says so, and `wait` raises it. Leaving it waits for
    what is left and closes the writer.
    """

    def __init__(self, writer: MetricsWriter, *, deadline: float) -> None:
        self._writer = writer
        self._error: Exception | None = None  # the first one
        self._worker = BackgroundWorker("log", timeout=deadline, torch_threads=1, max_pending=MAX_PENDING)

    @property
    def failed(self) -> bool:
        """Whether something could not be written: `wait` says what and why."""
        return self._error is not None

    def do(self, what: str, work: Callable[[], object]) -> None:
        """Have `work` done, which writes `what`, after all that was asked for before."""
        if not self.failed:
            self._worker.submit(self._write, what, work, what=f"writing {what}")

    def wait(self) -> None:
        """Until everything that was asked for is on the disk.

        Raises what went wrong there, and TimeoutError when it takes longer than the deadline.
        """
        self._worker.wait()
        if self._error is not None:
            raise self._error

    def __getattr__(self, name: str) -> Callable[..., None]:
        """As the method of that name of `MetricsWriter`, later."""
        if name.startswith("_") or not hasattr(MetricsWriter, name):
            raise AttributeError(f"got {name}, wanted a method of MetricsWriter")
        return partial(self._call_later, name)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None or error is not self._error:  # else the run ends by it already
                self.wait()
        except Exception as also:
            if error is None:
                raise
            error.add_note(f"and the log could not be written: {also}")
        finally:
            self._worker.shutdown(cancel_futures=True)
            self._writer.close()

    def _call_later(self, name: str, *given: Any) -> None:
        what = f"{name} of step {given[0]}" if given and isinstance(given[0], int) else name
        kept = tree_map_only(Tensor, lambda x: x.detach().cpu(), given)  # in containers of its own
        self.do(what, partial(getattr(self._writer, name), *kept))

    def _write(self, what: str, work: Callable[[], object]) -> None:
        """In the thread: `work`, unless something went wrong before."""
        if self._error is None:
            try:
                work()
            except Exception as error:
                error.add_note(f"while writing {what}")
                self._error = error
