"""The one configurable root: check, build, and loop over the box."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_fn import plan as planning
from grpo_fn import prng, sampling
from grpo_fn.algorithm import Algo, Experience, alone, grpo_step
from grpo_fn.evaluate import Judged, evaluate
from grpo_fn.problem import Problem, RewardFn, Scorer
from grpo_fn.shell import checkpoint, hf, rollout_store, system
from grpo_fn.shell.clock import Stopwatch
from grpo_fn.shell.console import Console
from grpo_fn.shell.durable import write_json
from grpo_fn.shell.reward_pool import RewardPool
from grpo_fn.shell.run_dir import open_run
from grpo_fn.shell.signals import EXIT_STOPPED, StopRequest
from grpo_fn.shell.writer import Writer, table
from grpo_fn.tasks.task import Task, train_problems
from grpo_fn.types import RunState

# Keyword-only parameters that the program passes to what gin names here; gin binds the others.
SUPPLIED = {
    "policy": ("temperature", "reference", "micro_tokens"),
    "sampler": ("choose",),
    "choose": ("temperature",),
    "reward": ("score",),
    "objective": ("batch", "totals"),
}

BEST = "eval/accuracy"  # what keep_best goes by
DATA, SAMPLING, EVALUATION = range(3)  # streams of the run's key


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    config_text: str
    fingerprint: str
    run_dir: Path
    dry_run: bool
    force: bool


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


@dataclass
class Progress:
    """What the loop carries from step to step besides the policy; all of it is in every checkpoint."""

    state: RunState
    accuracy_before: float
    accuracy: float
    seconds: float


def launch(kwargs: Mapping[str, Any], **request: Any) -> int:
    """Run `train` with the configured arguments; returns the exit code."""
    return train(Request(**request), **kwargs)


def train(
    request: Request,
    *,
    task: Callable[[], Task],
    model: str | hf.ModelSource,
    dtype: str,
    device: str,
    attention: str,
    policy: Callable[..., Any],
    sampler: Callable[..., Any],
    choose: Callable[..., tuple[Tensor, Tensor]],
    temperature: float,
    reward: Callable[..., Any],
    verdict: RewardFn,
    reward_pool: Callable[[], RewardPool],
    advantage: Callable[[Tensor, Tensor], Tensor],
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    old_logp: Callable[..., Tensor],
    group_size: int,
    epochs: int,
    minibatches: int,
    micro_tokens: int,
    prompts: int,
    eval_problems: int,
    cadence: Cadence,
    seed: int,
) -> int:
    """Train a policy on a task and leave a run folder; every argument is named in a gin file.

    Returns 0 when all steps are done and EXIT_STOPPED when a signal asked to stop. Raises ValueError, before any
    weights are loaded, for numbers, data, folders or a model that do not fit together.
    """
    planning.check_positive(
        group_size=group_size,
        epochs=epochs,
        minibatches=minibatches,
        micro_tokens=micro_tokens,
        prompts=prompts,
        steps=cadence.steps,
        save_every=cadence.save_every,
        eval_problems=eval_problems,
        keep_last=cadence.keep_last,
    )
    planning.check_divides(prompts, minibatches)
    planning.check_advantage(advantage, group_size)
    reference = planning.uses_reference(objective)
    place, precision = hf.find_device(device), hf.find_dtype(dtype)
    source = hf.Pretrained(model) if isinstance(model, str) else model
    config = source.config()
    problems = task()
    plan = planning.Plan(
        prompts=prompts,
        group_size=group_size,
        minibatches=minibatches,
        epochs=epochs,
        steps=cadence.steps,
        train_rows=problems.size,
        test_rows=len(problems.test),
        max_new_tokens=sampler.keywords["max_new_tokens"],
        max_rows=sampler.keywords["max_rows"],
        parameters=hf.parameter_count(hf.empty_model(config)),
        kv_bytes_per_token=planning.kv_bytes_per_token(config, precision.itemsize),
        weight_bytes=precision.itemsize,
        reference=reference,
    )
    if request.dry_run:
        print(request.config_text, *plan.lines(), sep="\n")
        return 0
    open_run(
        request.run_dir,
        config_text=request.config_text,
        fingerprint=request.fingerprint,
        force=request.force,
        need_bytes=plan.need_bytes(),
    )
    folder = source.folder()
    tokenizer = hf.load_tokenizer(folder)
    module = hf.load_model(folder, dtype=precision, device=place, attention=attention)
    drawing = sampler(module, tokenizer, choose=partial(choose, temperature=temperature))
    with reward_pool() as pool:
        built = Built(
            run_dir=request.run_dir,
            key=prng.key(seed, device="cpu"),
            seed=seed,
            policy=policy(module, temperature=temperature, reference=reference, micro_tokens=micro_tokens),
            sampler=drawing,
            greedy=replace(drawing, choose=sampling.greedy),
            tokenizer=tokenizer,
            algo=Algo(
                reward=partial(reward, score=pool.score),
                advantage=advantage,
                objective=objective,
                old_logp=old_logp,
                group_size=group_size,
                epochs=epochs,
                minibatches=minibatches,
                micro_tokens=micro_tokens,
            ),
            task=problems,
            held_out=problems.test[:eval_problems],
            prompts=prompts,
            verdict=verdict,
            score=pool.score,
            cadence=cadence,
        )
        return work(built)


def work(built: Built) -> int:
    """Restore or begin, take the steps that are left, and finish."""
    began, said = time.perf_counter(), []
    progress = restore(built, said.append)
    first = progress is None
    start = 0 if first else progress.state.step
    clock = Stopwatch()
    with ExitStack() as stack:
        console = stack.enter_context(Console(built.run_dir / "log.txt", built.cadence.steps, start))
        writer = stack.enter_context(Writer(built.run_dir, start_step=0 if first else start + 1))
        stop = stack.enter_context(StopRequest())
        for line in said:
            console.line(line)
        if first:
            progress = begin(built, writer, console, clock)
            writer.text(0, "config", "```\n" + (built.run_dir / "config.gin").read_text() + "\n```")
        else:
            console.line(f"resumed after step {start} from {built.run_dir / 'checkpoints'}")
        before = progress.seconds
        for step in range(start + 1, built.cadence.steps + 1):
            with noting(step, clock):
                advance(built, progress, step, writer, console, clock)
                progress.seconds = before + time.perf_counter() - began
                last = step == built.cadence.steps
                if last or stop.requested or step % built.cadence.save_every == 0:
                    with clock.span("checkpoint"):
                        save(built, progress)
            if stop.requested and not last:
                console.line(f"stopped by {stop.requested} after step {step}; the same command goes on from here")
                return EXIT_STOPPED
        progress.seconds = before + time.perf_counter() - began
        finish(built, progress, console)
    return 0


def begin(built: Built, writer: Writer, console: Console, clock: Stopwatch) -> Progress:
    """Measure the policy before training; its line in the metrics is step 0."""
    with noting(0, clock), clock.span("evaluate"):
        figures, judged = judge(built)
    show(writer, 0, "eval/samples", judged[: built.cadence.show_rows])
    writer.scalars(0, {**figures, **clock.lap()})
    console.line(f"before training: accuracy {figures[BEST]:.3f} on {len(judged)} held-out problems")
    return Progress(RunState(0, built.seed), figures[BEST], figures[BEST], 0.0)


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
        progress.accuracy = measured[BEST]
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


def save(built: Built, progress: Progress) -> None:
    """Write a checkpoint of everything that a resumed run needs, then drop those no longer kept."""
    root = built.run_dir / "checkpoints"
    meta = {
        **progress.state._asdict(),
        "accuracy_before": progress.accuracy_before,
        "seconds": progress.seconds,
        "metrics": {BEST: progress.accuracy},
    }
    tensors = dict(built.policy.weights())
    blobs = {"optimizer": built.policy.optimizer_state()}
    checkpoint.save(root, progress.state.step, tensors=tensors, blobs=blobs, meta=meta)
    checkpoint.prune(root, keep_last=built.cadence.keep_last, keep_best=built.cadence.keep_best, metric=BEST)


def restore(built: Built, warn: Callable[[str], None]) -> Progress | None:
    """Take back the newest checkpoint that verifies; None when there is none."""
    found = checkpoint.latest(built.run_dir / "checkpoints", warn=warn)
    if found is None:
        return None
    tensors, blobs, meta = checkpoint.load(found.path)
    built.policy.restore(tensors, blobs["optimizer"])
    state = RunState(meta["step"], meta["seed"])
    return Progress(state, meta["accuracy_before"], meta["metrics"][BEST], meta["seconds"])


def finish(built: Built, progress: Progress, console: Console) -> None:
    """Export the model and say what came of the run."""
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
