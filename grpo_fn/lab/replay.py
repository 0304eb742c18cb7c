"""A step of a run again: from the checkpoint before it, compared with what was recorded, and beside other knobs.

Everything happens in memory. Nothing is written into the run folder, in which the run may be at work.
"""

import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from grpo_fn.algo.group_sampling import Explore, GroupBatch
from grpo_fn.algo.step import Experience, without_signal
from grpo_fn.config import Config, load_config
from grpo_fn.core.batch import minibatches, pad_rollout
from grpo_fn.core.checksums import QUANTITIES, differing_quantities, of_curriculum
from grpo_fn.core.json_lines import DIGESTS, digests_by_step, metrics_by_step
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch, Carry, Gains, Groups, Rollout, Scores
from grpo_fn.lab.replay_diff import (
    RecordedStep,
    ReplayedStep,
    StoredRollout,
    circumstances,
    edited_fields,
    explain_difference,
    rounding_difference,
    side_by_side,
    tampered_fields,
)
from grpo_fn.lab.token_page import signal_as_sampled, signal_page
from grpo_fn.shell.atomic_io import write_bytes
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.checkpoint.run_dir import MARKER
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.logging.stopwatch import ErrorContext, Stopwatch
from grpo_fn.shell.model.hf import local_part
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.sampler.interface import DataParallelSampler
from grpo_fn.shell.world import Elsewhere, LostRank, World, join_world, leave_lost
from grpo_fn.trainer.build import RunRequest, TrainingRun, build, check_restored, first_carry, follow_groups
from grpo_fn.trainer.loop import take_step, training_problem
from grpo_fn.trainer.model_source import verified_checkpoint
from grpo_fn.trainer.plan import ValidatedPlan
from grpo_fn.trainer.recording import chosen_kernels, recorded_kernels, step_checksums
from grpo_fn.trainer.sections import Settings
from grpo_fn.trainer.state import unpack_carried
from grpo_fn.trainer.validate import check_this_machine, validate

# -- the records of a run, and the state before a step


def load_stored_rollout(run_dir: Path, step: int, width: int) -> StoredRollout | None:
    """The stored rollout of a step, padded to the width that it had; None when there is none.

    Raises ValueError for one that cannot be read.
    """
    path = run_dir / "rollouts" / f"step_{step:06d}.jsonl.gz"
    try:
        rows = rollout_store.load_rows(path)
        groups = rollout_store.groups_from_rows(rows)
        rollout = pad_rollout(groups.rollout, max(width, groups.rollout.tokens.shape[1]))
        return StoredRollout(groups._replace(rollout=rollout), rows)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(f"got {path}, which is broken ({error}), expected what the run stored") from error


def from_store(run: TrainingRun, stored: StoredRollout) -> Callable[[Explore, Carry], GroupBatch]:
    """The stored groups in the place of sampled ones, rewarded anew.

    Raises ValueError when the task has other prompts now.
    """
    groups = stored.groups
    problems = tuple(map(training_problem(run), (problem.uid for problem in groups.problems)))
    for past, drawn in zip(groups.problems, problems, strict=True):
        if past.prompt != drawn.prompt:
            raise ValueError(
                f"problem {drawn.uid}: got the prompt {drawn.prompt[:80]!r}, expected the stored one, "
                f"{past.prompt[:80]!r}: has the data changed?"
            )
    rollout = tree_map_only(Tensor, lambda x: x.to(run.world.device), groups.rollout)
    if not rollout.turns:  # of episodes the text is that of the last turn
        sampled = [tokens[mask].tolist() for tokens, mask in zip(rollout.tokens, rollout.mask, strict=True)]
        # The stored text may have been edited.
        rollout = rollout._replace(text=tuple(run.tokenizer.batch_decode(sampled, skip_special_tokens=True)))

    def collect(explore: Explore, carried: Carry, prompts: int) -> GroupBatch:
        rewarded = Groups(problems, rollout, run.reward(problems, rollout))
        return GroupBatch(rewarded, rewarded, carried, {})

    return follow_groups(run.settings, run.task, collect)


class NoSampler(DataParallelSampler):
    """The sampler of steps that learn from stored rollouts: it has no engine, takes no weights and samples nothing."""

    def __init__(self) -> None:
        self.sampler = None  # as `chosen_kernels` looks for it

    def _nothing(self, *args: object) -> None:
        pass

    load = rest = refill = _nothing

    def figures(self) -> dict[str, float]:
        return {}

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """Raise RuntimeError: a caller has lost what was stored."""
        raise RuntimeError(f"got {len(problems)} problems to sample, expected none: the step learns from stored tokens")


def restore_nearest(run: TrainingRun, last: int, say: Callable[[str], None]) -> tuple[int, Carry]:
    """Bring policy and sampler to the newest state kept of step `last` or before; the step and what it carried.

    The step is the one after which it was saved, 0 for the model that the run began with.
    """
    root = run.run_dir / "checkpoints"
    saved = run.world.agree(partial(nearest_checkpoint, root, last, say), what="the checkpoint before the step")
    if saved is None:
        say("no checkpoint is kept before this step: from the model that the run began with")
        step, carried, ahead = 0, first_carry(run), []
    else:
        step, path, blobs = saved
        run.policy.restore(partial(store.load_into, path, world=run.world), blobs["policy"])
        carried = check_restored(run, unpack_carried(blobs["carried"], training_problem(run)))
        say(f"restored {path}")
        ahead = blobs.get("ahead", [])
    run.sampler.load(run.policy)
    run.sampler.refill(ahead)
    return step, carried


def nearest_checkpoint(root: Path, last: int, say: Callable[[str], None]) -> tuple[int, Path, dict[str, Any]] | None:
    """The newest whole checkpoint of step `last` or before; None when there is none."""
    for step in reversed([step for step in store.steps(root) if step <= last]):
        try:
            path = verified_checkpoint(root / f"step_{step}")
            return step, path, store.blobs(path)
        except (ValueError, OSError) as error:  # broken; or deleted this moment by the run
            say(f"skipped: {error}")
    return None


class Before(NamedTuple):
    """The state before the step, on the CPU: this rank's part of every tensor, counters, and what is carried."""

    tensors: dict[str, Tensor]
    counters: Mapping[str, Any]
    carried: Carry
    ahead: list[dict[str, Any]]  # batches that are sampled and not yet learned from


def before(policy: FSDPPolicy, sampler: DataParallelSampler, carried: Carry) -> Before:
    """A copy of all that the step begins with."""
    tensors = {name: local_part(x).detach().cpu().clone() for name, x in policy.tensors().items()}
    return Before(tensors, policy.counters(), carried, sampler.drain())


def copy_state_into(held: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Copy the state into tensors that are to be the same ones. Raises ValueError where they are others."""
    own = {name: local_part(x) for name, x in into.items()}
    shapes = [{name: (tuple(x.shape), x.dtype) for name, x in part.items()} for part in (held, own)]
    odd = sorted(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
    if odd:
        raise ValueError(
            f"--override: got knobs that change what is trained or how it lies, {odd[0]} and {len(odd) - 1} more, "
            "expected some that leave the model, its optimizer and its place as they are"
        )
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(held[name])


SAME, DIFFERENT = 0, 1
AS_SAMPLED = (
    "As the policy that sampled it saw it, before the first update of the step: every ratio is 1, nothing is clipped "
    "yet, the entropy is not known."
)
REFUSED = " The step was refused: too few groups had a signal, and no update was made."


@dataclass(frozen=True)
class ReplayRequest:
    """The request of the command line."""

    run_dir: Path
    step: int
    overrides: Sequence[str]  # NAME=VALUE or a gin file
    stored: bool  # tokens from RUN/rollouts
    show: Path | None  # where the learning signal goes as a page


@dataclass
class Story:
    """The result of a replay."""

    first: list[str] = field(default_factory=list)  # about the first difference
    recorded: bool = False  # whether there was anything to compare the step with
    taken: ReplayedStep | None = None
    stored: StoredRollout | None = None  # what it learned from, where that was not sampled again
    before: Before | None = None


def launch_replay(request: ReplayRequest) -> int:
    """Replay; returns the exit code. Ends with EXIT_LOST when a rank is gone."""
    try:
        return replay(request)
    except (Elsewhere, LostRank) as error:
        return leave_lost(error, then="nothing was changed; the same command starts anew")


def replay(request: ReplayRequest) -> int:
    """Take the step again, say what differs, and what it would have been under other knobs.

    Returns SAME or DIFFERENT. Raises ValueError for a folder that is no run's, a step that was not recorded, a rollout
    that is needed and not stored, and overrides that are no knobs or that change what is trained.
    """
    if not (request.run_dir / MARKER).is_file():
        raise ValueError(f"got {request.run_dir}, expected the folder of a run, with {MARKER} in it")
    if request.step < 1:
        raise ValueError(f"--step: got {request.step}, expected 1 or later")
    own, other = replay_config(request.run_dir, []), replay_config(request.run_dir, request.overrides)
    lines = digests_by_step(request.run_dir)
    if request.step not in lines and not request.overrides:
        recorded = f"{len(lines)} steps from {min(lines)} to {max(lines)}" if lines else "none"
        raise ValueError(
            f"--step: got {request.step}, which is not in {request.run_dir / DIGESTS}, expected one of {recorded} "
            "(sections.Logging.checksums_every says which steps are recorded)"
        )
    settings = Settings(**own.kwargs())
    checked = validate(settings)
    world = join_world(settings.compute.device, deadline=settings.parallelism.collective_timeout)
    story = Story()
    overridden = None
    if request.overrides:  # before any work: they have to fit together, and these ranks
        changed = Settings(**other.kwargs())
        overridden = changed, validate(changed)
        changed.parallelism.shape(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    with build_replay(request, own, settings, checked, world) as run:
        repeat(run, request=request, lines=lines, story=story, eps=torch.finfo(checked.dtype).eps)
    code = world.agree(partial(conclude, request, story), what="the result")
    if overridden is not None:
        with build_replay(request, other, *overridden, world) as run:
            step_with_override(run, request=request, story=story)
    world.leave()
    return code


def replay_config(run_dir: Path, overrides: Sequence[str]) -> Config:
    """The run's own configuration with others on top. Raises ValueError as `load_config` does."""
    files = [name for name in overrides if name.endswith(".gin") and "=" not in name]
    params = [name for name in overrides if name not in files]
    return load_config([str(run_dir / "config.gin"), *files], params)


def build_replay(
    request: ReplayRequest, config: Config, settings: Settings, checked: ValidatedPlan, world: World
) -> AbstractContextManager[TrainingRun]:
    """The pieces of the run, which leave the run folder alone: it is entered for reading."""
    plan = RunRequest(config, request.run_dir, dry_run=False, ranks=1, hosts=1, force=False)
    check_this_machine(settings)
    return build(
        settings,
        checked,
        plan,
        world,
        enter=lambda run_dir, **_: True,
        started=time.perf_counter(),
        report=lambda text: None,
    )


# -- the run's own step


def repeat(
    run: TrainingRun, *, request: ReplayRequest, lines: Mapping[int, Mapping[str, Any]], story: Story, eps: float
) -> None:
    """Restore, take every step up to the one asked for, and compare each with what was recorded."""
    say = speaker(run.world)
    run.pool.judge_record.read_only = True
    stored = request.stored or unrepeatable(run, say)
    if stored:
        run = replace(run, sampler=NoSampler())
    start, carried = restore_nearest(run, request.step - 1, say)
    here = {"weights": run.policy.digests()["weights"], **of_curriculum(carried.curriculum)}
    recorded = {name: value for name, value in lines.get(start, {}).items() if name in here}
    story.first = [
        f"step {start}, {name}: {recorded[name]} recorded, {here[name]} in the checkpoint"
        for name in differing_quantities(recorded, here)
    ]
    figures = metrics_by_step(request.run_dir, torn_end=True)
    for step in range(start + 1, request.step + 1):
        if step == request.step and request.overrides:
            story.before = before(run.policy, run.sampler, carried)
        line = lines.get(step, {})
        kept = run.world.agree(
            partial(load_stored_rollout, request.run_dir, step, line.get("width", 0)), what="the stored rollout"
        )
        if run.environments is not None and kept is not None:
            run.environments.tape.strict = True
            run.environments.tape.add(kept.rows)
        was = RecordedStep(line, figures.get(step, {}), kept, recorded_kernels(request.run_dir, step))
        if stored and was.stored is None:
            raise ValueError(
                f"got no rollout of step {step} in {run.run_dir / 'rollouts'}, expected its tokens there "
                "(sections.Logging.keep_rollouts says how many steps are kept)"
            )
        story.stored = was.stored if stored else None
        gains = carried.gains
        story.taken, carried = replay_one_step(run, carried, step, story.stored)
        if step == request.step and request.show is not None and run.world.main:
            write_signal_page(run, step, story.taken.seen, gains, request.show)
            say(f"the learning signal of step {step} is in {request.show}")
        compare_step(run, step, was, story, eps, say)


def write_signal_page(run: TrainingRun, step: int, seen: Experience, gains: Gains, path: Path) -> None:
    """The step token by token, as the policy that sampled it saw it."""
    algo = run.algo
    signal, figures = signal_as_sampled(seen.batch, algo.objective, gains, minibatches=algo.minibatches)
    note = AS_SAMPLED + REFUSED * without_signal(seen.batch, algo)
    title = f"Step {step} of {run.run_dir.name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, signal_page(seen, signal, figures, run.tokenizer, title=title, note=note).encode())


def unrepeatable(run: TrainingRun, say: Callable[[str], None]) -> bool:
    """Whether the tokens have to be the stored ones, because the engine would draw others."""
    sampler = run.sampler.sampler
    if not run.sampler.repeatable:
        say(f"{type(sampler).__name__} cannot repeat its tokens: the stored ones are learned from")
    elif sampler.overlaps:
        say("the servers may be at work for the run itself: the stored tokens are learned from")
    return sampler.overlaps or not run.sampler.repeatable


def replay_one_step(
    run: TrainingRun, carried: Carry, step: int, stored: StoredRollout | None
) -> tuple[ReplayedStep, Carry]:
    """One step, and what the next one gets; learning from the stored rollout where one is given."""
    if stored is not None:
        run = replace(run, algo=replace(run.algo, group_sampling=from_store(run, stored)))
    clock, noted = Stopwatch(), run.policy.note()
    with ErrorContext(run.world, step, clock):
        seen, carried, figures = take_step(run, step, carried, clock.span)
        line = step_checksums(run, step, seen, carried, noted)
    algo = run.algo
    parts = micro_batch_rows(seen.batch, run.policy.split_rows, epochs=algo.epochs, parts=algo.minibatches)
    signal = signal_by_row(seen.batch, parts, noted.signals)
    return ReplayedStep(seen, figures, line, signal, chosen_kernels(run)), carried


def micro_batch_rows(batch: Batch, split: Callable[[Batch], list[Tensor]], *, epochs: int, parts: int) -> list[Tensor]:
    """The rows of a step's micro-batches, in the order in which they go to the policy; of `parts` minibatches."""
    size = len(batch.mask) // parts
    return [
        torch.where(rows < 0, rows, rows + number * size)
        for _ in range(epochs)
        for number, mini in enumerate(minibatches(batch, parts))
        for rows in split(mini)
    ]


def signal_by_row(batch: Batch, parts: Sequence[Tensor], sent: Sequence[tuple[Batch, Scores]]) -> Scores:
    """The learning signal of every row `[B, T]`, summed over the epochs; `sent` is what the policy got of each part.

    That is nothing when the step was refused.
    """
    whole = Scores(*(torch.zeros_like(batch.logp_sampled) for _ in Scores._fields))
    for rows, (part, signal) in zip(parts, sent, strict=bool(sent)):
        for into, x in zip(whole, signal, strict=True):
            into[:, : part.mask.shape[1]].index_add_(0, rows.clamp(min=0), torch.where(part.mask, x, 0.0))
    return whole


def compare_step(
    run: TrainingRun, step: int, was: RecordedStep, story: Story, eps: float, say: Callable[[str], None]
) -> None:
    """Say which quantities of the step differ; about the first difference of all, everything that is known."""
    now, report = story.taken, []
    names = differing_quantities(was.line, now.line)
    if names:
        report.append(f"step {step}, {names[0]}: {was.line[names[0]]} recorded, {now.line[names[0]]} now")
    if odd := tampered_fields(was):
        report.append(f"step {step}, {odd[0]}: the rollout in {run.run_dir / 'rollouts'} is not the recorded one")
    if report:
        report += explain_difference(names[0] if names else odd[0], was, now, run.tokenizer.decode)
        report += [*circumstances(was, now), *filter(None, [rounding_difference(was, now, eps)])]
    elif was.line and (edited := edited_fields(was, now, run.tokenizer.decode, sampled_anew=story.stored is None)):
        report = [f"step {step}, {edited[0]}", *edited[1:5]]
    story.first, story.recorded = story.first or report, bool(was.line)
    alike = f"{', '.join(name for name in QUANTITIES if name in was.line)} as recorded"
    if not was.line:
        alike = "; ".join(["not recorded", *circumstances(was, now)])
    say(f"step {step}: " + (f"{', '.join(names)} differ" if names else alike))


def conclude(request: ReplayRequest, story: Story) -> int:
    """Print the result; the exit code."""
    if story.first:
        print("first difference: " + "\n  ".join(story.first), flush=True)
        return DIFFERENT
    if story.recorded:
        print(f"step {request.step} of {request.run_dir} is what it was", flush=True)
    return SAME


def speaker(world: World) -> Callable[..., None]:
    """`print` on the main rank; the others are silent."""
    return partial(print, flush=True) if world.main else lambda *lines, sep=" ": None


# -- under other knobs


def step_with_override(run: TrainingRun, *, request: ReplayRequest, story: Story) -> None:
    """The step from the same state, under these knobs, beside the run's own."""
    say, step = speaker(run.world), request.step
    run.policy.restore(partial(copy_state_into, story.before.tensors), story.before.counters)
    if story.stored is not None:
        run = replace(run, sampler=NoSampler())
    run.sampler.load(run.policy)
    run.sampler.refill(story.before.ahead)
    other, _ = replay_one_step(run, check_restored(run, story.before.carried), step, story.stored)
    say(f"step {step} with {', '.join(request.overrides)}:", *side_by_side(story.taken, other), sep="\n")
