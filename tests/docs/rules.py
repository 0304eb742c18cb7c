"""What is done with a program that a page names: RULES has ours, FOREIGN the others. One in neither is an error."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from docs.doing import PATIENCE, Place, Site, begun, forked, well
from docs.foreign import FOREIGN, model_folder, named, pip
from docs.launchers import agent_arguments, checks, found, ranks, server, submitted
from docs.pages import ROOT, pipelines

from docs import desk, doing

# Flags that make a tool small, after the page's, which they win over. No tool is without a line.
TOOLS = {
    "tools/tables": ["--check"],
    "tools/export.py": [],
    "tools/import_config": [],
    "tools/make_tiny_model.py": [],
    "experiments/vmap_sweep/idea.py": ["--policies", "2", "--rows", "2", "--repeats", "1"],
}
# Tools whose work is not for here: their own parser reads the flags.
PARSED = {
    "tools/bench": "measures for minutes, some of it in programs of its own; tests/tools/test_bench.py runs it",
    "tools/device_check": "wants a GPU; a test of its own runs its small form",
    "tools/resume_check.py": "starts runs of its own; tests/tools/test_resume_check.py runs it",
}
BROWSER = ("tests/browser/screenshot.py", "tests/browser/tensorboard_page.py")


# -- programs of ours


def do(said: str, place: Place, env: Mapping[str, str] | None = None) -> None:
    """Do all that a shell would do for this line, with this in its environment. Raises AssertionError."""
    for pipeline in pipelines(said):
        read = Path("/dev/null")
        for number, stage in enumerate(pipeline):
            if stage.read not in ("", "|"):
                read = place.folder / stage.read
            out = place.folder / stage.write if stage.write not in ("", "|") else place.notes / f"out{number}"
            out.touch()
            one(stage.argv, place, place.site({**(env or {}), **stage.env}, read, out))
            read = out


def one(argv: Sequence[str], place: Place, site: Site) -> None:
    """One program."""
    rule = RULES.get(argv[0].rsplit("/", 1)[-1]) or RULES.get(Path(argv[0]).suffix)
    assert rule is not None, f"no rule for {argv[0]}: tests/docs wants one in rules.RULES or foreign.FOREIGN"
    rule(argv, place, site)


def python(argv: Sequence[str], place: Place, site: Site) -> None:
    """A module, a text or a file."""
    if argv[1:3] == ["-m", "venv"]:
        named(argv, place, site)
    elif argv[1] == "-m":
        MODULES.get(argv[2], unknown)(argv[1:], place, site)
    elif argv[1] == "-c":
        well(forked(doing.start, argv[1:], things=place.things, site=site), argv[2])
    else:
        script(argv[1:], place, site)


def unknown(argv: Sequence[str], place: Place, site: Site) -> None:
    raise AssertionError(f"no rule for python {' '.join(argv)}: tests/docs/rules.py wants one in MODULES")


def ours(small: Callable[[list[str], Place], list[str]], codes: Sequence[int] = (0,)) -> Callable:
    """A module of grpo_fn; one that is only named, without what it cannot do without, is asked for its flags."""

    def rule(argv: Sequence[str], place: Place, site: Site) -> None:
        given = small(desk.filled(argv[2:], place.things), place) if argv[2:] else ["--help"]
        begun = [*argv[:2], *(given if argv[2:] or argv[1] != "grpo_fn.doctor" else [])]
        done = well(forked(doing.start, begun, things=place.things, site=site), " ".join(begun), codes)
        assert done.out or site.out.name not in ("out0", "out1"), f"{' '.join(begun)} printed nothing"
        if argv[1] == "grpo_fn.run" and not {"--dry_run", "--help"} & {*begun}:
            finished(begun, place)

    return rule


def finished(argv: Sequence[str], place: Place) -> None:
    """The run has come to its end in the folder that was named."""
    if "--run_dir" in argv:
        folder = place.folder / argv[argv.index("--run_dir") + 1]
        assert (folder / "summary.json").exists(), f"no end of a run in {folder}"


def as_it_is(argv: list[str], place: Place) -> list[str]:
    return argv


def dry_run(argv: list[str], place: Place) -> list[str]:
    return [*argv, "--dry_run"]


def one_worker(argv: list[str], place: Place) -> list[str]:
    return [*argv, "--workers", "1"]


def few_problems(argv: list[str], place: Place) -> list[str]:
    return [*one_worker(argv, place), "--problems", "4", "--pulls", "0"]


def small_eval(argv: list[str], place: Place) -> list[str]:
    """The tokens and problems of e2e/small.gin, or of SMALL, over those of the page."""
    files = [word for flag, word in pairwise(argv) if flag == "--gin_file"]
    if "run/arithmetic.gin" in files:
        return desk.with_files(["--gin_file", str(desk.SMALL_RUN)], argv)
    if any(name.startswith("eval/") and name != "eval/samples.gin" for name in files):
        bound = {
            name: desk.SMALL[name] for name in ("EVAL_PROBLEMS", "MAX_NEW_TOKENS", "reward_pool.RewardPool.workers")
        }
        return [part for name, value in bound.items() for part in ("--gin_param", f"{name}={value}")] + argv
    return argv


def script(argv: Sequence[str], place: Place, site: Site) -> None:
    """A tool, made small; its flags alone, where its work is not for here."""
    name, *given = argv
    assert (place.folder / name).exists(), f"got {name}, expected a file that there is"
    given = desk.filled(given, place.things)
    if name == "tools/launch/agent.py":
        python(["python", *ranks(given)], place, site)
    elif name in PARSED:
        flags_alone([name, *given], place, site)
    elif "/" not in name and not (place.folder / name).is_symlink():  # the page's own
        well(forked(doing.start, [name, *given], things=place.things, site=site), name)
    elif name in BROWSER:
        without_a_browser([name, *given], place, site)
    else:
        assert name in TOOLS, f"no rule for {name}: tests/docs/rules.py wants a line in TOOLS or PARSED"
        small = [*given, *TOOLS[name]]
        well(forked(doing.start, [name, *small], things=place.things, site=site), " ".join([name, *small]))


def flags_alone(argv: Sequence[str], place: Place, site: Site) -> None:
    """The tool's own parser reads them."""
    well(forked(doing.parsed, argv, things=place.things, site=site), " ".join(argv))


def without_a_browser(argv: Sequence[str], place: Place, site: Site) -> None:
    """tests/browser looks at pages in Chromium; here it has none, which it says when its flags have been read."""
    bare = site._replace(env={**site.env, "PATH": str(place.notes)})
    done = well(forked(doing.start, argv, things=place.things, site=bare), " ".join(argv), (1, 2))
    assert "got no browser, expected" in done.err, done.err


# -- other programs of ours


def launched(argv: Sequence[str], place: Place, site: Site) -> None:
    """A launcher, and by one process what its ranks would do."""
    path = found(argv[0], place)
    given = desk.filled(argv[1:], place.things)
    if path.name == "check.sh":
        checks(path, given, place)
    elif path.name == "vllm_server.sh":
        server(path, given, place, site.env)
    else:
        python(["python", *agent_arguments([str(path), *given], place, site.env)], place, site)


def torchrun(argv: Sequence[str], place: Place, site: Site) -> None:
    python(["python", *ranks(argv[1:])], place, site)


def sbatch(argv: Sequence[str], place: Place, site: Site) -> None:
    given = [argv[0], *desk.filled(argv[1:], place.things)]
    python(["python", *submitted(given, place, site.env)], place, site)


def srun(argv: Sequence[str], place: Place, site: Site) -> None:
    """What follows srun's own options is done once."""
    at = next(i for i, word in enumerate(argv[1:], start=1) if not word.startswith("-"))
    one(argv[at:], place, site)


def make(argv: Sequence[str], place: Place, site: Site) -> None:
    """make says what it would do, and all of that is done by these rules."""
    said = begun(["make", "-n", "--no-print-directory", *argv[1:]], place, site.env).out  # also beneath another make
    lines = said.replace("\\\n", " ").splitlines()
    assert len(lines) > 1
    for line in lines:
        do(line, place, site.env)


def pytest_(argv: Sequence[str], place: Place, site: Site) -> None:
    """Flags, profile, marks and paths: some tests are collected with them, none is run. They are the suite's own.

    Those of an experiment are imported by tests of the suite, which runs them.
    """
    flags = [word for word in argv[1:] if not word.startswith(("tests/", "experiments/"))]
    paths = [word for word in argv[1:] if word not in flags]
    assert all((ROOT / path.partition("::")[0]).exists() for path in paths), paths
    for i, word in enumerate(flags):
        if word == "-n":
            flags[i + 1] = "0"
    small = ["-m", "pytest", *flags, "--collect-only", "-q", "--strict-markers", "-p", "no:cacheprovider"]
    if not any(path.startswith("experiments/") for path in paths):
        paths = ["tests/sandbox/test_sandbox.py" if "-m" in flags else "tests/docs/test_versions.py"]
    site = site._replace(folder=ROOT)
    done = well(forked(doing.anew, [*small, *paths], things=place.things, site=site), " ".join(argv))
    assert re.search(r"^\d+(/\d+)? tests? collected", done.out, re.MULTILINE), done.out


def pytest_module(argv: Sequence[str], place: Place, site: Site) -> None:
    pytest_(argv[1:], place, site)


def tensorboard(argv: Sequence[str], place: Place, site: Site) -> None:
    """It reads the folder that is named, and finds the run."""
    done = well(forked(doing.looked_at, argv, things=place.things, site=site), " ".join(argv))
    assert "learning" in done.out or "loss/" in done.out, done.out


def as_the_shell(argv: Sequence[str], place: Place, site: Site) -> None:
    """A small program of the system, as it is."""
    with open(site.read) as read, open(site.out, "w") as out:
        given = desk.filled(argv, place.things)
        done = subprocess.run(given, cwd=place.folder, stdin=read, stdout=out, timeout=PATIENCE)
    assert done.returncode == 0, argv


def small_run(argv: list[str], place: Place) -> list[str]:
    """As small as the desk's."""
    return desk.small_run(argv, place.things)


MODULES = {
    "grpo_fn.run": ours(small_run),
    "grpo_fn.eval": ours(small_eval),
    "grpo_fn.score": ours(one_worker),
    "grpo_fn.redteam": ours(few_problems),
    "grpo_fn.replay": ours(as_it_is),
    "grpo_fn.lab.lens": ours(as_it_is),
    "grpo_fn.lab.compare": ours(as_it_is),
    "grpo_fn.lab.report": ours(as_it_is),
    "grpo_fn.lab.sweep": ours(dry_run),  # tests/lab starts trials
    "grpo_fn.lab.pair": ours(dry_run),
    "grpo_fn.doctor": ours(as_it_is, (0, 1, 2)),  # what it finds is the machine's affair
    "pytest": pytest_module,
    "vllm.entrypoints.launchers.api_server.entry": model_folder,
    "pip": lambda argv, place, site: pip(argv[1:], place, site),
}
RULES: dict[str, Callable[[Sequence[str], Place, Site], None]] = {
    "python": python,
    "python3": python,
    "make": make,
    "pytest": pytest_,
    "tensorboard": tensorboard,
    "torchrun": torchrun,
    "sbatch": sbatch,
    "srun": srun,
    ".sh": launched,
    "echo": as_the_shell,
    "tail": as_the_shell,
}
RULES |= {name: rule for name, (rule, _) in FOREIGN.items()}
