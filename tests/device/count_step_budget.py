"""What a step may launch and wait for; apart from count_step.py, which needs the fake device."""

from collections.abc import Mapping
from pathlib import Path

BUDGET = Path(__file__).with_name("budget.json")
# Share by which torch's versions may differ; of waits, graphs, streams and a layer's part of a decoding step none.
MARGIN = {"launches": 0.05, "launches besides": 0.05}

Counts = Mapping[str, Mapping[str, int]]  # by phase and kind


def over_budget(counted: Counts, budget: Counts) -> list[str]:
    """A line for each kind of which there are more than the budget has; one that the budget lacks has none."""
    found = []
    for phase, kinds in counted.items():
        for kind, n in kinds.items():
            most = int(budget.get(phase, {}).get(kind, 0) * (1 + MARGIN.get(kind, 0.0)))
            if n > most:
                found.append(f"{phase}, {kind}: got {n}, wanted at most {most}")
    return found
