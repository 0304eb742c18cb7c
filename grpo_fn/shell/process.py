"""This process: stop requests by signal, deterministic kernels, and the C library's memory."""

import ctypes
import os
import signal
from types import FrameType

# EX_TEMPFAIL of sysexits.h: everything is saved, the same command resumes from here.
EXIT_STOPPED = 75
# A rule of sections.Health.stop fired: everything is saved, and a person should look before the same command resumes.
EXIT_UNHEALTHY = 76
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of the GNU C library's malloc.h


class StopRequest:
    """While entered, SIGTERM, SIGINT and SIGHUP are noted instead of obeyed; a second SIGINT interrupts at once.

    Left by an error, SIGTERM is noted still: torchrun sends it to the ranks that are left when one has died, and what
    they have to say of it, and their exit code, come first. Raises KeyboardInterrupt at the second SIGINT, ValueError
    when entered outside the main thread.
    """

    def __init__(self) -> None:
        self.requested: str | None = None  # the name of the first signal that came
        self._interrupts = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup has it ignored
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for number, handler in self._before.items():
            if number == signal.SIGTERM and kind is not None:
                continue
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt


def use_deterministic_kernels(expected: bool, device: str) -> None:
    """Have torch and cuBLAS use kernels that give the same bits again for the same inputs, or whichever is fastest.

    Called before the first product on the device: cuBLAS reads its variable then. Attention over packed rows
    (`ragged_attention`) follows torch's switch. An operation that has no such kernel warns and runs all the same; so
    would the fused kernels of `scaled_dot_product_attention`, in whose place its products are taken on CUDA.
    """
    if expected:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # of transformers, which asks flash-attn for it
    import torch  # what waits for signals alone does without

    torch.use_deterministic_algorithms(expected, warn_only=expected)
    if device == "cuda":
        torch.backends.cuda.enable_flash_sdp(not expected)
        torch.backends.cuda.enable_mem_efficient_sdp(not expected)
        torch.backends.cuda.enable_cudnn_sdp(not expected)


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for what comes next, as torch does with a GPU's memory.

    By default it hands large blocks back to the system, which clears each one page by page when it is asked for again:
    of the tensors of a step on CPU that is all of them, every step. A user who has set one of its MALLOC_ variables has
    chosen; another C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(TRIM_THRESHOLD, -1)  # never
        mallopt(MMAP_THRESHOLD, 2**31 - 1)
