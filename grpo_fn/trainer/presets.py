"""Every preset of gin/algo as it would be in some configuration: the algorithms that a lens looks through."""

from collections.abc import Sequence

from grpo_fn.algo.needs import needs
from grpo_fn.algo.step import Algorithm
from grpo_fn.config import freeze, load_config
from grpo_fn.config.parse import GIN_FOLDER
from grpo_fn.trainer.checks.algorithm import check_parts


def preset_names() -> list[str]:
    """The presets there are."""
    return sorted(path.stem for path in (GIN_FOLDER / "algo").glob("*.gin"))


def algorithm(config_files: Sequence[str], preset: str | None) -> Algorithm:
    """The algorithm of a configuration, with a preset laid over it unless that is None."""
    over = [] if preset is None else [f"algo/{preset}.gin"]
    config = load_config([*config_files, *over], [])
    return freeze(config.root.knobs["algorithm"], {})


def fitting(
    config_files: Sequence[str], parts: Sequence[str], *, energy: bool
) -> tuple[dict[str, Algorithm], dict[str, str]]:
    """The algorithm of every preset laid over a configuration; and of those that want what the step does not have, why.

    That is parts of the reward other than `parts`, and the energies of tokens where `energy` says they are not there.
    """
    fit, refused = {}, {}
    for name in preset_names():
        those = algorithm(config_files, name)
        try:
            check_parts(those.credit, parts)
            if "energy" in needs(those.credit) and not energy:
                raise ValueError("got a step without the energies of its tokens, which the preset's baseline reads")
            fit[name] = those
        except ValueError as error:
            refused[name] = str(error)
    return fit, refused
