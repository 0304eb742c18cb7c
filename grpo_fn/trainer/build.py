"""Build a run from its validated settings: model, policy, sampler and reward workers, in one context."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from grpo_fn.algo.supervised import Stage
from grpo_fn.core import prng
from grpo_fn.core import sampling as token_samplers
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Rollout
from grpo_fn.shell.episodes.episode_rows import Environments
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.demonstrations import check_demonstrations, given_rollout, shown_rows
from grpo_fn.shell.model.logprob_model import LogprobModel, chunk_elements
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.load_and_shard import LoadedModel, ModelSpec, load_and_shard
from grpo_fn.shell.process import keep_freed_memory, use_deterministic_kernels
from grpo_fn.shell.reward_workers.early_rewards import EarlyRewards, parts_of
from grpo_fn.shell.sampler.async_sampler import AsyncSampler
from grpo_fn.shell.sampler.interface import (
    DataParallelSampler,
    OnCompletions,
    SamplerContext,
    SamplerOptions,
    TokenSampler,
    positions,
    spread_score,
)
from grpo_fn.shell.sampler.probe import Probe
from grpo_fn.shell.world import World
from grpo_fn.tasks import overlong
from grpo_fn.tasks.task import Task, train_problems
from grpo_fn.trainer.async_eval import open_evaluator
from grpo_fn.trainer.checks.try_out import check_judges_answer, fitting_episodes, with_record
from grpo_fn.trainer.plan import StartReport, ValidatedPlan, plan_lines, rank_line, sampler_line, settle_blocks
from grpo_fn.trainer.run import (
    ADAPTERS,
    DATA,
    EVALUATION,
    PROBING,
    SHOWING,
    RunRequest,
    TrainingRun,
    draws_to_check,
    run_algorithm,
)
from grpo_fn.trainer.sections import Data, Episodes, Sampling, Settings, open_environments
from grpo_fn.trainer.state import check_steps, has_progress
from grpo_fn.trainer.teachers import PreparedTeachers, prepare_teachers, teacher_of_run

BEGINNING = 8  # characters for each of the model's positions: twice as many tokens as fit, in most languages


def prepare_process(device: torch.device, *, deterministic: bool) -> None:
    """Set what holds for the whole process: no bars of transformers, which kernels, how memory is kept."""
    disable_progress_bar()  # one a file: they would bury the lines of the run
    use_deterministic_kernels(deterministic, device.type)
    if device.type == "cpu":
        keep_freed_memory()


@contextmanager
def build(
    settings: Settings,
    checked: ValidatedPlan,
    request: RunRequest,
    world: World,
    *,
    enter: Callable[..., object],
    started: float,
    report: StartReport,
) -> Iterator[TrainingRun]:
    """The pieces of a run, until the context is left. `enter` takes the run folder, before a model is made or loaded.

    Raises ValueError, before any weights are loaded, for a folder, prompts or a number of ranks that do not fit.
    """
    s, said = settle_blocks(with_record(settings, request.run_dir, world.rank), checked.config, world.device)
    prepare_process(world.device, deterministic=s.compute.deterministic)
    check_ranks(s, request, world)
    key = prng.key(s.seed, device="cpu")
    (folder, tokenizer, task), taught = open_and_prepare(s, checked, request, world, enter=enter, report=report)
    environments, environment_workers = open_environments(s.episodes, tokenizer)
    report(f"loading the model from {folder}")
    spec = model_spec(s, checked, folder, prng.fold_in(key, ADAPTERS), world.device)
    teachers = teacher_specs(s, spec, checked, taught.folders)
    load = partial(load_and_shard, world, spec, reference=checked.frozen, teachers=teachers)
    loaded = world.together(load, what="loading the model")
    policy = build_policy(s, loaded, world, reference=checked.reference)
    early = EarlyRewards(pool := s.rewards.pool(), parts_of(s.rewards.reward))
    draw = partial(s.sampling.token_sampler, temperature=s.sampling.temperature)
    options = sampler_options(tokenizer, draw, s.sampling, s.data, environments, early.on_completions)
    start = partial(s.sampling.sampler, sampler_context(spec, world, loaded.decoding), options)
    report(sampler_line(s, checked.config, world.device))
    sampler = world.together(start, what="starting the sampler")
    probe = weight_probe(s.sampling.probe, checked, prng.fold_in(key, PROBING))
    with closing(sampler), pool, environment_workers:
        yield TrainingRun(
            settings=s,
            request=request,
            key=key,
            world=world,
            policy=policy,
            start_model=loaded.reference_model,
            sampler=AsyncSampler(
                DataParallelSampler(sampler, world, probe),
                partial(train_problems, task, prng.fold_in(key, DATA)),
                max_staleness=s.sampling.max_staleness,
                deadline=s.sampling.timeout,
            ),
            greedy=DataParallelSampler(sampler.for_evaluation(token_samplers.greedy), world),
            sampled=DataParallelSampler(sampler.for_evaluation(s.evaluation.token_sampler), world),
            tokenizer=tokenizer,
            algo=run_algorithm(s, task),
            reward=partial(early.reward_of, reward=s.rewards.reward, world=world),
            teacher=teacher_of_run(s.teacher, policy, loaded, taught, world),
            demonstration_rows=(read := demonstration_reader(s.data, tokenizer, world.device)),
            demonstrations=demonstrations_of_step(s, checked, read),
            task=task,
            evaluator=build_evaluator(s, spec, tokenizer, world, environments),
            pool=pool,
            environments=environments,
            score=spread_score(pool.score, world),
            plan=plan_lines(checked.plan, [*task.notes, *taught.notes, *said], task.size, world, checked.dtype),
            ranks=world.exchange(rank_line(s, world), what="the lines of the ranks"),
            started=started,
        )


def check_ranks(settings: Settings, request: RunRequest, world: World) -> None:
    """Raise ValueError for ranks that were started differently, too many of them, or a number no mesh has."""
    text = sha256(request.config.text.encode()).hexdigest()  # the fingerprint is blind to changeable sections
    world.same((text, torch.__version__, world.device.type), what="configuration, torch and device")
    if (prompts := settings.algorithm.prompts) < world.size:
        raise ValueError(f"prompts: got {prompts} a step for {world.size} ranks, wanted at least one for each of them")
    settings.parallelism.shape(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))


def model_spec(settings: Settings, checked: ValidatedPlan, folder: str, key: Tensor, device: torch.device) -> ModelSpec:
    """What there is to know of the model before it is loaded."""
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
            input_packing=compute.input_packing,
        ),
        parallelism=settings.parallelism,
        key=key,
    )


def teacher_specs(
    settings: Settings, own: ModelSpec, checked: ValidatedPlan, folders: Mapping[str, str]
) -> dict[str, ModelSpec]:
    """What there is to know of each teacher before it is loaded: spread and computed as the policy is, frozen."""
    how = settings.parallelism
    if settings.teacher is not None:
        how = replace(how, offload_reference=settings.teacher.offload)
    return {
        name: replace(own, folder=folder, config=checked.teachers[name][1], adapters=None, parallelism=how)
        for name, folder in folders.items()
    }


def open_and_prepare(
    settings: Settings,
    checked: ValidatedPlan,
    request: RunRequest,
    world: World,
    *,
    enter: Callable[..., object],
    report: StartReport,
) -> tuple["PreparedModel", PreparedTeachers]:
    """Enter the run folder, and look at model folder, all prompts and teachers; in the order that wastes least."""
    s, task = settings, checked.task
    draws = draws_to_check(s, task)
    key = prng.fold_in(prng.key(s.seed, device="cpu"), DATA)
    drawn = train_problems(task, key, 0, draws)
    world.agree(partial(check_judges_answer, s, request.run_dir, main=world.main), what="asking the judges")
    enter_folder = partial(
        enter,
        request.run_dir,
        config_text=request.config.text,
        fingerprint=request.config.fingerprint,
        hparams=request.config.hparams,
        force=request.force or not has_progress(request.run_dir),  # a start that failed has left nothing to lose
        need_bytes=checked.plan.need_bytes(),
    )
    world.agree(partial(check_steps, request.run_dir, s.steps), what="looking at the checkpoints")
    looking = f"looking at the prompts of {draws} draws and {len(task.test)} held-out problems"
    sources = [checked.source, *(source for source, _ in checked.teachers.values())]
    there = all(isinstance(one, hf.Pretrained) for one in sources)  # to be looked at before a run folder is made

    def prepare_here() -> tuple[PreparedModel, PreparedTeachers]:
        prepared = prepare_data(checked.source, task, drawn, checked.config, s.data, s.sampling, s.episodes)
        check_run_demonstrations(s, checked.demonstrations, drawn, prepared.tokenizer, prepared.task, checked.config)
        return prepared, prepare_teachers(s, checked, drawn, prepared.tokenizer, main=world.main)

    def open_folder() -> None:
        world.agree(enter_folder, what="opening the run folder")
        report(f"the run folder is {request.run_dir}")

    if not there:  # to be made, which takes time: not before the run folder is known to be ours
        open_folder()
        report("making the model, or finding it in its cache")
        for one in sources:
            world.agree_at_length(one.folder, what="making the model")
    report(looking)
    prepared = world.together(prepare_here, what="looking at model and data")
    if there:
        open_folder()
    return prepared


def build_policy(settings: Settings, loaded: LoadedModel, world: World, *, reference: bool) -> FSDPPolicy:
    """The policy with its optimizer."""
    return FSDPPolicy(
        loaded.logprob_model,
        world=world,
        data=loaded.data,
        reference_model=loaded.reference_model if reference else None,
        dropout_modules=loaded.dropout_modules,
        seed=settings.seed,
        **vars(settings.policy),
    )


def weight_probe(probe: Probe | None, checked: ValidatedPlan, key: Tensor) -> partial | None:
    """What compares the engine's log-probs with the policy's after a push; None where nothing does."""
    if probe is None:
        return None
    return partial(probe, key=key, max_positions=positions(checked.config), dtype=checked.dtype)


def sampler_context(spec: ModelSpec, world: World, full_model: Callable[[], torch.nn.Module]) -> SamplerContext:
    """What there is to make a sampler from."""
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
    """What the sections ask of a sampler."""
    return SamplerOptions(
        tokenizer=tokenizer,
        token_sampler=token_sampler,
        encode=data.encode_prompt,
        max_new_tokens=sampling.max_new_tokens,
        max_total_tokens=sampling.max_total_tokens,
        max_rows=sampling.max_rows,
        stop=sampling.stop,
        allow_biased=sampling.allow_biased,
        on_completions=on_completions,
        environments=environments,
    )


def build_evaluator(
    settings: Settings,
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    environments: Environments | None,
) -> partial | None:
    """What starts an evaluator with an engine of its own; None without one."""
    how = settings.evaluation
    if how.async_sampler is None:
        return None
    own = copy.deepcopy(tokenizer)  # a tokenizer is not made for two threads
    options = sampler_options(own, token_samplers.greedy, settings.sampling, settings.data, environments)
    options = replace(options, max_rows=how.max_rows)
    whole = partial(spec.full_model, world.device, spec.dtype)  # a module of its own, whatever trains
    start = partial(how.async_sampler, sampler_context(spec, world, whole), options)
    key = prng.fold_in(prng.key(settings.seed, device="cpu"), EVALUATION)
    return partial(open_evaluator, start, settings.rewards.pool, key, world)


def demonstration_reader(
    data: Data, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Callable[[Sequence[Problem]], Rollout]:
    """Problems with demonstrations -> their rows, one each, on a device."""
    return partial(
        given_rollout,
        tokenizer=tokenizer,
        device=device,
        demonstration=data.demonstration,
        encode=data.encode_prompt,
    )


def demonstrations_of_step(
    settings: Settings, checked: ValidatedPlan, read: Callable[[Sequence[Problem]], Rollout]
) -> Callable[[int], Rollout] | None:
    """Steps taken before -> the rows of demonstrations beside a step's samples; None in a run without any."""
    if settings.demonstrations is None:
        return None
    key = demonstration_key(settings)
    return partial(shown_rows, checked.demonstrations, key, settings.demonstrations.rows, read)


class PreparedModel(NamedTuple):
    """A model's folder and tokenizer, and the problems whose prompts leave tokens for a completion."""

    folder: str
    tokenizer: PreTrainedTokenizerBase
    task: Task


def prompt_length(
    tokenizer: PreTrainedTokenizerBase, prompt: str, *, encode: hf.Encode, max_positions: int | None
) -> int:
    """The tokens of a prompt; of one whose beginning is more than the model takes, those of its beginning."""
    # A prompt of 50 MB would take minutes to tokenize, and its row is refused or left out all the same.
    if max_positions is not None and len(prompt) > BEGINNING * max_positions:
        beginning = len(encode(tokenizer, prompt[: BEGINNING * max_positions]))
        if beginning > max_positions:
            return beginning
    return len(encode(tokenizer, prompt))


def prompt_limit(sampling: Sampling, max_positions: int | None) -> int | None:
    """Most tokens that a prompt may have, None without a limit.

    Raises ValueError for a `max_total_tokens` beyond the model's positions.
    """
    total = sampling.max_total_tokens
    if total is None:
        return None if max_positions is None else max_positions - sampling.max_new_tokens
    if max_positions is not None and total > max_positions:
        raise ValueError(
            f"sections.Sampling.max_total_tokens: got {total}, wanted at most the model's {max_positions} positions"
        )
    return total - 1


def prepare_data(
    source: hf.ModelSource,
    task: Task,
    drawn: Sequence[Problem],
    config: PretrainedConfig,
    data: Data,
    sampling: Sampling,
    episodes: Episodes | None,
) -> PreparedModel:
    """Make the model's folder there, and look at every prompt: those of the task, and those `drawn` from it.

    Raises ValueError for a prompt without tokens, as `overlong_prompts` does for one that leaves no tokens, and for an
    episode's opening that leaves none.
    """
    folder = source.folder()
    tokenizer = hf.load_tokenizer(folder)
    max_positions = positions(config)
    of_prompt = cache(partial(prompt_length, tokenizer, encode=data.encode_prompt, max_positions=max_positions))

    def length(problem: Problem) -> int:
        return of_prompt(problem.prompt)

    limit = prompt_limit(sampling, max_positions)
    if episodes is not None:
        if limit is not None:
            task = fitting_episodes(data.overlong_prompts, episodes, task, drawn, tokenizer, length, limit)
        return PreparedModel(folder, tokenizer, task)
    if empty := [problem.prompt for problem in (*drawn, *task.test) if not length(problem)]:
        raise ValueError(
            f"got a prompt of no tokens, {empty[0][:80]!r} with the tokenizer of {folder}, wanted at least one: is "
            "the prompt empty, or the folder without the tokenizer's files?"
        )
    if limit is None:
        return PreparedModel(folder, tokenizer, task)
    if drawn and not task.rows:  # made as they are drawn: nothing can be left out
        overlong.refuse(task._replace(rows=tuple(drawn)), length, limit)
    return PreparedModel(folder, tokenizer, data.overlong_prompts(task, length, limit)[0])


# -- the demonstrations of a run, looked at before any weights are loaded


def demonstration_key(settings: Settings) -> Tensor:
    """Key of the stream of demonstrations beside sampled completions."""
    return prng.fold_in(prng.key(settings.seed, device="cpu"), SHOWING)


def check_run_demonstrations(
    settings: Settings,
    beside: Task | None,
    drawn: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: PretrainedConfig,
) -> None:
    """Raise ValueError for a demonstration of the run, or a held-out one, that cannot be made or is too long."""
    problems = [*drawn, *task.test] if isinstance(settings.algorithm, Stage) else []
    if beside is not None:
        draws = min(beside.size, settings.demonstrations.rows * settings.steps) if beside.rows else settings.steps
        problems += train_problems(beside, demonstration_key(settings), 0, draws)
    check_demonstrations(
        problems,
        tokenizer=tokenizer,
        demonstration=settings.data.demonstration,
        encode=settings.data.encode_prompt,
        most=settings.sampling.max_total_tokens or positions(config),
    )
