"""python tools/sweep: the command is in sweep.py."""

import sys

from sweep import flags, main

__all__ = ["flags", "main"]

if __name__ == "__main__":
    sys.exit(main())
