"""A pytest plugin: which cases are slow, and a tenth of the tests for `--tenth=N`."""

from collections import Counter
from zlib import crc32

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", type=int, metavar="N", help="run one tenth of the tests; N, N + 1, ... N + 9 are all")


def tenth_of(test: str, case: int) -> int:
    """The tenth that a case is in: cases of a test cost alike, and neighbours are in different tenths."""
    return (crc32(test.encode()) + case) % 10


@pytest.hookimpl(tryfirst=True)  # before -m and -k choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what `slow_after` says, and leaves out the other nine tenths."""
    tenth, cases, chosen, left_out = config.getoption("tenth"), Counter[str](), [], []
    for item in items:
        test = item.nodeid.split("[")[0]
        mark = item.get_closest_marker("slow_after")
        if mark is not None and cases[test] >= mark.args[0]:
            item.add_marker(pytest.mark.slow)
        elsewhere = tenth is not None and tenth_of(test, cases[test]) != tenth % 10
        (left_out if elsewhere else chosen).append(item)
        cases[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
