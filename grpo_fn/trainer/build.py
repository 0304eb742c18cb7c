"""Build a run from its validated settings: model, policy, sampler and reward workers, in one context."""

import asyncio
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from grpo_fn.algo.curricula import begin_curriculum, check_arrays, sample_and_follow
from grpo_fn.algo.group_sampling import Explore, GroupBatch
from grpo_fn.algo.step import AT_THE_START, Algorithm
from grpo_fn.algo.supervised import Stage
from grpo_fn.config import Config
from grpo_fn.core import prng
from grpo_fn.core import sampling as token_samplers
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Problem, RewardFn
from grpo_fn.core.types import Carry, Groups, Reward, Rollout
from grpo_fn.rewards.combine import combine
from grpo_fn.shell.episodes.episode_rows import Environments
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.attention import model_attention
from grpo_fn.shell.model.demonstrations import given_rollout, shown_rows
from grpo_fn.shell.model.logprob_model import LogprobModel, chunk_elements
from grpo_fn.shell.model.lora import adapters_line
from grpo_fn.shell.policy.fsdp import FSDPPolicy, ReferenceModel
from grpo_fn.shell.policy.load_and_shard import LoadedModel, ModelSpec, load_and_shard
from grpo_fn.shell.process import keep_freed_memory, use_deterministic_kernels
from grpo_fn.shell.reward_workers.judge_client import JudgeRecord, check_endpoint
from grpo_fn.shell.reward_workers.reward_pool import EarlyRewards, RewardPool
from grpo_fn.shell.reward_workers.worker_pool import EnvironmentPool, PrintedText
from grpo_fn.shell.sampler.async_sampler import AsyncSampler
from grpo_fn.shell.sampler.interface import (
    DataParallelSampler,
    EngineSampler,
    OnCompletions,
    SamplerContext,
    SamplerOptions,
    TokenSampler,
    positions,
    spread_score,
)
from grpo_fn.shell.world import World
from grpo_fn.tasks.task import Task, train_problems
from grpo_fn.trainer.first_row import first_row
from grpo_fn.trainer.plan import (
    ValidatedPlan,
    device_notes,
    rank_line,
    run_lines,
    sampler_line,
    settle_blocks,
)
from grpo_fn.trainer.prepare import (
    ADAPTERS,
    CHOOSING,
    DATA,
    PROBING,
    PreparedModel,
    check_run_demonstrations,
    demonstration_key,
    draws_to_check,
    prepare_data,
)
from grpo_fn.trainer.sections import Data, Sampling, Settings, open_environments
from grpo_fn.trainer.state import check_steps, has_progress
from grpo_fn.trainer.teachers import PreparedTeachers, prepare_teachers, teacher_of_run
from grpo_fn.trainer.validate import judges_of_run

SampleGroups = Callable[[Explore, Carry, int], GroupBatch]
JUDGE_FOLDER = "judge"  # in the run folder


@dataclass(frozen=True)
class RunRequest:
    """The command line of a run."""

    config: Config
    run_dir: Path
    dry_run: bool
    ranks: int  # of a dry run, evenly on so many hosts
    hosts: int
    force: bool
    on_step: Callable[[int, Mapping[str, float]], object] | None = None  # called after a step, on the main rank


@dataclass(frozen=True)
class TrainingRun:
    """The pieces of a run: its settings, and what was made from them."""

    settings: Settings
    request: RunRequest
    key: Tensor
    world: World
    policy: FSDPPolicy
    start_model: ReferenceModel | None  # the frozen start model, where a copy is kept
    sampler: DataParallelSampler
    engine: EngineSampler  # of the sampler, for evaluations
    tokenizer: PreTrainedTokenizerBase
    algo: Algorithm | Stage
    reward: Callable[[Sequence[Problem], Rollout], Reward]
    teacher: Callable[[Groups, Tensor], Tensor] | None  # log-probs of the sampled tokens under the teachers
    demonstration_rows: Callable[[Sequence[Problem]], Rollout]  # of problems, one row each
    demonstrations: Callable[[int], Rollout] | None  # steps taken -> given rows beside the sampled ones
    task: Task
    evaluator: Callable[[], EngineSampler] | None  # starts an engine beside the training; None: its own evaluates
    pool: RewardPool
    environments: Environments | None  # of rows that are episodes
    plan: Sequence[str]  # the numbers of the run, for the log
    ranks: Sequence[str]  # a line for each rank, for the log
    started: float  # time.perf_counter() when the program began to work

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.request.run_dir

    @property
    def held_out(self) -> Sequence[Problem]:
        """The problems of the evaluation."""
        return self.task.test


@contextmanager
def build(
    settings: Settings,
    checked: ValidatedPlan,
    request: RunRequest,
    world: World,
    *,
    enter: Callable[..., object],
    started: float,
    report: Callable[[str], None],
) -> Iterator[TrainingRun]:
    """The pieces of a run, until the context is left. `enter` takes the run folder, before a model is made or loaded.

    Raises ValueError, before any weights are loaded, for a folder, prompts or a number of ranks that do not fit.
    """
    printed = PrintedText(request.run_dir / (f"printed_rank_{world.rank}.txt" if world.rank else "printed.txt"))
    recorded = with_record(settings, request.run_dir, world.rank, printed)
    s, block_notes = settle_blocks(recorded, checked.config, world.device)
    disable_progress_bar()  # one a file: they would bury the lines of the run
    use_deterministic_kernels(s.compute.deterministic, world.device.type)
    if world.device.type == "cpu":
        keep_freed_memory()
    check_ranks(s, request, world)
    key = prng.key(s.seed, device="cpu")
    (folder, tokenizer, task), teachers_prepared = open_and_prepare(
        s, checked, request, world, enter=enter, report=report
    )
    picture: list[str] = []
    if not has_progress(request.run_dir):
        show = partial(first_row, s, task, tokenizer, folder, checked.config)
        picture = world.agree(show, what="the first row")
    environments, environment_workers = open_environments(s.episodes, tokenizer)
    if isinstance(environment_workers, EnvironmentPool):
        environment_workers.printed = printed
    report(f"loading the model from {folder}")
    spec = model_spec(s, checked, folder, prng.fold_in(key, ADAPTERS), world.device)
    teachers = teacher_specs(s, spec, checked, teachers_prepared.folders, attention=settings.compute.attention)
    load = partial(load_and_shard, world, spec, reference=checked.frozen, teachers=teachers)
    loaded = world.together(load, what="loading the model")
    if s.lora is not None:
        report(adapters_line(loaded.logprob_model.model))
    policy = trained_policy(s, checked, loaded, world)
    early = EarlyRewards(pool := s.rewards.pool(), unconditional_rewards(s.rewards.reward))
    draw = partial(s.sampling.token_sampler, temperature=s.sampling.temperature)
    options = sampler_options(tokenizer, draw, s.sampling, s.data, environments, early.on_completions)
    report(sampler_line(s, checked.config, world.device))
    start = partial(s.sampling.sampler, sampler_context(spec, world, loaded.decoding), options)
    engine = world.together(start, what="starting the sampler")
    read, shown = demonstration_readers(s, checked, tokenizer, world)
    with closing(engine), pool, environment_workers:
        yield TrainingRun(
            settings=s,
            request=request,
            key=key,
            world=world,
            policy=policy,
            start_model=loaded.reference_model,
            sampler=training_sampler(s, checked, engine, task, key, world),
            engine=engine,
            tokenizer=tokenizer,
            algo=s.algorithm
            if s.curriculum is None
            else replace(s.algorithm, group_sampling=follow_groups(s, task, s.algorithm.group_sampling)),
            reward=partial(step_reward, reward=s.rewards.reward, early=early, world=world),
            teacher=teacher_of_run(s.teacher, policy, loaded, teachers_prepared, world),
            demonstration_rows=read,
            demonstrations=shown,
            task=task,
            evaluator=s.evaluation.async_sampler and partial(start_evaluator, s, spec, tokenizer, world, environments),
            pool=pool,
            environments=environments,
            plan=[
                *run_lines(s, checked, task.size),
                *(*task.notes, *teachers_prepared.notes, *block_notes),
                *device_notes(world, checked.dtype),
                *picture,
            ],
            ranks=world.exchange(rank_line(s, world), what="the lines of the ranks"),
            started=started,
        )


def with_record(settings: Settings, run_dir: Path, rank: int, printed: PrintedText) -> Settings:
    """The settings, with pools whose judges have one record and whose workers print to one file: those of the run.

    Raises ValueError for a bad line of the record.
    """
    record = JudgeRecord(run_dir / JUDGE_FOLDER, rank)
    record.open()

    def recorded_pool() -> RewardPool:
        pool = settings.rewards.pool()
        pool.judge_record, pool.printed = record, printed
        return pool

    return replace(settings, rewards=replace(settings.rewards, pool=recorded_pool))


def unconditional_rewards(reward: Callable[..., Reward]) -> Sequence[RewardFn]:
    """The rewards that score every row, whatever others score: the parts of `combine`; none of another function."""
    function, knobs = function_and_knobs(reward)
    return knobs["parts"] if function is combine else ()


def step_reward(
    problems: Sequence[Problem],
    rollout: Rollout,
    *,
    reward: Callable[..., Reward],
    early: EarlyRewards,
    world: World,
) -> Reward:
    """`reward` of a step's rollout, scored by the workers of all ranks, which may have begun with its rows."""
    try:
        return reward(problems, rollout, score=spread_score(early.score, world))
    finally:
        early.forget(max((problem.uid for problem in problems), default=-1))


def trained_policy(settings: Settings, checked: ValidatedPlan, loaded: LoadedModel, world: World) -> FSDPPolicy:
    """The policy that learns, with its optimizer."""
    how = settings.policy
    return FSDPPolicy(
        loaded.logprob_model,
        world=world,
        data=loaded.data,
        reference_model=loaded.reference_model if checked.reference else None,
        dropout_modules=loaded.dropout_modules,
        seed=settings.seed,
        micro_tokens=how.micro_tokens,
        min_micro_batches=how.min_micro_batches,
        optimizer=how.optimizer,
        schedule=how.schedule,
        loss_scale=how.loss_scale,
        initial_scale=how.initial_scale,
        max_grad_norm=how.max_grad_norm,
    )


def training_sampler(
    settings: Settings, checked: ValidatedPlan, engine: EngineSampler, task: Task, key: Tensor, world: World
) -> DataParallelSampler:
    """The engine as a step samples from it: probed, shared among the ranks, ahead by `max_staleness` steps."""
    probe = settings.sampling.probe and partial(
        settings.sampling.probe,
        key=prng.fold_in(key, PROBING),
        max_positions=positions(checked.config),
        dtype=checked.dtype,
    )
    if settings.sampling.max_staleness == 0:
        return DataParallelSampler(engine, world, probe)
    return AsyncSampler(
        engine,
        world,
        probe,
        stream=partial(train_problems, task, prng.fold_in(key, DATA)),
        max_staleness=settings.sampling.max_staleness,
        deadline=settings.parallelism.collective_timeout * 5 / 6,  # before the other ranks give up
    )


def demonstration_readers(
    settings: Settings, checked: ValidatedPlan, tokenizer: PreTrainedTokenizerBase, world: World
) -> tuple[Callable[[Sequence[Problem]], Rollout], Callable[[int], Rollout] | None]:
    """Problems to rows that are given, and steps taken to the rows beside the sampled ones; None for a run without."""
    read = partial(
        given_rollout,
        tokenizer=tokenizer,
        device=world.device,
        demonstration=settings.data.demonstration,
        encode=settings.data.encode_prompt,
    )
    shown = settings.demonstrations and partial(
        shown_rows, checked.demonstrations, demonstration_key(settings), settings.demonstrations.rows, read
    )
    return read, shown


def check_ranks(settings: Settings, request: RunRequest, world: World) -> None:
    """Raise ValueError for ranks that were started differently, too many of them, or a number no mesh has."""
    text = sha256(request.config.text.encode()).hexdigest()  # the fingerprint is blind to changeable sections
    world.same((text, torch.__version__, world.device.type), what="configuration, torch and device")
    if (prompts := settings.algorithm.prompts) < world.size:
        raise ValueError(
            f"prompts: got {prompts} a step for {world.size} ranks, expected at least one for each of them"
        )
    settings.parallelism.shape(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))


def model_spec(settings: Settings, checked: ValidatedPlan, folder: str, key: Tensor, device: torch.device) -> ModelSpec:
    """The facts about the model before it is loaded."""
    compute = settings.compute
    return ModelSpec(
        folder=folder,
        config=checked.config,
        dtype=checked.dtype,
        attention=compute.attention,
        adapters=settings.lora,
        logprob_model=partial(
            LogprobModel,
            temperature=settings.sampling.temperature,
            logits_chunk_elements=chunk_elements(compute.logits_chunk_elements, device),
        ),
        parallelism=settings.parallelism,
        key=key,
    )


def teacher_specs(
    settings: Settings, own: ModelSpec, checked: ValidatedPlan, folders: Mapping[str, str], *, attention: str
) -> dict[str, ModelSpec]:
    """The facts about each teacher before it is loaded: sharded and computed like the policy, frozen."""
    how = settings.parallelism
    if settings.teacher is not None:
        how = replace(how, offload_reference=settings.teacher.offload)
    configs = {name: checked.teachers[name][1] for name in folders}
    return {
        name: replace(
            own,
            folder=folder,
            config=configs[name],
            attention=model_attention(attention, configs[name]),
            adapters=None,
            parallelism=how,
        )
        for name, folder in folders.items()
    }


def open_and_prepare(
    settings: Settings,
    checked: ValidatedPlan,
    request: RunRequest,
    world: World,
    *,
    enter: Callable[..., object],
    report: Callable[[str], None],
) -> tuple[PreparedModel, PreparedTeachers]:
    """Enter the run folder, and look at model folder, all prompts and teachers; in the order that wastes least."""
    s, task = settings, checked.task
    draws = draws_to_check(s, task)
    key = prng.fold_in(prng.key(s.seed, device="cpu"), DATA)
    drawn = train_problems(task, key, 0, draws)

    def check_judges() -> None:
        if world.main and not (request.run_dir / JUDGE_FOLDER).is_dir():  # a run that has begun sends no request
            for judge in judges_of_run(s):
                asyncio.run(check_endpoint(judge))

    world.agree(check_judges, what="asking the judges")
    enter_folder = partial(
        enter,
        request.run_dir,
        config_text=request.config.text,
        fingerprint=request.config.fingerprint,
        hparams=request.config.hparams,
        force=request.force or not has_progress(request.run_dir),  # a start that failed has left nothing to lose
        need_bytes=checked.need_bytes(),
    )
    world.agree(partial(check_steps, request.run_dir, s.steps), what="looking at the checkpoints")
    looking = f"checking the prompts of {draws} training and {len(task.test)} held-out problems"
    sources = [checked.source, *(source for source, _ in checked.teachers.values())]
    already_made = all(isinstance(source, hf.Pretrained) for source in sources)  # looked at before a folder is made

    def prepare_here() -> tuple[PreparedModel, PreparedTeachers]:
        prepared = prepare_data(checked.source, task, drawn, checked.config, s.data, s.sampling, s.episodes)
        check_run_demonstrations(s, checked.demonstrations, drawn, prepared.tokenizer, prepared.task, checked.config)
        return prepared, prepare_teachers(s, checked, drawn, prepared.tokenizer, main=world.main)

    def open_folder() -> None:
        world.agree(enter_folder, what="opening the run folder")
        report(f"the run folder is {request.run_dir}")

    if not already_made:  # to be made, which takes time: not before the run folder is known to be ours
        open_folder()
        report("making the demo model, unless an earlier run has (it is kept)")
        for source in sources:
            world.agree_at_length(source.folder, what="making the model")
    report(looking)
    prepared = world.together(prepare_here, what="looking at model and data")
    if already_made:
        open_folder()
    return prepared


def sampler_context(spec: ModelSpec, world: World, full_model: Callable[[], torch.nn.Module]) -> SamplerContext:
    """The context from which a sampler is made."""
    return SamplerContext(
        folder=spec.folder,
        config=spec.config,
        dtype=spec.dtype,
        adapters=spec.adapters,
        world=world,
        full_model=full_model,
    )


def sampler_options(
    tokenizer: PreTrainedTokenizerBase,
    token_sampler: TokenSampler,
    sampling: Sampling,
    data: Data,
    environments: Environments | None,
    on_completions: OnCompletions | None = None,
) -> SamplerOptions:
    """The options of a sampler, from the sections."""
    return SamplerOptions(
        tokenizer=tokenizer,
        token_sampler=token_sampler,
        encode=data.encode_prompt,
        max_new_tokens=sampling.max_new_tokens,
        max_total_tokens=sampling.max_total_tokens,
        max_rows=sampling.max_rows,
        stop=sampling.stop,
        on_completions=on_completions,
        environments=environments,
    )


def start_evaluator(
    settings: Settings,
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    environments: Environments | None,
) -> EngineSampler:
    """A second engine, for evaluations beside the training."""
    how = settings.evaluation
    own = copy.deepcopy(tokenizer)  # a tokenizer is not made for two threads
    options = sampler_options(own, token_samplers.greedy, settings.sampling, settings.data, environments)
    options = replace(options, max_rows=how.max_rows)
    whole = partial(spec.full_model, world.device, spec.dtype)  # a second module, whatever trains
    start = partial(how.async_sampler, sampler_context(spec, world, whole), options)
    return world.together(start, what="starting the evaluator")


# -- the state of the curriculum


def first_carry(run: TrainingRun) -> Carry:
    """The state before the first step."""
    if run.settings.curriculum is None:
        return AT_THE_START
    key = prng.fold_in(run.key, CHOOSING)
    return AT_THE_START._replace(curriculum=begin_curriculum(run.settings.curriculum, len(run.task.arms), key))


def check_restored(run: TrainingRun, carried: Carry) -> Carry:
    """The content of a checkpoint, for a run with or without a curriculum.

    Raises ValueError for the state of another curriculum, or one over other arms.
    """
    fresh, restored = first_carry(run).curriculum, carried.curriculum
    if fresh is None or restored is None:
        return carried._replace(curriculum=fresh)
    check_arrays(
        {"turns": restored.turns, **restored.arrays}, {"turns": fresh.turns, **fresh.arrays}, "checkpoint, curriculum"
    )
    return carried


def follow_groups(settings: Settings, task: Task, group_sampling: SampleGroups | None) -> SampleGroups | None:
    """A group sampling that also moves the state of the run's curriculum, if it has one."""
    if settings.curriculum is None:
        return group_sampling
    return partial(sample_and_follow, group_sampling=group_sampling, curriculum=settings.curriculum, labels=task.arms)
