"""The tape: what environments answered in steps that were recorded, by problem and sample.

A row's entries form a hash chain (`checksums.tape_digest`), which is stored with them and is part of the step's
checksums. Where a step is taken again, environments that are not pure are read from the tape, and others are compared.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fn.core.checksums import tape_digest
from grpo_fn.core.json_lines import json_rows
from grpo_fn.core.problem import Turn

FIELDS = ("uid", "g", "tokens", "mask", "turns", "tape")  # of a stored row


class TapeDiffers(RuntimeError):
    """An episode that is taken again goes another way than on the tape."""


class Taped(NamedTuple):
    """An episode on the tape: its first tokens, and its turns."""

    opening: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass
class Tape:
    """Episodes of recorded steps. Empty in a run that does nothing again.

    `strict`, as replay has it, ends where an episode goes another way; otherwise its environment has failed there.
    """

    strict: bool = False
    episodes: dict[tuple[int, int], Taped] = field(default_factory=dict)

    def of(self, uid: int, g: int) -> Taped | None:
        """The episode, if it is there."""
        return self.episodes.get((uid, g))

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take in the stored rows of a step. Raises ValueError for a row whose hash chain is broken."""
        for row in rows:
            if "turns" not in row:
                continue
            turns = tuple(Turn(**turn) for turn in row["turns"])
            if (got := tape_digest(turns)) != row["tape"]:
                raise ValueError(
                    f"tape of problem {row['uid']}, sample {row['g']}: got turns with the digest {got}, wanted "
                    f"{row['tape']}: the rollout was changed"
                )
            opening = tuple(row["tokens"][: row["mask"].index(1)])
            self.episodes[row["uid"], row["g"]] = Taped(opening, turns)


def recorded_episodes(folder: Path, *, after: int) -> list[list[dict[str, Any]]]:
    """What `Tape.add` reads of the rows, for every step after this one that `folder` holds. A torn file ends it."""
    steps: list[list[dict[str, Any]]] = []
    for path in sorted(folder.glob("step_*.jsonl.gz")):
        if int(path.name[5:].partition(".")[0]) <= after:
            continue
        try:
            rows = [row.value for row in json_rows(path, wanted="an object")]
        except (OSError, EOFError, zlib.error):
            break
        steps.append([{name: row[name] for name in FIELDS} for row in rows if "turns" in row])
    return steps
