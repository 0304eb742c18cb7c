"""Imports point downwards: every module of grpo_fn has a layer, and imports only what that layer may.

L0 types < L1 the science < L2 the box; S everything stateful; L3 configuration and the root; L4 the command line. T,
the test kit, stands beside: nothing of the package imports it, and it alone imports hypothesis.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_fn"

LAYERS = {
    "L0": {"types", "problem", "prng", "masked"},
    "L1": {
        *{"advantage", "losses", "objective", "kl", "ratio", "weights", "correction", "sampling", "rewards", "batch"},
        *{"metrics", "page", "tasks", "groups", "credit", "filters", "marks", "control", "proportions", "digests"},
        *{"health", "loss_scale", "memory", "packing", "plots", "signal_style", "visible"},
        *{"findings", "verdicts", "versions"},
    },
    "L2": {"algorithm", "collect", "lens", "differences", "token_signal", "signal_page", "evaluate", "plan", "asking"},
    "S": {"shell"},
    "L3": {
        *{"config", "train", "loop", "voice", "resume", "finish", "prepare", "presets", "record", "ready"},
        *{"scoring", "named_reward", "measure", "locate", "again", "recall", "beside"},
        *{"diagnosis", "wants"},
    },
    "L4": {"run", "score", "eval", "replay", "doctor"},
    "T": {"testing"},
}
BELOW = {
    "L0": {"L0"},
    "L1": {"L0", "L1"},
    "L2": {"L0", "L1", "L2"},
    "S": {"L0", "L1", "S"},
    "L3": {"L0", "L1", "L2", "S", "L3"},
    "L4": {"L3"},
    "T": {"L0", "L1", "S", "T"},
}
PURE = ("L0", "L1", "L2")
# What a pure room may not touch; a name covers everything under it.
IMPURE = {
    *{"gin", "torch.distributed", "torch.utils.tensorboard", "tensorboard", "transformers", "vllm", "safetensors"},
    *{
        "os",
        "io",
        "logging",
        "pathlib",
        "json",
        "random",
        "time",
        "datetime",
        "subprocess",
        "threading",
        "tqdm",
        "psutil",
    },
}
READS_FILES = {"tasks", "rewards"}  # these may use pathlib and json
# Reward workers and --help start without it, and so does what looks at machines on which it may be broken.
NO_TORCH = {
    *{"problem", "run", "score", "scoring", "named_reward", "eval", "replay"},
    *{"doctor", "diagnosis", "findings", "verdicts", "versions"},
}
GIN = {"config/source.py"}  # the only file that imports gin


def layer_of(room: str) -> str | None:
    return next((layer for layer, rooms in LAYERS.items() if room in rooms), None)


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


def wrong_arrows(path: str, source: str) -> list[str]:
    """What is wrong with the imports of `path` (relative to the package), one message each."""
    parts = path.removesuffix(".py").split("/")
    room, package = parts[0], ".".join(["grpo_fn", *parts[:-1]])
    layer = layer_of(room)
    if layer is None:
        return [f"{path}: {room} has no layer: place it in LAYERS of tests/arch/test_arrows.py and in docs/design.md"]
    wrong = []
    for line, name in imported(source, package):
        target = name.split(".")[1] if name.startswith("grpo_fn.") else None
        if target is not None and layer_of(target) not in BELOW[layer]:
            wrong.append(f"{path}:{line}: {room} ({layer}) imports {name} ({layer_of(target) or 'no layer'})")
        allowed = {"pathlib", "json"} if room in READS_FILES else set()
        if layer in PURE and under(name, IMPURE - allowed):
            wrong.append(f"{path}:{line}: {room} ({layer}) is pure and imports {name}")
        if room in NO_TORCH and under(name, {"torch"}):
            wrong.append(f"{path}:{line}: {room} has to start fast and imports {name}")
        if layer != "T" and under(name, {"hypothesis", "pytest"}):
            wrong.append(f"{path}:{line}: imports {name}, which only the test kit may")
        if under(name, {"gin"}) and path not in GIN:
            wrong.append(f"{path}:{line}: imports {name}, which only {', '.join(GIN)} may")
    return wrong


def sources() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def test_every_arrow_points_down() -> None:
    modules = [path for path in sources() if path != "__init__.py"]
    assert len(modules) > 10
    wrong = [message for path in modules for message in wrong_arrows(path, (PACKAGE / path).read_text())]
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_imports_nothing() -> None:
    assert imported((PACKAGE / "__init__.py").read_text(), "grpo_fn") == []


def test_every_room_has_one_layer() -> None:
    rooms = [room for rooms in LAYERS.values() for room in rooms]
    assert len(rooms) == len(set(rooms))


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("types.py", "from grpo_fn.batch import split", "types.py:1: types (L0) imports grpo_fn.batch.split (L1)"),
        ("kl.py", "import torch\nfrom grpo_fn import algorithm", "kl.py:2: kl (L1) imports grpo_fn.algorithm (L2)"),
        ("kl.py", "def f():\n    import grpo_fn.shell.policy", "kl.py:2: kl (L1) imports grpo_fn.shell.policy (S)"),
        ("tasks/task.py", "from ..train import train", "tasks/task.py:1: tasks (L1) imports grpo_fn.train.train (L3)"),
        ("tasks/task.py", "from .. import evaluate", "tasks/task.py:1: tasks (L1) imports grpo_fn.evaluate (L2)"),
        ("shell/policy.py", "from grpo_fn import train", "shell/policy.py:1: shell (S) imports grpo_fn.train (L3)"),
        ("shell/policy.py", "import grpo_fn.algorithm", "shell/policy.py:1: shell (S) imports grpo_fn.algorithm (L2)"),
        ("run.py", "from grpo_fn.shell import console", "run.py:1: run (L4) imports grpo_fn.shell.console (S)"),
        ("metrics.py", "import os.path", "metrics.py:1: metrics (L1) is pure and imports os.path"),
        ("batch.py", "import logging", "batch.py:1: batch (L1) is pure and imports logging"),
        ("batch.py", "import json", "batch.py:1: batch (L1) is pure and imports json"),
        ("types.py", "from torch import distributed", "types.py:1: types (L0) is pure and imports torch.distributed"),
        ("algorithm.py", "import torch.distributed as d", "algorithm.py:1: algorithm (L2) is pure and imports torch.d"),
        (
            "evaluate.py",
            "from torch.utils.tensorboard import SummaryWriter",
            "evaluate.py:1: evaluate (L2) is pure and imports torch.utils.tensorboard.SummaryWriter",
        ),
        ("rewards/math.py", "import transformers", "rewards/math.py:1: rewards (L1) is pure and imports transformers"),
        ("problem.py", "import torch", "problem.py:1: problem has to start fast and imports torch"),
        ("train.py", "import gin", "train.py:1: imports gin, which only config/source.py may"),
        (
            "shell/policy.py",
            "from gin import config",
            "shell/policy.py:1: imports gin.config, which only config/source",
        ),
        ("kl.py", "from grpo_fn import testing", "kl.py:1: kl (L1) imports grpo_fn.testing (T)"),
        ("train.py", "from grpo_fn import testing", "train.py:1: train (L3) imports grpo_fn.testing (T)"),
        ("testing/losses.py", "import grpo_fn.plan", "testing/losses.py:1: testing (T) imports grpo_fn.plan (L2)"),
        ("loop.py", "import hypothesis", "loop.py:1: imports hypothesis, which only the test kit may"),
        ("trainer.py", "", "trainer.py: trainer has no layer: place it in LAYERS of tests/arch/test_arrows.py"),
        ("kl.py", "from grpo_fn import utils", "kl.py:1: kl (L1) imports grpo_fn.utils (no layer)"),
    ],
)
def test_a_wrong_arrow_is_seen(path: str, source: str, complaint: str) -> None:
    (message,) = [m for m in wrong_arrows(path, source) if m.startswith(complaint)]
    assert message


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "algorithm.py",
            "from grpo_fn import metrics\nfrom grpo_fn.types import Batch\nimport functools",
        ),
        ("tasks/gsm8k.py", "import json\nfrom pathlib import Path\nfrom grpo_fn.tasks.task import Task"),
        ("train.py", "import os\nfrom grpo_fn.shell import policy\nfrom grpo_fn.algorithm import Algo"),
        ("config/source.py", "import gin\nfrom gin import config_parser"),
        ("metrics.py", "import originals_of_os\nfrom torch import nn"),
        ("testing/texts.py", "import hypothesis.strategies as st\nfrom grpo_fn.shell import reward_pool"),
    ],
)
def test_a_right_arrow_is_not(path: str, source: str) -> None:
    assert wrong_arrows(path, source) == []
