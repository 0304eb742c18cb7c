"""Writes the tables of docs/algorithms/catalogue.md from the docstrings of the functions they list.

python tools/tables/catalogue_page.py            rewrite the tables in the page
python tools/tables/catalogue_page.py --check    exit 1 if the page is not what would be written

A table stands between `<!-- functions of MODULE (DATA, ...) -->` and `<!-- end -->`: the public functions of
grpo_fn/algo/MODULE.py with these positional parameters, in the order of the file. A line of it is made of the
function's knobs, the first line of its docstring, its paragraphs "Use it when:" and "Peers:" where it has them, and the
papers that the rest of it cites. All other text of the page is written by hand.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from page_files import write_pages

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "algorithms" / "catalogue.md"
TABLE = re.compile(r"^<!-- functions of (\w+) \(([\w, ]+)\) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
LABELS = {"Use it when": "use it when", "Peers": "peers"}
# "GSPO (arXiv:2507.18071, eq. 5 and 7)" or "(IcePop; arXiv:...)": a clause, and in parentheses where it is to be found.
PLACE = r"(?:arXiv:\d|https?://|(?:18|19|20)\d\d)"
CITATION = re.compile(
    rf"((?:[^.;:,()]|\.(?=\S)|(?<=al)\.|(?<=eq)\.|(?<=Dr)\.|,(?= \"|[^()]*\"))*)\(([^()]*?{PLACE}[^()]*)\)"
)


class Entry(NamedTuple):
    """A function's line of the page."""

    call: str
    formula: str
    use: str
    source: str
    peers: str


def functions(module: ModuleType, positional: tuple[str, ...]) -> dict[str, Callable[..., object]]:
    """The public functions of a module with these positional parameters, in the order of its file."""
    found = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module.__name__:
            parameters = inspect.signature(value).parameters.values()
            if tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY) == positional:
                found[name] = value
    return found


def citations(text: str) -> list[str]:
    """The papers that a docstring's text names, each as "what, where": the clause before it and its parentheses."""
    return [", ".join(part for part in (clause.strip(), where) if part) for clause, where in CITATION.findall(text)]


def entry(name: str, function: Callable[..., object]) -> Entry:
    """A function's line, from its signature and its docstring."""
    knobs = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    formula, _, rest = (inspect.getdoc(function) or "").partition("\n")
    if not formula:
        raise ValueError(f"{function.__module__}.{name}: got no docstring, wanted one: its first line is the formula")
    labelled = dict.fromkeys(LABELS.values(), "")
    body = [formula]
    for paragraph in re.split(rf"\n\n|\n(?=(?:{'|'.join(LABELS)}):)", rest.strip()):
        label, found, text = " ".join(paragraph.split()).partition(": ")
        if found and label in LABELS:
            labelled[LABELS[label]] = text.removesuffix(".")
        else:
            body.append(" ".join(paragraph.split()))
    call = f"{name}({', '.join(knobs)})" if knobs else name
    sources = "; ".join(citations(" ".join(body)))
    return Entry(f"`{call}`", formula.removesuffix("."), labelled["use it when"], sources, labelled["peers"])


def table(module: ModuleType, positional: tuple[str, ...]) -> str:
    """The Markdown table of a module's functions; a column in which nothing stands is left out."""
    lines = [entry(name, function) for name, function in functions(module, positional).items()]
    if not lines:
        raise ValueError(f"{module.__name__}: got no function of {positional}, wanted the data of some function there")
    heads = Entry("function", "what it is", "use it when", "source", "peers")
    shown = [i for i in range(len(heads)) if any(line[i] for line in lines)]
    rows = [heads, Entry(*["---"] * len(heads)), *lines]
    return "\n".join("| " + " | ".join(row[i].replace("|", r"\|") for i in shown) + " |" for row in rows)


def written(page: str) -> str:
    """The page with every table as the docstrings have it now."""

    def filled(found: re.Match[str]) -> str:
        module = importlib.import_module(f"grpo_fn.algo.{found[1]}")
        opening = found[0].partition("\n")[0]
        return f"{opening}\n\n{table(module, tuple(found[2].split(', ')))}\n\n<!-- end -->"

    return TABLE.sub(filled, page)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or say that it is not what would be written."""
    return write_pages("catalogue_page", __doc__, lambda: {PAGE: written(PAGE.read_text(encoding="utf-8"))}, argv)


if __name__ == "__main__":
    sys.exit(main())
