"""The sandbox: a program passes only if it answers right, and nothing that it does outlives or outgrows its run.

Every isolation that the machine has is put through the same; one that it lacks is said to be untested.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from hostile_programs import BOMBS, RIGHT, TESTS, WRONG

from grpo_fn import sandbox
from grpo_fn.core.problem import Completion, Problem, Program
from grpo_fn.rewards import code
from grpo_fn.sandbox import isolation as sandbox_isolation
from grpo_fn.shell.reward_workers.reward_pool import RewardPool

ISOLATIONS = {f.__name__: f for f in (sandbox.bubblewrap, sandbox.namespaces, sandbox.rlimits_only)}
ALWAYS = ["plain", "mounts", "makes a namespace", "allocates uncounted memory", "kills", "leaves a daemon", "sends"]
KNOBS = {"wall_seconds": 20.0, "cpu_seconds": 10, "memory_mb": 256, "processes": 8, "file_mb": 8, "output_kb": 64}


def isolation_named(name):
    if amiss := sandbox.available()[name]:
        pytest.skip(f"NOT TESTED here, as this machine does not have it: {name}: {amiss}")
    return ISOLATIONS[name]


def most():
    """The most that this machine has."""
    return next((ISOLATIONS[name] for name, amiss in sandbox.available().items() if not amiss), None) or pytest.skip(
        f"NOT TESTED here, as this machine has no isolation: {sandbox.available()}"
    )


@pytest.fixture(params=list(ISOLATIONS))
def isolation(request):
    return isolation_named(request.param)


@pytest.fixture(params=["bubblewrap", "namespaces"])
def walls(request):
    """An isolation that keeps more than the calls a program makes."""
    return isolation_named(request.param)


def run(isolation, source, *, tests=TESTS, setup="", names=("f",), **knobs):
    program = Program(sources=("", source), setup=setup, tests=tests, names=names)
    return sandbox.run_program(program, **{**KNOBS, **knobs}, isolation=isolation)


def printed(isolation, source, **knobs):
    """What a program prints, which has no tests to pass."""
    ran = run(isolation, source, tests=("assert f",), **knobs)
    assert ran.proven, ran
    return ran.printed.strip()


def reward(isolation, source):
    problem = Problem(0, "?", RIGHT["plain"], {"tests": TESTS, "setup": ""})
    runner = partial(sandbox.run_program, **KNOBS, isolation=isolation)
    completion = Completion(f"So:\n```python\n{source}\n```\n", 1, False)
    return code.all_tests_pass(problem, completion, run=runner)


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT.keys())
def test_right_programs_pass(isolation, source):
    ran = run(isolation, source)
    assert ran.proven, ran
    assert ran.verdicts == (True, True, True)
    assert ran.reason == ""


def no_pass(ran):
    return not (ran.proven and all(ran.verdicts))


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG.keys())
def test_wrong_programs_never_pass(source):
    ran = run(most(), source, wall_seconds=1.0)
    assert no_pass(ran), ran
    assert ran.reason


@pytest.mark.parametrize("title", ALWAYS[1:])
def test_programs_that_an_isolation_must_stop_pass_in_none(isolation, title):
    ran = run(isolation, WRONG[title], wall_seconds=1.0)
    assert no_pass(ran), ran
    assert ran.reason


def test_the_reward_is_1_with_proof_and_0_without(isolation):
    assert reward(isolation, RIGHT["plain"]) == 1.0
    assert reward(isolation, WRONG["exits"]) == 0.0
    assert reward(isolation, WRONG["leaves a daemon"]) == 0.0


class Traces:
    """Of what is started while it is around: processes by a word on their command line, files by one in the name."""

    def __init__(self, monkeypatch):
        self.word = f"run{uuid.uuid4().hex}"
        monkeypatch.setattr(sandbox, "PYTHON_FLAGS", (*sandbox.PYTHON_FLAGS, "-X", self.word))

    def processes(self):
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            if self.word in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def files(self):
        places = ["/tmp", "/var/tmp", "/dev/shm", os.getcwd(), str(Path.home())]
        return [path for place in places for path in Path(place).glob(f"*{self.word}*")]


@pytest.fixture
def traces(monkeypatch):
    return Traces(monkeypatch)


def soon(holds, seconds=5.0):
    due = time.monotonic() + seconds
    while not holds() and time.monotonic() < due:
        time.sleep(0.02)
    return holds()


def ends(isolation, source, traces):
    start = time.monotonic()
    ran = run(isolation, source, wall_seconds=1.0, cpu_seconds=1)
    assert no_pass(ran), ran
    assert time.monotonic() - start < 1.0 + sandbox.BACKSTOP_SECONDS
    assert traces.processes() == []


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_end_within_limits_and_leave_no_process(source, traces):
    ends(most(), source, traces)


@pytest.mark.slow
@pytest.mark.parametrize("source", [*BOMBS.values()][::3], ids=[*BOMBS][::3])
def test_bombs_end_in_every_isolation(isolation, source, traces):
    ends(isolation, source, traces)


LITTER = """
import os
for place in ("/tmp", "/var/tmp", "/dev/shm", ".", {here!r}, {home!r}):
    for name in ("{word}", "{word}-folder/{word}"):
        try:
            os.makedirs(os.path.dirname(os.path.join(place, name)), exist_ok=True)
            with open(os.path.join(place, name), "w") as file:
                file.write("x")
        except OSError:
            pass
def f(x): return x * x
"""


def test_no_file_is_left(isolation, traces):
    source = LITTER.format(here=os.getcwd(), home=str(Path.home()), word=traces.word)
    assert run(isolation, source).proven
    assert traces.files() == []
    assert traces.processes() == []


def test_every_process_of_a_fork_bomb_is_counted(walls):
    source = (
        "import os, time\nn = 1\ntry:\n    while n < 50:\n        if not os.fork(): time.sleep(60)\n        n += 1\n"
    )
    ran = run(walls, f"{source}except OSError: print(n)\ndef f(x): return x * x", processes=5)
    assert ran.printed.strip() == "5"
    assert ran.reason == "the program leaves processes behind"


OVER_OUTPUT = "over the output limit of 8 kB, printed and answered together"


@pytest.mark.parametrize(
    ("source", "knobs", "reason"),
    [
        ("def f(x):\n    while True: pass", {"cpu_seconds": 1}, "the program died of signal 24, over the CPU time"),
        ("import time\ndef f(x): time.sleep(60)", {"wall_seconds": 0.5}, "over the wall time of 0.5 s"),
        ("kept = bytearray(10**8)", {"memory_mb": 64}, "MemoryError: "),
        ("def f(x): return 'x' * 10**5", {"output_kb": 8}, OVER_OUTPUT),
        ("def f(x): print('x' * 10**5); return x * x", {"output_kb": 8}, OVER_OUTPUT),
    ],
)
def test_a_limit_says_which_it_was(isolation, source, knobs, reason):
    ran = run(isolation, source, **knobs)
    assert ran.reason == reason
    assert no_pass(ran)


def test_results_from_before_a_limit_count(isolation):
    ran = run(isolation, "def f(x):\n    while x == 10: pass\n    return x * x", wall_seconds=1.0)
    assert (ran.verdicts, ran.proven) == ((True, True, False), False)


def test_the_scratch_folder_is_private_empty_and_limited(walls):
    source = """
import os
print(os.getcwd() == "/tmp", os.listdir("."), end=" ")
def size(name, bytes):
    try:
        with open(name, "wb") as file:
            while bytes > 0:
                bytes -= file.write(b"x" * min(bytes, 2**16))
    except OSError as error:
        return error.errno
print(size("one", 2**20), size("large", 3 * 2**20), size("second", 2**20))
def f(x): return 1
"""
    assert printed(walls, source, file_mb=2) == "True [] None 28 28"
    assert printed(walls, source, file_mb=8) == "True [] None None None"


SEES = """
import os, sys
def readable(path):
    try:
        return bool(os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1))
    except OSError:
        return False
def writable():
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if folder.count("/") < 3 and os.path.join(folder, name) != "/proc"]
        try:
            open(os.path.join(folder, "w"), "w").close()
            yield folder
        except OSError:
            pass
print([path for path in {paths!r} if readable(path)], sorted(writable()), dict(os.environ), os.getpid() < 10)
expected = {{"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "dev", "tmp", sys.prefix.split("/")[1]}}
print(sorted({{*os.listdir("/")}} - expected) if os.getpid() < 10 else "", end=" ")
print([path for path in ("/", "/usr", "/dev", sys.prefix, "/tmp") if not os.statvfs(path).f_flag & os.ST_RDONLY])
def f(x): return 1
"""


def test_the_program_sees_the_system_read_only_and_nothing_of_anybody(walls, tmp_path):
    (tmp_path / "mine").write_text("x")
    paths = [str(tmp_path / "mine"), __file__, str(Path.home() / ".bashrc"), "/etc/passwd", "/proc/1", "/sys", "/home"]
    assert printed(walls, SEES.format(paths=paths)) == "[] ['/tmp'] {} True\n[] ['/tmp']"


def test_rlimits_alone_write_nothing_anywhere():
    isolation = isolation_named("rlimits_only")
    source = SEES.replace('os.walk("/")', 'os.walk("/tmp")').format(paths=[])
    assert printed(isolation, source).startswith("[] [] {} False")


def test_the_program_runs_as_a_user_without_capabilities(isolation):
    source = """
import ctypes, os
data = (ctypes.c_uint32 * 6)()
ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
try:
    os.setuid(0)
except OSError:
    print(os.getuid() != 0, data[0], data[1], data[3], data[4])
def f(x): return 1
"""
    assert printed(isolation, source) == "True 0 0 0 0"


LOOKS = """
import ctypes, gc, sys
mark = "".join(["421", "3987", "65"])
def texts(thing):
    yield from [*thing.keys(), *thing.values()] if isinstance(thing, dict) else thing
def found():
    frame = sys._getframe()
    while frame:
        if frame.f_globals is not globals() and mark in repr(frame.f_locals):
            yield "frame"
        frame = frame.f_back
    for thing in gc.get_objects():
        if type(thing) in (dict, list, tuple, set, frozenset):
            yield from [text for text in texts(thing) if type(text) is str and mark in text and text != mark]
    try:
        maps = open("/proc/self/maps").readlines()
    except OSError:
        return
    for line in maps:
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if line.split()[1][0] == "r" and "[v" not in line:
            data = ctypes.string_at(first, last - first)
            place = data.find(mark.encode())
            while place >= 0:
                if data[place + len(mark) : place + len(mark) + 1] == b"!":
                    yield line
                place = data.find(mark.encode(), place + 1)
def f(x):
    print("found", list(found()))
    return x
"""


def test_neither_tests_nor_what_they_expect_are_in_the_programs_memory(isolation):
    shown = run(isolation, LOOKS, tests=('assert f("421398765!") and False',))  # what looks for them would find them
    assert "421398765!" in shown.printed
    ran = run(isolation, LOOKS, tests=('assert f(1) == 1, "421398765!"', 'assert f(1) == "421398765!"'))
    assert ran.verdicts == (True, False)
    assert ran.printed.split() == ["found", "[]"] * 2


def test_tests_may_use_the_programs_classes_and_functions_of_their_own(isolation):
    source = "class Node:\n    def __init__(self, n): self.n, self.next = n, None\n"
    source += (
        "def total(node): return node.n + total(node.next) if node else 0\ndef each(f, xs): return [f(x) for x in xs]"
    )
    ran = run(
        isolation,
        source,
        setup="root = Node(1)\nroot.next = Node(2)\ndef double(x): return 2 * x",
        tests=("assert total(root) == 3", "assert each(double, [1, 2]) == [2, 4]", "assert each(object(), []) == []"),
        names=("Node", "total", "each"),
    )
    assert (ran.verdicts, ran.proven) == ((True, True, None), True)


BOX = """
class Box:
    def __init__(self, n): self.n, self.open = n, False
    def __repr__(self): return f"Box({self.n})"
    def __contains__(self, n): return n == self.n
    def __eq__(self, other): return self.n == other.n
    def __hash__(self): return hash(self.n)
    def __neg__(self): return Box(-self.n)
    def __abs__(self): return Box(abs(self.n))
    def __delitem__(self, n): self.n -= n
    def __enter__(self): self.open = True; return self
    def __exit__(self, kind, error, trace): self.open = False; self.error = repr(error); return kind is KeyError
"""
OF_A_BOX = {
    "assert repr(Box(1)) == f'{Box(1)!r}' == 'Box(1)'": True,
    "assert 1 in Box(1) and 2 not in Box(1)": True,
    "assert hash(Box(1)) == hash(Box(1)) and {Box(1): 2}[Box(1)] == 2 and len({Box(1), Box(1), Box(2)}) == 2": True,
    "assert -Box(1) == Box(-1) and abs(Box(-1)) == Box(1)": True,
    "b = Box(3)\ndel b[1]\ndel b.open\nassert b.n == 2 and not hasattr(b, 'open')": True,
    "with Box(1) as b:\n    assert b.open\nassert not b.open and b.error == 'None'": True,
    "with Box(1) as b:\n    raise KeyError('k')\nassert 'KeyError' in b.error": True,
    "with Box(1):\n    raise ValueError('v')": False,
    "import copy\nb = Box(1)\nc, d = copy.copy(b), copy.deepcopy(b)\nc.n = d.n = 5\nassert b.n == 1 and c == d": True,
    "class Small(Box):\n    pass\nassert Small(1).n == 1": None,
}


def test_a_class_is_judged_by_what_its_objects_can_do_and_one_derived_from_it_is_unscorable():
    ran = sandbox.run_program(Program(("", BOX), "", tuple(OF_A_BOX), ("Box",), ("Box",)), **KNOBS, isolation=most())
    assert dict(zip(OF_A_BOX, ran.verdicts, strict=True)) == OF_A_BOX
    assert ran.proven


def test_nothing_is_in_an_answer_that_holds_everything():
    source = "class f:\n    def __init__(self, n): pass\n    def __contains__(self, n): return True\n"
    run = partial(sandbox.run_program, **KNOBS, isolation=most())
    problem = Problem(0, "?", "def f(n): return [n]", {"tests": ["assert 5 in f(5)"]})
    assert code.all_tests_pass(problem, Completion(source, 1, False), run=run) == 0.0
    assert code.all_tests_pass(problem, Completion(problem.answer, 1, False), run=run) == 1.0
    boxes = Problem(0, "?", "", {"tests": ["assert 5 in Box(5)"]})
    assert code.all_tests_pass(boxes, Completion(BOX, 1, False), run=run) == 1.0


def test_a_test_that_catches_everything_does_not_hide_a_program_that_is_gone(isolation):
    test = "try:\n    f(1)\nexcept BaseException:\n    pass"
    ran = run(isolation, WRONG["exits for good when asked"], tests=(test, "assert True"))
    assert (ran.verdicts, ran.proven) == ((False, False), False)


OFFERS = """
import sys
wire = sys.modules["grpo_fn.sandbox.rpc"]
honest = wire.encode
def encode(message, refer):
    if message[0] == "value" and type(message[1]) is dict and "f" in message[1]:
        message = ("value", {**message[1], "sorted": lambda _: [1, 2], "g": f, "__builtins__": {}}, message[2])
    return honest(message, refer)
wire.encode = encode
def f(x): return x
"""


def test_the_program_brings_no_names_that_it_was_not_asked_for(isolation):
    ran = run(isolation, OFFERS, tests=("assert f(1) == 1", "assert sorted([f(2)]) == [1, 2]", "assert g(1) == 1"))
    assert (ran.verdicts, ran.proven) == ((True, False, False), True)


def test_a_setup_that_fails_fails_every_test(isolation):
    ran = run(isolation, RIGHT["plain"], setup="root = Missing()")
    assert (ran.verdicts, ran.proven) == ((False,) * 3, True)
    assert "Missing" in ran.reason


DAEMON_AND_SLEEP = """
import os, time
try:
    if not os.fork(): os.setsid()
except OSError:
    pass
while True: time.sleep(1)
"""
SLEEPER = """
import sys
from test_sandbox import DAEMON_AND_SLEEP, ISOLATIONS, run, sandbox
sandbox.PYTHON_FLAGS = (*sandbox.PYTHON_FLAGS, "-X", sys.argv[2])
print("up", flush=True)
run(ISOLATIONS[sys.argv[1]], DAEMON_AND_SLEEP, wall_seconds=60.0)
"""


def killed_after(isolation, delay, traces):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SLEEPER, isolation.__name__, traces.word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout.readline() == b"up\n"
        if delay is None:
            assert soon(lambda: len(traces.processes()) >= 3, 20.0)  # the parent itself, the judge, the program
        else:
            time.sleep(delay)
        parent.send_signal(signal.SIGKILL)
    assert soon(lambda: not traces.processes()), traces.processes()


@pytest.mark.parametrize("delay", [None, 0.0, 0.02])
def test_everything_dies_with_the_process_that_started_it(isolation, delay, traces):
    killed_after(isolation, delay, traces)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.004 * step for step in range(1, 40, 6)])
def test_everything_dies_with_it_at_any_moment(isolation, delay, traces):
    killed_after(isolation, delay, traces)


@pytest.mark.slow
def test_a_reward_worker_that_is_late_takes_its_program_with_it():
    runner = partial(sandbox.run_program, **{**KNOBS, "wall_seconds": 60.0}, isolation=most())
    scorer = pickle.loads(pickle.dumps(partial(code.all_tests_pass, run=runner)))
    problem = Problem(0, "?", "", {"tests": TESTS, "setup": ""})
    texts = [RIGHT["plain"], BOMBS["sleeps"], WRONG["exits"], RIGHT["a callable"]]
    seen = set()

    def watch():
        while not done.wait(0.1):
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    seen.update(worker.children(recursive=True))

    done = threading.Event()
    before = set(psutil.Process().children())
    with RewardPool(workers=1, timeout_per_completion=6.0, memory_mb=1024, stop_on_error=True) as pool:
        workers = set(psutil.Process().children()) - before
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            scores = pool.score(scorer, [problem] * 4, [Completion(text, 1, False) for text in texts])
        finally:
            done.set()
            watcher.join()
    assert scores == [1.0, None, 0.0, 1.0]
    assert pool.counts["timeouts"] == 1
    assert len(seen) >= 2
    assert psutil.wait_procs(seen, timeout=5)[1] == []


VERDICTS = ["verdict 7269676874", "verdict 77726f6e67", "proven "]


@pytest.mark.parametrize(
    ("lines", "verdicts", "proven"),
    [
        (VERDICTS, (True, False), True),
        (VERDICTS[:2], (True, False), False),
        (VERDICTS[:1], (True, False), False),
        ([VERDICTS[0], VERDICTS[2]], (True, False), False),
        (VERDICTS[2:], (False, False), False),
    ],
)
def test_only_lines_behind_the_secret_count(lines, verdicts, proven):
    said = "".join(f"s3cret {line}\n" for line in ["ready ", *lines])
    forged = "".join(f"{word} {line}\n" for word in ("", "secret", "ready") for line in VERDICTS)
    ran = sandbox._parse_report(f"{forged}{said}{forged}", "", "s3cret", 2, 0.0)
    assert (ran.verdicts, ran.proven) == (verdicts, proven)
    with pytest.raises(RuntimeError, match="expected the harness to start"):
        sandbox._parse_report(forged, "", "s3cret", 2, 0.0)


def test_a_limit_that_is_none_is_refused(isolation):
    for knob in KNOBS:
        for value in (type(KNOBS[knob])(0), type(KNOBS[knob])(-1)):
            with pytest.raises(ValueError, match=f"sandbox {knob}: got {value}, expected more than 0"):
                run(isolation, RIGHT["plain"], **{knob: value})


def test_a_harness_that_does_not_start_says_nothing_about_the_program(isolation, monkeypatch):
    monkeypatch.setattr(sandbox, "BOOT", "raise SystemExit('no such thing')")
    with pytest.raises(RuntimeError, match="got 'no such thing', expected the harness to start"):
        run(isolation, RIGHT["plain"])


def test_a_check_before_expensive_work_says_whether_it_would(isolation):
    sandbox.check_runner(partial(sandbox.run_program, **KNOBS, isolation=isolation))
    with pytest.raises(RuntimeError, match=r"expected (the harness to start|the right answer accepted)"):
        sandbox.check_runner(partial(sandbox.run_program, **{**KNOBS, "memory_mb": 1}, isolation=isolation))
    with pytest.raises(RuntimeError, match="the wrong one rejected"):
        sandbox.check_runner(partial(run_nothing, **KNOBS))


def run_nothing(program, **knobs):
    return run(ISOLATIONS["rlimits_only"], "def f(x): return x * x")


@pytest.fixture
def forgotten():
    """What was found out about this machine is found out anew, before and after."""
    sandbox._amiss.cache_clear()
    yield
    sandbox._amiss.cache_clear()


def test_without_bubblewrap_it_is_namespaces_and_without_both_it_is_refused(monkeypatch, forgotten):
    isolation_named("namespaces")
    sandbox._amiss.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "apt-get install bubblewrap" in sandbox.available()["bubblewrap"]
    with sandbox.strongest_isolation(sandbox.ROOMY) as cell:
        assert cell.settings["enter"] == "enter_namespaces"
    assert run(sandbox.strongest_isolation, RIGHT["plain"]).proven

    sandbox._amiss.cache_clear()
    monkeypatch.setattr(sandbox_isolation, "SYSTEM_FOLDERS", ("/proc/self",))  # in which no Python starts
    with pytest.raises(RuntimeError, match=r"(?s)bubblewrap .*namespaces .*expected one of them.*rlimits_only"):
        run(sandbox.strongest_isolation, RIGHT["plain"])


ORDINARY = """
import sys
sys.path[:0] = [{project!r}, {here!r}]
sys.dont_write_bytecode = True
from hostile_programs import RIGHT, TESTS, WRONG
from grpo_fn.core.problem import Program
from grpo_fn import sandbox
def passes(isolation, source):
    ran = sandbox.run_program(Program((source,), "", TESTS, ("f",)), **{knobs!r}, isolation=isolation)
    return ran.proven and all(ran.verdicts)
for name, amiss in sandbox.available().items():
    if amiss:
        print("LACKS", name, amiss)
        continue
    isolation = getattr(sandbox, name)
    print("HAS", name)
    for programs, right in ((WRONG, False), (RIGHT, True)):
        for title in [*list(programs)[::{every}], *[title for title in {always!r} if title in programs]]:
            source = programs[title]
            if passes(isolation, source) is not right:
                print("NOT SO:", name, title)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are an ordinary user's already")
@pytest.mark.parametrize("every", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_an_ordinary_user_gets_the_same_verdicts(every):
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not os.path.exists(python):
        pytest.skip(f"NOT TESTED as an ordinary user: no {python}, which such a user could start")
    root = Path(__file__).parents[2]
    text = ORDINARY.format(
        project=str(root),
        here=str(Path(__file__).parent),
        knobs=KNOBS | {"wall_seconds": 3.0},
        every=every,
        always=ALWAYS,
    )
    said = subprocess.run(
        [python, "-"], input=text, text=True, capture_output=True, user=65534, group=65534, extra_groups=[]
    )
    assert said.returncode == 0, said.stderr
    lines = said.stdout.split("\n")
    assert [line for line in lines if line.startswith("NOT SO")] == []
    assert "HAS rlimits_only" in lines
