"""torchrun jobs of the small run, and what may befall one of their ranks.

A job is torchrun's own main in a process forked from the server of `running.py`, and so are the ranks, which torchrun
starts, watches, ends and starts again as ever: nothing waits for imports.
"""

import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import psutil
import torch
from crew import serving
from e2e.running import SERVER, command

from grpo_fn import run
from grpo_fn.shell.checkpoint import tensor_shards

PATIENCE = 240.0  # seconds that a job may take; a loaded machine is slow
DEATH = 4  # seconds that torchrun gives a rank between SIGTERM and SIGKILL: a stopped one lets its own 30 pass
MARK = "GRPO_FN_TEST_JOB"  # environment variable by which a job's processes are known, their workers' too

Harm = Callable[[], None]


# -- what befalls a rank


def signalled(number: int) -> None:
    """Harm: the signal, to this process."""
    os.kill(os.getpid(), number)


def full_disk() -> None:
    """Harm: what a write to a full disk raises."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


KILL, STOP, ASK = (partial(signalled, number) for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM))


@dataclass(frozen=True)
class Doom:
    """What befalls one rank, once, and only in the job's first attempt: `plan` prepares it, in that rank."""

    rank: int
    plan: Callable[[Harm], None]
    harm: Harm


def after(calls: int, module: Any, name: str, then: Callable[..., Any]) -> None:
    """Replace `module.name` by `then(real, *args, **kwargs)` for the call with that number alone, counted from 1."""
    real, left = getattr(module, name), [calls]

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return then(real, *args, **kwargs) if left[0] == 0 else real(*args, **kwargs)

    setattr(module, name, counted)


def generating(calls: int, harm: Harm) -> None:
    """The harm comes after some tokens of the n-th decoding."""
    from grpo_fn.shell.sampler.local.local_sampler import LocalSampler

    def options(real: Callable, sampler: LocalSampler, *args: Any) -> Any:
        object.__setattr__(sampler, "token_sampler", Interrupted(sampler.token_sampler, 3, harm))
        return real(sampler, *args)

    after(calls, LocalSampler, "_options", options)


class Interrupted:
    """A function that does harm in its n-th call."""

    def __init__(self, real: Callable, left: int, harm: Harm) -> None:
        self.real, self.left, self.harm = real, left, harm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.harm()
        return self.real(*args, **kwargs)


def backward(calls: int, harm: Harm) -> None:
    """The harm comes in the midst of the n-th backward pass."""

    def halfway(real: Callable, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        node = tensors[0].grad_fn
        for _ in range(10):
            node = next((following for following, _ in node.next_functions if following is not None), node)
        node.register_prehook(lambda grads: harm())
        real(tensors, grads)

    after(calls, torch.autograd, "backward", halfway)


def spoilt(calls: int, harm: Harm) -> None:
    """In the n-th backward pass this rank's rows have a learning signal of NaN."""

    def pull(real: Callable, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        harm()
        real(tensors, [grad * float("nan") for grad in grads])

    after(calls, torch.autograd, "backward", pull)


STAGING = "grpo_fn.shell.checkpoint.tensor_shards.stage"  # copies of a rank's pieces of a checkpoint
SEALING = "grpo_fn.shell.checkpoint.async_saver.seal"  # the manifest of the main rank; all pieces are on the disk
SCORING = "grpo_fn.shell.reward_workers.reward_pool.RewardPool.collect"  # a rank's share of rows


def before(place: str, calls: int, harm: Harm) -> None:
    """The harm comes as the n-th call of the function at `place` begins."""
    owner, _, name = place.rpartition(".")
    after(calls, resolve_name(owner), name, partial(first_the_harm, harm))


def first_the_harm(harm: Harm, real: Callable, *args: Any, **kwargs: Any) -> Any:
    harm()
    return real(*args, **kwargs)


def writing(calls: int, harm: Harm) -> None:
    """The harm comes in the thread that writes the n-th checkpoint, half of the rank's file being there."""

    def half(real: Callable, folder: Path, *args: Any) -> Any:
        (folder / f"__{os.environ['RANK']}_0.distcp").write_bytes(b"half")
        harm()
        return real(folder, *args)

    after(calls, tensor_shards, "write_shards", half)


# -- a rank


def nothing() -> None:
    """Harm: done elsewhere."""


def worker_killed() -> None:
    """Harm: SIGKILL to this rank's reward workers."""
    for worker in psutil.Process().children():
        if "grpo_fn.shell.reward_workers.worker" in worker.cmdline():
            worker.kill()
            worker.wait()  # a dead one, and not one that is about to die


def main(argv: Sequence[str]) -> int:
    """FOLDER and the flags of grpo_fn.run: what torchrun starts as a rank."""
    folder, attempt, rank = Path(argv[0]), os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    torch.set_num_threads(1)
    doom = pickle.loads((folder / "doom").read_bytes())
    if doom is not None and attempt == "0" and rank == str(doom.rank):
        doom.plan(partial(strike, folder, doom.harm))
    return run.main(argv[1:])


def strike(folder: Path, harm: Harm) -> None:
    """Note the moment, and do it."""
    (folder / "struck").write_text(repr(time.time()))
    harm()


# -- torchrun, and ranks that are forked


class End(NamedTuple):
    """How a rank of an attempt ended."""

    attempt: int
    rank: int
    code: int  # minus the signal that ended it
    at: float  # time.time()


class Rank:
    """A forked process, which torchrun takes for a subprocess.Popen; its end is noted in the job's folder."""

    def __init__(self, folder: Path, handler: Any, args: Sequence[str], env: dict[str, str]) -> None:
        streams = [handler._stdout.name, handler._stderr.name]
        flags = args[args.index("e2e.faults") + 1 :]
        self.process = SERVER.Process(target=live, args=(flags, env, os.getcwd(), streams))
        self.process.start()
        self.pid, self.returncode, self.over = self.process.pid, None, threading.Event()
        note(folder / "begun", [self.pid])
        number = int(env["TORCHELASTIC_RESTART_COUNT"]), int(env["RANK"])
        threading.Thread(target=self.watch, args=(folder / "ended", *number)).start()

    def watch(self, ended: Path, attempt: int, rank: int) -> None:
        self.process.join()
        note(ended, End(attempt, rank, self.process.exitcode, time.time()))
        self.returncode = self.process.exitcode
        self.over.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.over.wait(PATIENCE if timeout is None else timeout):
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.returncode


def note(path: Path, line: Sequence[Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def agent(argv: list[str], folder: Path, address: str, here: str) -> None:
    """Be torchrun, with the exit code that it ends with; its ranks come from the server that forked this process."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    os.chdir(here)
    path = os.pathsep.join(entry or here for entry in sys.path)
    os.environ |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: str(folder)}
    os.setpgid(0, 0)
    out = os.open(folder / "torchrun", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    forkserver._forkserver._forkserver_address, forkserver._forkserver.ensure_running = address, lambda: None
    stop, close = SubprocessHandler.close, api.PContext.close

    def stop_if_there(handler: SubprocessHandler, *args: Any, **kwargs: Any) -> None:
        with suppress(ProcessLookupError):  # the server has reaped it already
            stop(handler, *args, **kwargs)

    SubprocessHandler.close = stop_if_there
    SubprocessHandler._popen = lambda handler, args, env: Rank(folder, handler, args, env)
    api.PContext.close = lambda context, death_sig=None, timeout=DEATH: close(context, death_sig, timeout)
    torchrun.main(argv)  # which ends in an exception, or returns; Python waits for the watching threads


def live(flags: Sequence[str], env: dict[str, str], folder: str, streams: Sequence[str]) -> None:
    """Be a rank. It ends without taking its interpreter down piece by piece, which ranks that are executed do."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, path in zip((1, 2), streams, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), fd)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    try:
        code = main(flags)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


# -- a job


@dataclass(frozen=True)
class Job:
    """A torchrun job that is over."""

    folder: Path
    code: int  # torchrun's own

    @property
    def ends(self) -> list[End]:
        """How every rank ended, in the order of attempts and ranks."""
        path = self.folder / "ended"
        return sorted(End(*json.loads(line)) for line in path.read_text().splitlines()) if path.exists() else []

    def codes(self, attempt: int) -> dict[int, int]:
        """The exit code of every rank of an attempt."""
        return {end.rank: end.code for end in self.ends if end.attempt == attempt}

    @property
    def struck(self) -> float:
        """When the doom struck."""
        path = self.folder / "struck"
        assert path.exists(), f"the doom missed; {self.everything()}"
        return float(path.read_text())

    def lasted(self, rank: int) -> float:
        """Seconds from the stroke to a rank's end, in the first attempt."""
        return next(end.at for end in self.ends if (end.attempt, end.rank) == (0, rank)) - self.struck

    def said(self, attempt: int, rank: int, stream: str = "std*") -> str:
        """What a rank printed, on both streams or on `stream` ("stdout", "stderr")."""
        found = (self.folder / "logs").glob(f"*/attempt_{attempt}/{rank}/{stream}.log")
        return "\n".join(path.read_text() for path in sorted(found))

    def everything(self) -> str:
        """All that anybody printed."""
        logs = sorted((self.folder / "logs").glob("*/attempt_*/*/std*.log"))
        texts = [
            f"-- {path.relative_to(self.folder)}\n{path.read_text()}" for path in [self.folder / "torchrun", *logs]
        ]
        return re.sub(r"\n\n+", "\n", "\n".join([*map(str, self.ends), *texts]))


def job(
    folder: Path,
    ranks: int,
    argv: Sequence[str],
    *,
    doom: Doom | None = None,
    restarts: int = 0,
) -> Job:
    """Run grpo_fn.run with these arguments under torchrun. Fails when a process of it is left over."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "doom").write_bytes(pickle.dumps(doom))
    flags = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    flags += ["--log-dir", str(folder / "logs"), "--redirects", "3", "-m", "e2e.faults", str(folder)]
    serving()
    address = forkserver._forkserver._forkserver_address
    process = SERVER.Process(target=agent, args=([*flags, *argv], folder, address, os.getcwd()))
    process.start()
    process.join(PATIENCE)
    late = process.exitcode is None
    process.kill()
    process.join()
    over = Job(folder, process.exitcode)
    left = leftovers(folder, seconds=0.0 if late else 10.0)
    for one in left:
        one.kill()
    assert not late, f"torchrun is not over after {PATIENCE:.0f} s; {over.everything()}"
    assert not left, f"left over: {left}; {over.everything()}"
    return over


@cache
def undisturbed(models: Path, ranks: int) -> Path:
    """The folder of the small run on so many ranks, from beginning to end."""
    over = job(models / f"undisturbed-{ranks}", ranks, command(models, models / f"undisturbed-{ranks}" / "run"))
    assert over.code == 0, over.everything()
    return over.folder / "run"


def leftovers(folder: Path, *, seconds: float) -> list[psutil.Process]:
    """Processes of a job that are still there after so many seconds: its ranks, and whatever bears its mark."""
    until = time.monotonic() + seconds
    while (left := _alive(folder)) and time.monotonic() < until:
        psutil.wait_procs(left, timeout=until - time.monotonic())
    return left


def _alive(folder: Path) -> list[psutil.Process]:
    begun = folder / "begun"
    ranks = {json.loads(line)[0] for line in begun.read_text().splitlines()} if begun.exists() else set()
    found = []
    for one in psutil.process_iter():
        try:
            marked = one.pid in ranks or one.environ().get(MARK) == str(folder)
            if marked and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
