"""Two hosts for a test, always cleaned away."""

from collections.abc import Iterator

import pytest
from launch import hosts


@pytest.fixture
def two_hosts() -> Iterator[list[hosts.Host]]:
    """Named as the pods of the Kubernetes job grpo are. Skips, and says why, where namespaces cannot be made."""
    if (why := hosts.missing()) is not None:
        pytest.skip(f"NOT TESTED HERE, two hosts: {why}")
    made = hosts.pair([("grpo-0", "grpo-0.grpo"), ("grpo-1", "grpo-1.grpo")])
    yield made
    for host in made:
        host.remove()
