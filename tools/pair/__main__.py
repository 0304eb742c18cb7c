"""python tools/pair: the command is in pair.py."""

import sys

from pair import flags, main

__all__ = ["flags", "main"]

if __name__ == "__main__":
    sys.exit(main())
