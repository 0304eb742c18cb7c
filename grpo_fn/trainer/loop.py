"""The loop around the box: begin or resume, step, evaluate, record, save, finish."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_fn.algo.step import AT_THE_START, Algorithm, Experience, Span, grpo_step
from grpo_fn.analysis import health
from grpo_fn.analysis.evaluation import Evaluation, evaluate, summarise
from grpo_fn.core import prng
from grpo_fn.core.problem import Problem, RewardFn, Scorer
from grpo_fn.core.types import Carried, RunState
from grpo_fn.shell.checkpoint.async_saver import Retention
from grpo_fn.shell.logging import system_metrics, tensorboard_layout
from grpo_fn.shell.logging.stopwatch import noting
from grpo_fn.shell.logging.tracker import Mirror
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy import checksums
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.process import EXIT_STOPPED, EXIT_UNHEALTHY, StopRequest
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.shell.sampler.data_parallel import DataParallelSampler
from grpo_fn.shell.world import World
from grpo_fn.tasks.task import Task, train_problems
from grpo_fn.trainer import async_eval
from grpo_fn.trainer.export import export_run
from grpo_fn.trainer.loggers import RunLoggers, lost_rows, open_loggers
from grpo_fn.trainer.recording import check_health, due, record, record_evaluation, step_checksums
from grpo_fn.trainer.state import BEST, Progress, packed_progress, read_history, restore

DATA, SAMPLING, EVALUATION, ADAPTERS, PROBING = range(5)  # streams of the run's key


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How often what happens, in steps, and how much of it is kept."""

    steps: int
    eval_every: int  # 0: only before and after
    eval_deadline: float  # seconds that an evaluation beside the training may take (train.train.evaluator)
    save_every: int
    keep_last: int
    keep_best: int
    keep_rollouts: int
    show_every: int  # sample tables in TensorBoard; 0: never
    show_rows: int
    digest_every: int  # checksums of the step, for replay; 0: never
    lens_every: int  # what every preset would have made of the step, in TensorBoard; 0: never
    signal_every: int  # the learning signal token by token, in signal/ and TensorBoard; 0: never
    signal_rows: int  # of the most influential rows


@dataclass(frozen=True)
class TrainingRun:
    """The pieces of a run, put together."""

    run_dir: Path
    key: Tensor
    seed: int
    world: World
    policy: FSDPPolicy
    adapters: LoRA | None
    sampler: Any  # an Ahead, or what stands in for one
    greedy: DataParallelSampler
    sampled: DataParallelSampler  # as the evaluation draws
    tokenizer: Any
    algo: Algorithm
    task: Task
    held_out: Sequence[Problem]
    prompts: int
    judges: Sequence[RewardFn]
    evaluation: Evaluation
    # Beside the training, on an engine of its own, which is started here. None: on the training's, which waits for it.
    evaluator: Callable[[], AbstractContextManager[async_eval.AsyncEvaluator]] | None
    pool: RewardPool
    score: Scorer
    mirror: Mirror
    cadence: Cadence
    profile_steps: Sequence[int]  # of which torch.profiler keeps a trace
    health: Sequence[health.Rule]  # what they find is said
    stop_on: Sequence[health.Rule]  # what these find ends the run, saved
    plan: Sequence[str]  # the numbers of the run, for the log
    start_over: bool  # when every checkpoint is broken
    started: float  # time.perf_counter() when the program began to work


def run_training(built: TrainingRun) -> int:
    """Restore or begin, take the steps that are left, and finish."""
    said: list[str] = []
    progress = restore(
        built.run_dir, built.policy, training_problem(built), built.world, start_over=built.start_over, said=said
    )
    first, past = progress is None, 0.0 if progress is None else progress.seconds
    start = 0 if progress is None else progress.state.step
    saved = -1 if progress is None else start
    fatal: list[health.Finding] = []
    with ExitStack() as stack:
        voice = open_loggers(built, stack, start, first=first)
        stop = stack.enter_context(StopRequest())
        halt = partial(stop_requested, built, stop, voice)
        for line in said:
            voice.console.line(line)
        built.sampler.load(built.policy)
        if progress is None:
            for line in built.plan:
                voice.console.line(line)
            tensorboard_layout.begin(voice.writer, built.run_dir / "config.gin")
            progress = begin(built, voice)
            if progress.pending:
                with voice.clock.span("checkpoint"):
                    save_checkpoint(built, progress, voice)
                saved = 0
        else:
            if built.world.main:
                voice.history[:] = read_history(built.run_dir)
            built.sampler.refill(progress.ahead)
            voice.console.line(f"resumed after step {start} from {built.run_dir / 'checkpoints'}")
            with noting(built.world, start, voice.clock), voice.clock.span("evaluate"):
                fatal = async_eval.resume_pending(built, progress, voice, stop=halt)
        for step in range(start + 1, built.cadence.steps + 1):
            with noting(built.world, step, voice.clock):
                if halt() or fatal:
                    break
                with voice.profiler.recorded(step, voice.clock.span):
                    advance(built, progress, step, voice)
                    progress.seconds = past + time.perf_counter() - built.started
                    fatal = check_health(built, step, voice.history, voice.console, voice.writer)
                    if built.evaluator is not None:
                        with voice.clock.span("evaluate"):  # in the next step's time: what of it holds up the training
                            fatal += async_eval.advance_evaluation(
                                built, progress, voice, due=evaluates(built, step), stop=halt
                            )
                    last = halt() or bool(fatal) or step == built.cadence.steps
                    if last or due(step, built.cadence.save_every) or step in progress.pending:
                        with voice.clock.span("checkpoint"):
                            save_checkpoint(built, progress, voice)
                        saved = step
                if fatal:
                    break
        done = progress.state.step
        if done == built.cadence.steps and not async_eval.finish_evaluations(built, progress, voice, stop=halt):
            voice.saver.wait()
            by = stop.requested or "a signal to another rank"
            voice.console.line(f"stopped by {by} before the last evaluation; the same command makes it")
            return EXIT_STOPPED
        with noting(built.world, done, voice.clock), voice.clock.span("checkpoint"):
            if done < built.cadence.steps and saved < done:  # the signal came between two steps, or before the first
                save_checkpoint(built, progress, voice)
            voice.saver.wait()
        if done < built.cadence.steps and fatal:
            rules = ", ".join(found.rule for found in fatal)
            voice.console.line(
                f"ended by {rules} (train.train.stop_on) after step {done}, which is saved; the same command goes on "
                "from here, and ends again when a rule fires anew"
            )
            return EXIT_UNHEALTHY
        if done < built.cadence.steps:
            by = stop.requested or "a signal to another rank"
            voice.console.line(f"stopped by {by} after step {done}; the same command goes on from here")
            return EXIT_STOPPED
        progress.seconds = past + time.perf_counter() - built.started
        with noting(built.world, done, voice.clock), voice.clock.span("export"):
            export_run(built, progress, voice.console)
            if start < done:  # the events of a run that was done before say so already
                voice.writer.finished()
    return 0


def evaluates(built: TrainingRun, step: int) -> bool:
    """Whether the policy is measured after a step."""
    return step == built.cadence.steps or due(step, built.cadence.eval_every)


def stop_requested(built: TrainingRun, stop: StopRequest, voice: RunLoggers) -> bool:
    """Whether any rank was asked to stop: all of them do, after the same step. Raises what a save or the log raised."""
    mine = (stop.requested is not None, voice.saver.failed, voice.writer.failed)
    asked, unsaved, unwritten = zip(*built.world.exchange(mine, what="whether to stop"), strict=True)
    if any(unwritten):
        built.world.agree(voice.writer.wait, what="the log")
    if any(unsaved):
        voice.saver.wait()
    return any(asked)


def begin(built: TrainingRun, voice: RunLoggers) -> Progress:
    """Measure the policy before training; its line in the metrics is step 0."""
    if built.evaluator is not None:
        voice.writer.scalars(0, voice.clock.lap())
        voice.history.append(health.line(0, {}))
        progress = Progress(RunState(0, built.seed), AT_THE_START, nan, nan, 0, 0.0, pending=[0])
        with noting(built.world, 0, voice.clock), voice.clock.span("evaluate"):
            async_eval.begin_evaluation(built, 0, voice)
        return progress
    with noting(built.world, 0, voice.clock), voice.clock.span("evaluate"):
        figures = run_evaluation(built, 0, voice)
    voice.writer.scalars(0, {**figures, **voice.clock.lap()})
    voice.history.append(health.line(0, figures))
    voice.console.line(f"before training: accuracy {figures[BEST]:.3f} on {len(built.held_out)} held-out problems")
    return Progress(RunState(0, built.seed), AT_THE_START, figures[BEST], figures[BEST], 0, 0.0)


def advance(built: TrainingRun, progress: Progress, step: int, voice: RunLoggers) -> None:
    """One step of the algorithm, its evaluation when one is due, and the record of both."""
    gains, troubles, clock = progress.carried.gains, Counter(built.pool.counts), voice.clock
    noted = built.policy.note() if due(step, built.cadence.digest_every) else None
    experience, progress.carried, figures = take_step(built, progress.carried, clock.span)
    built.world.same(repr(sorted(figures.items())), what=f"figures of step {step}")
    if figures["advantage/refused"]:
        share = figures["advantage/no_signal"]
        voice.console.line(
            f"step {step} is not trained on: got too few groups with signal, all rewards within {share:.0%} of the "
            "groups were alike"
        )
    if evaluates(built, step) and built.evaluator is None:
        with clock.span("evaluate"):
            measured = run_evaluation(built, step, voice)
        progress.accuracy, progress.evaluated = measured[BEST], step
        figures |= measured
    if noted is not None:
        with clock.span("log"):
            line = step_checksums(built, step, experience, noted)
            if built.world.main:
                voice.writer.do(f"the digests of step {step}", partial(checksums.append, built.run_dir, line))
    if built.world.main:
        with clock.span("log"):
            record(built, step, experience, gains, prng.fold_in(built.key, SAMPLING), voice.writer)
    lost = lost_rows(built, troubles, voice.console)
    for line in built.sampler.said():
        voice.console.line(line)
    times = clock.lap()
    generating = times["time/total" if built.sampler.max_staleness else "time/generate"]  # ahead, it fills the step
    figures |= {
        "generation/prompts": figures["generation/rows"] / built.algo.group_size,
        "generation/group_size": float(built.algo.group_size),
        "generation/tokens_per_second": figures["generation/tokens"] / generating,
        **lost,
        **built.sampler.figures(),
        **system_metrics.usage(),
        **times,
    }
    with clock.span("log"):  # in the next step's time: this one's is among what is written
        voice.writer.scalars(step, figures)
        voice.console.step(figures)
    voice.history[:] = health.kept([*voice.history, health.line(step, figures)])
    progress.state = RunState(step, built.seed)


def take_step(built: TrainingRun, carried: Carried, span: Span) -> tuple[Experience, Carried, dict[str, float]]:
    """One step of the algorithm; nothing of it is recorded."""
    return grpo_step(
        built.policy,
        built.sampler,
        partial(train_problems, built.task, prng.fold_in(built.key, DATA)),
        carried,
        key=prng.fold_in(built.key, SAMPLING),  # a problem's uid is its place in the stream: no step is needed
        algo=built.algo,
        span=span,
    )


def training_problem(built: TrainingRun) -> Callable[[int], Problem]:
    """The training problem of a uid, which is its place in the stream."""
    return partial(built.task.train, prng.fold_in(built.key, DATA))


def run_evaluation(built: TrainingRun, step: int, voice: RunLoggers) -> dict[str, float]:
    """Measure the policy on the held-out problems; all that it answered goes to eval/step_N.jsonl."""
    how = built.evaluation
    judged = evaluate(
        built.greedy,
        built.sampled,
        built.held_out,
        key=prng.fold_in(built.key, EVALUATION),
        judges=built.judges,
        samples=how.samples,
        answer=how.answer,
        score=built.score,
    )
    if built.world.main:
        record_evaluation(built.run_dir, step, judged, built.cadence.show_rows, voice.writer)
    return summarise(judged, ks=how.ks, by=how.by)


def save_checkpoint(built: TrainingRun, progress: Progress, voice: RunLoggers) -> None:
    """Begin to save a checkpoint, once the log is written up to it; those no longer kept go when it is there."""
    built.world.agree(voice.writer.wait, what="the log")  # a line may be lost only where its checkpoint is not there
    progress.ahead = built.sampler.drain()
    blobs, meta = packed_progress(progress, built.policy, built.adapters)
    cadence = built.cadence
    kept = Retention(cadence.keep_last, cadence.keep_best, BEST, {**progress.scores}, [*progress.pending])
    voice.saver.save(progress.state.step, tensors=built.policy.tensors(), blobs=blobs, meta=meta, keep=kept)
