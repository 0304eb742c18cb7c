"""What `python -m grpo_fn.doctor` looks at. It does without torch itself: that may be what is broken."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

from packaging.utils import canonicalize_name

from grpo_fn.doctor import checks, versions
from grpo_fn.doctor.checks import Reply
from grpo_fn.doctor.report import DoctorFinding, State
from grpo_fn.doctor.subprocess_probe import call_in_subprocess

# Quiet, offline, nothing compiled: what is asked of an engine is whether it takes the folder.
CALM = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the doctor is asked: a model folder ("" for none), a configuration, and how long each part may take."""

    model: str
    gin_files: Sequence[str]
    gin_params: Sequence[str]
    deadline: int | float


def examine(question: Question) -> list[DoctorFinding]:
    """Everything, by topic. Each part that may crash or hang has a process of its own and `deadline` seconds."""
    wanted, refused = configuration(question)
    model = question.model or wanted["model"]
    unusable = folder_trouble(model)
    folder = "" if unusable else model
    replies = probe_replies(folder, question.deadline)
    gpus = (replies["devices"].facts or {}).get("devices", [])
    parameters = (replies["transformers"].facts or {}).get("parameters", 0) if folder else 0
    uses_vllm = "vllm" in wanted["packages"]
    all_reduce = []
    if gpus:
        arguments = ("cuda", str(len(gpus)), str(question.deadline))
        probe = "grpo_fn.doctor.probe_devices:time_all_reduce"
        reply = call_in_subprocess(probe, *arguments, deadline=question.deadline)
        all_reduce = [checks.check_all_reduce(reply, len(gpus))]
    return [
        *refused,
        *packages(installed_versions(), wanted["packages"]),
        *checks.devices(replies["devices"]),
        *all_reduce,
        *checks.check_host(replies["host"], parameters=parameters, gpus=len(gpus), vllm=uses_vllm),
        *engines(replies),
        *([unusable] if unusable else []),
        *(model_findings(replies, gpus, uses_vllm or not question.gin_files) if folder else []),
    ]


def configuration(question: Question) -> tuple[Mapping, list[DoctorFinding]]:
    """What the gin files want of the machine, and what is wrong with them."""
    nothing = {"packages": [], "model": ""}
    if not question.gin_files:
        return nothing, []
    arguments = (*question.gin_files, "--", *question.gin_params)
    reply = call_in_subprocess("grpo_fn.doctor.config_needs:config_needs", *arguments, deadline=question.deadline)
    if reply.facts is None:
        todo = "as the message says; python -m grpo_fn.run --dry_run shows the same, and more"
        return nothing, [DoctorFinding("configuration", "gin", State.BROKEN, reply.trouble, todo)]
    wanted = ", ".join(reply.facts["packages"]) or "no extra"
    return reply.facts, [DoctorFinding("configuration", "gin", State.OK, f"wants {wanted}")]


def folder_trouble(model: str) -> DoctorFinding | None:
    """Why there is no folder of this name to look into; None where there is one, or no name."""
    if not model or Path(model).is_dir():
        return None
    finding = partial(DoctorFinding, "model", "folder")
    if not Path(model).exists() and HUB_NAME.fullmatch(model) and not model.startswith("."):
        todo = "download it, and give its folder with --model"
        return finding(State.WARNING, f"{model} is no folder here; hub names are not looked at", todo)
    return finding(State.BROKEN, f"got {model}, wanted a folder that exists", "correct the name")


def probe_replies(folder: str, deadline: int | float) -> dict[str, Reply]:
    """The replies of the processes that look, side by side. Engines are asked that are there to be asked."""
    questions = {
        "devices": ("grpo_fn.doctor.probe_devices:device_facts",),
        "host": ("grpo_fn.doctor.probe_host:host_facts", "."),
    }
    if folder:
        questions["transformers"] = ("grpo_fn.doctor.probe_transformers:open_in_transformers", folder)
    if is_installed("vllm"):
        questions["vllm"] = ("grpo_fn.doctor.probe_vllm:open_in_vllm", folder)
    if is_installed("flash_attn"):
        questions["flash-attn"] = ("grpo_fn.doctor.subprocess_probe:import_version", "flash_attn")
    if is_installed("flash_attn_interface"):
        questions["flash-attn 3"] = ("grpo_fn.doctor.subprocess_probe:import_version", "flash_attn_interface")
    with ThreadPoolExecutor(len(questions)) as pool:
        waiting = {
            name: pool.submit(call_in_subprocess, *what, deadline=deadline, environment=CALM)
            for name, what in questions.items()
        }
        return {name: future.result() for name, future in waiting.items()}


def is_installed(name: str) -> bool:
    """Whether a module is installed. A folder of its name on the path, a package without a file, is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


# -- packages


def installed_versions() -> dict[str, str]:
    """Name to version of every distribution here."""
    found = {canonicalize_name(each.metadata["Name"] or ""): each.version for each in metadata.distributions()}
    return found | {"python": python_version()}


def packages(here: Mapping[str, str], wanted: Collection[str]) -> Iterator[DoctorFinding]:
    """Every package of the matrix against what is here, and what those that are here ask of one another."""
    known = (versions.PYTHON, *versions.PACKAGES)
    for package in known:
        version = next((here[name] for name in (package.name, *package.builds) if name in here), None)
        yield versions.check_version(package, version, wanted=package.extra is None or package.name in wanted)
    names = [name for package in known for name in (package.name, *package.builds) if name in here]
    requires = {name: metadata.requires(name) or [] for name in names if name != "python"}
    yield from versions.requirement_conflicts(requires, {name: here[name] for name in names})


# -- engines


def engines(replies: Mapping[str, Reply]) -> Iterator[DoctorFinding]:
    """What is installed and must import, whatever is done with it."""
    if "flash-attn" in replies:
        yield checks.check_flash_attention(replies["flash-attn"])
    if "flash-attn 3" in replies:
        yield checks.check_flash_attention_3(replies["flash-attn 3"])
    if "vllm" in replies and ("transformers" not in replies or replies["vllm"].facts is None):
        yield checks.vllm_alone(replies["vllm"])


def model_findings(replies: Mapping[str, Reply], gpus: Sequence[Mapping], vllm: bool) -> Iterator[DoctorFinding]:
    """The model folder in either engine."""
    old = any(not gpu["bf16"] for gpu in gpus)
    yield from checks.check_transformers(replies["transformers"], gpus_without_bf16=old)
    if "vllm" not in replies:
        yield DoctorFinding("model", "vLLM", State.ABSENT, "not installed, so not asked")
    elif replies["vllm"].facts is not None:
        yield checks.check_vllm(replies["vllm"].facts, wanted=vllm)
