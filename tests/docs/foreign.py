"""Programs that are not ours and are not run, why, and what is looked at: whatever of ours is named to them exists."""

import re
import tomllib
from collections.abc import Sequence

from docs.doing import Place, Site
from docs.pages import ROOT
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PLUGINS = {
    "torch-tb-profiler": "a tab of TensorBoard's, which nothing of ours imports",
    "lm_eval": "reads model folders, from an environment of its own",
}
PIP_FLAGS = ("--no-deps", "--require-hashes", "--no-build-isolation", "--no-compile", "--disable-pip-version-check")


def pip(argv: Sequence[str], place: Place, site: Site) -> None:
    """Extras, ranges and files that pyproject.toml and the repository have."""
    words = [word for word in argv[1:] if word not in ("-e", "--quiet")]
    if words == ["check"]:
        return
    assert words.pop(0) == "install", argv
    while words:
        word = words.pop(0)
        if word == "-r":
            assert (place.folder / words[0]).is_file(), argv
            words.pop(0)
        elif word.startswith("--"):
            assert word in PIP_FLAGS, f"no rule for pip's {word}"
        else:
            required(word)


def required(word: str) -> None:
    """This project with extras it has, or one of its dependencies within its range."""
    expected = Requirement(word.replace(".", PROJECT["name"], 1) if word.startswith(".") else word)
    if expected.name in PLUGINS:
        return
    if expected.name == PROJECT["name"]:
        assert expected.extras <= EXTRAS.keys(), f"got {word}, expected extras of {[*EXTRAS]}"
    else:
        (allowed,) = (each for each in map(Requirement, PROJECT["dependencies"]) if each.name == expected.name)
        (version,) = {spec.version.removesuffix(".*") for spec in expected.specifier}
        assert allowed.specifier.contains(f"{version}.0"), f"got {word}, expected {allowed}"


def named(argv: Sequence[str], place: Place, site: Site) -> None:
    """Files of the repository that are named exist."""
    paths = [word for word in argv[1:] if re.match(r"(docs|experiments|gin|grpo_fn|tests|tools)/", word)]
    assert all((ROOT / path).exists() for path in paths), paths


def model_folder(argv: Sequence[str], place: Place, site: Site) -> None:
    """The one folder that it is to open holds a model."""
    (folder,) = re.findall(r"(?:^|pretrained=)([^\s,=]*/model)(?:,|$)", "\n".join(argv), re.MULTILINE)
    assert (place.folder / folder / "config.json").is_file(), argv


# Not run, and why.
FOREIGN = {
    "pip": (pip, "would install, from a network"),
    "python3.11": (named, "may not be this Python: it makes an environment"),
    "source": (named, "a file of the environment that was made before"),
    ".": (named, "the same"),
    "touch": (named, "marks what make would have made"),
    "kubectl": (named, "wants a cluster; tests/launch holds the manifests against the schema, runs the command"),
    "docker": (named, "wants a daemon; tests/launch looks at the Dockerfile"),
    "nvidia-smi": (named, "wants a driver; tests/launch has a stand-in"),
    "scontrol": (named, "wants Slurm; tests/launch has a stand-in"),
    "scancel": (named, "the same"),
    "wandb": (named, "would send, to an account"),
    "trackio": (named, "would open a page and stay"),
    "transformers": (model_folder, "would serve, and stay"),
    "vllm": (model_folder, "the same"),
    "lm_eval": (model_folder, "is in an environment of its own"),
}
