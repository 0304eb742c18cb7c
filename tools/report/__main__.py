"""python tools/report: the command is in report.py."""

import sys

from report import flags, main

__all__ = ["flags", "main"]

if __name__ == "__main__":
    sys.exit(main())
