"""What a model may write instead of f, which squares a number: programs that must not pass, and programs that must.

No imports: this is read by a Python that has none of the test dependencies as well.
"""

TESTS = ("assert f(2) == 4", "assert f(3) == 9", "assert f(10) == 100")


def sections(text):
    """Programs by their headings, lines that begin with `#: `."""
    parts = [part.partition("\n") for part in text.split("#: ")[1:]]
    return {heading: program.rstrip("\n") for heading, _, program in parts}


# Wrong, or right in a way that must not count.
WRONG = sections(r"""
#: nothing
#: a comment
# f
#: exits
import sys
sys.exit(0)
#: exits for good
import os
os._exit(0)
#: exits when asked
import sys
def f(x): sys.exit(0)
#: exits for good when asked
import os
def f(x): os._exit(0)
#: exits in a finaliser
class D:
    def __del__(self): raise SystemExit(0)
d = D()
del d
def f(x): return 1
#: exits at exit
import atexit, os
atexit.register(os._exit, 0)
def f(x): return 1
#: exits from a thread
import os, threading, time
threading.Timer(0.05, os._exit, [0]).start()
def f(x):
    time.sleep(1)
    return x * x
#: catches SystemExit
def f(x):
    try:
        raise SystemExit
    except BaseException:
        return 1
#: a type that equals everything
class Meta(type):
    __eq__ = lambda *_: True
    __hash__ = type.__hash__
class Everything(metaclass=Meta): pass
def f(x): return Everything
#: is close to everything
class Everything:
    def __getattr__(self, name): return lambda *_: True
    def __sub__(self, other): return 0
    __rsub__ = __abs__ = __sub__
    def __lt__(self, other): return True
    __gt__ = __contains__ = __eq__ = __lt__
def f(x): return Everything()
#: redefines what asserts use
import builtins
for name in ("AssertionError", "Exception", "BaseException"):
    setattr(builtins, name, type("Never", (Exception,), {}))
for name in ("exec", "compile", "eval", "all", "isinstance", "getattr"):
    setattr(builtins, name, lambda *_, **__: True)
def f(x): return 1
#: redefines what the harness uses
import sys
for name, module in list(sys.modules.items()):
    for thing in dir(module) if "sandbox" in name or name == "operator" else ():
        if not thing.startswith("__"):
            setattr(module, thing, lambda *_, **__: True)
def f(x): return 1
#: edits the frames that called it
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for name in [*frame.f_locals]: frame.f_globals[name] = True
        frame = frame.f_back
    return 1
#: traces
import sys, threading
def trace(frame, event, value):
    frame.f_globals["AssertionError"] = SystemExit
    return trace
sys.settrace(trace)
sys.setprofile(trace)
threading.settrace(trace)
def f(x): return 1
#: prints that it passes
def f(x):
    print("ready\nproven\n1.0\nOK")
    return 1
#: writes that it passes to every descriptor
import os
def f(x):
    for fd in range(64):
        try: os.write(fd, b" ready \n verdict 7269676874\n proven \n end \n")
        except OSError: pass
    return 1
#: writes noise to every descriptor
import os
def f(x):
    for fd in range(3, 64):
        try: os.write(fd, b"\xff" * 64)
        except OSError: pass
    return 1
#: closes every descriptor
import os
os.closerange(0, 64)
def f(x): return x * x
#: writes to the harness's files
import glob, os
for pattern in ("/proc/*/fd/*", "/proc/*/mem", "/tmp/*", "./*", "/dev/shm/*"):
    for path in glob.glob(pattern)[:500]:
        if not path.startswith(f"/proc/{os.getpid()}/"):
            try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b"proven")
            except OSError: pass
def f(x): return 1
#: forks and lets the child answer
import os
if os.fork(): os._exit(0)
def f(x): return x * x
#: leaves a daemon
import os, time
if not os.fork():
    os.setsid()
    if not os.fork(): time.sleep(600)
    os._exit(0)
os.wait()
def f(x): return x * x
#: leaves another program
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
def f(x): return x * x
#: floods
print("x" * 10**7)
def f(x): return x * x
#: floods when asked
import os
def f(x):
    while True: os.write(1, b"x" * 65536)
#: answers with too much
def f(x): return b"x" * 10**7
#: answers with something endless
def f(x): return iter(int, 1)
#: answers with itself
def f(x):
    value = []
    value.append(value)
    return value
#: answers too deep
def f(x):
    value = 4
    for _ in range(10**5): value = [value]
    return value
#: ends the iteration
def f(x): raise StopIteration
#: kills
import os
def f(x):
    for process in (os.getppid(), 1, 0, -1):
        try: os.kill(process, 9)
        except OSError: pass
    return 1
#: stops the judge
import os, signal
for process in (os.getppid(), 1):
    try: os.kill(process, signal.SIGSTOP)
    except OSError: pass
def f(x): return 1
#: crashes
import ctypes
ctypes.string_at(0)
#: sends
import socket
socket.create_connection(("192.0.2.1", 80), 1)
def f(x): return x * x
#: listens
import socket
socket.socket().bind(("127.0.0.1", 0))
def f(x): return x * x
#: makes a namespace
import ctypes
if ctypes.CDLL(None).unshare(0x10000000) != 0: raise OSError
def f(x): return x * x
#: mounts
import ctypes
if ctypes.CDLL(None).mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) != 0: raise OSError
def f(x): return x * x
#: allocates uncounted memory
import ctypes
libc = ctypes.CDLL(None)
if libc.shmget(0, 10**6, 0o1600) < 0 and libc.memfd_create(b"m", 0) < 0: raise OSError
def f(x): return x * x
""")
EVERYTHING = """
class Everything{}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 4
def f(x): return Everything()
"""
WRONG |= {
    f"a {base} that equals everything": EVERYTHING.format(f"({base})") for base in ("int", "list", "str", "object")
}
WRONG |= {"nests too deep to be parsed": "(" * 10**6, "is no text": "x = '\0'", "is half a character": "x = '\ud800'"}

# Wrong, and to be ended by a limit.
BOMBS = sections(r"""
#: forks
import os
while True:
    try: os.fork()
    except OSError: pass
#: forks when asked
import os
def f(x):
    while True:
        try: os.fork()
        except OSError: pass
#: threads
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except Exception: time.sleep(0.01)
#: allocates
kept = []
while True: kept.append(bytearray(10**7))
#: allocates and goes on
kept = []
while True:
    try: kept.append(bytearray(10**6))
    except MemoryError: pass
#: loops
def f(x):
    while True: pass
#: ignores signals and loops
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
#: sleeps
import time
def f(x): time.sleep(600)
#: recurses
import sys
sys.setrecursionlimit(10**9)
def f(x): return f(x)
#: counts to a power
def f(x): return len(str(9 ** 9 ** 9))
#: fills the disk
number = 0
while True:
    try: open(f"{number}", "wb").write(b"x" * 10**6)
    except OSError: number += 1
#: makes files
number = 0
while True:
    open(f"{number}", "wb").close()
    number += 1
#: makes folders
import os
while True:
    os.mkdir("d")
    os.chdir("d")
#: locks its folders
import os
os.makedirs("a/b")
os.chmod("a", 0)
while True: pass
""")

# Right, however odd.
RIGHT = sections(r"""
#: plain
def f(x): return x * x
#: with a main part
def f(x): return x * x
if __name__ == "__main__":
    raise SystemExit(f(int(input())))
#: with noise
import sys
print("hello", file=sys.stderr)
def f(x):
    print(x)
    return x * x
#: without a standard output
import os, sys
os.close(1)
sys.stdout = None
def f(x): return x * x
#: with imports
import collections, dataclasses, functools, heapq, itertools, math, random, re, statistics, string, typing
def f(x): return math.prod([x, x])
#: with an encoding to be looked for
def f(x): return len(("x" * x * x).encode("cp1252"))
#: a callable
class F:
    def __call__(self, x): return x * x
f = F()
#: a class
class f(int):
    def __new__(cls, x): return int.__new__(cls, x * x)
#: a cached function
import functools
@functools.lru_cache
def f(x): return x * x
#: with a dataclass
from __future__ import annotations
import dataclasses
@dataclasses.dataclass
class P:
    x: int
def f(x): return P(x).x * x
#: another kind of number
from fractions import Fraction
def f(x): return Fraction(x) * x
#: with a thread
import threading
def f(x):
    out = []
    thread = threading.Thread(target=lambda: out.append(x * x))
    thread.start()
    thread.join()
    return out[0]
#: that breaks its own surroundings
import builtins, os, sys
builtins.print = builtins.exec = None
os.environ["A"] = "b"
sys.modules.clear()
def f(x): return x * x
#: deeply recursive
import sys
sys.setrecursionlimit(20000)
def f(x, n=5000): return f(x, n - 1) if n else x * x
""")
RIGHT["with windows line ends"] = "def f(x):\r\n    return x * x\r\n"
