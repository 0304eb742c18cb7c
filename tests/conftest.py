"""Hypothesis profiles (environment variable HYPOTHESIS_PROFILE), and the small run that several folders look at."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import shape_checks  # noqa: F401 before anything of the package is imported
import torch
from hypothesis import settings

pytest_plugins = ["leftover_threads", "slow_part"]

# Triton is asked when it is imported: where there is no card its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Tensors in tests are small: a second thread only costs, and one thread keeps the order of sums fixed.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models that runs make."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a small run that nothing interrupted."""
    from e2e.running import command, finish

    folder = tmp_path_factory.mktemp("whole")
    code = finish(command(cache, folder / "run"), folder / "out")
    assert code == 0, (folder / "out").read_text()
    return folder / "run"
