"""The functions of a module of grpo_fn/algo with given positional parameters, from their docstrings.

`functions: MODULE (DATA, ...)` are the public functions of grpo_fn/algo/MODULE.py with these positional parameters, in
the order of the file. A line is made of the function's knobs, the first line of its docstring, its paragraphs "Use it
when:" and "Peers:" where it has them, and the papers that the rest of it cites.
"""

import importlib
import inspect
import re
from collections.abc import Callable

COLUMNS = ["function", "what it is", "use it when", "source", "peers"]
LABELS = ("Use it when", "Peers")
# "GSPO (arXiv:2507.18071, eq. 5 and 7)" or "(IcePop; arXiv:...)": a clause, and in parentheses where it is to be found.
PLACE = r"(?:arXiv:\d|https?://|(?:18|19|20)\d\d)"
CITATION = re.compile(
    rf"((?:[^.;:,()]|\.(?=\S)|(?<=al)\.|(?<=eq)\.|(?<=Dr)\.|,(?= \"|[^()]*\"))*)\(([^()]*?{PLACE}[^()]*)\)"
)


def functions(words: str) -> dict[str, Callable[..., object]]:
    """The public functions of MODULE (DATA, ...), in the order of its file."""
    name, positional = re.fullmatch(r"(\w+) \((.+)\)", words).groups()
    module, found = importlib.import_module(f"grpo_fn.algo.{name}"), {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module.__name__:
            parameters = inspect.signature(value).parameters.values()
            if ", ".join(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY) == positional:
                found[name] = value
    return found


def cells(name: str, function: Callable[..., object]) -> list[str]:
    """A function's COLUMNS, from its signature and its docstring."""
    knobs = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    formula, _, rest = (inspect.getdoc(function) or "").partition("\n")
    if not formula:
        raise ValueError(f"{function.__module__}.{name}: got no docstring, expected one: its first line is the formula")
    labelled = dict.fromkeys(LABELS, "")
    body = [formula]
    for paragraph in re.split(rf"\n\n|\n(?=(?:{'|'.join(LABELS)}):)", rest.strip()):
        label, found, text = " ".join(paragraph.split()).partition(": ")
        if found and label in LABELS:
            labelled[label] = text.removesuffix(".")
        else:
            body.append(" ".join(paragraph.split()))
    call = f"{name}({', '.join(knobs)})" if knobs else name
    papers = CITATION.findall(" ".join(body))  # each as "what, where"
    sources = "; ".join(", ".join(part for part in (clause.strip(), where) if part) for clause, where in papers)
    return [f"`{call}`", formula.removesuffix("."), labelled["Use it when"], sources, labelled["Peers"]]


def table(words: str) -> str:
    """The Markdown table; a column in which nothing stands is left out."""
    lines = [cells(name, function) for name, function in functions(words).items()]
    if not lines:
        raise ValueError(f"got no function of {words}, expected the data of some function there")
    shown = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
    rows = [COLUMNS, ["---"] * len(COLUMNS), *lines]
    return "\n".join("| " + " | ".join(row[i].replace("|", r"\|") for i in shown) + " |" for row in rows)
