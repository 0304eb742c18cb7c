"""One browser for all tests of this folder, or none: then they are skipped, and say so."""

import os
import warnings
from collections.abc import Iterator

import pytest
from browser.chrome import BROWSERS, DRIVERS, Chrome, found

REQUIRED = "GRPO_FN_BROWSER"  # set to 1, a machine without a browser fails instead


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    browser, driver = found(BROWSERS), found(DRIVERS)
    if browser is None or driver is None:
        missing = (
            "no Chromium with ChromeDriver here, the pages are not looked at: apt-get install chromium chromium-driver"
        )
        assert os.environ.get(REQUIRED) != "1", missing
        warnings.warn(missing, stacklevel=1)
        pytest.skip(missing)
    window = Chrome(tmp_path_factory.mktemp("chrome"), browser=browser, driver=driver)
    yield window
    window.close()
