"""Tests of the real engine, in its own environment: `make test-vllm`. Elsewhere they are skipped, loudly."""

from importlib.util import find_spec
from pathlib import Path

import pytest

SPEC = find_spec("vllm")
# This folder, which is on the path by its parent, would pass for an empty package of that name; but it has no origin.
THERE = SPEC is not None and SPEC.origin is not None


class Skipped(pytest.File):
    """A file of tests that are not run; not imported either, so they may import vLLM at their top."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("NOT TESTED: the real vLLM is not here: make test-vllm", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Skip what is in this folder where there is no vLLM."""
    return None if THERE else Skipped.from_parent(parent, path=module_path)
