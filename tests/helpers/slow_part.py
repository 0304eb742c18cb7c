"""A pytest plugin: which cases are slow, and a tenth of the slow ones for `--tenth=N`."""

from collections import Counter

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", type=int, metavar="N", help="a tenth of the slow tests; N, N + 1, ... N + 9 are all")


@pytest.hookimpl(tryfirst=True)  # before -m and -k choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what `slow_after` says, and deals the slow cases out in ten: neighbours cost alike."""
    cases = Counter[str]()
    for item in items:
        test, mark = item.nodeid.split("[")[0], item.get_closest_marker("slow_after")
        if mark is not None and cases[test] >= mark.args[0]:
            item.add_marker(pytest.mark.slow)
        cases[test] += 1
    if (tenth := config.getoption("tenth")) is not None:
        chosen = [item for item in items if item.get_closest_marker("slow")][tenth % 10 :: 10]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
