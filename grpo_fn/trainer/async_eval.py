"""Evaluation beside the training: a second engine answers, a thread of the main rank grades, and steps continue.

The figures of an evaluation belong to the step whose weights it measured, whenever they come: that step's line of the
metrics takes them in. Until then the evaluation is pending. So are it and its step's checkpoint, which is written at
once and stays: there a run that ends meanwhile finds the weights again.
"""

from collections.abc import Mapping
from functools import partial
from math import isfinite

from grpo_fn.core import prng, sampling
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.logging.console import evaluation_line
from grpo_fn.shell.logging.metrics_writer import MetricsWriter
from grpo_fn.shell.logging.stopwatch import ErrorContext
from grpo_fn.shell.reward_workers.reward_pool import ScoringInterrupted
from grpo_fn.shell.sampler.interface import EngineSampler
from grpo_fn.trainer import health
from grpo_fn.trainer.background import ShouldStop
from grpo_fn.trainer.build import TrainingRun
from grpo_fn.trainer.evaluation import GradedAnswer, grader_names, summarise
from grpo_fn.trainer.prepare import EVALUATION
from grpo_fn.trainer.recording import Findings, RunLoggers, record_evaluation, report_findings, stop_requested
from grpo_fn.trainer.sections import Health
from grpo_fn.trainer.state import BEST, Progress, figures_of, reload_policy

ROUND = 0.5  # seconds between two looks at whether to stop, while one waits
EvaluationResult = tuple[list[GradedAnswer], list[str]]  # and complaints of graders, on rows that were lost


def run_evaluation(run: TrainingRun, evaluator: EngineSampler, should_stop: ShouldStop) -> EvaluationResult:
    """The evaluation itself, on the main rank alone. Its workers begin and end with it: they live in its thread.

    Raises ScoringInterrupted once `should_stop` is true: it is called every few decode steps, or after every completion
    of a server, and after every few rows of a grader.
    """
    how = run.settings.evaluation

    def check() -> None:
        if should_stop():
            raise ScoringInterrupted("evaluation: got a request to stop")

    with run.settings.rewards.pool() as pool:
        greedy, sampled = (evaluator.for_evaluation(f, check) for f in (sampling.greedy, how.token_sampler))
        score = partial(pool.score, should_stop=should_stop)
        key = prng.fold_in(run.key, EVALUATION)
        return how.grade_answers(greedy, sampled, run.held_out, key=key, score=score), [*pool.complaints]


def advance_evaluation(run: TrainingRun, progress: Progress, loggers: RunLoggers, *, due: bool) -> None:
    """After a step: take in what has come, and begin what is due.

    There are never two at once: what is at work when another one is due is waited for, unless a stop is requested
    meanwhile. What is not begun or has not come is pending then.
    """
    record_if_done(run, progress, loggers, patience=0.0)
    if due:
        progress.pending.append(progress.state.step)
        wait_for_evaluation(run, progress, loggers)
        if loggers.background.name is None:
            begin_evaluation(run, progress.state.step, loggers)


def wait_for_evaluation(run: TrainingRun, progress: Progress, loggers: RunLoggers) -> None:
    """Wait for what is at work, unless a stop is requested."""
    if loggers.background.name is not None:
        loggers.line(f"waiting for the {loggers.background.name}")
    while loggers.background.name is not None and not stop_requested(run, loggers):
        record_if_done(run, progress, loggers, patience=ROUND)


def finish_evaluations(run: TrainingRun, progress: Progress, loggers: RunLoggers) -> bool:
    """Wait for what is at work after the last step. False when a stop is requested: it stays pending."""
    with ErrorContext(run.world, progress.state.step, loggers.clock), loggers.clock.span("evaluate"):
        wait_for_evaluation(run, progress, loggers)
    return not progress.pending


def begin_evaluation(run: TrainingRun, step: int, loggers: RunLoggers) -> None:
    """Push the policy's weights, which are those of `step`, and have the questions asked; every rank takes part."""
    loggers.evaluator.load(run.policy)
    loggers.background.start_task(f"evaluation of step {step}", partial(run_evaluation, run, loggers.evaluator))


def record_if_done(run: TrainingRun, progress: Progress, loggers: RunLoggers, *, patience: float) -> None:
    """Record the evaluation at work once it is over, and what the rules of health find in it."""
    if loggers.background.name is None:
        return
    step, now = progress.pending[0], progress.state.step
    figures = loggers.background.poll_result(partial(write_evaluation, run, step, now, loggers), patience=patience)
    if figures is None:
        return
    credit_score(progress, step, figures)
    before = [line for line in loggers.history if line["step"] <= step]
    loggers.history[:] = amend_history(loggers.history, step, figures)
    where = "before training" if step == 0 else f"evaluation of step {step}"
    grader = grader_names(run.settings.evaluation.graders)[0]
    loggers.line(
        f"{where}: {evaluation_line(figures, grader)} on {len(run.held_out)} held-out problems, "
        f"{figures['eval/seconds']:.1f} s beside the training, known after step {now}"
    )
    findings = run.world.agree(
        partial(findings_of_late_evaluation, run.settings.health, before, amend_history(before, step, figures)),
        what="the rules of health",
    )
    report_findings(findings, step, loggers)


def write_evaluation(
    run: TrainingRun, step: int, now: int, loggers: RunLoggers, result: EvaluationResult, seconds: float
) -> dict[str, float]:
    """On the main rank: an evaluation in the files of the run, at its step; returns its figures."""
    how, (judged, complaints) = run.settings.evaluation, result
    record_evaluation(run.run_dir, step, judged, loggers)
    figures = {**summarise(judged, ks=how.ks, by=how.by), "eval/lag_steps": float(now - step), "eval/seconds": seconds}
    loggers.write(MetricsWriter.amend, step, figures)  # the last one: where they are in the metrics, all of it is there
    for complaint in complaints:
        loggers.line(f"evaluation of step {step}: {complaint}")
    return figures


def amend_history(history: health.History, step: int, figures: Mapping[str, float]) -> list[health.Line]:
    """The history with the figures in the line of their step."""
    return [{**line, **health.history_line(step, figures)} if line["step"] == step else line for line in history]


def findings_of_late_evaluation(rules: Health, before: health.History, after: health.History) -> Findings:
    """Findings of a step's rules that its late evaluation adds to those of the time."""
    warn, stop = rules.rules()
    earlier_rules = {finding.rule for finding in health.new_findings([*warn, *stop], before)}
    warnings, fatal = (
        [finding for finding in health.new_findings(of, after) if finding.rule not in earlier_rules]
        for of in (warn, stop)
    )
    return warnings, fatal


def credit_score(progress: Progress, step: int, figures: Mapping[str, float]) -> None:
    """The figures count for the checkpoint of their step."""
    progress.pending.remove(step)
    if isfinite(figures[BEST]):
        progress.scores[step] = figures[BEST]
    progress.accuracy, progress.evaluated = figures[BEST], step
    if step == 0:
        progress.accuracy_before = figures[BEST]


def resume_pending(run: TrainingRun, progress: Progress, loggers: RunLoggers) -> None:
    """Settle what was pending in the checkpoint from which the run resumes.

    An evaluation that came in after the checkpoint is in the metrics; another one is made again, of the weights in the
    checkpoint of its step. The policy is left as it was.
    """
    root, now = run.run_dir / "checkpoints", progress.state.step
    for step in [*progress.pending]:
        figures = run.world.agree(partial(figures_of, run.run_dir, step), what=f"the metrics of step {step}")
        if BEST in figures:
            credit_score(progress, step, figures)
            continue
        if step != now and (flaw := run.world.agree(partial(store.checkpoint_flaw, root, step), what="a checkpoint")):
            loggers.line(f"the evaluation of step {step} is lost, its weights are not there any more: {flaw}")
            progress.pending.remove(step)
            continue
        wait_for_evaluation(run, progress, loggers)
        if loggers.background.name is not None:
            break
        if step != now:
            reload_policy(run.run_dir, step, run.policy, run.world)
        begin_evaluation(run, step, loggers)
        if step != now:
            reload_policy(run.run_dir, now, run.policy, run.world)
