"""Every preset of gin/algo as it would be in some configuration: the algorithms that a lens looks through."""

from collections.abc import Sequence

from grpo_fn.algo.step import Stages
from grpo_fn.config import freeze, load_config
from grpo_fn.config.parse import GIN_FOLDER
from grpo_fn.trainer.validate import check_credit


def preset_names() -> list[str]:
    """The presets there are."""
    return sorted(path.stem for path in (GIN_FOLDER / "algo").glob("*.gin"))


def stages(config_files: Sequence[str], preset: str | None) -> Stages:
    """The stages of a configuration, with a preset laid over it unless that is None."""
    over = [] if preset is None else [f"algo/{preset}.gin"]
    config = load_config([*config_files, *over], [])
    return freeze(config.root.knobs["algorithm"], {})


def fitting(config_files: Sequence[str], parts: Sequence[str]) -> tuple[dict[str, Stages], dict[str, str]]:
    """The stages of every preset laid over a configuration; and of those that want other parts of the reward, why."""
    every = {name: stages(config_files, name) for name in preset_names()}
    refused = {name: why for name, those in every.items() if (why := complaint(those, parts))}
    return {name: those for name, those in every.items() if name not in refused}, refused


def complaint(those: Stages, parts: Sequence[str]) -> str:
    """What the stages have against these parts of the reward; nothing when they fit."""
    try:
        check_credit(those.credit, 2, parts)
    except ValueError as error:
        return str(error)
    return ""
