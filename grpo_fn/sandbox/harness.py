"""What runs inside the sandbox: a judge, and the program in its own child process.

The judge reads how to be shut in, starts the child, and only then reads the tests and the secret: the child, which
begins as a copy of the judge, never had any of them in its memory. The child runs the program and answers the judge's
calls over two pipes. The asserts run in the judge, with a `rpc.Remote` for each function of the program's,
and the judge alone holds the pipe on which verdicts leave, each of them behind the secret.
"""

import os
import sys
import time

from grpo_fn.sandbox import confine
from grpo_fn.sandbox.rpc import PROGRAM_OPS, Channel, ChannelClosed, Peer, Unsendable, read_exactly, write_all

READY = "ready"
LONGEST_REASON = 400  # characters
LONGEST_OUTPUT = 4000
PATIENCE = 0.1  # seconds
SIGNALS = {24: ", over the CPU time", 25: ", over the file size"}


def main(settings, take):
    """Be the judge. `take()` reads the next thing from standard input."""
    getattr(confine, settings["enter"])(settings)
    report = Report(os.dup(1))
    os.dup2(2, 1)  # what a test prints is no verdict
    child, channel = start(settings)
    confine.confine_judge(settings)
    if (reply := channel.first()) != READY:
        finish(child, PATIENCE)
        raise SystemExit(reply)
    task = take()
    report.begin(task["secret"])
    channel.begin(settings["wall_seconds"], settings["output_kb"] * 1024)
    over = ""
    try:
        run_tests(task, channel, report)
    except ChannelClosed as ended:
        over = f"{ended}"
    left = finish(child, PATIENCE if channel.closed else 0.0)
    report.note((left or over) if channel.closed else (over or left))
    if not over and not left:
        report.say("proven")
    report.say("reason", report.reason)
    report.say("printed", channel.take_output()[-LONGEST_OUTPUT:])
    report.say("end")
    os._exit(0)


class Report:
    """The lines that leave the sandbox: the secret, a word, a text in hexadecimal digits, as it may be any."""

    def __init__(self, fd):
        self.fd, self.secret, self.reason = fd, "", ""

    def begin(self, secret):
        """From now on the caller outside knows that everything inside is as it should be."""
        self.secret = secret
        self.say("ready")

    def say(self, word, text=""):
        """Write one line."""
        write_all(self.fd, f"{self.secret} {word} {text.encode(errors='surrogatepass').hex()}\n".encode())

    def note(self, reason):
        """Keep the first reason there is for what did not pass."""
        self.reason = self.reason or reason[:LONGEST_REASON]


def run_tests(task, channel, report):
    """Load the program, run the setup, then every test, and report each test's verdict as it comes."""
    peer = Peer(channel.read, channel.write, {name: PROGRAM_OPS[name] for name in ("call", "hash")}, callable)
    space = {"__name__": "tests"}

    def fill_namespace():  # with what the tests need of the program's, then with what the setup makes of it
        found = peer.ask("load", task["sources"], task["names"])
        space.update((name, found[name]) for name in task["names"] if name in found)
        peer.classes += [found[name] for name in task["classes"] if name in found]
        exec_code(task["setup"], space)

    ready = test_holds(fill_namespace, channel, report)
    for test in task["tests"]:
        verdict = test_holds(lambda test=test: exec_code(test, space), channel, report) if ready else ready
        report.say("verdict", {True: "right", False: "wrong", None: "unscorable"}[verdict])


def exec_code(code, space):
    """Run a piece of the tests' code."""
    exec(compile(code, "tests.py", "exec"), space)


def test_holds(act, channel, report):
    """Does it run without an exception? None where the test's own objects cannot be sent to the program."""
    try:
        act()
        channel.check()
        return True
    except ChannelClosed:
        raise
    except Unsendable as error:
        report.note(f"the test cannot be put to a program: {error}")
        return None
    except BaseException as error:
        channel.check()
        report.note(describe_error(error))
        return False


def describe_error(error):
    """An exception in one line. It may hold an object of the program's, which says what it likes."""
    try:
        return f"{type(error).__name__}: {error}"
    except ChannelClosed:
        raise
    except BaseException:
        return type(error).__name__


def start(settings):
    """Start the child that will run the program; its number, and the judge's end of the pipes."""
    (down, requests), (replies, up), (output, printed) = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        be_program(settings, down, up, printed)
    for fd in (down, up, printed):
        os.close(fd)
    return child, Channel(requests, replies, output, settings["life"])


def be_program(settings, requests, replies, printed):
    """Be the child: shut in for good, say so, and serve. Does not return."""
    try:
        for fd, source in enumerate((os.open("/dev/null", os.O_RDONLY), printed, printed)):
            os.dup2(source, fd)
        close_all_but({0, 1, 2, requests, replies})
        confine.confine_program(settings)
    except BaseException as error:
        write_all(replies, f"{describe_error(error)}\n".encode())
        os._exit(1)
    try:
        write_all(replies, f"{READY}\n".encode())
        serve_calls(requests, replies)
    finally:
        os._exit(0)


def serve_calls(requests, replies):
    """Do what the judge asks, until it is gone."""
    os.environ.clear()
    sys.argv[:] = [""]

    def answer(data):
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:
                continue  # closed, or no stream at all: its own affair
        write_all(replies, data)

    ops = {**PROGRAM_OPS, "load": load_module}
    Peer(lambda size: read_exactly(requests, size), answer, ops, lambda value: True).serve()


def load_module(sources, names):
    """Run the sources in one module; those of the names that it has then."""
    module = type(sys)("solution")
    sys.modules["solution"] = module  # where dataclasses and pickle look for it
    for source in sources:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
    return {name: module.__dict__[name] for name in names if name in module.__dict__}


def close_all_but(kept):
    """Close every other descriptor."""
    before = -1
    for fd in (*sorted(kept), 4096):
        if fd > before + 1:  # of an empty range that begins at 0, Python 3.11 closes everything
            os.closerange(before + 1, fd)
        before = fd


def finish(child, patience):
    """End the program. Says how it had ended, or that it leaves processes behind; nothing where all is well.

    `patience` are the seconds that one whose pipes are closed is given to be gone altogether.
    """
    due = time.monotonic() + patience
    while not (gone := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < due:
        time.sleep(0.001)
    if gone[0]:
        code = os.waitstatus_to_exitcode(gone[1])
        died = f"the program died of signal {-code}{SIGNALS.get(-code, '')}"
        return died if code < 0 else f"the program ended by itself: exit status {code}"
    os.kill(child, confine.SIGKILL)
    os.waitpid(child, 0)
    return "the program leaves processes behind" if orphan_is_running() else ""


def orphan_is_running():
    """Is there a process whose parents are gone, and whose parent this one has become so?"""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
