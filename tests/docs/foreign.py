"""Programs that are not ours and are not run, why, and what is looked at: whatever of ours is named to them exists."""

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from itertools import pairwise

import yaml
from docs.doing import Place, Site
from docs.pages import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

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
    wanted = Requirement(word.replace(".", PROJECT["name"], 1) if word.startswith(".") else word)
    if wanted.name in PLUGINS:
        return
    if wanted.name == PROJECT["name"]:
        assert wanted.extras <= EXTRAS.keys(), f"got {word}, wanted extras of {[*EXTRAS]}"
    else:
        (allowed,) = (each for each in map(Requirement, PROJECT["dependencies"]) if each.name == wanted.name)
        (version,) = {spec.version.removesuffix(".*") for spec in wanted.specifier}
        assert allowed.specifier.contains(f"{version}.0"), f"got {word}, wanted {allowed}"


def venv(argv: Sequence[str], place: Place, site: Site) -> None:
    """A Python that is allowed makes a folder that the launchers or the Makefile look for."""
    assert "venv" in argv, argv
    assert argv[-1] in (".venv", ".venv-vllm"), argv
    if version := re.fullmatch(r"python(3\.\d+)", argv[0]):
        assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version[1]}.0"), argv


def activate(argv: Sequence[str], place: Place, site: Site) -> None:
    assert re.fullmatch(r"\.venv(-vllm)?/bin/activate", argv[1]), argv


def kubectl(argv: Sequence[str], place: Place, site: Site) -> None:
    """Manifests are YAML with a kind each; a patch is JSON of fields that the Job of this name has."""
    if argv[1] == "apply":
        found = [*yaml.safe_load_all((place.folder / argv[argv.index("-f") + 1]).read_text())]
        assert found
        assert all({"apiVersion", "kind", "metadata", "spec"} <= each.keys() for each in found)
        (job,) = (each for each in found if each["kind"] == "Job")
        given = job["spec"]["template"]["spec"]["containers"][0]["args"]
        named = [word for flag, word in pairwise(given) if flag == "--gin_file"]
        assert named
        assert all((ROOT / name).exists() or (ROOT / "gin" / name).exists() for name in named), named
    else:
        assert [*argv[1:3]] == ["patch", "job"], argv
        jobs = [*yaml.safe_load_all((ROOT / "tools/launch/kubernetes.yaml").read_text())]
        assert argv[3] in [each["metadata"]["name"] for each in jobs if each["kind"] == "Job"]
        assert json.loads(argv[argv.index("-p") + 1])["spec"].keys() <= {"suspend"}  # of batch/v1


def docker(argv: Sequence[str], place: Place, site: Site) -> None:
    """The Dockerfile and all that it copies are there."""
    text = (place.folder / argv[argv.index("-f") + 1]).read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    assert all((ROOT / word).exists() for word in copied if not word.startswith("--")), copied


def said_by(path: str) -> Callable:
    """A program that a launcher of ours calls so."""

    def rule(argv: Sequence[str], place: Place, site: Site) -> None:
        assert " ".join(argv) in (ROOT / path).read_text(), f"{path} does not call {' '.join(argv)}"

    return rule


def scontrol(argv: Sequence[str], place: Place, site: Site) -> None:
    said_by("tools/launch/slurm.sbatch")(argv, place, site)


def wandb(argv: Sequence[str], place: Place, site: Site) -> None:
    """The folder is where the mirror has it."""
    assert argv[1] == "sync"
    assert "RUN_DIR/" + argv[2].partition("/")[2] in (ROOT / "grpo_fn/shell/logging/tracker.py").read_text(), argv


def trackio(argv: Sequence[str], place: Place, site: Site) -> None:
    """The project is the one that a run goes to."""
    assert argv[1:3] == ["show", "--project"]
    assert f'tracker.trackio.destination = "{argv[3]}:offline"' in (ROOT / "gin/logging.gin").read_text(), argv


def model_folder(argv: Sequence[str], place: Place, site: Site) -> None:
    """The one folder that it is to open holds a model."""
    (folder,) = re.findall(r"(?:^|pretrained=)([^\s,=]*/model)(?:,|$)", "\n".join(argv), re.MULTILINE)
    assert (place.folder / folder / "config.json").is_file(), argv


def touch(argv: Sequence[str], place: Place, site: Site) -> None:
    """make's mark that an environment is ready, which was not made here."""
    assert argv[-1] in (".venv/ready", ".venv-vllm/ready"), argv


# Not run, and why; what they name of ours is looked at.
FOREIGN = {
    "pip": (pip, "would install, from a network"),
    "python3.11": (venv, "may not be this Python: it makes an environment"),
    "source": (activate, "a file of the environment that was made before"),
    ".": (activate, "the same"),
    "kubectl": (
        kubectl,
        "wants a cluster; tests/launch holds the manifests against the schema, runs the command",
    ),
    "docker": (docker, "wants a daemon"),
    "nvidia-smi": (said_by("tools/launch/torchrun.sh"), "wants a driver; tests/launch has a stand-in"),
    "scontrol": (scontrol, "wants Slurm; tests/launch has a stand-in"),
    "scancel": (scontrol, "the same"),
    "touch": (touch, "marks what make would have made"),
    "wandb": (wandb, "would send, to an account"),
    "trackio": (trackio, "would open a page and stay"),
    "transformers": (model_folder, "would serve, and stay"),
    "vllm": (model_folder, "the same"),
    "lm_eval": (model_folder, "is in an environment of its own"),
}
