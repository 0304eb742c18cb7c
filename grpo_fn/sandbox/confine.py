"""What shuts a run in, from inside: namespaces, a root folder of its own, rlimits, a filter on system calls.

Runs inside the sandbox under a bare Python. `settings` come from `sandbox`: see `isolation.Cell`.
"""

import os
import resource
import sys

SYSTEM_DEVICES = ("null", "zero", "full", "random", "urandom")
OPEN_FILES = 64
SIGKILL = 9  # the module that knows imports enum, which takes as long as Python takes to start
INODES = 4096

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h
NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NET = 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, BIND, RECURSIVE, PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
DETACH = 0x2
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVILEGES = 1, 4, 22, 38
SECCOMP_FILTER = 2
MOUNT_SETATTR, HERE, WHOLE_TREE, READ_ONLY_NO_SETUID = 442, -100, 0x8000, 0x3  # the number is the same on every machine
CAPABILITY_VERSION, KILL_OTHERS = 0x20080522, 1 << 5


def enter_nothing(settings):
    """For what has been shut in already, by bubblewrap."""


def enter_session(settings):
    """For rlimits alone: nothing is shared less than it was."""
    die_with_parent()
    if os.getppid() != settings["parent"]:
        os._exit(1)


def enter_namespaces(settings):
    """New user (unless root), mount, pid, network, ipc, uts and cgroup namespaces, and a root folder of little.

    Returns in a process that is number 1 of its namespace: when it ends, the kernel ends everything else in there.
    """
    user, group = os.geteuid(), os.getegid()
    spaces = NEW_MOUNTS | NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NET
    libc_function("unshare", spaces | (NEW_USER if settings["user"] is None else 0))
    if settings["user"] is None:
        for name, line in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
            write_file(f"/proc/self/{name}", line)
    enter_session(settings)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    build_root(settings)


def build_root(settings):
    """A root folder with the system read-only, a few devices, and an empty scratch folder of limited size."""
    os.umask(0o022)
    mount(None, "/", None, RECURSIVE | PRIVATE, None)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID, "mode=0755,size=1m")
    os.mkdir("/tmp/old")
    libc_function("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for path in settings["folders"]:
        os.makedirs(path)
        mount("/old" + path, path, None, BIND | RECURSIVE, None)
    for path, target in settings["links"]:
        os.symlink(target, path)
    os.mkdir("/dev")
    for name in SYSTEM_DEVICES:
        write_file(f"/dev/{name}", "")
        mount(f"/old/dev/{name}", f"/dev/{name}", None, BIND, None)
    os.mkdir("/tmp")
    libc_function("umount2", b"/old", DETACH)
    os.rmdir("/old")
    attributes = READ_ONLY_NO_SETUID.to_bytes(8, "little") + bytes(24)
    libc_function("syscall", MOUNT_SETATTR, HERE, b"/", WHOLE_TREE, attributes, len(attributes))
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, f"mode=1777,size={settings['file_mb']}m,nr_inodes={INODES}")


def confine_program(settings):
    """The last steps of the process that runs the program, before it does."""
    os.setsid()
    os.chdir(settings["folder"])
    if settings["user"] is not None:
        if settings["far"]:
            keep_python_importable()
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)  # takes the capabilities as well
    megabytes = 2**20
    lower_limit(resource.RLIMIT_CPU, settings["cpu_seconds"], settings["cpu_seconds"] + 1)
    lower_limit(resource.RLIMIT_AS, settings["memory_mb"] * megabytes)
    lower_limit(resource.RLIMIT_FSIZE, settings["file_mb"] * megabytes)
    lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_MSGQUEUE, 0)
    if settings["processes"] is not None:
        lower_limit(resource.RLIMIT_NPROC, settings["processes"])
    if settings["filter"] is not None:
        keep_power(0)  # a user namespace of one's own comes with every capability
        die_with_parent()
        filter_calls(settings["filter"])


def confine_judge(settings):
    """The judge keeps no power either, and nothing of its user may look into it. It runs the tests' own code."""
    lower_limit(resource.RLIMIT_CPU, settings["cpu_seconds"] + 1)
    lower_limit(resource.RLIMIT_AS, settings["memory_mb"] * 2**20)
    lower_limit(resource.RLIMIT_CORE, 0)
    if settings["filter"] is not None:
        libc_function("prctl", SET_DUMPABLE, 0, 0, 0, 0)
        keep_power(0 if settings["user"] is None else KILL_OTHERS)  # the program is another user's then


def lower_limit(which, soft, hard=None):
    """Lower a limit, or leave what is lower already."""
    before = resource.getrlimit(which)[1]
    expected = (soft, soft if hard is None else hard)
    resource.setrlimit(which, expected if before == resource.RLIM_INFINITY else tuple(min(n, before) for n in expected))


def keep_python_importable():
    """Let Python be imported from by a user that may not go to where it is, through folders that are open already."""
    moved = {}
    for path in filter(os.path.isdir, sys.path):
        moved[path] = f"/proc/self/fd/{os.open(path, os.O_PATH | os.O_DIRECTORY)}"
    sys.path[:] = moved.values()
    for module in list(sys.modules.values()):
        for place, path in enumerate(getattr(module, "__path__", ())):
            folder, name = os.path.split(path)
            module.__path__[place] = os.path.join(moved.get(folder, folder), name)


def die_with_parent():
    """Be killed when the parent ends. Becoming another user undoes it."""
    libc_function("prctl", SET_DEATH_SIGNAL, SIGKILL, 0, 0, 0)


def keep_power(power):
    """Keep of the capabilities at most these."""
    kept = power.to_bytes(4, "little") * 2 + bytes(16)  # effective, permitted, inheritable; and the upper halves
    libc_function("capset", CAPABILITY_VERSION.to_bytes(4, "little") + bytes(4), kept)


def filter_calls(program):
    """Install a filter (see `seccomp`) for this process and all that it starts, for good."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    libc_function("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc_function("prctl", SET_SECCOMP, SECCOMP_FILTER, ctypes.byref(Program(len(program) // 8, program)), 0, 0)


def mount(source, target, kind, flags, options):
    """mount(2), of texts."""
    source, kind, options = (text if text is None else text.encode() for text in (source, kind, options))
    libc_function("mount", source, target.encode(), kind, flags, options)


def write_file(path, text):
    """Put text into a file."""
    with open(path, "w") as file:
        file.write(text)


def libc_function(name, *args):
    """A function of the C library's. Raises OSError that names it when it returns -1."""
    import ctypes  # here, as bubblewrap makes it unnecessary

    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*(ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
