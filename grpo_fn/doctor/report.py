"""What an examination found: one line each, what state it is in, and what to do about it."""

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple


class State(Enum):
    """What is thought of a finding, and how much it weighs: 0 well, 1 may work, 2 cannot be relied upon."""

    OK = ("ok", 0)
    ABSENT = ("absent", 0)  # and nothing asked for it
    UNTESTED = ("untested", 1)  # allowed, and not what has been tested
    WARNING = ("warning", 1)
    OUTSIDE = ("outside", 2)  # of the range that is allowed
    MISSING = ("missing", 2)  # and wanted
    BROKEN = ("broken", 2)

    def __init__(self, label: str, weight: int) -> None:
        self.label, self.weight = label, weight


class DoctorFinding(NamedTuple):
    """`subject` belongs to `topic`, under which findings are listed; `todo` is one line, empty where all is well."""

    topic: str
    subject: str
    state: State
    seen: str
    todo: str = ""


def findings_exit_code(findings: Iterable[DoctorFinding]) -> int:
    """0 when all is well, 1 when there are warnings, 2 when something is missing, broken or out of range."""
    return max((finding.state.weight for finding in findings), default=0)


def findings_table(findings: Sequence[DoctorFinding]) -> str:
    """Findings for people: under their topics in the order given, each trouble with what to do below it."""
    states = max((len(finding.state.label) for finding in findings), default=0)
    subjects = max((len(finding.subject) for finding in findings), default=0)
    lines: list[str] = []
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        lines += ["", topic]
        for finding in group:
            line = f"  {finding.state.label:{states}}  {finding.subject:{subjects}}  {one_line(finding.seen)}"
            lines.append(line.rstrip())
            lines += [f"  {'':{states}}  -> {one_line(finding.todo)}"] if finding.todo else []
    return "\n".join([*lines[1:], "", summary(findings)])


def summary(findings: Sequence[DoctorFinding]) -> str:
    """The last line: how many of each weight."""
    bad, doubtful = (sum(finding.state.weight == weight for finding in findings) for weight in (2, 1))
    if not bad and not doubtful:
        return "all well"
    return f"{bad} missing, broken or out of range; {doubtful} untested or doubtful"


def findings_as_json(findings: Sequence[DoctorFinding]) -> dict[str, Any]:
    """Findings for scripts: what json.dumps takes."""
    rows = [finding._asdict() | {"state": finding.state.label} for finding in findings]
    return {"exit": findings_exit_code(findings), "findings": rows}


def one_line(text: str) -> str:
    """The text with every run of white space a single space."""
    return " ".join(text.split())
