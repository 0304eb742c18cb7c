"""The loop around the box: begin or resume, step, evaluate, record, save, finish."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_fn import prng
from grpo_fn.algorithm import Algo, Experience, alone, grpo_step
from grpo_fn.evaluate import Judged, evaluate
from grpo_fn.problem import Problem, RewardFn, Scorer
from grpo_fn.resume import BEST, Progress, prune, restore, save
from grpo_fn.shell import hf, rollout_store, system
from grpo_fn.shell.clock import Stopwatch
from grpo_fn.shell.console import Console
from grpo_fn.shell.durable import write_json
from grpo_fn.shell.signals import EXIT_STOPPED, StopRequest
from grpo_fn.shell.writer import Writer, table
from grpo_fn.tasks.task import Task, train_problems
from grpo_fn.types import RunState

DATA, SAMPLING, EVALUATION = range(3)  # streams of the run's key


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How often what happens, in steps, and how much of it is kept."""

    steps: int
    eval_every: int  # 0: only before and after
    save_every: int
    keep_last: int
    keep_best: int
    keep_rollouts: int
    show_every: int  # sample tables in TensorBoard; 0: never
    show_rows: int


@dataclass(frozen=True)
class Built:
    """The pieces of a run, put together."""

    run_dir: Path
    key: Tensor
    seed: int
    policy: Any
    sampler: Any
    greedy: Any
    tokenizer: Any
    algo: Algo
    task: Task
    held_out: Sequence[Problem]
    prompts: int
    verdict: RewardFn
    score: Scorer
    cadence: Cadence
    plan: Sequence[str]  # the numbers of the run, for the log
    start_over: bool  # when every checkpoint is broken
    started: float  # time.perf_counter() when the program began to work


def work(built: Built) -> int:
    """Restore or begin, take the steps that are left, and finish."""
    said: list[str] = []
    progress = restore(built.run_dir, built.policy, start_over=built.start_over, said=said)
    first, past = progress is None, 0.0 if progress is None else progress.seconds
    start = 0 if progress is None else progress.state.step
    saved = -1 if progress is None else start
    clock = Stopwatch()
    with ExitStack() as stack:
        console = stack.enter_context(Console(built.run_dir / "log.txt", built.cadence.steps, start))
        writer = stack.enter_context(Writer(built.run_dir, start_step=0 if first else start + 1))
        stop = stack.enter_context(StopRequest())
        for line in said:
            console.line(line)
        if progress is None:
            for line in built.plan:
                console.line(line)
            writer.text(0, "config", "```\n" + (built.run_dir / "config.gin").read_text() + "\n```")
            progress = begin(built, writer, console, clock)
        else:
            console.line(f"resumed after step {start} from {built.run_dir / 'checkpoints'}")
        for step in range(start + 1, built.cadence.steps + 1):
            if stop.requested:
                break
            with noting(step, clock):
                advance(built, progress, step, writer, console, clock)
                progress.seconds = past + time.perf_counter() - built.started
                if stop.requested or step == built.cadence.steps or step % built.cadence.save_every == 0:
                    with clock.span("checkpoint"):
                        keep(built, progress)
                    saved = step
        done = progress.state.step
        if done < built.cadence.steps:
            if saved < done:  # the signal came between two steps, or before the first
                keep(built, progress)
            console.line(f"stopped by {stop.requested} after step {done}; the same command goes on from here")
            return EXIT_STOPPED
        progress.seconds = past + time.perf_counter() - built.started
        finish(built, progress, console)
    return 0


def begin(built: Built, writer: Writer, console: Console, clock: Stopwatch) -> Progress:
    """Measure the policy before training; its line in the metrics is step 0."""
    with noting(0, clock), clock.span("evaluate"):
        figures, judged = judge(built)
    show(writer, 0, "eval/samples", judged[: built.cadence.show_rows])
    writer.scalars(0, {**figures, **clock.lap()})
    console.line(f"before training: accuracy {figures[BEST]:.3f} on {len(judged)} held-out problems")
    return Progress(RunState(0, built.seed), figures[BEST], figures[BEST], 0, 0.0)


def advance(built: Built, progress: Progress, step: int, writer: Writer, console: Console, clock: Stopwatch) -> None:
    """One step of the algorithm, its evaluation when one is due, and the record of both."""
    first = (step - 1) * built.prompts
    problems = train_problems(built.task, prng.fold_in(built.key, DATA), first, built.prompts)
    experience, figures = grpo_step(
        built.policy,
        built.sampler,
        problems,
        key=prng.fold_in(built.key, SAMPLING),  # a problem's uid is its place in the stream: no step is needed
        algo=built.algo,
        all_reduce=alone,
        span=clock.span,
    )
    cadence = built.cadence
    if step == cadence.steps or (cadence.eval_every and step % cadence.eval_every == 0):
        with clock.span("evaluate"):
            measured, judged = judge(built)
        progress.accuracy, progress.evaluated = measured[BEST], step
        figures |= measured
        show(writer, step, "eval/samples", judged[: cadence.show_rows])
    with clock.span("log"):
        record(built, step, problems, experience, writer)
    times = clock.lap()
    figures |= {
        "generation/prompts": float(built.prompts),
        "generation/group_size": float(built.algo.group_size),
        "generation/tokens_per_second": figures["generation/tokens"] / times["time/generate"],
        **system.usage(),
        **times,
    }
    with clock.span("log"):  # in the next step's time: this one's is among what is written
        writer.scalars(step, figures)
        console.step(figures)
    progress.state = RunState(step, built.seed)


def judge(built: Built) -> tuple[dict[str, float], list[Judged]]:
    """Greedy accuracy on the held-out problems."""
    key = prng.fold_in(built.key, EVALUATION)
    return evaluate(built.greedy, built.held_out, key=key, verdict=built.verdict, score=built.score)


def record(built: Built, step: int, problems: Sequence[Problem], seen: Experience, writer: Writer) -> None:
    """Store the rollout; put distributions and a few samples where TensorBoard shows them."""
    cadence, group = built.cadence, built.algo.group_size
    rollouts = built.run_dir / "rollouts"
    rollout_store.store(rollouts, step, problems, group, *seen, keep=cadence.keep_rollouts)
    writer.histogram(step, "advantage/distribution", seen.adv)
    writer.histogram(step, "generation/length", seen.rollout.mask.sum(-1))
    if cadence.show_every and step % cadence.show_every == 0:
        rows = [
            {
                "prompt": problems[b // group].prompt,
                "completion": seen.rollout.text[b],
                "answer": problems[b // group].answer,
                "reward": f"{seen.reward.value.flatten()[b]:.2f}",
                "advantage": f"{seen.adv.flatten()[b]:.2f}",
            }
            for b in range(min(cadence.show_rows, len(seen.rollout.text)))
        ]
        show(writer, step, "samples", rows)


def show(writer: Writer, step: int, tag: str, rows: Sequence[Any]) -> None:
    """Rows as a table in TensorBoard's text tab."""
    if rows:
        writer.text(step, tag, table([row._asdict() if isinstance(row, tuple) else row for row in rows]))


def keep(built: Built, progress: Progress) -> None:
    """Save a checkpoint, then drop those no longer kept."""
    save(built.run_dir, built.policy, progress)
    prune(built.run_dir, keep_last=built.cadence.keep_last, keep_best=built.cadence.keep_best)


def finish(built: Built, progress: Progress, console: Console) -> None:
    """Export the model and say what came of the run."""
    # A process killed after its last checkpoint may not have come to it.
    prune(built.run_dir, keep_last=built.cadence.keep_last, keep_best=built.cadence.keep_best)
    hf.export(built.policy.model, built.tokenizer, built.run_dir / "model")
    summary = {
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy,
        "held_out_problems": len(built.held_out),
        "steps": progress.state.step,
        "seed": built.seed,
        "wall_seconds": round(progress.seconds, 2),
    }
    write_json(built.run_dir / "summary.json", summary)
    console.line(
        f"held-out accuracy {progress.accuracy_before:.3f} before, {progress.accuracy:.3f} after "
        f"{progress.state.step} steps, {progress.seconds:.0f} s; model in {built.run_dir / 'model'}"
    )


class noting(AbstractContextManager):
    """Adds the step and the phase to whatever is raised inside."""

    def __init__(self, step: int, clock: Stopwatch) -> None:
        self.step, self.clock = step, clock

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(f"at step {self.step}, phase {self.clock.phase}")
