"""python tools/tables: the command is in page_tables.py."""

import sys

from page_tables import flags, main

__all__ = ["flags", "main"]

if __name__ == "__main__":
    sys.exit(main())
