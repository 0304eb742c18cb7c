"""Rows of completions in, the same rows with a verdict out: as a stream, in order, in constant memory."""

import inspect
import os
import stat
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tqdm import tqdm

from grpo_fn.config.function_knobs import bind_function
from grpo_fn.core.display_text import escape_control
from grpo_fn.core.problem import RewardFn, verdict_name
from grpo_fn.score.jsonl_stream import Lines, annotate_row, parse_row
from grpo_fn.shell.reward_workers.reward_pool import RETURNED_NONE, Outcome, RewardError, RewardPool
from grpo_fn.trainer.checks.requirements import check_sandboxes

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
    "run.wall_seconds=10.0",
    "run.cpu_seconds=10",
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


def known_reward(name: str) -> RewardSpec:
    """What is known of a reward by its short or its full name."""
    for short, named in NAMES.items():
        if name in (short, named.function):
            return named
    return RewardSpec(name, ("length",) if name.startswith("grpo_fn.rewards.length.") else (), RETURNED_NONE, 5.0, ())


def reward_of(named: RewardSpec, knobs: Sequence[str]) -> RewardFn:
    """The function with its knobs, each `KNOB=VALUE`; a later one beats an earlier.

    A value is a Python literal, or `@module.function`, whose own knobs are `KNOB.ITS_KNOB=VALUE`. Raises ValueError for
    what is not there, does not fit, or is missing, and for a sandbox that cannot be had here.
    """
    fn = bind_function(named.function, [*named.knobs, *knobs], flag="--reward_param", short=tuple(NAMES))
    try:
        inspect.signature(fn).bind("problem", "completion")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{named.function}: got another signature, wanted f(problem, completion)") from error
    check_sandboxes([fn])
    return fn


# In flight, read and not yet written: enough for the other workers while one row takes its time.
MOST_ROWS = 4096
MOST_BYTES = 2**24
EXIT_BROKEN_PIPE = 141  # what a shell says of a program that SIGPIPE ended


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
    """Score every row of `input` to `output`; returns the exit code. Says how it went on standard error.

    Raises ValueError for a reward, a knob or a row that cannot be used; what came before a bad row is written.
    """
    named = known_reward(reward)
    seconds = named.deadline if deadline is None else deadline
    pool = RewardPool(workers=workers, timeout_per_completion=seconds, memory_mb=memory_mb, stop_on_error=False)
    fn = reward_of(named, knobs)
    tally: Counter[str] = Counter()
    try:
        with _source(input) as source, _sink(output) as sink, _progress(pool, tally, source) as bar, pool:
            lines = Lines(source, "standard input" if input is None else str(input))
            for batch in score_lines(lines, pool, fn, needs=named.needs, suffix=suffix):
                outcomes = [(line, _meaning(outcome, named.none)) for line, outcome in batch]
                sink.write(b"".join(annotate_row(line, outcome, suffix=suffix) for line, outcome in outcomes))
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
    flying: deque[bytes] = deque()
    fault, held, come = None, 0, False
    with pool.job(fn) as job:
        while True:
            try:
                if come:
                    lines.fill()
                while lines.ready and len(flying) < MOST_ROWS and held < MOST_BYTES:
                    where, number, line = lines.ready.popleft()
                    job.add(*parse_row(where, number, line, needs=needs, suffix=suffix))
                    flying.append(line)
                    held += len(line)
            except ValueError as error:
                fault = error
                lines.stop()
            hungry = not lines.ready and not lines.ended
            if not flying and not hungry:
                break
            come = pool.turn(job, watching=[lines] if hungry else [])
            if done := [(flying.popleft(), outcome) for outcome in job.take()]:
                held -= sum(len(line) for line, _ in done)
                yield done
    if fault is not None:
        raise fault


def _meaning(outcome: Outcome, none: str) -> Outcome:
    return outcome._replace(reason=none) if outcome.reason == RETURNED_NONE else outcome


def _source(path: Path | None) -> BinaryIO:
    if path is None and os.isatty(0):
        print("reading rows from the terminal, end with Ctrl-D", file=sys.stderr)
    return open(0 if path is None else path, "rb", buffering=0, closefd=path is not None)


def _sink(path: Path | None) -> BinaryIO:
    if path is not None and path.is_file() and path.stat().st_size:
        raise ValueError(f"--output: got {path}, which holds something, wanted a new or an empty file")
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
