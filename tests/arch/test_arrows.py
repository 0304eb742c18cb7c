"""Imports between packages: each package of grpo_fn has a list of those that it may import, and pure ones stay pure.

core < algo, rewards < environments, tasks < trainer.health, trainer.evaluation are pure; verifier imports nothing of
ours, sandbox core alone; shell is stateful and does not know algo; trainer puts both together; train, the commands
run, eval, score, export and doctor, and the functions of `api` come last. The lab looks at what runs leave behind:
nothing imports it but its commands redteam and replay. Nothing imports testing or a command, but the lab has the
rewards of score.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_fn"

PURE = {"core", "verifier", "algo", "rewards", "environments", "tasks", "trainer.health", "trainer.evaluation"}
SCIENCE = {"core", "verifier", "rewards", "environments", "tasks"}  # what the shell may know
BASE = {
    "shell.world",
    "shell.process",
    "shell.atomic_io",
    "shell.background_worker",
}
MAY_IMPORT = {
    "core": set(),
    "algo": {"core"},
    "verifier": set(),
    "sandbox": {"core"},
    "rewards": {"core", "verifier"},
    "environments": {"core", "rewards"},
    "tasks": {"core", "rewards"},
    "trainer.health": set(),
    "trainer.evaluation": {"core", "verifier", "rewards"},
    "config": {"core.display_text"},
    **dict.fromkeys(BASE, SCIENCE | BASE),
    "shell.model": SCIENCE | BASE,
    "shell.policy": SCIENCE | BASE | {"shell.model"},
    "shell.episodes": SCIENCE | BASE | {"shell.model"},
    "shell.sampler": SCIENCE | BASE | {"shell.model", "shell.policy", "shell.episodes"},
    "shell.vllm": SCIENCE | BASE | {"shell.model", "shell.policy", "shell.sampler", "shell.episodes"},
    "shell.environments": SCIENCE | {"shell.episodes.answers"},
    "shell.reward_workers": SCIENCE | BASE | {"shell.sampler", "shell.episodes"},
    "shell.checkpoint": SCIENCE | BASE,
    "shell.logging": SCIENCE | BASE | {"shell.model"},
    "trainer": {*PURE, "sandbox", "shell", "config", "command_line"},
    "train": {*PURE, "shell", "trainer"},
    "command_line": {"core.partials", "core.display_text"},
    "__main__": {"command_line", "config", "core.display_text"},
    "export": {"command_line", "trainer"},
    "tiny_model": {"command_line", "shell.model"},
    "import_config": {"command_line"},
    "api": {"command_line", "core", "config", "shell", "train", "eval", "score"},
    "run": {"command_line", "config", "train"},
    "eval": {"command_line", *PURE, "shell", "trainer", "config"},
    "score": {"command_line", "core", "shell", "trainer", "config"},
    "lab": {"command_line", *PURE, "score", "shell", "trainer", "config"},
    "redteam": {"command_line", "config", "lab.redteam"},
    "replay": {"command_line", "lab.replay"},
    "doctor": {"command_line", "config"},
    "testing": {*PURE, "shell"},
}
# What a pure package may not import; a name covers everything under it.
IMPURE = {
    *("gin", "torch.distributed", "torch.utils.tensorboard", "tensorboard", "transformers", "vllm", "safetensors"),
    *("os", "io", "logging", "pathlib", "json", "random", "time", "datetime", "subprocess", "threading"),
    *("tqdm", "psutil"),
}
READS_FILES = {"tasks", "rewards", "environments", "core.json_lines", "core.problem"}  # may use pathlib and json
# Reward workers and --help start without torch, and so does what looks at machines on which it may be broken.
NO_TORCH = {
    "core.problem",
    "core.environment",
    "environments",
    "shell.episodes.answers",
    "shell.environments",
    "core.display_text",
    "core.json_lines",
    "core.partials",
    "command_line",
    "api",
    "run",
    "score",
    "eval.__main__",
    "__main__",
    "export",
    "tiny_model",
    "import_config",
    "redteam",
    "replay",
    "trainer.health",
    "doctor",
}
GIN = {"config.parse"}  # the only module that imports gin


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name below grpo_fn, file) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if name:
            yield name, path


def package_of(name: str) -> str | None:
    """The entry of MAY_IMPORT that a module (or a name in it) belongs to."""
    parts = name.split(".")
    return next((key for n in (2, 1) if (key := ".".join(parts[:n])) in MAY_IMPORT), None)


def imported(source: str, package: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, at the top or inside a function; `from a import b` counts as a.b."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def under(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def allowed(package: str, target: str) -> bool:
    """Whether a module of `package` may import `target`, both below grpo_fn."""
    if target == "shell" or package_of(target) == package:
        return True
    return package_of(target) is not None and under(target, MAY_IMPORT[package])


def wrong_arrows(name: str, source: str) -> list[str]:
    """What is wrong with the imports of the module `name`, one message each."""
    package = package_of(name)
    if package is None:
        return [f"{name}: no package of MAY_IMPORT in tests/arch/test_arrows.py holds it"] if name != "shell" else []
    wrong = []
    for line, target in imported(source, ".".join(["grpo_fn", *name.split(".")[:-1]])):
        where = f"{name}:{line}: "
        if target.startswith("grpo_fn.") and not allowed(package, target.removeprefix("grpo_fn.")):
            wrong.append(f"{where}{package} imports {target}")
        files = {"pathlib", "json"} if under(name, READS_FILES) else set()
        if package in PURE and under(target, IMPURE - files):
            wrong.append(f"{where}{package} is pure and imports {target}")
        if under(name, NO_TORCH) and under(target, {"torch"}):
            wrong.append(f"{where}it has to start without torch and imports {target}")
        if package != "testing" and under(target, {"hypothesis", "pytest"}):
            wrong.append(f"{where}imports {target}, which only testing may")
        if under(target, {"gin"}) and name not in GIN:
            wrong.append(f"{where}imports {target}, which only {', '.join(GIN)} may")
    return wrong


def test_every_arrow_is_allowed() -> None:
    everything = list(modules())
    assert len(everything) > 100
    wrong = [message for name, path in everything for message in wrong_arrows(name, path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_importing_the_package_loads_nothing_but_the_standard_library() -> None:
    show = "import sys, grpo_fn; print(*{name.partition('.')[0] for name in sys.modules}, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    loaded = {*done.stdout.split()}
    assert not loaded & {"torch", "numpy", "gin", "transformers", "grpo_fn.api", "grpo_fn.command_line"}
