"""python tools/device_check: the command is in device_check.py."""

import sys

from device_check import flags, main

__all__ = ["flags", "main"]

if __name__ == "__main__":
    sys.exit(main())
