"""Ways to shut a program in, one signature: what is started, and what the harness inside is to do about it.

An isolation is a context manager that gives a `Cell`. `sandbox.strongest_isolation` picks the first of the first two
that works.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fn.shell.sandbox import seccomp

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
INSIDE_USER = "1000"
SPARE_USERS = 4096


class Limits(NamedTuple):
    """What one run may use. CPU time, memory and file size are each process's."""

    wall_seconds: float
    cpu_seconds: int
    memory_mb: int
    processes: int
    file_mb: int
    output_kb: int


class Cell(NamedTuple):
    """What stands before Python on the command line, what the harness is given, and the descriptors it is left with."""

    wrapper: tuple[str, ...]
    settings: dict[str, Any]
    descriptors: tuple[int, ...]


Isolation = Callable[[Limits], AbstractContextManager[Cell]]


@contextmanager
def bubblewrap(limits: Limits) -> Iterator[Cell]:
    """bwrap(1): new namespaces of every kind, a root folder of little, the filter on system calls.

    Raises RuntimeError where it is not installed.
    """
    if (bwrap := shutil.which("bwrap")) is None:
        raise RuntimeError("bubblewrap: got no bwrap on the PATH, wanted it installed: apt-get install bubblewrap")
    user = unused_user_id()
    wrapper = [bwrap, "--die-with-parent", "--new-session", "--as-pid-1"]
    wrapper += [f"--unshare-{space}" for space in ("pid", "net", "ipc", "uts", "cgroup-try")]
    if user is None:
        wrapper += ["--unshare-user", "--uid", INSIDE_USER, "--gid", INSIDE_USER]
    else:
        wrapper += ["--cap-drop", "ALL"]
        for power in ("SETUID", "SETGID", "KILL"):  # to make the program another user's, and to end it
            wrapper += ["--cap-add", f"CAP_{power}"]
    wrapper += _view_for_bwrap(limits.file_mb)
    reading, writing = os.pipe()  # the filter is read from here
    with open(reading, "rb"):
        with open(writing, "wb") as file:
            file.write(seccomp.program(os.uname().machine, alone=False))
        spare = 1 if user is None else 0  # the judge counts as well where the user is the same
        settings = _settings("enter_nothing", user, processes=limits.processes + spare)
        yield Cell((*wrapper, "--seccomp", f"{reading}", "--"), settings, (reading,))


@contextmanager
def namespaces(limits: Limits) -> Iterator[Cell]:
    """What bubblewrap does, from the kernel alone: wants Linux 5.12, and user namespaces unless this is root."""
    folders, links = read_only_folders()
    user = unused_user_id()
    spare = 2 if user is None else 0  # the judge, and who waits for it
    settings = _settings("enter_namespaces", user, processes=limits.processes + spare)
    settings |= {"folders": folders, "links": links, "filter": seccomp.program(os.uname().machine, alone=False)}
    yield Cell((), settings, ())


@contextmanager
def rlimits_only(limits: Limits) -> Iterator[Cell]:
    """rlimits and a stricter filter on system calls, for where nothing else can be had.

    No process can be started and no file written, whatever `processes` and `file_mb` say. But the program can read
    every file that its user can: a user of its own where this process is root's, else this one.
    """
    settings = _settings("enter_session", unused_user_id(), processes=None) | {"folder": "/", "far": True}
    yield Cell((), settings | {"filter": seccomp.program(os.uname().machine, alone=True)}, ())


def unused_user_id() -> int | None:
    """As root: a number for this process's runs alone, of a user whom nothing belongs to. Else None: stay the same.

    None as well for a root who has no other users, as in a user namespace of one: to the kernel that is no root.
    """
    if os.geteuid() != 0:
        return None
    first, _, count = map(int, Path("/proc/self/uid_map").read_text().splitlines()[-1].split())
    return first + min(count, 2**31) - 2 - os.getpid() % SPARE_USERS if count >= 65536 else None


def read_only_folders() -> tuple[list[str], list[tuple[str, str]]]:
    """The folders that a program sees, read-only: the system's, and Python's; and the symbolic links beside them."""
    paths = [path for path in SYSTEM_FOLDERS if os.path.exists(path)]
    links = [(path, os.readlink(path)) for path in paths if os.path.islink(path)]
    folders = [path for path in paths if not os.path.islink(path)]
    for prefix in map(os.path.realpath, (sys.base_prefix, sys.base_exec_prefix)):
        if not any(Path(prefix).is_relative_to(folder) for folder in folders):
            folders.append(prefix)
    return folders, links


def _settings(enter: str, user: int | None, *, processes: int | None) -> dict[str, Any]:
    return {"enter": enter, "user": user, "processes": processes, "filter": None, "folder": "/tmp", "far": False}


def _view_for_bwrap(file_mb: int) -> list[str]:
    folders, links = read_only_folders()
    words = []
    for folder in folders:
        for parent in reversed(Path(folder).parents[:-1]):  # bwrap would make them as closed as they are outside
            words += ["--perms", "0755", "--dir", f"{parent}"]
        words += ["--ro-bind", folder, folder]
    for path, target in links:
        words += ["--symlink", target, path]
    words += ["--dev", "/dev", "--perms", "1777", "--size", f"{file_mb * 2**20}", "--tmpfs", "/tmp"]
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
