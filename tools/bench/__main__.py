"""python tools/bench: the command is in bench.py."""

import sys
from pathlib import Path

from bench import flags, main

__all__ = ["flags", "main"]

sys.path.append(str(Path(__file__).resolve().parents[2]))  # experiments/ is no part of what is installed

if __name__ == "__main__":
    sys.exit(main())
