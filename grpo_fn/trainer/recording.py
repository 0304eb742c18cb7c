"""The record of a run: its loggers, a step in tables, its kernels, what the rules of health say of it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from grpo_fn.algo.metrics import sample_advantages
from grpo_fn.algo.step import Experience
from grpo_fn.core.checksums import of_curriculum, of_step
from grpo_fn.core.json_lines import DIGESTS, step_lines
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import transcript
from grpo_fn.core.types import Carry
from grpo_fn.shell.atomic_io import append_json
from grpo_fn.shell.checkpoint.async_saver import AsyncSaver
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.logging.console import Console
from grpo_fn.shell.logging.metrics_writer import AsyncWriter, MetricsWriter, MirrorWrite, rewind
from grpo_fn.shell.logging.stopwatch import Profiler, Stopwatch, is_due
from grpo_fn.shell.model import blocks, hf
from grpo_fn.shell.model.attention import AttentionSpec, choose_kernel
from grpo_fn.shell.model.logprob_model import choose_head_kernels
from grpo_fn.shell.policy.fsdp import StepChecksums
from grpo_fn.shell.process import StopRequest
from grpo_fn.shell.sampler.interface import EngineSampler
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler
from grpo_fn.shell.world import World
from grpo_fn.trainer import health
from grpo_fn.trainer.background import Background
from grpo_fn.trainer.build import TrainingRun
from grpo_fn.trainer.evaluation import GradedAnswer, grader_names

P = ParamSpec("P")
Findings = tuple[list[health.HealthFinding], list[health.HealthFinding]]  # what warns, and what ends the run

JUDGE_METRICS = {  # by key of RewardPool.costs
    **{name: f"judge/{name}" for name in ("requests", "retries", "prompt_tokens", "completion_tokens")},
    **{name: f"judge/{name}" for name in ("failures", "unreadable")},
    "seconds": "time/judge_requests",
}
KERNELS = "kernels.jsonl"  # a line for each start of the process, on CUDA
LOG = 600.0  # seconds that the log may take for what is waiting, where the ranks have no shorter deadline
SAMPLES = 8  # completions in each of TensorBoard's tables


@dataclass(frozen=True)
class RunLoggers:
    """Console, metrics, checkpoints and profiler of a run."""

    console: Console | None  # of the main rank, as the writer
    writer: AsyncWriter | None
    saver: AsyncSaver
    clock: Stopwatch
    profiler: Profiler
    evaluator: EngineSampler | None  # beside the training; None: evaluation is the training engine's business
    background: Background
    history: list[health.Line]  # of the metrics, for the rules of health; on the main rank
    losses: list[str]  # of the newest step whose rewards lost rows, the first of each kind with its reason
    stop: StopRequest
    fatal: list[health.HealthFinding]  # what ends the run; the same on every rank

    def line(self, text: str) -> None:
        """Show a line, if this is the main rank."""
        if self.console is not None:
            self.console.line(text)

    def progress(self, text: str, total: int) -> AbstractContextManager[Callable[[int], None] | None]:
        """A bar on the main rank's terminal, as `Console.progress`."""
        return nullcontext() if self.console is None else self.console.progress(text, total)

    def write(self, call: Callable[Concatenate[MetricsWriter, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the metrics' writer called, if this is the main rank, with these arguments."""
        if self.writer is not None:
            self.writer.write(call, *args, **kwargs)

    def do(self, what: str, work: Callable[[], object]) -> None:
        """Have `work` done in the writer's thread, which writes `what`, if this is the main rank."""
        if self.writer is not None:
            self.writer.do(what, work)


def open_loggers(run: TrainingRun, stack: ExitStack, start: int, *, first: bool) -> RunLoggers:
    """The run's console, writer and saver; the latter is the only one that every rank has."""
    run_dir, main = run.run_dir, run.world.main
    # One, on the main rank; it opens before the writer, whose events it may follow.
    mirrors: list[MirrorWrite | None] = []
    opened = run.settings.logging.mirror(run_dir)
    run.world.agree(lambda: mirrors.append(stack.enter_context(opened)), what="opening the mirror")
    if main:
        for name in (DIGESTS, KERNELS):
            rewind(run_dir / name, 0 if first else start + 1)
    profiler = Profiler(run_dir / "tensorboard", run.world, run.settings.logging.profile_steps)
    run.world.mark = profiler.mark
    console, writer, clock = None, None, Stopwatch(mark=profiler.mark)
    if main:
        grader = grader_names(run.settings.evaluation.graders)[0]
        compiles = function_and_knobs(run.settings.parallelism.compile)[0] is not blocks.eager
        shown = Console(
            run_dir / "log.txt",
            run.settings.steps,
            start,
            grader=grader,
            phase=lambda: clock.phase,
            first_step="compiling in the first step" if compiles else "",
        )
        console = stack.enter_context(shown)
        writer = stack.enter_context(open_writer(run_dir, run.world, *mirrors, start_step=0 if first else start + 1))
    return RunLoggers(
        console=console,
        writer=writer,
        saver=stack.enter_context(AsyncSaver(run_dir / "checkpoints", run.world)),
        clock=clock,
        profiler=profiler,
        evaluator=stack.enter_context(nullcontext() if run.evaluator is None else closing(run.evaluator())),
        background=stack.enter_context(Background(run.world, deadline=run.settings.evaluation.timeout)),
        history=[],
        losses=[],
        stop=stack.enter_context(StopRequest()),
        fatal=[],
    )


def stop_requested(run: TrainingRun, loggers: RunLoggers) -> bool:
    """Whether any rank was asked to stop: all of them do, after the same step. Raises what a save or the log raised."""
    unwritten = loggers.writer is not None and loggers.writer.failed
    outcome = (loggers.stop.requested is not None, loggers.saver.failed, unwritten)
    requested, unsaved, unwritten = zip(*run.world.exchange(outcome, what="whether to stop"), strict=True)
    if any(unwritten):
        run.world.agree(lambda: loggers.writer.wait(), what="the log")
    if any(unsaved):
        loggers.saver.wait()
    return any(requested)


def open_writer(run_dir: Path, world: World, mirror: MirrorWrite | None, *, start_step: int) -> AsyncWriter:
    """The run's metrics and events, written beside the training."""
    writer = MetricsWriter(run_dir, start_step=start_step, mirror=mirror)
    return AsyncWriter(writer, deadline=min(world.deadline, LOG))


def lost_rows(run: TrainingRun, before: Counter, loggers: RunLoggers) -> dict[str, float]:
    """How many rows each kind of trouble has cost on all ranks, and what judges cost; complaints go to the log.

    `before` has the pool's counts and costs before the step.
    """
    counts = {f"reward/{kind}": number - before[kind] for kind, number in run.pool.counts.items()}
    costs = {JUDGE_METRICS[kind]: number - before[kind] for kind, number in run.pool.costs.items()}
    texts = [run.pool.complaints, *([run.environments.complaints] if run.environments else [])]
    own = (counts, costs, [text for found in texts for text in found])
    for found in texts:
        found.clear()
    parts = run.world.exchange(own, what="the others' troubles with rewards")
    lines = [
        text if len(parts) == 1 else f"rank {rank}: {text}" for rank, (*_, texts) in enumerate(parts) for text in texts
    ]
    for text in lines:
        loggers.line(text)
    if lines:
        loggers.losses[:] = lines
    total: Counter[str] = Counter()
    for counts, costs, _ in parts:  # `update`, unlike +, keeps what is 0
        total.update(counts)
        total.update(costs)
    return {name: float(number) for name, number in total.items()}


# -- a step in tables


def sample_rows(experience: Experience) -> list[dict[str, str]]:
    """The first samples as a person would read them."""
    problems, rollout, reward = experience.groups
    size, adv = reward.value.shape[1], sample_advantages(experience.adv, experience.groups)
    return [
        {
            "prompt": problems[b // size].prompt,
            "completion": transcript(rollout.text[b], rollout.turns[b] if rollout.turns else ()),
            "answer": problems[b // size].answer,
            "reward": f"{reward.value.flatten()[b]:.2f}",
            "advantage": f"{adv.flatten()[b]:.2f}",
        }
        for b in range(min(SAMPLES, len(rollout.text)))
    ]


def record(run: TrainingRun, step: int, experience: Experience, loggers: RunLoggers) -> None:
    """Store the rollout; put distributions and a few samples where TensorBoard shows them."""
    how = run.settings.logging
    adv = sample_advantages(experience.adv, experience.groups)
    problems, rollout, reward = experience.groups
    on_host = tree_map_only(Tensor, Tensor.cpu, (rollout, reward, adv))
    store = partial(
        rollout_store.store_rollouts, run.run_dir / "rollouts", step, problems, run.algo.group_size, *on_host
    )
    loggers.do(f"the rollout of step {step}", partial(store, keep=how.keep_rollouts))
    loggers.write(MetricsWriter.histogram, step, "advantage/distribution", adv)
    loggers.write(MetricsWriter.histogram, step, "generation/length", rollout.mask.sum(-1))
    loggers.write(MetricsWriter.histogram, step, "loss/ratio", experience.ratio)
    if is_due(step, how.samples_every):
        loggers.write(MetricsWriter.table, step, "samples", sample_rows(experience))


def step_checksums(
    run: TrainingRun, step: int, experience: Experience, carried: Carry, noted: StepChecksums
) -> dict[str, Any]:
    """The step's line in digests.jsonl: its checksums, and what they may depend on besides. Every rank takes part.

    `carried` is what the step hands to the next one.
    """
    (_, rollout, reward), world = experience.groups, run.world
    return {
        "step": step,
        **of_step(rollout, reward, experience.adv, experience.batch.logp_old, noted.signals),
        **of_curriculum(carried.curriculum),
        **run.policy.digests(),
        "width": rollout.tokens.shape[1],
        "ranks": world.size,
        "device": world.device.type,
        "torch": torch.__version__,
    }


# -- the kernels that it was computed with


def chosen_kernels(run: TrainingRun) -> dict[str, str]:
    """What was chosen on this rank's card, by trials and by what is installed; of decoding once it has an engine."""
    device = run.world.device
    if device.type != "cuda":
        return {}
    compile_ = function_and_knobs(run.settings.parallelism.compile)[0].__name__
    sampler = run.sampler.sampler  # None where a replay learns from stored tokens
    engine = sampler.shared.engine if isinstance(sampler, LocalSampler) else None
    decoding = {} if engine is None else engine.choices()
    compute = run.settings.compute
    query = torch.empty(0, 1, 1, 8, dtype=hf.find_dtype(compute.dtype), device=device)
    attends = choose_kernel(query, AttentionSpec(None, 1.0, 0.0, None, compute.attention))
    rows = getattr(attends, "func", attends).__name__  # flash-attn's where it imports, else torch's
    head = type(choose_head_kernels(device).kernels).__name__
    return {"blocks": compile_, "attention of packed rows": rows, "head": head, **decoding}


def settle_model(run: TrainingRun) -> list[str]:
    """Find out how the model is sampled from and trained, before the first step; every rank calls this. A line on it.

    Both are tried as the first step would: nothing is held that it would not hold. Raises ValueError for a model that
    the local sampler cannot decode.
    """
    sampler, trained = run.sampler.sampler, run.policy.logprob_model
    sampled = f"sampled by {type(run.engine).__name__}"
    if isinstance(sampler, LocalSampler):
        run.world.together(sampler.prepare, what="choosing how rows are decoded")
        sampled = "sampled in slots" if sampler.shared.engine is not None else "sampled with a cache that grows"
    with run.world.talking("asking how the model reads rows"):
        trained.settle(run.world.device)
    if not run.world.main:
        return []
    rows = "packed" if trained.packs else "padded"
    attention = trained.model.config.get_text_config()._attn_implementation
    balance = getattr(trained.model.config.get_text_config(), "router_aux_loss_coef", None)
    routing = f", without its balancing loss (router_aux_loss_coef {balance:g})" if balance else ""
    return [f"{type(trained.model).__name__}: {sampled}, trained on {rows} rows, attention {attention}{routing}"]


def settle_kernels(run: TrainingRun, step: int) -> list[str]:
    """Compare all kernels on all ranks and record them, before anything is decoded; every rank calls this."""
    if run.world.device.type != "cuda":
        return []
    check_same_kernels(run, f"before step {step}")
    return record_kernels(run.run_dir, step, chosen_kernels(run)) if run.world.main else []


def check_same_kernels(run: TrainingRun, when: str) -> None:
    """Raise RuntimeError on all ranks where two of them compute with different kernels; every rank calls this.

    A rank that has no engine yet has no choice of that, and is not compared.
    """
    if run.world.device.type != "cuda":
        return
    first_choice: dict[str, tuple[int, str]] = {}
    for rank, brought in enumerate(run.world.exchange(chosen_kernels(run), what="the kernels of the ranks")):
        for what, which in brought.items():
            first, expected = first_choice.setdefault(what, (rank, which))
            if which != expected:
                raise RuntimeError(
                    f"{what}, by a trial on each rank, {when}: got {which} on rank {rank}, expected {expected} "
                    f"as on rank {first}"
                )


def record_kernels(run_dir: Path, step: int, kernels: Mapping[str, str]) -> list[str]:
    """Record the kernels of a process, on the main rank, and report where they differ from earlier ones of the run."""
    if not kernels:
        return []
    before = recorded_kernels(run_dir, step - 1)
    append_json(run_dir / KERNELS, {"step": step, "kernels": dict(kernels)})
    changes = [
        f"{what} {before[what]} recorded, {now} now" for what, now in kernels.items() if before.get(what, now) != now
    ]
    return [f"step {step} has other kernels than before: {'; '.join(changes)}"] if changes else []


def recorded_kernels(run_dir: Path, step: int) -> dict[str, str]:
    """The kernels that a step was taken with."""
    records = [line.row["kernels"] for line in step_lines(run_dir / KERNELS, torn_end=True) if line.step <= step]
    return records[-1] if records else {}


def record_evaluation(run_dir: Path, step: int, judged: Sequence[GradedAnswer], loggers: RunLoggers) -> None:
    """Everything that was answered to eval/step_N.jsonl, the first SAMPLES of it to TensorBoard."""
    rollout_store.store_evaluation(run_dir / "eval", step, [answer.row() for answer in judged])
    loggers.write(MetricsWriter.table, step, "eval/samples", [answer.display_fields() for answer in judged[:SAMPLES]])


# -- what the rules of health find in the metrics


def check_health(run: TrainingRun, step: int, loggers: RunLoggers) -> None:
    """Report what the rules newly find in the metrics.

    The main rank judges: seconds and memory differ between ranks, and a rule may look at them.
    """
    rules = run.settings.health.rules()
    findings = run.world.agree(
        lambda: tuple(health.new_findings(of, loggers.history) for of in rules), what="the rules of health"
    )
    report_findings(findings, step, loggers)


def report_findings(findings: Findings, step: int, loggers: RunLoggers) -> None:
    """Log what was found of a step; what ends the run is added to `loggers.fatal`."""
    # Rows without a score: with the first line about the first row that was lost, where there is one.
    quote = f". The first: {loggers.losses[0].splitlines()[0]}" if loggers.losses else ""
    warnings, fatal = (
        [each._replace(text=each.text + quote) if each.rule == "invalid_high" else each for each in of]
        for of in findings
    )
    every = [*dict.fromkeys([*warnings, *fatal])]
    for finding in every:
        loggers.line(f"health, {finding.rule}: {finding.text}")
    loggers.write(MetricsWriter.table, step, "health", [finding._asdict() for finding in every])
    loggers.fatal.extend(fatal)
