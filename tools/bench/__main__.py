"""python tools/bench: the command is in bench.py."""

import sys

from bench import flags, main

__all__ = ["flags", "main"]

if __name__ == "__main__":
    sys.exit(main())
