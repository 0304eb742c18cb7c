"""Published data sets, where they are: tests that need one say that they did not run when it is absent."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"


def published(name: str) -> Path:
    """The file or folder of that name under $GRPO_FN_DATA, or under shared/data beside the project."""
    path = Path(os.environ.get("GRPO_FN_DATA", BESIDE)) / name
    if not path.exists():
        pytest.skip(f"NOT TESTED on the published data: no {path}; point GRPO_FN_DATA at the folder that holds gsm8k/")
    return path
