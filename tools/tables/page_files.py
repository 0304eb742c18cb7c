"""Pages of docs that a program of this folder writes, and checks with --check."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def write_pages(
    command: str, doc: str | None, pages: Callable[[], Mapping[Path, str]], argv: Sequence[str] | None
) -> int:
    """Write the pages of python tools/tables/COMMAND.py; with --check 1 if one is not what would be written."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page would change")
    check = parser.parse_args(argv).check
    old = {p: text for p, text in pages().items() if not p.exists() or p.read_text(encoding="utf-8") != text}
    for path, text in old.items():
        if check:
            print(f"{path.name}: got another page than the code gives, run python tools/tables/{command}.py")
        else:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(old))
