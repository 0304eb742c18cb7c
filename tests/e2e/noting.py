"""Weights & Biases' mirror with a stand-in for its package, which leaves a file for everyone who opens a run there."""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from grpo_fn.shell.logging import tracker as ours


def mirror() -> ours.Mirror:
    """tracker.wandb, offline."""
    sys.modules["wandb"] = package()
    return ours.wandb(destination="tests:offline")


def package() -> ModuleType:
    """What tracker.wandb uses of the package."""
    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    watched: list[str] = []
    patch = lambda root_logdir, save: watched.append(root_logdir)  # noqa: E731
    module.tensorboard = SimpleNamespace(patch=patch, unpatch=watched.clear)  # type: ignore[attr-defined]
    module.Settings = module.Table = SimpleNamespace  # type: ignore[attr-defined]

    def init(*, dir: str, **settings: Any) -> SimpleNamespace:
        (path,) = watched
        note = {
            "watched": path,
            "rank": os.environ.get("RANK"),
            **{k: v for k, v in settings.items() if k != "settings"},
        }
        (Path(dir) / "wandb" / f"opened-{os.environ.get('RANK')}-{os.getpid()}").write_text(json.dumps(note))
        return SimpleNamespace(finish=lambda exit_code: None, log=lambda values: None)

    module.init = init  # type: ignore[attr-defined]
    return module
