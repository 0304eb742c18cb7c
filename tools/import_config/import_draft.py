"""A gin file in the making, a reader of the original's keys, and the translations that importers share."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DIFFERS, LEFT, UNKNOWN = "means something else here", "not carried", "unknown"
LARGEST = 1e15  # no number of a configuration is larger
Number = (int, float)


class Text(str):
    """Text of the original: never a reference, whatever it begins with."""


@dataclass
class Draft:
    """A gin file in the making."""

    includes: list[str] = field(default_factory=lambda: ["base.gin", "algo/grpo.gin"])
    macros: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)  # a value that begins with @ or % is a reference
    notes: list[tuple[str, str, str]] = field(default_factory=list)  # (kind, key, what there is to say)

    def note(self, kind: str, key: str, text: str) -> None:
        self.notes.append((kind, key, text))

    def text(self, source: str) -> str:
        """The file."""
        head = f"From {source}, by tools/import_config. Read what follows before you compare with the original."
        lines = [f"# {line}" for line in (one_line(head), *self.listed())]
        lines += ["from __gin__ import dynamic_registration", ""]
        lines += [*sorted(self._imports()), "", *(f'include "{name}"' for name in dict.fromkeys(self.includes)), ""]
        lines += [f"{name} = {literal(value)}" for name, value in self.macros.items()]
        return "\n".join([*lines, "", *(f"{name} = {literal(value)}" for name, value in self.knobs.items()), ""])

    def listed(self) -> Iterator[str]:
        """The notes, a line each: what differs, what was left, what is unknown."""
        for kind in (DIFFERS, LEFT, UNKNOWN):
            for key, said in [(key, said) for k, key, said in self.notes if k == kind]:
                yield one_line(f"{kind}: {key}: {said}")

    def _imports(self) -> Iterator[str]:
        values = [literal(value) for value in self.knobs.values()]
        named = {name.partition(".")[0] for name in self.knobs}
        named |= {module for value in values for module in re.findall(r"(?:^|[\[ ])@(\w+)\.", value)}
        for module in named:
            yield f"from {PACKAGES[module]} import {module}"


def one_line(text: str) -> str:
    """The text as it may stand in a comment."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode()


MODULES = {
    "grpo_fn": "train",
    "grpo_fn.algo": (
        "advantage aggregation credit distillation group_sampling importance kl losses masking objective step "
        "weighted_losses"
    ),
    "grpo_fn.rewards": "combine length math",
    "grpo_fn.shell.model": "blocks lora",
    "grpo_fn.shell.policy": "fsdp mesh optimizer",
    "grpo_fn.shell.vllm": "vllm_sampler vllm_servers",
    "grpo_fn.trainer": "loop sections",
}
WEIGHTED_LOSSES = {"vespo"}  # of those that an importer names
PACKAGES = {module: package for package, modules in MODULES.items() for module in modules.split()}


def literal(value: Any) -> str:
    """A value as gin reads it; text that begins with @ or % stays a reference."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, Text) or not isinstance(value, str):
        return repr(str(value)) if isinstance(value, Text) else repr(value)
    return value if re.fullmatch(r"@[\w.]+|%[A-Z_]+", value) else repr(value)


class Reader:
    """The original's keys, each taken once; those not taken are listed in the end."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.values = dict(leaves(config))
        self.taken: set[str] = set()

    def __call__(self, key: str, wanted: type | tuple[type, ...], default: Any) -> Any:
        """The value, or `default` where there is none. Raises ValueError for another type."""
        self.taken.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        if isinstance(value, str) and str not in kinds and set(kinds) & {int, float}:  # YAML reads 1e-6 as text
            value = number(value)
        if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
            value = int(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{key}: got {value!r}, wanted {' or '.join(kind.__name__ for kind in kinds)}")
        if isinstance(value, Number) and not abs(value) <= LARGEST:
            raise ValueError(f"{key}: got {value!r}, wanted a number of at most {LARGEST:g}")
        return value

    def count(self, key: str, default: int, least: int = 1) -> int:
        """A whole number from `least`."""
        value = self(key, int, default)
        if value is not None and value < least:
            raise ValueError(f"{key}: got {value}, wanted at least {least}")
        return value

    def positive(self, key: str, default: float, *, zero: bool) -> float:
        """A number above 0, or from 0 where `zero`."""
        value = float(self(key, Number, default))
        if value < 0 or (value == 0 and not zero):
            raise ValueError(f"{key}: got {value}, wanted {'0 or more' if zero else 'more than 0'}")
        return value

    def choice(self, key: str, default: str, known: Mapping[str, Any]) -> Any:
        """What `known` has for the name."""
        value = self(key, str, default)
        if value not in known:
            raise ValueError(f"{key}: got {value!r}, wanted one of {', '.join(known)}")
        return known[value]

    def rest(self, draft: Draft, reasons: Mapping[str, str], quiet: Sequence[str]) -> None:
        """Note every key that was not taken: those of one reason together, unknown ones one by one."""
        why = {**reasons, "|".join(quiet): "about logging, files or processes"}
        left: dict[str, list[str]] = {}
        for key in sorted(self.values.keys() - self.taken):
            said = f"{key} = {self.values[key]!r}"
            because = next((why[name] for name in why if fits(name, key)), None)
            if because is None:
                draft.note(UNKNOWN, key, repr(self.values[key]))
            else:
                left.setdefault(because, []).append(said)
        for because, keys in left.items():
            draft.note(LEFT, ", ".join(keys), because)


def fits(pattern: str, key: str) -> bool:
    """Whether a key, or an empty mapping under it, is meant."""
    return any(re.fullmatch(pattern, name) for name in (key, f"{key}."))


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in nested mappings."""
    for key, value in config.items():
        if not isinstance(key, str):
            raise ValueError(f"got the key {key!r} in {prefix or 'the file'}, wanted text")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def number(text: str) -> Any:
    """A number written as text, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


# -- what both have


def clipped(draft: Draft, sequence: bool, low: float, high: float, cap: float | None, name: str) -> None:
    """PPO's clip of a token's ratio or a row's, with a bound for bad tokens where `cap` is one."""
    if sequence:
        token_loss(draft, "sequence_ratio", clip_low=low, clip_high=high)
    elif cap is None:
        token_loss(draft, "clipped_ratio", clip_low=low, clip_high=high)
    elif cap <= 1:
        raise ValueError(f"{name}: got {cap}, wanted more than 1")
    else:
        token_loss(draft, "dual_clip", clip_low=low, clip_high=high, cap=float(cap))


def token_loss(draft: Draft, name: str, **knobs: float) -> None:
    module = "weighted_losses" if name in WEIGHTED_LOSSES else "losses"
    draft.knobs["objective.policy_objective.token_loss"] = f"@{module}.{name}"
    draft.knobs |= {f"{module}.{name}.{knob}": value for knob, value in knobs.items()}


def weigh(draft: Draft, name: str) -> None:
    draft.knobs["objective.policy_objective.loss_aggregation"] = f"@aggregation.{name}"
    if name.startswith("constant_length"):
        draft.knobs[f"aggregation.{name}.max_length"] = "%MAX_NEW_TOKENS"


def penalty(draft: Draft, beta: float, name: str) -> None:
    """The KL to the reference, in the loss."""
    draft.knobs["objective.policy_objective.beta"] = beta
    draft.knobs["objective.policy_objective.kl"] = f"@kl.{name}"
    if beta and name == "k3":
        draft.note(
            DIFFERS,
            "KL",
            "k3 in the loss, as there, weighed as the loss is; its gradient is not the KL's (kl.k3_ratio repairs it)",
        )


def normalized(draft: Draft, eps: float) -> None:
    draft.knobs["credit.outcome.advantage"] = "@advantage.group_normalized"
    draft.knobs |= {"advantage.group_normalized.eps": eps, "advantage.group_normalized.ddof": 1}
    draft.note(
        DIFFERS, "std of advantages", f"eps {eps:g} and ddof 1 as there; a group of equal rewards is exactly 0 here"
    )


def adamw(draft: Draft, name: str, **knobs: float) -> None:
    for beta in ("beta1", "beta2"):
        if knobs[beta] >= 1:
            raise ValueError(f"adam {beta}: got {knobs[beta]}, wanted less than 1")
    draft.knobs["sections.PolicyUpdate.optimizer"] = f"@optimizer.{name}"
    draft.knobs |= {f"optimizer.{name}.{knob}": float(value) for knob, value in knobs.items()}


def schedule(draft: Draft, name: str, warmup: int, total: int, final: float) -> None:
    """A function of the optimizer module with its knobs; `constant` has no total and no final one."""
    draft.knobs["sections.PolicyUpdate.schedule"] = f"@optimizer.{name}"
    draft.knobs[f"optimizer.{name}.warmup"] = warmup
    if name != "constant":
        draft.knobs |= {f"optimizer.{name}.total": total, f"optimizer.{name}.final": final}


def colocated(draft: Draft, *, share: float, ranks: int, name: str) -> None:
    """vLLM in the training processes; `share` of a device's memory is the original's `name`."""
    if share > 1:
        raise ValueError(f"{name}: got {share}, wanted at most 1")
    draft.includes.append("engine/vllm_colocated.gin")
    draft.knobs["vllm_sampler.colocated_sampler.gpu_memory_utilization"] = share
    draft.knobs["vllm_sampler.colocated_sampler.tensor_parallel"] = ranks


def corrected(draft: Draft, name: str, **knobs: Any) -> str:
    """The reference to a correction, whose knobs are bound."""
    draft.knobs |= {f"importance.{name}.{knob}": value for knob, value in knobs.items()}
    return f"@importance.{name}"


def correct(draft: Draft, weight: str | None, mask: str | None) -> None:
    """What a sample is worth: a correction, another one that masks besides, or both."""
    found = corrected(draft, "weight_and_mask", weight=weight, mask=mask) if weight and mask else weight or mask
    if found:
        draft.knobs["objective.policy_objective.importance_correction"] = found


def bounded(draft: Draft, kind: str, low: float, high: float, name: str, *, sequence: bool) -> str:
    """The reference to a truncated or a masked weight, of tokens or rows; the upper bound is the original's `name`."""
    if not low <= 1 <= high:
        raise ValueError(f"{name}: got {low:g} to {high:g}, wanted 1 within, or the policy's own samples lose weight")
    if kind == "truncated_weight" and low:
        draft.note(LEFT, f"the lower bound beside {name}", f"{low:g}: a small weight stays small")
    if sequence:
        draft.note(
            DIFFERS,
            name,
            f"{high:g} bounds exp of the sum of a row's log-ratios there, of their mean here: that lies near 1, and so "
            "should the bound",
        )
    knobs = {"cap": high} if kind == "truncated_weight" else {"low": low, "high": high}
    return corrected(draft, f"sequence_{kind}" if sequence else kind, **knobs)
