"""python tools/import_config: the command is in import_config.py."""

import sys

from import_config import flags, main

__all__ = ["flags", "main"]

if __name__ == "__main__":
    sys.exit(main())
