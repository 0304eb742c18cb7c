"""Ways to shut a program in, one signature: what is started, and what the harness inside is to do about it.

An isolation is a context manager that gives a `Cell`. `sandbox.strongest_isolation` picks the first of the first two
that works.
"""

import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
        raise RuntimeError("bubblewrap: got no bwrap on the PATH, expected it installed: apt-get install bubblewrap")
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
            file.write(syscall_filter(os.uname().machine, alone=False))
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
    settings |= {"folders": folders, "links": links, "filter": syscall_filter(os.uname().machine, alone=False)}
    yield Cell((), settings, ())


@contextmanager
def rlimits_only(limits: Limits) -> Iterator[Cell]:
    """rlimits and a stricter filter on system calls, for where nothing else can be had.

    No process can be started and no file written, whatever `processes` and `file_mb` say. But the program can read
    every file that its user can: a user of its own where this process is root's, else this one.
    """
    settings = _settings("enter_session", unused_user_id(), processes=None) | {"folder": "/", "far": True}
    yield Cell((), settings | {"filter": syscall_filter(os.uname().machine, alone=True)}, ())


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


# -- the system calls that a program may not make, as a classic BPF program for seccomp(2)


# linux/audit.h; asm/unistd_64.h and asm-generic/unistd.h. None: that machine has no such call.
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = {
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),
    "setns": (308, 268),
}
DENIED_ALONE = {
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "creat": (85, None),
    "truncate": (76, 45),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
CLONE, OPEN, OPENAT, PRLIMIT = (56, 220), (2, None), (257, 56), (302, 261)
# What they do is written in memory, where a filter sees nothing; the C library does without them.
OPAQUE = {"clone3": (435, 435), "openat2": (437, 437)}
UNKNOWN = 452  # the first system call of Linux 6.6: what is newer, and x86-64's other ABI, does not exist in there

NEW_NAMESPACES, NEW_THREAD = 0x7E020000, 0x00010000  # linux/sched.h: every CLONE_NEW flag that clone(2) knows
WRITING = 0o1 | 0o2 | 0o100 | 0o1000  # asm-generic/fcntl.h: for writing, or for both, create, truncate
ANYTHING = 0xFFFFFFFF

NUMBER, MACHINE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; an argument's low half is its first
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h
EPERM, ENOSYS = 1, 38

Step = tuple[int, int, int, int]  # what, with which value, how many steps to skip if so, if not


def syscall_filter(machine: str, *, alone: bool) -> bytes:
    """The filter for a machine (`os.uname().machine`); `alone`: also for where nothing else keeps files and processes.

    Raises ValueError for a machine whose numbers are not known here.
    """
    if machine not in MACHINES:
        raise ValueError(f"system call filter: got a {machine} machine, expected {' or '.join(MACHINES)}")
    column = list(MACHINES).index(machine)
    steps = [(LOAD, MACHINE, 0, 0), (EQUAL, MACHINES[machine], 1, 0), (RETURN, KILL, 0, 0)]
    steps += [(LOAD, NUMBER, 0, 0), (AT_LEAST, UNKNOWN, 0, 1), _fail(ENOSYS)]
    for numbers in OPAQUE.values():
        steps += _when(numbers[column], [_fail(ENOSYS)])
    for numbers in [*DENIED.values(), *(DENIED_ALONE.values() if alone else ())]:
        steps += _when(numbers[column], [_fail(EPERM)])
    clone = _unless(0, NEW_NAMESPACES)
    if alone:
        clone += [(ANY_BIT, NEW_THREAD, 1, 0), _fail(EPERM)]
        steps += _when(OPEN[column], [*_unless(1, WRITING), (RETURN, ALLOW, 0, 0)])
        steps += _when(OPENAT[column], [*_unless(2, WRITING), (RETURN, ALLOW, 0, 0)])
        steps += _when(PRLIMIT[column], [*_unless(0, ANYTHING), (RETURN, ALLOW, 0, 0)])  # 0 is oneself
    steps += [*_when(CLONE[column], clone), (RETURN, ALLOW, 0, 0)]
    return b"".join(struct.pack("=HBBI", what, yes, no, value) for what, value, yes, no in steps)


def _when(number: int | None, steps: list[Step]) -> list[Step]:
    """Steps for one system call; they have to end, or else be the last, as they may forget its number."""
    return [] if number is None else [(EQUAL, number, 0, len(steps)), *steps]


def _unless(argument: int, bits: int) -> list[Step]:
    """Fail when the argument has any of these bits."""
    return [(LOAD, ARGUMENTS + 8 * argument, 0, 0), (ANY_BIT, bits, 0, 1), _fail(EPERM)]


def _fail(number: int) -> Step:
    return (RETURN, FAIL | number, 0, 0)
