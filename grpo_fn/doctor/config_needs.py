"""What a configuration wants of the machine: packages of an extra, and a model folder."""

from collections.abc import Iterator
from typing import Any

from grpo_fn.config import load_config
from grpo_fn.config.nodes import Node, full_name

# What a function's full name begins with, and the package that it cannot work without.
NEEDS = {
    "grpo_fn.shell.vllm": "vllm",
    "grpo_fn.shell.policy.optimizer.adamw_8bit": "torchao",
    "grpo_fn.shell.logging.tracker.wandb": "wandb",
    "grpo_fn.shell.logging.tracker.trackio": "trackio",
    "grpo_fn.shell.environments.mcp_tools.environment": "mcp",
    "grpo_fn.shell.environments.gymnasium_class.make_registered": "gymnasium",
    "grpo_fn.shell.environments.openenv_server.environment": "websockets",
    "grpo_fn.shell.episodes.renderers_format.family_renderer": "renderers",
}


def config_needs(*arguments: str) -> dict[str, Any]:
    """`packages`, sorted, and `model`: a name or folder, empty where the run makes its own.

    `arguments` are gin files and, after "--", gin parameters. Raises ValueError, as training would.
    """
    at = arguments.index("--")
    config = load_config(arguments[:at], arguments[at + 1 :])
    knobs = config.root.knobs
    used = {full_name(node.target) for node in nodes([config.root])}
    packages = {package for start, package in NEEDS.items() if any(name.startswith(start) for name in used)}
    if knobs["compute"].knobs["attention"] == "flash_attention_2":
        packages.add("flash-attn")
    return {"packages": sorted(packages), "model": knobs["model"] if isinstance(knobs["model"], str) else ""}


def nodes(value: Any) -> Iterator[Node]:
    """Every function inside a resolved value, itself included."""
    match value:
        case Node():
            yield value
            yield from nodes(list(value.knobs.values()))
        case dict():
            yield from nodes([*value.keys(), *value.values()])
        case list() | tuple():
            for item in value:
                yield from nodes(item)
