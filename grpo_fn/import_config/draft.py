"""What importers share: a peer's table of options, the reader that goes by it, and the gin file in the making."""

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_fn.import_config.peer_file import flat_options, parse_number

DIFFERS, LEFT, UNKNOWN = "means something else here", "not carried", "unknown"
UNBOUNDED = 1e9  # a bound of None, or a norm of 0
LARGEST = 1e15  # no number of a configuration is larger
LOSS = "objective.policy_objective"
MODULES = {
    "grpo_fn": "train",
    "grpo_fn.algo": "advantage corrections credit distillation group_sampling losses masking objective step",
    "grpo_fn.rewards": "combine format math",
    "grpo_fn.shell.model": "blocks lora",
    "grpo_fn.shell.policy": "mesh optimizer",
    "grpo_fn.shell.vllm": "vllm_sampler vllm_servers",
    "grpo_fn.trainer": "sections",
}
PACKAGES = {module: package for package, modules in MODULES.items() for module in modules.split()}
TYPES = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "list": (list,)}
BOUNDS = {(int,): ">= 1", (int, float): ">= 0"}
SIGNS = {
    **{">": (operator.gt, "more than"), ">=": (operator.ge, "at least")},
    **{"<": (operator.lt, "less than"), "<=": (operator.le, "at most")},
}


class Text(str):
    """Text of the original: never a reference, whatever it begins with."""


# -- the gin file


@dataclass
class Draft:
    """A gin file in the making."""

    includes: list[str] = field(default_factory=lambda: ["base.gin", "algo/grpo.gin"])
    macros: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(  # a value that begins with @ or % is a reference
        default_factory=lambda: {"train.train.model": "%MODEL", "sections.Sampling.max_new_tokens": "%MAX_NEW_TOKENS"}
    )
    notes: list[tuple[str, str, str]] = field(default_factory=list)  # (kind, key, what there is to say)

    def bind(self, function: str, **knobs: Any) -> str:
        """Bind knobs of a grpo_fn function; the reference to it."""
        self.knobs |= {f"{function}.{knob}": value for knob, value in knobs.items()}
        return f"@{function}"

    def differs(self, key: str, text: str) -> None:
        self.notes.append((DIFFERS, key, text))

    def leave_out(self, key: str, text: str) -> None:
        self.notes.append((LEFT, key, text))

    def text(self, source: str) -> str:
        """The file; its knobs in order, so that those of a function stand together."""
        values = "\n".join(map(draft_literal, self.knobs.values()))
        modules = {name.partition(".")[0] for name in self.knobs}
        modules |= {*re.findall(r"(?:^|[\[ ])@(\w+)\.", values, re.MULTILINE)}
        head = f"From {source}, by grpo_fn import. Read what follows before you compare with the original."
        lines = [f"# {line}" for line in (comment_text(head), *self.note_lines())]
        lines += ["from __gin__ import dynamic_registration", ""]
        lines += [*sorted(f"from {PACKAGES[module]} import {module}" for module in modules), ""]
        lines += [*(f'include "{name}"' for name in dict.fromkeys(self.includes)), ""]
        lines += [*(f"{name} = {draft_literal(value)}" for name, value in sorted(self.macros.items())), ""]
        return "\n".join(
            [*lines, *(f"{name} = {draft_literal(value)}" for name, value in sorted(self.knobs.items())), ""]
        )

    def note_lines(self) -> Iterator[str]:
        """The notes, a line each: what differs, what was left, what is unknown."""
        for kind in (DIFFERS, LEFT, UNKNOWN):
            yield from (comment_text(f"{kind}: {key}: {text}") for k, key, text in self.notes if k == kind)


def comment_text(text: str) -> str:
    """The text as it may stand in a comment."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode()


def draft_literal(value: Any) -> str:
    """A value as gin reads it; text of our own that begins with @ or % stays a reference."""
    if isinstance(value, list):
        return "[" + ", ".join(map(draft_literal, value)) + "]"
    ours = isinstance(value, str) and not isinstance(value, Text)
    return value if ours and re.fullmatch(r"@[\w.]+|%[A-Z_]+", value) else repr(value)


# -- the table


class Option(NamedTuple):
    """How an option is read, and what it is in grpo_fn."""

    types: tuple[type, ...]
    default: Any
    bounds: list[tuple[str, str]]  # (sign, number)
    known: Any  # the values that there are, and what they are in grpo_fn
    ours: str
    when: str  # condition


class Table(NamedTuple):
    """A peer's options, as trl.yaml describes them."""

    options: dict[str, Option]
    absent: dict[str, str]  # a pattern of options, and why they have no counterpart
    notes: list[list[str]]  # differs, left or refused; key; text, in which {OPTION} is its value; conditions

    def reason(self, name: str) -> str | None:
        """Why an option, or an empty mapping under it, has no counterpart."""
        names = (name, f"{name}.")
        return next((why for form, why in self.absent.items() if any(re.fullmatch(form, key) for key in names)), None)


def table_option(default: Any, bounds: Any = "", ours: str = "", when: str = "") -> Option:
    """A row of a table."""
    names = default.split("|") if isinstance(default, str) else [type(default).__name__]
    typed = isinstance(default, str) and {*names} <= TYPES.keys()
    types = sum((TYPES[name] for name in names), ()) if typed else TYPES[type(default).__name__]
    known = {} if isinstance(bounds, str) else bounds
    limits = "" if known or bounds == "any" else bounds or BOUNDS.get(types, "")
    signs = re.findall(r"([<>]=?) (\S+?)(?:,|$)", limits)
    return Option(types, None if typed else default, signs, known, ours, when)


def read_table(name: str) -> Table:
    """The table in a YAML file beside this one."""
    rows = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    notes = rows.pop("notes")
    options = {key: table_option(*row) for key, row in rows.items() if isinstance(row, list)}
    return Table(options, {key: row for key, row in rows.items() if isinstance(row, str)}, notes)


class OptionReader:
    """The original's options."""

    def __init__(self, config: Mapping[str, Any], rows: Table) -> None:
        self.values, self.rows = dict(flat_options(config)), rows
        self.taken: set[str] = set()

    def __call__(self, name: str, default: Any = None) -> Any:
        """The value; where there is none the default, of the table if none is given.

        Raises ValueError for another type, or a value out of bounds.
        """
        self.taken.add(name)
        types, usual, bounds, known, *_ = self.rows.options[name]
        values = (self.values.get(name), default, usual)
        value = next((x for x in values if x is not None), None)
        if value is None:
            return None
        if isinstance(value, str) and str not in types and int in types:  # YAML reads 1e-6 as text
            value = parse_number(value)
        if isinstance(value, float) and types == (int,) and value.is_integer():
            value = int(value)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{name}: got {value!r}, expected {' or '.join(kind.__name__ for kind in types)}")
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise ValueError(f"{name}: got {value!r}, expected a number of at most {LARGEST:g}")
        value = float(value) if float in types else value
        for sign, bound in bounds:
            holds, words = SIGNS[sign]
            if not holds(value, float(bound)):
                raise ValueError(f"{name}: got {value}, expected {words} {bound}")
        if known and value not in known:
            raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}")
        return Text(value) if isinstance(value, str) else value

    def holds(self, when: str) -> bool:
        """Whether a condition holds: `a & b=1|2 & c!=3`, an option by itself that is neither nothing nor false."""
        parts = (re.fullmatch(r"([\w.]+)(?:(!?=)(\S+))?", part).groups() for part in when.split(" & "))
        return all(
            (str(self(name)) in values.split("|")) == (sign == "=") if sign else bool(self(name))
            for name, sign, values in parts
        )

    def carry(self, draft: Draft) -> None:
        """Note what the table says, and put the options where it says; what has no value goes nowhere.

        Raises ValueError for what the table refuses.
        """
        for kind, key, text, *when in self.rows.notes:
            if when and not any(map(self.holds, when)):
                continue
            text = re.sub(r"\{([\w.]+)\}", lambda name: str(self(name[1])), text)
            if kind == "refused":
                raise ValueError(f"{key}: {text}")
            (draft.differs if kind == "differs" else draft.leave_out)(key, text)
        for name, row in self.rows.options.items():
            if not row.ours or (row.when and not self.holds(row.when)):
                continue
            value = row.known[self(name)] if isinstance(row.known, Mapping) and row.known else self(name)
            if row.ours == "include" or row.ours.endswith(".gin"):
                draft.includes += [value if row.ours == "include" else row.ours] if value else []
            elif value not in (None, ""):
                (draft.macros if row.ours.isupper() else draft.knobs)[row.ours] = value

    def rest(self, draft: Draft) -> None:
        """Note every option that was not read: those of one reason together, unknown ones one by one."""
        left: dict[str, list[str]] = {}
        for name in sorted(self.values.keys() - self.taken):
            if why := self.rows.reason(name):
                left.setdefault(why, []).append(f"{name} = {self.values[name]!r}")
            elif name in self.rows.options:
                self(name)  # without effect beside the others, and yet of its type
            else:
                draft.notes.append((UNKNOWN, name, repr(self.values[name])))
        for why, options in left.items():
            draft.leave_out(", ".join(options), why)


# -- what both peers have


def clip_loss(draft: Draft, low: float, high: float, cap: float | None, name: str, *, sequence: bool) -> str:
    """PPO's clip of a token's ratio or a row's, with a bound for bad tokens where `cap`, the original's `name`, is."""
    if sequence or cap is None:
        loss = "losses.sequence_ratio" if sequence else "losses.clipped_ratio"
        return draft.bind(loss, clip_low=low, clip_high=high)
    if cap <= 1:
        raise ValueError(f"{name}: got {cap}, expected more than 1")
    return draft.bind("losses.dual_clip", clip_low=low, clip_high=high, cap=cap)


def normalize_advantage(draft: Draft, eps: float) -> str:
    """The group's advantage over its standard deviation, as the original has it."""
    draft.differs("std of advantages", f"eps {eps:g} and ddof 1 as there; a group of equal rewards is exactly 0 here")
    return draft.bind("advantage.group_normalized", eps=eps, ddof=1)


def bound_weight(draft: Draft, kind: str, low: float, high: float, name: str, *, sequence: bool) -> str:
    """A truncated or a masked weight, of tokens or rows; the upper bound is the original's `name`."""
    if not low <= 1 <= high:
        raise ValueError(f"{name}: got {low:g} to {high:g}, expected 1 within, or the policy's own samples lose weight")
    if kind == "truncated_weight" and low:
        draft.leave_out(f"the lower bound beside {name}", f"{low:g}: a small weight stays small")
    if sequence:
        draft.differs(
            name,
            f"{high:g} bounds exp of the sum of a row's log-ratios there, of their mean here: that lies near 1, and so "
            "should the bound",
        )
    ratio = {"ratio": "@corrections.row_ratio" if sequence else "@corrections.token_ratio"}
    knobs = {"cap": high} if kind == "truncated_weight" else {"low": low, "high": high}
    return draft.bind(f"corrections.{kind}", **ratio, **knobs)


def bind_correction(draft: Draft, weight: str | None, mask: str | None) -> None:
    """Bind what a sample is worth: a correction, another one that masks besides, or both."""
    both = draft.bind("corrections.weight_and_mask", weight=weight, mask=mask) if weight and mask else weight or mask
    if both:
        draft.bind(LOSS, importance_correction=both)
