"""torchrun with the trainer's exit code, and with time to save when it is asked to stop.

    python tools/launch/agent.py <flags of torchrun> -m grpo_fn.run <flags of grpo_fn.run>

The engine is torch.distributed.run, unchanged: the same flags, the same rendezvous, the same restarts. Three things are
done around it, because torchrun itself ends with 1 whatever happened, kills its workers 30 s after a SIGTERM, and
starts them again when they end with 2, 75 or 76:

- the exit code is the trainer's: 0 done, 2 bad input, 75 stopped after saving, 76 ended after saving by a rule of
  health, 71 the other hosts were lost, 128 + n killed by signal n;
- SIGTERM, SIGINT and SIGHUP are passed to the workers, which then have GRACE seconds (an environment variable, 120 when
  it is not set) to save; a second SIGINT kills them;
- a worker that ends with 2, 75 or 76 ends the launch (worker.py signals it to the agent): trying again would not help.
  Nothing is said of that, and an error that several ranks find is said once.

And the ranks get their own store at every restart: torchrun shares its own with them, in which the addresses of
the attempt before are still written, and the new ranks then call ports at which no process listens (pytorch#135712).
"""

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

BAD_INPUT, LOST, STOPPED, UNHEALTHY = 2, 71, 75, 76
FINAL = (BAD_INPUT, UNHEALTHY, STOPPED)  # said by one rank, true for all of them
FINAL_EXIT = signal.SIGUSR1  # from a worker whose exit code is final
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AGENT = "GRPO_FN_AGENT"  # environment variable with the agent's process id, for worker.py
ERRORS = "GRPO_FN_ERRORS"  # with a folder in which ranks note the errors that they have said, once a host
OTHERS = 10.0  # seconds that the other workers of this host have to end by themselves after one's exit code was final
POLL = 0.05
STORE_GRACE = 10.0  # seconds beyond read_timeout that torch has to raise by itself, which says more


class Stop:
    """Handler of the signals that end a launch: let the workers save, note how they ended, leave torchrun."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.final = False  # whether a worker ended with a code that no retry changes
        self.codes: list[int] | None = None  # of the workers, negative for a signal; None until a stop is requested

    def __call__(self, number: int, frame: FrameType | None) -> None:
        workers = psutil.Process().children()
        if self.codes is None:
            self.codes, self.final = [], number == FINAL_EXIT
            if self.final:
                self._wait(workers, OTHERS)
            for worker in workers:
                if exit_code(worker.pid) is None:
                    worker.send_signal(signal.SIGTERM)
            self._wait(workers, self.grace)
        elif number == signal.SIGINT:
            for worker in workers:
                worker.kill()
            self._wait(workers, self.grace)
        else:
            return
        self.codes = [-signal.SIGKILL if (code := exit_code(w.pid)) is None else code for w in workers]
        # torchrun knows this exception from its own handlers: it kills what is left and leaves the rendezvous open.
        raise SignalException(f"asked to stop by {signal.Signals(number).name}", signal.Signals(number))

    def _wait(self, workers: Sequence[psutil.Process], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(exit_code(worker.pid) is None for worker in workers):
            time.sleep(POLL)


class StoreWatch(threading.Thread):
    """Ends the agent with LOST when the rendezvous host has gone without a word.

    torch waits for that host's answer without a deadline in some places, and then notices neither a worker's end nor
    a signal. A call of its store longer than read_timeout, while no worker of this host runs, is such a wait.
    """

    def __init__(self, read_timeout: float) -> None:
        super().__init__(daemon=True, name="store-watch")
        self.limit = read_timeout + STORE_GRACE

    def run(self) -> None:
        """Look once a second."""
        since: dict[FrameType, float] = {}  # the frames themselves: the address of one that is gone is used again
        while True:
            time.sleep(1.0)
            now = time.monotonic()
            since = {frame: since.get(frame, now) for frame in _in_the_store()}
            waited = max((now - start for start in since.values()), default=0.0)
            if waited > self.limit and not any(exit_code(w.pid) is None for w in psutil.Process().children()):
                print(
                    f"error: waited {waited:.0f} s for the rendezvous host to answer, expected at most {self.limit:g}; "
                    "the same command resumes from the newest checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(LOST)


def _in_the_store() -> Iterator[FrameType]:
    for frame in sys._current_frames().values():
        inner: FrameType | None = frame
        while inner is not None and inner.f_code.co_name != "_call_store":  # of the c10d rendezvous backend
            inner = inner.f_back
        if inner is not None:
            yield inner


def exit_code(pid: int) -> int | None:
    """How a child ended, -n for signal n; None while it runs.

    Leaves it to torchrun to reap; 0 for one that it has reaped.
    """
    try:
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def verdict(codes: Sequence[int]) -> int:
    """The exit code of a host from its workers': a final one first, then an error's, then a signal's as 128 + n."""
    for final in FINAL:
        if final in codes:
            return final
    errors = [code for code in codes if code > 0]
    signals = [128 - code for code in codes if code < 0]
    # LOST is what an error on one rank looks like to the others: the error itself says more.
    return min((code for code in errors if code != LOST), default=LOST if errors else max(signals, default=0))


def through_worker(args: Sequence[str]) -> list[str]:
    """torchrun's arguments with worker.py in front of the module.

    Raises ValueError when they do not start a module with -m.
    """
    asked = torchrun.parse_args(list(args))
    if not asked.module:
        raise ValueError(f"got {asked.training_script!r} to start, expected a module: -m grpo_fn.run")
    own = list(args[: len(args) - len(asked.training_script_args) - 1])
    while own and own[-1] in ("-m", "--module"):
        own.pop()
    # SIGQUIT stays torchrun's: it ends the launch without waiting for anything.
    worker = str(Path(__file__).resolve().with_name("worker.py"))
    return [*own, "--signals-to-handle=SIGQUIT", worker, asked.training_script, *asked.training_script_args]


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; returns the exit code."""
    try:
        args = torchrun.parse_args(through_worker(sys.argv[1:] if argv is None else argv))
        grace = seconds("GRACE", os.environ.get("GRACE", "120"))
        read_timeout = seconds("read_timeout", re.findall(r"(?:^|,)read_timeout=([^,]*)|$", args.rdzv_conf)[0] or "60")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    os.environ[AGENT] = str(os.getpid())
    if args.nproc_per_node.isdigit() and int(args.nproc_per_node) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it too, and warns of that in four lines
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Packed micro-batches never have the same number of tokens twice: blocks of fixed sizes would leave a nearly
        # full card in fragments.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    stop = Stop(grace)
    for number in (*STOP_SIGNALS, FINAL_EXIT):
        signal.signal(number, stop)
    StoreWatch(read_timeout).start()
    logging.getLogger("torch.distributed.elastic.agent.server.api").addFilter(lambda record: not stop.final)
    with TemporaryDirectory(prefix="grpo_fn-errors-") as errors:
        os.environ[ERRORS] = errors
        return launched(args, stop)


def launched(args: Namespace, stop: Stop) -> int:
    """Run torchrun with its arguments; returns the exit code. `stop` knows how the workers ended."""
    try:
        torchrun.run(args)
        return 0
    except SignalException as left:
        if not stop.final:  # a worker has said why
            print(f"{left}; workers ended with {stop.codes}", file=sys.stderr)
        # No worker was running: there was nothing to save, and the same command resumes.
        return verdict(stop.codes) if stop.codes else STOPPED
    except ChildFailedError as failed:
        print(failures(failed), file=sys.stderr)
        return verdict([failure.exitcode for failure in failed.failures.values()])
    except RendezvousError as lost:
        expected = f"{args.nnodes} at {args.rdzv_endpoint or 'this host'}"
        print(f"error: got no rendezvous of the hosts ({lost}), expected {expected}", file=sys.stderr)
        return LOST


def failures(failed: ChildFailedError) -> str:
    """The ranks of this host that failed in one line, the first of them first."""
    first, _ = failed.get_first_failure()
    ranks = sorted(failed.failures, key=lambda rank: (rank != first, rank))
    codes = {rank: failed.failures[rank].exitcode for rank in ranks}
    ends = {rank: f"with {code}" if code >= 0 else f"by {signal.Signals(-code).name}" for rank, code in codes.items()}
    return "error: " + ", ".join(f"rank {rank} ended {how}" for rank, how in ends.items()) + "; the first one says why"


def seconds(name: str, text: str) -> float:
    """A time as a number; ValueError unless it is one above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise ValueError(f"{name}: got {text!r}, expected seconds above 0")


if __name__ == "__main__":
    sys.exit(main())
