"""The loop around a step: begin or resume, step, evaluate, record, save, finish."""

import shlex
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import nan

import torch
from torch import Tensor

from grpo_fn.algo import metrics
from grpo_fn.algo.curricula import choose_uids
from grpo_fn.algo.step import Experience, Span, Stream, grpo_step
from grpo_fn.algo.supervised import Stage, supervised_step
from grpo_fn.command_line import installed_script, resume_command
from grpo_fn.core import prng, sampling
from grpo_fn.core.json_lines import DIGESTS
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Carry, Rollout, RunState
from grpo_fn.shell.atomic_io import append_json, write_json
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.checkpoint.run_dir import LOCK, keep_lock, write_config
from grpo_fn.shell.episodes.episode_rows import recorded_episodes
from grpo_fn.shell.logging import rollout_store, stopwatch
from grpo_fn.shell.logging.console import evaluation_line, short_time
from grpo_fn.shell.logging.metrics_writer import MetricsWriter, write_run_header
from grpo_fn.shell.logging.stopwatch import ErrorContext, is_due
from grpo_fn.shell.model import hf, lora
from grpo_fn.shell.process import EXIT_STOPPED, EXIT_UNHEALTHY
from grpo_fn.shell.sampler.interface import DataParallelSampler, engine_share, spread_score
from grpo_fn.tasks.task import train_problems
from grpo_fn.trainer import async_eval, health
from grpo_fn.trainer.build import TrainingRun, check_restored, first_carry
from grpo_fn.trainer.evaluation import before_and_after, grader_names, summarise, why_no_reward
from grpo_fn.trainer.prepare import CHOOSING, DATA, EVALUATION, SAMPLING
from grpo_fn.trainer.recording import (
    RunLoggers,
    check_health,
    check_same_kernels,
    lost_rows,
    open_loggers,
    record,
    record_evaluation,
    settle_kernels,
    settle_model,
    step_checksums,
    stop_requested,
)
from grpo_fn.trainer.state import (
    BEST,
    Progress,
    line_gaps,
    newest_checkpoint,
    null_to_nan,
    packed_progress,
    read_history,
    unpack_carried,
)


def run_training(run: TrainingRun) -> int:
    """Restore or begin, take the steps that are left, and finish; returns the exit code."""
    messages: list[str] = []
    progress = restore(run, messages)
    config = run.request.config
    renew = partial(write_config, run.run_dir, config.text, config.fingerprint, config.hparams)
    run.world.agree(renew, what="writing the configuration")  # not before the restore: what it refuses stays as it is
    start = 0 if progress is None else progress.state.step
    with ExitStack() as stack:
        loggers = open_loggers(run, stack, start, first=progress is None)
        for line in (*run.ranks, *messages, *read_tape(run, start)):
            loggers.line(line)
        run.sampler.load(run.policy)
        if start < run.settings.steps:
            for line in (*settle_model(run), *settle_kernels(run, start + 1)):
                loggers.line(line)
        if progress is None:
            progress = start_from_scratch(run, loggers)
        else:
            resume(run, progress, loggers)
        began = run.started - progress.seconds
        take_steps(run, progress, loggers, began)
        if (code := end_early(run, progress, loggers)) is not None:
            return code
        progress.seconds = time.perf_counter() - began
        with ErrorContext(run.world, progress.state.step, loggers.clock), loggers.clock.span("export"):
            export_run(run, progress, loggers)
            if start < progress.state.step:  # the events of a run that was done before have it already
                loggers.write(MetricsWriter.finish)
    return 0


def restore(run: TrainingRun, notes: list[str]) -> Progress | None:
    """Take back the newest checkpoint that verifies; None when there is none. What is amiss is added to `notes`.

    The number of ranks that wrote it, and how the model was spread over them, may have been others. Raises ValueError
    when there are checkpoints and none is whole, or those that the run had are gone, unless --force: that would drop
    the metrics of the run so far. In any case for a checkpoint of another model or optimizer.
    """
    s, world = run.settings, run.world
    root, start_over = run.run_dir / "checkpoints", run.request.force
    find = partial(newest_checkpoint, root, start_over=start_over, every=s.checkpoints.every)
    path, blobs, meta, skipped = world.agree(find, what="the newest checkpoint")
    notes += skipped
    if path is None:
        return None
    look = partial(line_gaps, run.run_dir, meta["step"], s.logging.checksums_every)
    notes += world.agree(look, what="looking at the log")
    run.policy.restore(partial(store.load_into, path, world=world, exact=True), blobs["policy"])
    return Progress(
        state=RunState(meta["step"], meta["seed"]),
        carried=unpack_carried(blobs["carried"], training_problem(run)),  # a checkpoint holds no text of problems
        accuracy_before=null_to_nan(meta["accuracy_before"]),
        accuracy=null_to_nan(meta["accuracy"]),
        evaluated=meta["evaluated"],
        seconds=meta["seconds"],
        ahead=blobs.get("ahead", []),
        pending=[*meta.get("pending", ())],
        scores={int(step): score for step, score in meta.get("scores", {}).items()},
        saved=meta["step"],
    )


def read_tape(run: TrainingRun, start: int) -> list[str]:
    """Read the recorded answers of environments for steps that will be repeated; return a line on it."""
    if run.environments is None or run.request.force:  # with another configuration it is another run
        return []
    steps = run.world.agree(
        partial(recorded_episodes, run.run_dir / "rollouts", after=start), what="the tape of environments"
    )
    for rows in steps:
        run.environments.tape.add(rows)
    text = f"environments answer as recorded in {len(steps)} steps after step {start}, which are taken again"
    return [text] if steps else []


def start_from_scratch(run: TrainingRun, loggers: RunLoggers) -> Progress:
    """Log the plan and measure the policy before training, as step 0; save a checkpoint if that is pending."""
    for line in run.plan:
        loggers.line(line)
    loggers.write(write_run_header, run.run_dir)
    if run.evaluator is not None:
        loggers.write(MetricsWriter.scalars, 0, loggers.clock.lap())
        loggers.history.append(health.history_line(0, {}))
        progress = Progress(RunState(0, run.settings.seed), first_carry(run), nan, nan, 0, 0.0, pending=[0])
        with ErrorContext(run.world, 0, loggers.clock), loggers.clock.span("evaluate"):
            async_eval.begin_evaluation(run, 0, loggers)
        with loggers.clock.span("checkpoint"):
            save_checkpoint(run, progress, loggers)
        return progress
    loggers.line(f"evaluating {len(run.held_out)} held-out problems before training")
    with ErrorContext(run.world, 0, loggers.clock), loggers.clock.span("evaluate"):
        figures = evaluate_policy(run, 0, loggers)
    times = loggers.clock.lap()
    loggers.write(MetricsWriter.scalars, 0, {**figures, **times})
    loggers.history.append(health.history_line(0, figures))
    grader = grader_names(run.settings.evaluation.graders)[0]
    loggers.line(f"before training: {evaluation_line(figures, grader)} on {len(run.held_out)} held-out problems")
    if not isinstance(run.algo, Stage):
        answers = len(run.held_out) * (1 + run.settings.evaluation.samples)
        rows = run.settings.steps * run.algo.prompts * run.algo.group_size
        guess = short_time(2 * times["time/evaluate"] * rows / answers)
        loggers.line(f"{run.settings.steps} steps take roughly {guess}, if training takes as long as sampling does")
    return Progress(RunState(0, run.settings.seed), first_carry(run), figures[BEST], figures[BEST], 0, 0.0)


def resume(run: TrainingRun, progress: Progress, loggers: RunLoggers) -> None:
    """Resume from a checkpoint: history, batches sampled ahead, pending evaluations."""
    start = progress.state.step
    progress.carried = check_restored(run, progress.carried)
    if run.world.main:
        loggers.history[:] = read_history(run.run_dir)
    run.sampler.refill(progress.ahead)
    loggers.line(f"resumed after step {start} from {run.run_dir / 'checkpoints'}")
    with ErrorContext(run.world, start, loggers.clock), loggers.clock.span("evaluate"):
        async_eval.resume_pending(run, progress, loggers)


def take_steps(run: TrainingRun, progress: Progress, loggers: RunLoggers, began: float) -> None:
    """The steps that are left, until one is the last, a stop is requested, or a rule of health ends the run.

    `began` is when the run began, on the clock of time.perf_counter, as if it had never been interrupted.
    """
    for step in range(progress.state.step + 1, run.settings.steps + 1):
        with ErrorContext(run.world, step, loggers.clock):
            if stop_requested(run, loggers) or loggers.fatal:
                return
            with loggers.profiler.record_step(step, loggers.clock.span):
                advance(run, progress, step, loggers)
                progress.seconds = time.perf_counter() - began
                check_health(run, step, loggers)
                if run.evaluator is not None:
                    with loggers.clock.span("evaluate"):  # in the next step's time: only what training waits for
                        async_eval.advance_evaluation(run, progress, loggers, due=evaluates(run, step))
                last = stop_requested(run, loggers) or bool(loggers.fatal) or step == run.settings.steps
                if last or is_due(step, run.settings.checkpoints.every) or step in progress.pending:
                    with loggers.clock.span("checkpoint"):
                        save_checkpoint(run, progress, loggers)
            report_saved(loggers)
            if loggers.fatal:
                return


def end_early(run: TrainingRun, progress: Progress, loggers: RunLoggers) -> int | None:
    """Wait for evaluations and saves; the exit code of a run that ends before all is done, None otherwise."""
    done, steps = progress.state.step, run.settings.steps
    again = resume_command(run.run_dir, run.world.size)
    signal = loggers.stop.requested or "a signal to another rank"
    if done == steps and not async_eval.finish_evaluations(run, progress, loggers):
        loggers.saver.wait()
        loggers.line(f"stopped by {signal} before the last evaluation; to make it: {again}")
        return EXIT_STOPPED
    with ErrorContext(run.world, done, loggers.clock), loggers.clock.span("checkpoint"):
        if progress.saved < done < steps:  # the signal came between two steps, or before the first
            save_checkpoint(run, progress, loggers)
        loggers.saver.wait()
        report_saved(loggers)
    if done == steps:
        return None
    if loggers.fatal:
        rules = ", ".join(finding.rule for finding in loggers.fatal)
        loggers.line(
            f"ended by {rules} (sections.Health.stop) after step {done}, which is saved. To train on, until a rule of "
            f"sections.Health.stop finds something again: {again}"
        )
        return EXIT_UNHEALTHY
    loggers.line(f"stopped by {signal} after step {done}. To resume from here: {again}")
    return EXIT_STOPPED


def evaluates(run: TrainingRun, step: int) -> bool:
    """Whether the policy is measured after a step."""
    return step == run.settings.steps or is_due(step, run.settings.evaluation.every)


def advance(run: TrainingRun, progress: Progress, step: int, loggers: RunLoggers) -> None:
    """One step of the algorithm, its evaluation when one is due, and the record of both."""
    troubles, clock = Counter(run.pool.counts | run.pool.costs), loggers.clock
    loggers.do(LOCK, partial(keep_lock, run.run_dir))
    noted = run.policy.note() if is_due(step, run.settings.logging.checksums_every) else None
    experience, progress.carried, figures = take_step(run, step, progress.carried, clock.span)
    run.world.same(repr(sorted(figures.items())), what=f"figures of step {step}")
    check_same_kernels(run, f"after step {step}")
    if figures["train/skipped_step"]:
        share = figures["advantage/zero_variance_groups"]
        alike = f"in {share:.0%} of the groups all rewards are equal (filters aside)"
        why = "none of its rows could be scored" if figures["reward/invalid"] == 1 else alike
        loggers.line(f"step {step} is not trained on: got too few groups with signal, {why}")
    if step == 1 and not isinstance(run.algo, Stage):
        limit = run.settings.sampling.max_new_tokens
        if reason := why_no_reward(experience.groups, run.settings.rewards.reward, limit=limit):
            loggers.line(reason)
    if evaluates(run, step) and run.evaluator is None:
        with clock.span("evaluate"):
            measured = evaluate_policy(run, step, loggers)
        progress.accuracy, progress.evaluated = measured[BEST], step
        figures |= measured
    if noted is not None:
        with clock.span("log"):
            line = step_checksums(run, step, experience, progress.carried, noted)
            if run.world.main:
                loggers.do(f"the digests of step {step}", partial(append_json, run.run_dir / DIGESTS, line))
    if run.world.main:
        with clock.span("log"):
            record(run, step, experience, loggers)
    lost = lost_rows(run, troubles, loggers)
    for line in run.sampler.messages():
        loggers.line(line)
    times = clock.lap()
    engine = run.sampler.figures()
    figures |= {
        **throughput(run, figures, times),
        **lost,
        **engine,
        **environment_share(engine, times, ahead=bool(run.sampler.max_staleness)),
        **stopwatch.usage(run.world),
        **times,
        "system/steps_per_second": 1 / times["time/total"],
    }
    with clock.span("log"):  # in the next step's time: this one's is among what is written
        loggers.write(MetricsWriter.scalars, step, figures)
        if loggers.console is not None:
            loggers.console.step(figures)
    if run.request.on_step is not None and run.world.main:
        run.request.on_step(step, figures)
    loggers.history[:] = health.trim_history([*loggers.history, health.history_line(step, figures)])
    progress.state = RunState(step, run.settings.seed)


def throughput(run: TrainingRun, figures: dict[str, float], times: dict[str, float]) -> dict[str, float]:
    """What was sampled and how fast, or how fast given tokens were learned."""
    if "generation/rows" not in figures:
        return {"sft/tokens_per_second": figures["sft/tokens"] / times["time/train"]}
    generating = times["time/total" if run.sampler.max_staleness else "time/generate"]  # ahead, it fills the step
    return {
        "generation/prompts": figures["generation/rows"] / run.algo.group_size,
        "generation/group_size": float(run.algo.group_size),
        "generation/tokens_per_second": figures["generation/tokens"] / generating,
    }


def environment_share(engine: dict[str, float], times: dict[str, float], *, ahead: bool) -> dict[str, float]:
    """Of the time that sampling takes, the share in which nothing is drawn as environments are waited for."""
    if "time/environment_wait" not in engine:
        return {}
    sampling = times["time/total"] if ahead else times.get("time/generate", 0.0) + times.get("time/evaluate", 0.0)
    return {"system/environment_wait_share": engine["time/environment_wait"] / sampling if sampling else 0.0}


def take_step(run: TrainingRun, step: int, carried: Carry, span: Span) -> tuple[Experience, Carry, dict[str, float]]:
    """One step of the algorithm, with `loss/kl_start` where that is due; nothing of it is recorded."""
    stream, algo = problem_stream(run, carried), run.algo
    if isinstance(algo, Stage):
        return supervised_step(
            run.policy, run.sampler, stream, carried, algo=algo, given=run.demonstration_rows, span=span
        )
    at_start: list[Tensor] = []

    def keep_all_rows(rollout: Rollout, adv: Tensor) -> Tensor:
        at_start.append(run.policy.logp_under(run.start_model, rollout))  # the sampler rests now, which leaves memory
        return torch.ones(adv.shape[:2], dtype=torch.bool, device=adv.device)

    watched = is_due(step, run.settings.logging.start_kl_every)
    experience, carried, figures = grpo_step(
        run.policy,
        run.sampler,
        stream,
        carried,
        key=prng.fold_in(run.key, SAMPLING),  # a problem's uid is its place in the stream: no step is needed
        algo=replace(algo, filters=[*algo.filters, keep_all_rows]) if watched else algo,
        reward=run.reward,
        span=span,
        teacher=run.teacher,
        demonstrations=run.demonstrations,
    )
    return experience, carried, figures | (metrics.start_kl(experience.batch, *at_start) if watched else {})


def training_problem(run: TrainingRun) -> Callable[[int], Problem]:
    """The training problem of a uid, which is its place in the stream."""
    return partial(run.task.train, prng.fold_in(run.key, DATA))


def evaluate_policy(run: TrainingRun, step: int, loggers: RunLoggers) -> dict[str, float]:
    """Measure the policy on the held-out problems; all that it answered goes to eval/step_N.jsonl."""
    how, key = run.settings.evaluation, prng.fold_in(run.key, EVALUATION)
    figures = {}
    if isinstance(run.algo, Stage):
        demonstrations = run.demonstration_rows(run.held_out)  # how likely the policy finds the held-out demonstrations
        figures = metrics.likelihood("eval/", metrics.stat(-run.policy.logp(demonstrations), demonstrations.mask))
        run.sampler.load(run.policy)  # no step did
    score = spread_score(run.pool.score, run.world)
    answers = len(engine_share(run.held_out, run.engine, run.world)) * (1 + how.samples)
    with loggers.progress(f"evaluating {len(run.held_out)} held-out problems", answers) as count:
        done = {} if count is None else {"on_completions": lambda _, completions: count(len(completions))}
        greedy, sampled = (
            DataParallelSampler(run.engine.for_evaluation(draw, **done), run.world)
            for draw in (sampling.greedy, how.token_sampler)
        )
        judged = how.grade_answers(greedy, sampled, run.held_out, key=key, score=score)
    if run.world.main:
        record_evaluation(run.run_dir, step, judged, loggers)
    return {**summarise(judged, ks=how.ks, by=how.by), **figures}


def save_checkpoint(run: TrainingRun, progress: Progress, loggers: RunLoggers) -> None:
    """Start to save a checkpoint once the log is written; those that are not kept go when it is whole."""
    run.world.agree(lambda: loggers.writer.wait(), what="the log")  # a line is lost only if its checkpoint is, too
    progress.ahead = run.sampler.drain()
    blobs, meta = packed_progress(progress, run.policy, run.settings.lora)
    loggers.saver.wait()
    report_saved(loggers)
    how = run.settings.checkpoints
    clean_up = partial(
        store.prune,
        loggers.saver.root,
        keep_last=how.keep_last,
        keep_best=how.keep_best,
        metric=BEST,
        scores={**progress.scores},
        spare=[*progress.pending],
    )
    loggers.saver.save(progress.state.step, tensors=run.policy.tensors(), blobs=blobs, meta=meta, prune=clean_up)
    progress.saved = progress.state.step


def report_saved(loggers: RunLoggers) -> None:
    """Log a checkpoint that has become whole."""
    if (step := loggers.saver.newly_saved()) is not None:
        loggers.line(f"checkpoint saved: {loggers.saver.root / f'step_{step}'}")


def problem_stream(run: TrainingRun, carried: Carry) -> Stream:
    """The problems of a step by number: those that the curriculum chooses, or the stream in its order."""
    key, curriculum = prng.fold_in(run.key, DATA), run.settings.curriculum
    if curriculum is None:
        return partial(train_problems, run.task, key)
    choosing = prng.fold_in(run.key, CHOOSING)

    def stream(first: int, count: int) -> tuple[Problem, ...]:
        uids = choose_uids(curriculum, carried.curriculum, choosing, carried.drawn, first, count)
        return tuple(run.task.train(key, uid) for uid in uids)

    return stream


# -- the end of a run


def export_run(run: TrainingRun, progress: Progress, loggers: RunLoggers) -> None:
    """Export the model and write the summary of the run."""
    weights = {name: x.cpu() for name, x in run.policy.weights(trained=False) if run.world.main}
    run.world.agree(partial(write_export, run, progress, weights, loggers), what="exporting the model")


def write_export(run: TrainingRun, progress: Progress, weights: dict[str, Tensor], loggers: RunLoggers) -> None:
    """Write model, adapters and summary.json; on the main rank."""
    # A process killed after its last checkpoint may not have done so.
    root, how = run.run_dir / "checkpoints", run.settings.checkpoints
    store.prune(root, keep_last=how.keep_last, keep_best=how.keep_best, metric=BEST, scores=progress.scores)
    model = run.policy.model
    if run.settings.lora is not None:
        lora.adapter_folder(weights, run.settings.lora, model.name_or_path, run.run_dir / "adapter")
        weights = dict(lora.merge_adapters(weights, run.settings.lora))
    hf.export_model_folder(model, weights, run.tokenizer, run.run_dir / "model")
    summary = {
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy,
        "held_out_problems": len(run.held_out),
        "steps": progress.state.step,
        "seed": run.settings.seed,
        "ranks": run.world.size,
        "wall_seconds": round(progress.seconds, 2),
    }
    write_json(run.run_dir / "summary.json", summary)
    for line in closing_lines(run, progress):
        loggers.line(line)


def closing_lines(run: TrainingRun, progress: Progress) -> list[str]:
    """The result of the run, one problem answered before and after it, and the commands that people want next."""
    grader, folder = grader_names(run.settings.evaluation.graders)[0], run.run_dir / "eval"
    steps = rollout_store.evaluation_steps(folder)
    rows = [rollout_store.load_rows(folder / f"step_{step}.jsonl") for step in (*steps[:1], *steps[-1:])]
    commands = installed_script("grpo_fn", "grpo_fn")
    board, root = installed_script("tensorboard", "tensorboard.main"), shlex.quote(str(run.run_dir.parent))
    return [
        f"held-out accuracy by {grader} {progress.accuracy_before:.3f} before, {progress.accuracy:.3f} after "
        f"{progress.state.step} steps, {progress.seconds:.0f} s; model in {run.run_dir / 'model'}",
        *(before_and_after(*rows) if rows else []),
        f"curves               {board} --logdir {root}",
        f"a page of the run    {commands} report {shlex.quote(str(run.run_dir))} --out report.html",
        f"measure the model    {commands} eval --model {shlex.quote(str(run.run_dir))}",
    ]
