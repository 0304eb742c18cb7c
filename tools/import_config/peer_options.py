"""The options of a peer: their table, a YAML file beside this one, and the reader that goes by it."""

import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from config_file import leaves, number
from import_draft import UNKNOWN, Draft, Text

LARGEST = 1e15  # no number of a configuration is larger
TYPES = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "list": (list,)}
BOUNDS = {(int,): ">= 1", (int, float): ">= 0"}
SIGNS = {
    **{">": (operator.gt, "more than"), ">=": (operator.ge, "at least")},
    **{"<": (operator.lt, "less than"), "<=": (operator.le, "at most")},
}


class Option(NamedTuple):
    """How an option is read, and what it is here."""

    types: tuple[type, ...]
    default: Any
    bounds: list[tuple[str, str]]  # (sign, number)
    known: Any  # the values there are, and what they are here
    ours: str
    when: list[tuple[str, str]]  # (option, value)


def option(default: Any, bounds: Any = "", ours: str = "", when: str = "") -> Option:
    """A row of a table, as trl.yaml describes them."""
    names = default.split("|") if isinstance(default, str) else [type(default).__name__]
    typed = isinstance(default, str) and {*names} <= TYPES.keys()
    types = sum((TYPES[name] for name in names), ()) if typed else TYPES[type(default).__name__]
    known = {} if isinstance(bounds, str) else bounds
    limits = "" if known or bounds == "any" else bounds or BOUNDS.get(types, "")
    signs, values = re.findall(r"([<>]=?) (\S+?)(?:,|$)", limits), re.findall(r"([\w.]+)(?:=(\S+))?", when)
    return Option(types, None if typed else default, signs, known, ours, values)


Table = Mapping[str, Option | str]  # an option; or a pattern of options, and why they have no counterpart


def table(name: str) -> Table:
    """The table in a YAML file."""
    rows = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return {key: row if isinstance(row, str) else option(*row) for key, row in rows.items()}


def reason(rows: Table, name: str) -> str | None:
    """Why an option, or an empty mapping under it, has no counterpart."""
    for pattern, why in rows.items():
        if isinstance(why, str) and any(re.fullmatch(pattern, key) for key in (name, f"{name}.")):
            return why
    return None


class Reader:
    """The original's options."""

    def __init__(self, config: Mapping[str, Any], rows: Table) -> None:
        self.values, self.rows = dict(leaves(config)), rows
        self.taken: set[str] = set()

    def __call__(self, name: str, default: Any = None) -> Any:
        """The value; where there is none the default, of the table if none is given.

        Raises ValueError for another type, or a value out of bounds.
        """
        self.taken.add(name)
        types, usual, bounds, known, *_ = self.rows[name]
        value = self.values.get(name)
        value = default if value is None else value
        value = usual if value is None else value
        if value is None:
            return None
        if isinstance(value, str) and str not in types and int in types:  # YAML reads 1e-6 as text
            value = number(value)
        if isinstance(value, float) and types == (int,) and value.is_integer():
            value = int(value)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{name}: got {value!r}, wanted {' or '.join(kind.__name__ for kind in types)}")
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise ValueError(f"{name}: got {value!r}, wanted a number of at most {LARGEST:g}")
        value = float(value) if float in types else value
        for sign, bound in bounds:
            holds, words = SIGNS[sign]
            if not holds(value, float(bound)):
                raise ValueError(f"{name}: got {value}, wanted {words} {bound}")
        if known and value not in known:
            raise ValueError(f"{name}: got {value!r}, wanted one of {', '.join(known)}")
        return Text(value) if isinstance(value, str) else value

    def carry(self, draft: Draft) -> None:
        """Put the options where the table says; what has no value goes nowhere."""
        for name, row in self.rows.items():
            if isinstance(row, str) or not row.ours or any(str(self(key)) != (x or "True") for key, x in row.when):
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
            if why := reason(self.rows, name):
                left.setdefault(why, []).append(f"{name} = {self.values[name]!r}")
            elif name in self.rows:
                self(name)  # without effect beside the others, and yet of its type
            else:
                draft.notes.append((UNKNOWN, name, repr(self.values[name])))
        for why, options in left.items():
            draft.left(", ".join(options), why)
