"""JSON lines as a stream: what a row asks a reward, and the row as it was with the verdict on it."""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from grpo_fn.core.json_lines import json_object
from grpo_fn.core.problem import LIMITS, Completion, Problem, Turn, verdict_name
from grpo_fn.shell.reward_workers.reward_pool import Outcome

PIECE = 2**16  # bytes read at once
LONGEST_LINE = 2**26
ROLLOUT = {
    "uid",
    "g",
    "tokens",
    "text",
}  # fields of a row in rollouts/, whose `text` is the completion; MBPP's is the task
SPACE = b" \t\r"


class Lines:
    """The lines of a stream as they arrive: reading never waits for more than has come."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.ready: deque[tuple[str, int, bytes]] = deque()  # `file:line`, the number of the line, the line
        self.ended = False
        self._begun: list[bytes] = []  # pieces of a line whose end has not come
        self._size = 0  # of these
        self._number = 0

    def fileno(self) -> int:
        """To wait on."""
        return self._stream.fileno()

    def fill(self) -> None:
        """Take in what has come, or the end of it. Waits when nothing has. Raises ValueError for an endless line."""
        piece = os.read(self.fileno(), PIECE)
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._begun.append(end)
            self._finish()
        self._begun.append(rest)
        self._size += len(rest)
        if self._size > LONGEST_LINE:
            where = f"{self._name}:{self._number + 1}"
            raise ValueError(f"{where}: got a line of more than {LONGEST_LINE} bytes, wanted a shorter one")
        if not piece:
            self.ended = True
            self._finish()

    def stop(self) -> None:
        """As if there were no more."""
        self.ready.clear()
        self.ended = True

    def _finish(self) -> None:
        line = b"".join(self._begun)
        self._begun, self._size = [], 0
        self._number += 1
        if line.strip(SPACE):
            self.ready.append((f"{self._name}:{self._number}", self._number, line))


def parse_row(where: str, number: int, line: bytes, *, needs: Sequence[str], suffix: str) -> tuple[Problem, Completion]:
    """What a row asks: its problem, numbered like the line, and its completion.

    A row of `rollouts/` has its completion in `text`. `problem.meta` is the row without the completion, and has the
    fields of MBPP under our names too: `tests`, `setup` and, of a row without one, `answer`, the reference program.
    `problem.answer` is the field `answer`; of an answer that ends in a line with `####`, as GSM8K's do, it is what
    follows there. `length` and `truncated` are read where they are an integer and a boolean, and are 0 and False
    otherwise; `turns` are those of an episode. `needs` names fields of FIELDS that the reward cannot do without.
    Raises ValueError that says where, for a line that is not such a row, for turns that are none, and for a row that
    has one of the names that `annotate_row` adds with this suffix.
    """
    row = json_object(where, line, wanted="an object with 'completion'")
    seen = _renamed(row)
    for name in verdict_names(suffix):
        if name in row:
            raise ValueError(
                f"{where}: got a row with {name!r} already, wanted none, or --field_suffix for a second verdict"
            )
    for name in ("completion", *needs):
        fits, wanted = FIELDS[name]
        if not fits(seen.get(name)):
            raise ValueError(f"{where}: got {_shown(seen, name)}, wanted {wanted}")
    turns = read_turns(where, row.get("turns", []))
    meta = {name: value for name, value in seen.items() if name not in ("completion", "turns")}
    prompt, answer, length = seen.get("prompt"), seen.get("answer"), seen.get("length")
    gold = str(answer) if _is_answer(answer) else ""
    asked = prompt if isinstance(prompt, str) else ""
    problem = Problem(number, asked, gold if "tests" in seen else _last_line(gold), meta)
    counted = length if _is_count(length) else 0
    return problem, Completion(seen["completion"], counted, row.get("truncated") is True, turns)


def read_turns(where: str, value: object) -> tuple[Turn, ...]:
    """The turns of an episode, as rollouts/ and evaluations store them. Raises ValueError that says where."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise ValueError(f"{where}: got 'turns': {json.dumps(value)[:80]}, wanted a list with an object for each turn")
    for n, turn in enumerate(value, start=1):
        lacking = [name for name in Turn._fields if name not in turn and name not in Turn._field_defaults]
        if lacking or (unknown := [name for name in turn if name not in Turn._fields]):
            got = f"no {lacking[0]!r}" if lacking else f"{unknown[0]!r}"
            raise ValueError(f"{where}, turn {n}: got {got}, wanted the fields {', '.join(Turn._fields)}")
        for name, held in turn.items():
            fits, wanted = TURN_FIELDS[name]
            if not fits(held):
                raise ValueError(f"{where}, turn {n}: got {name!r}: {json.dumps(held)[:80]}, wanted {wanted}")
    return tuple(Turn(**turn) for turn in value)


def annotate_row(line: bytes, outcome: Outcome, *, suffix: str) -> bytes:
    """The row, byte for byte as it was, with verdict, score, reason and seconds at its end."""
    values = (verdict_name(outcome.value), outcome.value, outcome.reason, round(outcome.seconds, 6))
    added = json.dumps(dict(zip(verdict_names(suffix), values, strict=True)))
    return line.strip(SPACE)[:-1].rstrip(SPACE) + b", " + added[1:].encode("ascii") + b"\n"


def verdict_names(suffix: str) -> list[str]:
    """The fields that a verdict adds to a row."""
    return [name + suffix for name in ("verdict", "score", "reason", "seconds")]


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with what its fields are called here beside what MBPP calls them."""
    seen = dict(row)
    if "completion" not in row and {*row} >= ROLLOUT:
        seen["completion"] = row["text"]
    if "test_list" in row:
        seen.setdefault("tests", row["test_list"])
    if "tests" in seen:
        imports = row.get("test_imports", [])
        seen.setdefault("setup", row.get("test_setup_code", "\n".join(imports) if _are_texts(imports) else ""))
        seen.setdefault("answer", row.get("code", ""))
    return seen


def _last_line(answer: str) -> str:
    """What follows the last `####` of an answer, if that is one line; else all of it."""
    _, mark, gold = answer.rpartition("####")
    return gold.strip() if mark and "\n" not in gold.strip() else answer


def _shown(row: dict[str, Any], name: str) -> str:
    if name in row:
        return f"{name!r}: {json.dumps(row[name])[:80]}"
    return f"the fields {', '.join(map(repr, row))[:200] or 'none'}"


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_reward(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and abs(value) <= sys.float_info.max)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


# What a field has to be where it is needed, and the words of the error.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "completion": (_is_text, "text in 'completion'"),
    "answer": (_is_answer, "text or a number in 'answer'"),
    "tests": (lambda value: _are_texts(value) and bool(value), "a list of asserts in 'tests' or 'test_list'"),
    "length": (_is_count, "the number of sampled tokens in 'length'"),
}
TURN_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("text", "observation", "state", "error", "answer"), (_is_text, "text")),
    "length": (_is_count, "a number of sampled tokens"),
    "calls": (_is_count, "a number of tool calls"),
    "reward": (_is_reward, "a finite number, or null for a turn that cannot be scored"),
    "limit": (lambda value: value in ("", *LIMITS), f"an empty text or one of {', '.join(LIMITS)}"),
}
