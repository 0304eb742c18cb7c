"""The loggers of a run: console, metrics writer, checkpoint saver, profiler; null objects on ranks other than 0."""

from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from grpo_fn.analysis import health
from grpo_fn.analysis.evaluation import grader_names
from grpo_fn.shell.checkpoint.async_saver import AsyncSaver
from grpo_fn.shell.logging import kernel_record
from grpo_fn.shell.logging.async_writer import AsyncWriter
from grpo_fn.shell.logging.console import Console
from grpo_fn.shell.logging.metrics_writer import MetricsWriter, NullLogger, rewind
from grpo_fn.shell.logging.mirror_writer import MirrorWriter
from grpo_fn.shell.logging.stopwatch import Profiler, Stopwatch
from grpo_fn.shell.policy import checksums
from grpo_fn.shell.world import World
from grpo_fn.trainer.background import Background
from grpo_fn.trainer.run import AsyncEvaluator, TrainingRun

JUDGE_METRICS = {  # by field of reward_pool.JudgeCost
    **{name: f"judge/{name}" for name in ("requests", "retries", "prompt_tokens", "completion_tokens")},
    **{name: f"judge/{name}" for name in ("failures", "unreadable")},
    "seconds": "time/judge_requests",
}
LOG = 600.0  # seconds that the log may take for what is waiting, where the ranks have no shorter deadline


@dataclass(frozen=True)
class RunLoggers:
    """Console, metrics, checkpoints and profiler of a run; null objects on ranks other than 0."""

    console: Console | NullLogger
    writer: AsyncWriter | NullLogger
    saver: AsyncSaver
    clock: Stopwatch
    profiler: Profiler
    evaluator: AsyncEvaluator | None  # beside the training; None: evaluation is the training engine's business
    background: Background
    history: list[health.Line]  # of the metrics, for the rules of health; on the main rank
    losses: list[str]  # of the newest step whose rewards lost rows, the first of each kind with its reason


def open_loggers(run: TrainingRun, stack: ExitStack, start: int, *, first: bool) -> RunLoggers:
    """The run's console, writer and saver; the latter is the only one that every rank has."""
    run_dir, main = run.run_dir, run.world.main
    mirrors: list[MirrorWriter] = []  # one, on the main rank; it opens before the writer, whose events it may follow
    opened = run.settings.logging.mirror(run_dir)
    run.world.agree(lambda: mirrors.append(stack.enter_context(opened)), what="opening the mirror")
    if main:
        for name in (checksums.FILE, kernel_record.FILE):
            rewind(run_dir / name, 0 if first else start + 1)
    profiler = Profiler(run_dir / "tensorboard", run.world, run.settings.logging.profile_steps)
    run.world.mark = profiler.mark
    console, writer = NullLogger(Console), NullLogger(AsyncWriter, MetricsWriter)
    if main:
        grader = grader_names(run.settings.evaluation.graders)[0]
        console = Console(run_dir / "log.txt", run.settings.steps, start, grader=grader)
        writer = open_writer(run_dir, run.world, *mirrors, start_step=0 if first else start + 1)
    return RunLoggers(
        console=stack.enter_context(console),
        writer=stack.enter_context(writer),
        saver=stack.enter_context(AsyncSaver(run_dir / "checkpoints", run.world)),
        clock=Stopwatch(mark=profiler.mark),
        profiler=profiler,
        evaluator=stack.enter_context(nullcontext() if run.evaluator is None else run.evaluator()),
        background=stack.enter_context(Background(run.world, deadline=run.settings.evaluation.timeout)),
        history=[],
        losses=[],
    )


def open_writer(run_dir: Path, world: World, mirror: MirrorWriter, *, start_step: int) -> AsyncWriter:
    """The run's metrics and events, written beside the training."""
    writer = MetricsWriter(run_dir, start_step=start_step, mirror=mirror)
    return AsyncWriter(writer, deadline=min(world.deadline, LOG))


def lost_rows(run: TrainingRun, before: Counter, loggers: RunLoggers) -> dict[str, float]:
    """How many rows each kind of trouble has cost on all ranks, and what judges cost; complaints go to the log.

    `before` has the pool's counts and costs before the step.
    """
    counts = {f"reward/{kind}": number - before[kind] for kind, number in run.pool.counts.items()}
    costs = {JUDGE_METRICS[kind]: number - before[kind] for kind, number in run.pool.costs.items()}
    mine = (counts, costs, [*run.pool.complaints])
    run.pool.complaints.clear()
    parts = run.world.exchange(mine, what="the others' troubles with rewards")
    said = [
        text if len(parts) == 1 else f"rank {rank}: {text}" for rank, (*_, texts) in enumerate(parts) for text in texts
    ]
    for text in said:
        loggers.console.line(text)
    if said:
        loggers.losses[:] = said
    total: Counter[str] = Counter()
    for counts, costs, _ in parts:  # `update`, unlike +, keeps what is 0
        total.update(counts)
        total.update(costs)
    return {name: float(number) for name, number in total.items()}
