"""The gin files of a folder of gin/: what each is for, what it includes, and what it binds itself."""

import re
from pathlib import Path

from knob_table import GIN, cell, code


def table(folder: str) -> str:
    """A line for each file of the folder; "." are the files of gin/ itself."""
    lines = ["| file | what it is for | includes | binds |", "|---|---|---|---|"]
    for path in sorted((GIN / folder).glob("*.gin")):
        includes = re.findall(r'^include "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
        names, bound = (", ".join(map(code, found)) for found in (includes, own_bindings(path)))
        lines.append(f"| `{path.relative_to(GIN)}` | {cell(opening(path))} | {names} | {bound} |")
    return "\n".join(lines)


def opening(path: Path) -> str:
    """The first sentence of the comment that a file opens with."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or not line.lstrip("# "):
            break
        lines.append(line.lstrip("# "))
    return re.split(r"(?<=\w\w\w\.) (?=[A-Z@])", " ".join(lines), maxsplit=1)[0]


def own_bindings(path: Path) -> list[str]:
    """What a file binds itself, as it is written there, functions once."""
    text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
    names = re.findall(r"^([\w./]+)(?:\.\w+ *=|:$| *=)", text, re.MULTILINE)
    return list(dict.fromkeys(name for name in names if name != "include"))
