"""What the end-to-end tests share: one model cache, and one small run that nothing interrupted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.running import command, finish


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def whole(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run from beginning to end."""
    folder = tmp_path_factory.mktemp("whole")
    code = finish(command(cache, folder / "run"), folder / "out")
    assert code == 0, (folder / "out").read_text()
    return folder / "run"
