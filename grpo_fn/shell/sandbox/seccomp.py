"""The system calls that a program in the sandbox may not make, as a classic BPF program for seccomp(2).

It says no where neither namespaces nor rlimits do: no sockets; no way into the memory of another process; no kernel
memory that no limit counts; no namespaces of one's own, in which mounts would be limited by nothing. Where a program
shares the machine's processes and files with everybody it may not change any of them either: no process started or
signalled, as what it leaves behind could not be found again, and no file written, made, moved or removed.
"""

import struct

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


def program(machine: str, *, alone: bool) -> bytes:
    """The filter for a machine (`os.uname().machine`); `alone`: also for where nothing else keeps files and processes.

    Raises ValueError for a machine whose numbers are not known here.
    """
    if machine not in MACHINES:
        raise ValueError(f"system call filter: got a {machine} machine, wanted {' or '.join(MACHINES)}")
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
