"""Where a run speaks, and what it has to tell of its rewards."""

from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_fn.analysis import health
from grpo_fn.shell.checkpoint.async_saver import AsyncSaver
from grpo_fn.shell.logging.async_writer import AsyncWriter
from grpo_fn.shell.logging.console import Console
from grpo_fn.shell.logging.metrics_writer import MetricsWriter, NullLogger, rewind
from grpo_fn.shell.logging.profiler import Profiler
from grpo_fn.shell.logging.stopwatch import Stopwatch
from grpo_fn.shell.policy import checksums
from grpo_fn.trainer.async_eval import AsyncEvaluator
from grpo_fn.trainer.background import Background

LOG = 600.0  # seconds that the log may take for what is waiting, where the ranks have no shorter deadline


@dataclass(frozen=True)
class RunLoggers:
    """Where a run speaks: to people, to the metrics, to its checkpoints. On all ranks but the main one mostly mute."""

    console: Console | NullLogger
    writer: AsyncWriter | NullLogger
    saver: AsyncSaver
    clock: Stopwatch
    profiler: Profiler
    evaluator: AsyncEvaluator | None  # beside the training; None: evaluation is the training engine's business
    background: Background
    history: list[health.Line]  # of the metrics, for the rules of health; on the main rank


def open_loggers(built: Any, stack: ExitStack, start: int, *, first: bool) -> RunLoggers:
    """The run's console, writer and saver; the latter is the only one that every rank has."""
    run_dir, main = built.run_dir, built.world.main
    mirrored = partial(stack.enter_context, built.mirror(run_dir))  # before the writer, whose events it follows
    built.world.agree(mirrored, what="opening the mirror")
    if main:
        rewind(run_dir / checksums.FILE, 0 if first else start + 1)
    profiler = Profiler(run_dir / "tensorboard", built.world, built.profile_steps)
    built.world.mark = profiler.mark
    return RunLoggers(
        console=stack.enter_context(Console(run_dir / "log.txt", built.cadence.steps, start) if main else NullLogger()),
        writer=stack.enter_context(late(built, start_step=0 if first else start + 1) if main else NullLogger()),
        saver=stack.enter_context(AsyncSaver(run_dir / "checkpoints", built.world)),
        clock=Stopwatch(mark=profiler.mark),
        profiler=profiler,
        evaluator=stack.enter_context(nullcontext() if built.evaluator is None else built.evaluator()),
        background=stack.enter_context(Background(built.world, deadline=built.cadence.eval_deadline)),
        history=[],
    )


def late(built: Any, *, start_step: int) -> AsyncWriter:
    """The run's metrics and events, written beside the training."""
    return AsyncWriter(MetricsWriter(built.run_dir, start_step=start_step), deadline=min(built.world.deadline, LOG))


def lost_rows(built: Any, before: Counter, console: Console | NullLogger) -> dict[str, float]:
    """How many rows each kind of trouble has cost on all ranks; what rewards complained of goes to the log."""
    mine = ({kind: number - before[kind] for kind, number in built.pool.counts.items()}, [*built.pool.complaints])
    built.pool.complaints.clear()
    parts = built.world.exchange(mine, what="the others' troubles with rewards")
    for rank, (_, complaints) in enumerate(parts):
        for complaint in complaints:
            console.line(complaint if len(parts) == 1 else f"rank {rank}: {complaint}")
    return {f"reward/{kind}": float(sum(counts[kind] for counts, _ in parts)) for kind in parts[0][0]}
