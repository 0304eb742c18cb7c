"""Rows of completions in, the same rows with a verdict out: as a stream, in order, in constant memory."""

import inspect
import json
import os
import stat
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from grpo_fn.config.resolve import bind_function
from grpo_fn.core.display_text import escape_control
from grpo_fn.core.json_lines import json_object
from grpo_fn.core.problem import LIMITS, Completion, Problem, RewardFn, Turn, verdict_name
from grpo_fn.shell.reward_workers.reward_pool import RewardError, RewardPool
from grpo_fn.shell.reward_workers.worker_pool import RETURNED_NONE, BegunCall, Outcome
from grpo_fn.trainer.requirements import check_sandboxes

# -- JSON lines as a stream


PIECE = 2**16  # bytes read at once
LONGEST_LINE = 2**26
ROLLOUT = {"uid", "g", "tokens", "text"}  # of a row in rollouts/, whose `text` is the completion; MBPP's is the task
SPACE = b" \t\r"


class Lines:
    """The lines of a stream as they arrive: reading never waits for more than has come."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.ready: deque[tuple[str, int, bytes]] = deque()  # `file:line`, the number of the line, the line
        self.ended = False
        self._pieces: list[bytes] = []  # of a line whose end has not come
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
            self._pieces.append(end)
            self._finish()
        self._pieces.append(rest)
        self._size += len(rest)
        if self._size > LONGEST_LINE:
            where = f"{self._name}:{self._number + 1}"
            raise ValueError(f"{where}: got a line of more than {LONGEST_LINE} bytes, expected a shorter one")
        if not piece:
            self.ended = True
            self._finish()

    def stop(self) -> None:
        """As if there were no more."""
        self.ready.clear()
        self.ended = True

    def _finish(self) -> None:
        line = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        self._number += 1
        if line.strip(SPACE):
            self.ready.append((f"{self._name}:{self._number}", self._number, line))


def parse_row(where: str, number: int, line: bytes, *, needs: Sequence[str], suffix: str) -> tuple[Problem, Completion]:
    """The problem of a row, numbered like the line, and its completion.

    A row of `rollouts/` has its completion in `text`. `problem.meta` is the row without the completion, and has the
    fields of MBPP under the names of grpo_fn too: `tests`, `setup` and, of a row without one, `answer`, the program.
    `problem.answer` is the field `answer`; of an answer that ends in a line with `####`, as GSM8K's do, it is what
    follows there. `length` and `truncated` are read where they are an integer and a boolean, and are 0 and False
    otherwise; `turns` are those of an episode. `needs` names fields of FIELDS that the reward cannot do without.
    Raises ValueError with the place, for a line that is not such a row, for turns that are none, and for a row that
    has one of the names that `annotate_row` adds with this suffix.
    """
    row = json_object(where, line, expected="an object with 'completion'")
    fields = _renamed(row)
    for name in verdict_names(suffix):
        if name in row:
            raise ValueError(
                f"{where}: got a row with {name!r} already, expected none, or --field_suffix for a second verdict"
            )
    for name in ("completion", *needs):
        fits, expected = FIELDS[name]
        if not fits(fields.get(name)):
            raise ValueError(f"{where}: got {_shown(fields, name)}, expected {expected}")
    turns = read_turns(where, row.get("turns", []))
    meta = {name: value for name, value in fields.items() if name not in ("completion", "turns")}
    prompt, answer, length = fields.get("prompt"), fields.get("answer"), fields.get("length")
    gold = str(answer) if _is_answer(answer) else ""
    question = prompt if isinstance(prompt, str) else ""
    problem = Problem(number, question, gold if "tests" in fields else _last_line(gold), meta)
    tokens = length if _is_count(length) else 0
    return problem, Completion(fields["completion"], tokens, row.get("truncated") is True, turns)


def read_turns(where: str, value: object) -> tuple[Turn, ...]:
    """The turns of an episode, as rollouts/ and evaluations store them. Raises ValueError with the place."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise ValueError(
            f"{where}: got 'turns': {json.dumps(value)[:80]}, expected a list with an object for each turn"
        )
    for n, turn in enumerate(value, start=1):
        lacking = [name for name in Turn._fields if name not in turn and name not in Turn._field_defaults]
        if lacking or (unknown := [name for name in turn if name not in Turn._fields]):
            got = f"no {lacking[0]!r}" if lacking else f"{unknown[0]!r}"
            raise ValueError(f"{where}, turn {n}: got {got}, expected the fields {', '.join(Turn._fields)}")
        for name, content in turn.items():
            fits, expected = TURN_FIELDS[name]
            if not fits(content):
                raise ValueError(f"{where}, turn {n}: got {name!r}: {json.dumps(content)[:80]}, expected {expected}")
    return tuple(Turn(**turn) for turn in value)


def annotate_row(line: bytes, outcome: Outcome, *, suffix: str) -> bytes:
    """The row, byte for byte as it was, with verdict, score, reason and seconds at its end."""
    values = (verdict_name(outcome.value), outcome.value, outcome.reason, round(outcome.seconds, 6))
    verdict = json.dumps(dict(zip(verdict_names(suffix), values, strict=True)))
    return line.strip(SPACE)[:-1].rstrip(SPACE) + b", " + verdict[1:].encode("ascii") + b"\n"


def verdict_names(suffix: str) -> list[str]:
    """The fields that a verdict adds to a row."""
    return [name + suffix for name in ("verdict", "score", "reason", "seconds")]


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with the names of grpo_fn for its fields beside those of MBPP."""
    fields = dict(row)
    if "completion" not in row and {*row} >= ROLLOUT:
        fields["completion"] = row["text"]
    if "test_list" in row:
        fields.setdefault("tests", row["test_list"])
    if "tests" in fields:
        imports = row.get("test_imports", [])
        fields.setdefault("setup", row.get("test_setup_code", "\n".join(imports) if _are_texts(imports) else ""))
        fields.setdefault("answer", row.get("code", ""))
    return fields


def _last_line(answer: str) -> str:
    """The part after the last `####` of an answer, if it is one line; else the whole answer."""
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
    return value is None or (_is_answer(value) and not _is_text(value) and abs(value) <= sys.float_info.max)


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


# -- a reward as the command line names it: a short name or `module.function`, with its knobs


class RewardSpec(NamedTuple):
    """A reward function by its import path, with the fields, knobs and timeout that scoring rows needs."""

    function: str
    needs: tuple[str, ...]  # fields of a row that it cannot do without
    none: str  # what it means when it returns None
    deadline: float  # seconds for a row by default
    knobs: tuple[str, ...]  # as for --reward_param, which comes on top


GOLD = "the gold answer cannot be parsed"
TESTS = "no program can pass these tests"
SANDBOX = (
    "run=@grpo_fn.sandbox.run_program",
    "run.wall_seconds=20.0",
    "run.cpu_seconds=5",
    "run.memory_mb=512",
    "run.processes=8",
    "run.file_mb=16",
    "run.output_kb=1024",
    "run.isolation=@grpo_fn.sandbox.strongest_isolation",
)
NAMES = {
    "math": RewardSpec("grpo_fn.rewards.math.correct", ("answer",), GOLD, 5.0, ()),
    "math_evaluated": RewardSpec("grpo_fn.rewards.math.correct_evaluated", ("answer",), GOLD, 5.0, ()),
    "lenient": RewardSpec("grpo_fn.rewards.math.lenient", ("answer",), GOLD, 5.0, ()),
    "code": RewardSpec("grpo_fn.rewards.code.all_tests_pass", ("tests",), TESTS, 30.0, SANDBOX),
    "share_of_tests": RewardSpec("grpo_fn.rewards.code.share_of_tests", ("tests",), TESTS, 30.0, SANDBOX),
}
OF_LENGTH = {f"grpo_fn.rewards.format.{name}" for name in ("soft_overlong_punishment", "cosine_length")}


def known_reward(name: str) -> RewardSpec:
    """The entry of a reward by its short or its full name."""
    for short, spec in NAMES.items():
        if name in (short, spec.function):
            return spec
    return RewardSpec(name, ("length",) if name in OF_LENGTH else (), RETURNED_NONE, 5.0, ())


def reward_of(spec: RewardSpec, knobs: Sequence[str]) -> RewardFn:
    """The function with its knobs, each `KNOB=VALUE`; a later one beats an earlier.

    A value is a Python literal, or `@module.function`, whose own knobs are `KNOB.ITS_KNOB=VALUE`. Raises ValueError for
    what is not there, does not fit, or is missing, and for a sandbox that cannot be had here.
    """
    fn = bind_function(spec.function, [*spec.knobs, *knobs], flag="--reward_param", short=tuple(NAMES))
    try:
        inspect.signature(fn).bind("problem", "completion")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec.function}: got another signature, expected f(problem, completion)") from error
    check_sandboxes([fn])
    return fn


# In flight, read and not yet written: enough for the other workers while one row takes its time.
MOST_ROWS = 4096
MOST_BYTES = 2**24
PAUSE = 0.02  # seconds between two looks at what is scored, while no line comes
EXIT_BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended


def score_file(
    *,
    reward: str,
    knobs: Sequence[str],
    input: Path | None,
    output: Path | None,
    suffix: str,
    workers: int,
    deadline: float | None,
    memory_mb: int,
) -> int:
    """Score every row of `input` to `output`; returns the exit code. Its summary goes to standard error.

    Raises ValueError for a reward, a knob or a row that cannot be used; what came before a bad row is written.
    """
    spec = known_reward(reward)
    seconds = spec.deadline if deadline is None else deadline
    pool = RewardPool(workers=workers, timeout_per_completion=seconds, memory_mb=memory_mb, stop_on_error=False)
    fn = reward_of(spec, knobs)
    tally: Counter[str] = Counter()
    try:
        with _source(input) as source, _sink(output) as sink, _progress(pool, tally, source) as bar, pool:
            lines = Lines(source, "standard input" if input is None else str(input))
            for batch in score_lines(lines, pool, fn, needs=spec.needs, suffix=suffix):
                for line, outcome in batch:
                    if outcome.reason == RETURNED_NONE:
                        outcome = outcome._replace(reason=spec.none)
                    sink.write(annotate_row(line, outcome, suffix=suffix))
                sink.flush()
                tally.update(verdict_name(outcome.value) for _, outcome in batch)
                bar.set_postfix_str(_counts(tally), refresh=False)
                bar.update(sum(len(line) + 1 for line, _ in batch))
    except RewardError as error:
        raise ValueError(error) from error
    except BrokenPipeError:  # the reader has closed the pipe
        return EXIT_BROKEN_PIPE
    return 0


def score_lines(
    lines: Lines, pool: RewardPool, fn: RewardFn, *, needs: Sequence[str], suffix: str
) -> Iterator[list[tuple[bytes, Outcome]]]:
    """Each line with its outcome, in order, as many together as became known at once.

    Not more than MOST_ROWS rows, or the first beyond MOST_BYTES, are in flight. Raises ValueError for the first bad
    row, after everything before it.
    """
    pending: deque[tuple[bytes, Problem, Completion, BegunCall]] = deque()
    error_of_row, size, full = None, 0, False
    try:
        while True:
            rows, must_read = [], not lines.ready and not lines.ended
            full = full and (
                len(pending) > MOST_ROWS // 2 or size > MOST_BYTES // 2
            )  # many rows are submitted together
            try:
                if must_read and select([lines], [], [], PAUSE if pending else None)[0]:
                    lines.fill()
                while lines.ready and not full:
                    where, number, line = lines.ready.popleft()
                    rows.append((line, *parse_row(where, number, line, needs=needs, suffix=suffix)))
                    size += len(line)
                    full = len(pending) + len(rows) >= MOST_ROWS or size >= MOST_BYTES
            except ValueError as error:
                error_of_row = error
                lines.stop()
            problems, completions = [row[1] for row in rows], [row[2] for row in rows]
            calls = pool.submit(fn, problems, completions)
            pending += [(*row, call) for row, call in zip(rows, calls, strict=True)]
            if not pending and lines.ended:
                break
            if pending and (lines.ready or lines.ended):
                wait([pending[0][-1].future])
            count = next((n for n, (*_, call) in enumerate(pending) if not call.future.done()), len(pending))
            if done := [pending.popleft() for _ in range(count)]:
                size -= sum(len(line) for line, *_ in done)
                outcomes = pool.collect(fn, *zip(*(row[1:] for row in done), strict=True))
                yield [(line, outcome) for (line, *_), outcome in zip(done, outcomes, strict=True)]
    finally:
        for *_, call in pending:
            call.future.cancel()
    if error_of_row is not None:
        raise error_of_row


def _source(path: Path | None) -> BinaryIO:
    if path is None and os.isatty(0):
        print("reading rows from the terminal, end with Ctrl-D", file=sys.stderr)
    return open(0 if path is None else path, "rb", buffering=0, closefd=path is not None)


def _sink(path: Path | None) -> BinaryIO:
    if path is not None and path.is_file() and path.stat().st_size:
        raise ValueError(f"--output: got {path}, which holds something, expected a new or an empty file")
    return open(1 if path is None else path, "wb", closefd=path is not None)


@contextmanager
def _progress(pool: RewardPool, tally: Counter[str], source: BinaryIO) -> Iterator[tqdm]:
    """A progress bar on a terminal; at the end a line, and what went wrong with the first rows lost."""
    started, about = time.monotonic(), os.fstat(source.fileno())
    size = about.st_size if stat.S_ISREG(about.st_mode) else None
    try:
        with tqdm(total=size, unit="B", unit_scale=True, dynamic_ncols=True, disable=None) as bar:
            yield bar
    finally:
        if not isinstance(sys.exception(), BrokenPipeError):
            _print_summary(pool, tally, time.monotonic() - started)


def _print_summary(pool: RewardPool, tally: Counter[str], seconds: float) -> None:
    rows = tally.total()
    lost = "".join(f", {count} {cause.replace('_', ' ')}" for cause, count in pool.counts.items() if count)
    print(f"{rows} rows in {seconds:.1f} s ({rows / seconds:.0f} a second): {_counts(tally)}{lost}", file=sys.stderr)
    for text in pool.complaints:
        print(escape_control(text), file=sys.stderr)


def _counts(tally: Mapping[str, int]) -> str:
    return ", ".join(f"{tally[name]} {name}" for name in ("right", "wrong", "unscorable"))
