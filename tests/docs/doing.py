"""Programs of ours, as a shell would start them, each in a process forked from the server that has torch already."""

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from docs.desk import Things
from e2e.running import SERVER, serve

from docs import desk

SECONDS = 180.0  # that a command may take
PATIENCE = 60.0  # seconds that a launcher may take


class Site(NamedTuple):
    """Where a program works, what it reads, and the files for what it prints."""

    folder: Path
    env: Mapping[str, str]
    read: Path
    out: Path
    err: Path


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Place(NamedTuple):
    """A page's desk."""

    folder: Path
    things: Things
    notes: Path  # what stand-ins were called with, and what programs print

    def site(self, env: Mapping[str, str], read: Path, out: Path) -> Site:
        env = desk.environment(self.things, self.notes) | env
        return Site(self.folder, env, read, out, self.notes / "err")


def well(done: Done, what: str, codes: Sequence[int] = (0,)) -> Done:
    """The same, when it ended as expected; else AssertionError with what it said."""
    assert done.code in codes, (
        f"{what}\nended with {done.code}, expected {codes}\n{done.err[-3000:]}\n{done.out[-1000:]}"
    )
    return done


def begun(argv: Sequence[str | Path], place: Place, env: Mapping[str, str]) -> Done:
    """A program in a new process, to its end, which has to be a good one."""
    done = subprocess.run(argv, cwd=place.folder, env=dict(env), capture_output=True, text=True, timeout=PATIENCE)
    return well(Done(done.returncode, done.stdout, done.stderr), " ".join(map(str, argv)))


def forked(how: Callable[[Sequence[str]], None], argv: Sequence[str], *, things: Things, site: Site) -> Done:
    """`how(argv)` in a process of its own, to its end."""
    serve()
    process = SERVER.Process(target=_work, args=(how, [*argv], things, site))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{' '.join(argv)}: not over after {SECONDS} s; it said {site.err.read_text()[-2000:]}")
    return Done(process.exitcode, site.out.read_text(errors="replace"), site.err.read_text(errors="replace"))


def _work(how: Callable[[Sequence[str]], None], argv: list[str], things: Things, site: Site) -> None:
    os.chdir(site.folder)
    torch.set_num_threads(torch.get_num_threads())  # makes torch's pool anew before two threads do so at once
    os.environ.clear()
    os.environ.update(site.env)
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (file, flags) in enumerate([(site.read, os.O_RDONLY), (site.out, new), (site.err, new)]):
        os.dup2(os.open(file, flags, 0o644), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode) for n, mode in enumerate("rww"))
    subprocess.Popen = within(subprocess.Popen, things)
    sys.path[:0] = [str(site.folder), str(things.bin / "packages")]
    try:
        how(argv)
    finally:
        sys.stdout.flush()


def start(argv: Sequence[str]) -> None:
    """As the interpreter starts a module, a program text or a file."""
    sys.argv = [*argv]
    if argv[0] == "-m":
        sys.argv = [*argv[1:]]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        exec(argv[1], {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")


def anew(argv: Sequence[str]) -> None:
    """As `start`, for a program that wants to import grpo_fn itself: jaxtyping checks what it sees imported."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("grpo_fn", "e2e", "docs", "experiments")]:
        del sys.modules[name]
    start(argv)


def parsed(argv: Sequence[str]) -> None:
    """The flags of a tool whose work is not for here, read by its own parser."""
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0])["flags"]().parse_args(argv[1:])


def program(name: str) -> ModuleType:
    """The module that `python -m` runs under that name."""
    module = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__") if hasattr(module, "__path__") else module


def all_parsed(commands: Sequence[str]) -> None:
    """The same of many, each a JSON list that begins with a file or with -m and a module."""
    for command in commands:
        argv = json.loads(command)
        print(*argv, file=sys.stderr)  # the last one is the one that was refused
        if argv[0] == "-m":
            program(argv[1]).flags().parse_args(argv[2:])
        else:
            parsed(argv)


def looked_at(argv: Sequence[str]) -> None:
    """TensorBoard reads the folder and says what is in it, in the place of serving it."""
    from tensorboard.main import run_main

    sys.argv = [*argv, "--inspect"]
    run_main()


def within(popen: type, things: Things) -> type:
    """subprocess.Popen, but runs of ours are forked from this process, and made small."""

    class Started(popen):
        def __new__(cls, command: Any, *args: Any, **how: Any) -> Any:
            if isinstance(command, list) and command[1:3] == ["-m", "grpo_fn.run"]:
                return Twin(command, small=desk.small_run(command[3:], things), **how)
            return super().__new__(cls)

    return Started


class Twin:
    """What is used of a Popen, of a run in a fork of this process."""

    def __init__(self, command: list[str], *, small: list[str], stdout: Any, **_: Any) -> None:
        self.args, self.returncode = command, None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            code = 1
            try:
                from grpo_fn import run

                code = run.main(small)
                sys.stdout.flush()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[None, None]:
        self.wait()
        return None, None

    def terminate(self) -> None:
        os.kill(self.pid, 15)

    def kill(self) -> None:
        os.kill(self.pid, 9)

    def __enter__(self) -> "Twin":
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()
