"""Every configuration resolves to the values that it had before knobs had sections (docs/configuration/renamed.md).

values_6bb6efa.json has what 59 combinations of gin files resolved to at commit 6bb6efa, under the names of then:
"values" of the first by path from the root, and of the others what differs from it. The page maps names of then to
names of now.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from grpo_fn.config import load_config
from grpo_fn.config.nodes import Node

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "configuration" / "renamed.md"
STORED = json.loads((HERE / "values_6bb6efa.json").read_text())
BASE = "arithmetic"
# Where the owner of a knob of then stood in the tree of then, and where its section stands in that of now.
OWNERS = {
    "train.train": "",
    "loop.Cadence": "cadence",
    "evaluate.Evaluation": "evaluation",
    "policy.Sharded": "policy",
    "scorer.Scorer": "scorer",
    "scale.Scale": "scale",
    "local_sampler.local": "sampler",
    "vllm_sampler.colocated": "sampler",
    "vllm_sampler.dedicated": "sampler",
    "vllm_servers.Dedicated": "sampler.engine",
    "reward_pool.RewardPool": "reward_pool",
    "objective.policy_objective": "objective",
}
SECTIONS = {
    "train.train": "",
    "step.Algorithm": "algorithm",
    "controllers.next_gains": "algorithm.control",
    "mesh.Parallelism": "parallelism",
    "objective.policy_objective": "algorithm.objective",
    "reward_pool.RewardPool": "rewards.pool",
    "vllm_sampler.colocated_sampler": "sampling.sampler",
    "vllm_sampler.dedicated_sampler": "sampling.sampler",
    "vllm_servers.DedicatedEngine": "sampling.sampler.engine",
    "sections.PolicyUpdate": "policy",
    **{
        f"sections.{name}": name.lower()
        for name in (
            "Data",
            "Compute",
            "Sampling",
            "Rewards",
            "Evaluation",
            "Checkpoints",
            "Logging",
            "Health",
        )
    },
}
# The engine of an evaluation is the sampler's kind in another place.
EVALUATOR = {
    "evaluator.max_rows": "evaluation.max_rows",
    "evaluator.accept_bias": "evaluation.async_sampler.allow_biased",
    "evaluator.engine.deadline": "evaluation.async_sampler.engine.server_timeout",
}
GONE = {"", "cadence", "evaluation", "policy"}  # values that only grouped knobs
ADDED = {"", "evaluation.max_rows", *(name.lower() for name in ("Data", "Compute", "Sampling", "Rewards", "Policy"))}
ADDED |= {"evaluation", "checkpoints", "logging", "health", "algorithm"}
# With values that change nothing.
KNOBS_SINCE = {
    "algorithm.beside": "list[0]",
    "algorithm.reweighting": "None",
    "data.demonstration": "@demonstrations.assistant_turns",
    "demonstrations": "None",
    "curriculum": "None",
    "teacher": "None",
    "episodes": "None",
    "compute.deterministic": "False",
    "logging.start_kl_every": "0",
    "parallelism.compile.mode": "'default'",
    "policy.min_micro_batches": "1",
    "sampling.max_total_tokens": "None",
    "sampling.probe.draws": "128",
    "sampling.probe.max_gap_float32": "0.001",
    "sampling.probe.min_p_value": "1e-09",
}
# Not bound since, with the values that they have by themselves; a coefficient that nothing controls has no controller.
UNBOUND_SINCE = {
    **{"algorithm.min_groups_with_signal": "1"},
    **{"algorithm.old_logp": "@step.from_sampler"},
    **{"algorithm.control.kl_control": "None", "algorithm.control.entropy_control": "None"},
}
# What recipes have otherwise since they say what their documents do; None: what was there is gone.
_OFFLOAD: dict[str, str | None] = {"logging.checksums_every": "10"}  # a CPU takes them there
_LORA: dict[str, str | None] = _OFFLOAD | {
    "policy.min_micro_batches": "8",
    "algorithm.credit.advantage": "@advantage.mean_centered",
    "algorithm.credit.advantage.eps": None,
    "algorithm.credit.advantage.ddof": None,
}
_PRINTS: dict[str, str | None] = {  # a right program that prints 100 kB is right
    f"{where}.{i}.run.output_kb": "1024" for where in ("evaluation.graders", "rewards.reward.parts") for i in (0, 1)
}
# Values of base.gin that have changed since: then and now.
VALUES_SINCE = {
    "compute.logits_chunk_elements": ("16777216", "268435456"),  # a bound now, below it memory decides
    "parallelism.compile": ("@blocks.eager", "@blocks.compiled_on_cuda"),  # eager on a CPU
}
_HELD_BACK = _PRINTS | {"data.task.shown_tests": "1"}  # a table of all asserts would be right
RECIPES_SINCE: dict[str, dict[str, str | None]] = {
    "mbpp_code": _HELD_BACK,
    "code_slurm_v100-run": _HELD_BACK,
    "arithmetic+offload": _OFFLOAD,
    "gsm8k_lora_8gb-run": _LORA,
    "gsm8k_lora_8gb-one_card": _LORA,
    "arithmetic_vllm": {"sampling.probe.max_gap": "0.05"},  # float32 has a limit of its own
    "qwen_math_2gpu-run": {"parallelism.compile.mode": "'max-autotune-no-cudagraphs'"},
    "math_k8s_16gpu-run": {
        "steps": "100",
        "checkpoints.keep_best": "5",
        "sampling.max_total_tokens": "512",
        "data.overlong_prompts": "@overlong.drop_both",
        "algorithm.credit.advantage": "@advantage.leave_one_out_others_std",
        "algorithm.credit.advantage.ddof": None,
        "rewards.reward.parts": "list[1]",
        "rewards.reward.parts.1": None,
        "rewards.reward.weights": "list[1]",
        "rewards.reward.weights.1": None,
    },
}
# At the end of sections.Health.warn.
RULES_SINCE = [
    "@health.invalid_high",
    *(f"@health_trends.{name}" for name in ("reward_flat", "reward_falling", "generation_slow", "loss_spike")),
]


@cache
def table(title: str) -> dict[str, str]:
    """A table of the page, before -> now."""
    (part,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith(title)]
    return dict(re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", part, re.MULTILINE))


@cache
def paths() -> dict[str, str]:
    """Where a value stood then -> where it stands now, for every knob of the page."""
    found = dict(EVALUATOR)
    for before, now in table("Knobs").items():
        (owner, knob), (section, name) = before.rsplit(".", 1), now.rsplit(".", 1)
        found[f"{OWNERS[owner]}.{knob}".lstrip(".")] = f"{SECTIONS[section]}.{name}".lstrip(".")
    return found


def moved(path: str) -> str:
    """A path of then as it is now: the longest known beginning decides."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        if (known := ".".join(parts[:i])) in paths():
            return ".".join([paths()[known], *parts[i:]])
    return path


def renamed(value: str) -> str:
    """A value of then, functions under their names of now (module and name, without packages)."""
    if not value.startswith("@"):
        return value
    name = ".".join(value[1:].split(".")[-2:])
    now = table("Functions").get(name, name)
    return "None" if now == "None" else "@" + now  # of functions that did nothing, none is left


def flat(value: Any, path: str, out: dict[str, str]) -> dict[str, str]:
    """A resolved value by path, as it was stored then."""
    match value:
        case Node():
            name = f"{value.target.__module__}.{value.target.__qualname__}"
            out[path] = "@" + ".".join(name.split(".")[-2:])
            for knob, item in value.knobs.items():
                flat(item, f"{path}.{knob}".lstrip("."), out)
        case list() | tuple():
            out[path] = f"{type(value).__name__}[{len(value)}]"
            for i, item in enumerate(value):
                flat(item, f"{path}.{i}", out)
        case dict():
            out[path] = f"dict[{len(value)}]"
            for key, item in value.items():
                flat(item, f"{path}.{key}", out)
        case _:
            out[path] = repr(value)
    return out


def without_rules_since(values: dict[str, str]) -> dict[str, str]:
    """The values without RULES_SINCE."""
    if "health.warn" not in values:
        return values
    kept = int(values["health.warn"].removeprefix("list[").removesuffix("]")) - len(RULES_SINCE)
    since = tuple(f"health.warn.{kept + i}" for i in range(len(RULES_SINCE)))
    assert [values[place] for place in since] == RULES_SINCE
    rest = {path: value for path, value in values.items() if not path.startswith(since)}
    return rest | {"health.warn": f"list[{kept}]"}


def then(name: str) -> dict[str, str]:
    """What a configuration resolved to then, under the names and paths of now."""
    stored = STORED[name]
    base = STORED[BASE]["values"]
    values = stored.get("values") or {k: v for k, v in base.items() if k not in stored["gone"]} | stored["changed"]
    now = {moved(path): renamed(value) for path, value in values.items() if path not in GONE}
    return {path: value for path, value in now.items() if UNBOUND_SINCE.get(path) != value}


@pytest.mark.parametrize("name", sorted(STORED))
def test_a_configuration_has_the_values_that_it_had(name: str) -> None:
    files = [table("gin files").get(file, file) for file in STORED[name]["files"]]
    taker = "grpo_fn.eval.measure.measure" if STORED[name]["eval"] else None
    values = without_rules_since(flat(load_config(files, STORED[name]["params"], taker=taker).root, "", {}))
    before = then(name)
    changed = {path: now for path, (was, now) in VALUES_SINCE.items() if before.get(path) == was}
    since = before | changed | RECIPES_SINCE.get(name, {})
    wanted = {path: value for path, value in since.items() if value is not None}
    known = {path: value for path, value in values.items() if KNOBS_SINCE.get(path) != value}
    here = {path: value for path, value in known.items() if path in wanted or path not in ADDED}
    if taker is not None:  # sections come whole: an evaluation is given knobs that it did not take then
        here = {path: here.get(path, "missing") for path in wanted}
    assert here == wanted


def test_the_page_lists_only_what_there_is() -> None:
    known = [
        flat(load_config(["run/arithmetic.gin", *more], []).root, "", {})
        for more in ([], ["engine/vllm_dedicated.gin"])
    ]
    more = ["step.Algorithm.control=@controllers.next_gains"]
    known.append(flat(load_config(["run/arithmetic.gin", "engine/vllm_colocated.gin"], more).root, "", {}))
    known.append(UNBOUND_SINCE)
    for knob in table("Knobs").values():
        section, _, name = knob.rpartition(".")
        assert any(f"{SECTIONS[section]}.{name}".lstrip(".") in values for values in known), knob
