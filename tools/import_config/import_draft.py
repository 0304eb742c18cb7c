"""A gin file in the making, and the translations that importers share."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

DIFFERS, LEFT, UNKNOWN = "means something else here", "not carried", "unknown"
UNBOUNDED = 1e9  # a bound of None, or a norm of 0
LOSS = "objective.policy_objective"
MODULES = {
    "grpo_fn": "train",
    "grpo_fn.algo": (
        "advantage aggregation credit distillation group_sampling importance kl losses masking objective step "
        "weighted_losses"
    ),
    "grpo_fn.rewards": "combine length math",
    "grpo_fn.shell.model": "blocks lora",
    "grpo_fn.shell.policy": "mesh optimizer",
    "grpo_fn.shell.vllm": "vllm_sampler vllm_servers",
    "grpo_fn.trainer": "sections",
}
PACKAGES = {module: package for package, modules in MODULES.items() for module in modules.split()}


class Text(str):
    """Text of the original: never a reference, whatever it begins with."""


@dataclass
class Draft:
    """A gin file in the making."""

    includes: list[str] = field(default_factory=lambda: ["base.gin", "algo/grpo.gin"])
    macros: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)  # a value that begins with @ or % is a reference
    notes: list[tuple[str, str, str]] = field(default_factory=list)  # (kind, key, what there is to say)

    def bind(self, function: str, **knobs: Any) -> str:
        """Bind knobs of a function of ours; the reference to it."""
        self.knobs |= {f"{function}.{knob}": value for knob, value in knobs.items()}
        return f"@{function}"

    def differs(self, key: str, said: str) -> None:
        self.notes.append((DIFFERS, key, said))

    def left(self, key: str, said: str) -> None:
        self.notes.append((LEFT, key, said))

    def text(self, source: str) -> str:
        """The file; its knobs in order, so that those of a function stand together."""
        values = "\n".join(map(literal, self.knobs.values()))
        modules = {name.partition(".")[0] for name in self.knobs}
        modules |= {*re.findall(r"(?:^|[\[ ])@(\w+)\.", values, re.MULTILINE)}
        said = f"From {source}, by tools/import_config. Read what follows before you compare with the original."
        lines = [f"# {line}" for line in (one_line(said), *self.listed())]
        lines += ["from __gin__ import dynamic_registration", ""]
        lines += [*sorted(f"from {PACKAGES[module]} import {module}" for module in modules), ""]
        lines += [*(f'include "{name}"' for name in dict.fromkeys(self.includes)), ""]
        lines += [*(f"{name} = {literal(value)}" for name, value in sorted(self.macros.items())), ""]
        return "\n".join([*lines, *(f"{name} = {literal(value)}" for name, value in sorted(self.knobs.items())), ""])

    def listed(self) -> Iterator[str]:
        """The notes, a line each: what differs, what was left, what is unknown."""
        for kind in (DIFFERS, LEFT, UNKNOWN):
            yield from (one_line(f"{kind}: {key}: {said}") for k, key, said in self.notes if k == kind)


def one_line(said: str) -> str:
    """The text as it may stand in a comment."""
    return " ".join(said.split()).encode("utf-8", "backslashreplace").decode()


def literal(value: Any) -> str:
    """A value as gin reads it; text of our own that begins with @ or % stays a reference."""
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    ours = isinstance(value, str) and not isinstance(value, Text)
    return value if ours and re.fullmatch(r"@[\w.]+|%[A-Z_]+", value) else repr(value)


# -- what both have


def clipped(draft: Draft, low: float, high: float, cap: float | None, name: str, *, sequence: bool) -> str:
    """PPO's clip of a token's ratio or a row's, with a bound for bad tokens where `cap`, the original's `name`, is."""
    if sequence or cap is None:
        loss = "losses.sequence_ratio" if sequence else "losses.clipped_ratio"
        return draft.bind(loss, clip_low=low, clip_high=high)
    if cap <= 1:
        raise ValueError(f"{name}: got {cap}, wanted more than 1")
    return draft.bind("losses.dual_clip", clip_low=low, clip_high=high, cap=cap)


def normalized(draft: Draft, eps: float) -> str:
    draft.differs("std of advantages", f"eps {eps:g} and ddof 1 as there; a group of equal rewards is exactly 0 here")
    return draft.bind("advantage.group_normalized", eps=eps, ddof=1)


def bounded(draft: Draft, kind: str, low: float, high: float, name: str, *, sequence: bool) -> str:
    """A truncated or a masked weight, of tokens or rows; the upper bound is the original's `name`."""
    if not low <= 1 <= high:
        raise ValueError(f"{name}: got {low:g} to {high:g}, wanted 1 within, or the policy's own samples lose weight")
    if kind == "truncated_weight" and low:
        draft.left(f"the lower bound beside {name}", f"{low:g}: a small weight stays small")
    if sequence:
        draft.differs(
            name,
            f"{high:g} bounds exp of the sum of a row's log-ratios there, of their mean here: that lies near 1, and so "
            "should the bound",
        )
    knobs = {"cap": high} if kind == "truncated_weight" else {"low": low, "high": high}
    return draft.bind(f"importance.sequence_{kind}" if sequence else f"importance.{kind}", **knobs)


def correct(draft: Draft, weight: str | None, mask: str | None) -> None:
    """What a sample is worth: a correction, another one that masks besides, or both."""
    both = draft.bind("importance.weight_and_mask", weight=weight, mask=mask) if weight and mask else weight or mask
    if both:
        draft.bind(LOSS, importance_correction=both)
