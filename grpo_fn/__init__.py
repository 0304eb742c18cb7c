"""GRPO and its relatives as pure functions, composed with torch.func and injected by gin.

`train`, `evaluate`, `score` and `load_run` do from Python what the commands do (grpo_fn/api.py). They are loaded when
they are first used, so importing the package is immediate.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what an editor reads; at run time __getattr__ has them
    from grpo_fn.api import EvaluationResult, Run, RunError, Score, TrainingSettings, evaluate, load_run, score, train

    __version__: str

__all__ = [
    "EvaluationResult",
    "Run",
    "RunError",
    "Score",
    "TrainingSettings",
    "__version__",
    "evaluate",
    "load_run",
    "score",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("grpo-fn")
        except PackageNotFoundError:  # a clone on the path, installed nowhere
            return "0+unknown"
    if name in __all__:
        return getattr(importlib.import_module("grpo_fn.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package, in which `train` and `score` stay functions.

    There are modules grpo_fn.train and grpo_fn.score too: gin files name the one, `python -m` the other. Python binds a
    module in its package once it is imported, and these two would hide the functions.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
