"""Write the tables of a page of docs that are made from the code, or measured by enumeration.

python tools/tables docs/configuration/knobs.md docs/algorithms/catalogue.md      rewrite their tables
python tools/tables docs/algorithms/bias.md --check                               exit 1 if one would change

A table stands between `<!-- NAME: WORDS -->` and `<!-- end -->`: what the module of that name in TABLES makes of the
words. All other text of a page is written by hand.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

# A table's name, and the module whose `table(words)` is its text.
TABLES = {
    "functions": "function_table",
    "knobs": "knob_table",
    "gin files": "gin_file_table",
    "bias and noise": "bias_table",
    "procedural kinds": "procedural_audit",
    "families": "family_table",
}
PLACE = re.compile(rf"^<!-- ({'|'.join(TABLES)}): ([^\n]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a table would change")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or say which are not what would be written."""
    args = flags().parse_args(argv)
    texts = {path: path.read_text(encoding="utf-8") if path.is_file() else "" for path in args.pages}
    if absent := [str(path) for path, text in texts.items() if not PLACE.search(text)]:
        print(f"error: got {', '.join(absent)}, expected pages with a place for a table", file=sys.stderr)
        return 2
    changed = {path: made for path, text in texts.items() if (made := with_tables(text)) != text}
    for path, text in changed.items():
        if args.check:
            print(f"{path}: got another table than the code gives, run python tools/tables {path}")
        else:
            path.write_text(text, encoding="utf-8")
    return int(args.check and bool(changed))


def with_tables(text: str) -> str:
    """A page with all its tables anew."""

    def filled(place: re.Match[str]) -> str:
        table = importlib.import_module(TABLES[place[1]]).table(place[2])
        return f"<!-- {place[1]}: {place[2]} -->\n\n{table.strip()}\n\n<!-- end -->"

    return PLACE.sub(filled, text)
