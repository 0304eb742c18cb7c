"""The one configurable root: check what gin named, put the pieces together, and hand them to the loop."""

import copy
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from grpo_fn.algo.group_sampling import GroupBatch
from grpo_fn.algo.step import Algorithm, compare_as_given, compare_to_own_pass, from_sampler
from grpo_fn.analysis import health as rules
from grpo_fn.analysis.evaluation import Evaluation, grader_names
from grpo_fn.core import prng, sampling
from grpo_fn.core.problem import RewardFn
from grpo_fn.rewards.combine import part_names
from grpo_fn.shell.checkpoint.run_dir import open_run
from grpo_fn.shell.logging import profiler
from grpo_fn.shell.logging.tracker import Mirror
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy import memory_estimate
from grpo_fn.shell.policy.load_and_shard import ModelSpec, load_and_shard
from grpo_fn.shell.policy.mesh import Parallelism
from grpo_fn.shell.process import keep_freed_memory
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.shell.reward_workers.streaming import StreamingRewards
from grpo_fn.shell.sampler.async_sampler import AsyncSampler
from grpo_fn.shell.sampler.data_parallel import DataParallelSampler, spread_score
from grpo_fn.shell.sampler.interface import SamplerContext, positions
from grpo_fn.shell.sampler.probe import Probe
from grpo_fn.shell.world import EXIT_LOST, Elsewhere, LostRank, World, join
from grpo_fn.tasks.task import Task, first, train_problems
from grpo_fn.trainer import async_eval, validate
from grpo_fn.trainer import plan as planning
from grpo_fn.trainer.build import prepare
from grpo_fn.trainer.loop import ADAPTERS, DATA, EVALUATION, PROBING, Cadence, TrainingRun, run_training
from grpo_fn.trainer.requirements import check_engines, check_sandboxes
from grpo_fn.trainer.state import has_progress

# Keyword-only parameters that the program passes to what gin names here; gin binds the others.
SUPPLIED = {
    "scorer": ("temperature",),
    "policy": ("world", "data", "frozen", "noisy", "seed", "micro_tokens"),
    "sampler": ("choose", "encode", "max_new_tokens", "stop"),
    "evaluator": ("choose", "encode", "max_new_tokens", "stop"),
    "choose": ("temperature",),
    "reward": ("score",),
    "objective": ("batch", "totals", "gains"),
    "collect": ("prompts",),
}

# Knobs that may be others when a run goes on: over which devices the model is spread, what is complained of, who
# else is told and what is traced, and not what is computed.
CHANGEABLE = ("scale", "health", "stop_on", "mirror", "profile_steps")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    config_text: str
    fingerprint: str
    run_dir: Path
    dry_run: bool
    ranks: int  # that a dry run is asked about, evenly on so many hosts
    hosts: int
    force: bool
    enter: Callable[..., object] = open_run  # how the run folder is entered
    run_training: Callable[[TrainingRun], int] = run_training  # what is done with the pieces; returns the exit code
    world: World | None = None  # where the ranks are together already; they stay so


def launch(kwargs: Mapping[str, Any], **request: Any) -> int:
    """Run `train` with the configured arguments; returns the exit code. Ends with EXIT_LOST when a rank is gone."""
    try:
        return train(Request(**request), **kwargs)
    except (Elsewhere, LostRank) as error:
        return parted(error, then="the same command goes on from the newest checkpoint")


def parted(error: Elsewhere | LostRank, *, then: str) -> int:
    """The exit code when another rank found bad input; ends the process with EXIT_LOST when one is gone."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, Elsewhere) and not notes:  # the rank that found it says so
        return 2
    print(f"{', '.join([str(error), *notes])}; {then}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_LOST)  # taking Python down, a backend that has lost its peers may wait for them, or abort


def train(
    request: Request,
    *,
    task: Callable[[], Task],
    overlong_prompts: Callable[..., tuple[Task, int]],
    encode: hf.Encode,
    model: str | hf.ModelSource,
    dtype: str,
    device: str,
    attention: str,
    scale: Parallelism,
    adapters: LoRA | None,
    scorer: Callable[..., LogprobModel],
    policy: Callable[..., Any],
    sampler: Callable[..., Any],
    evaluator: Callable[..., Any] | None,
    probe: Probe | None,
    choose: Callable[..., tuple[Tensor, Tensor]],
    temperature: float,
    accept_bias: bool,
    max_staleness: int,
    sample_deadline: float,
    max_new_tokens: int,
    stop: Sequence[str],
    reward: Callable[..., Any],
    judges: Sequence[RewardFn],
    evaluation: Evaluation,
    reward_pool: Callable[[], RewardPool],
    collect: Callable[..., GroupBatch],
    credit: Callable[..., Tensor],
    filters: Sequence[Callable[..., Tensor]],
    mark: Callable[..., Tensor],
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    old_logp: Callable[..., Tensor],
    kl_control: Callable[[float, float], float],
    entropy_control: Callable[[float, float], float],
    min_signal: int,
    group_size: int,
    epochs: int,
    minibatches: int,
    micro_tokens: int,
    prompts: int,
    eval_problems: int,
    cadence: Cadence,
    mirror: Mirror,
    profile_steps: Sequence[int],
    health: Sequence[rules.Rule],
    stop_on: Sequence[rules.Rule],
    seed: int,
) -> int:
    """Train a policy on a task and leave a run folder; every argument is named in a gin file.

    Under torchrun every rank calls it with the same arguments, and the main rank writes. Returns 0 when all steps are
    done, EXIT_STOPPED when a signal asked to stop and EXIT_UNHEALTHY when a rule of `stop_on` did; what `request.work`
    returns where that is another. Raises ValueError, before any weights are loaded, for numbers, data, folders, rules
    or a model that do not fit together.
    """
    started = time.perf_counter()
    planning.check_positive(
        group_size=group_size,
        epochs=epochs,
        minibatches=minibatches,
        micro_tokens=micro_tokens,
        max_new_tokens=max_new_tokens,
        prompts=prompts,
        steps=cadence.steps,
        save_every=cadence.save_every,
        eval_problems=eval_problems,
        keep_last=cadence.keep_last,
    )
    planning.check_divides(prompts, minibatches)
    profiler.check(profile_steps, cadence.steps)
    parts = part_names(reward.keywords.get("parts", ()))
    grader_names(judges)
    check_sandboxes([reward, *judges])
    if not request.dry_run:  # which may be about another machine
        check_engines([sampler, evaluator])
    rules.check([*health, *stop_on])
    validate.check_credit(credit, group_size, parts)
    planning.check_signal(min_signal, prompts)
    validate.check_full_support(partial(choose, temperature=temperature), temperature, accept_bias)
    validate.check_correction(objective, old_logp)
    validate.check_stale(objective, old_logp, max_staleness)
    reference = validate.uses_reference(objective, credit, parts)
    # What drops at random says another thing in the pass that trains.
    found = validate.own_pass_suffices(old_logp, epochs * minibatches, credit, mark, parts) and (
        adapters is None or adapters.dropout == 0
    )
    precision = hf.find_dtype(dtype)
    source = hf.Pretrained(model) if isinstance(model, str) else model
    config = source.config()
    problems = first(task(), eval_problems)
    planning.check_positive(train_rows=problems.size, held_out_problems=len(problems.test))
    plan = planning.Plan(
        prompts=prompts,
        group_size=group_size,
        minibatches=minibatches,
        epochs=epochs,
        steps=cadence.steps,
        train_rows=problems.size,
        test_rows=len(problems.test),
        max_new_tokens=max_new_tokens,
        max_rows=sampler.keywords.get("max_rows", 0),  # a sampler elsewhere holds nothing here
        parameters=hf.parameter_count(hf.empty_model(config)),
        trained=memory_estimate.trained_parameters(config, adapters),
        kv_bytes_per_token=planning.kv_bytes_per_token(config, precision.itemsize),
        ranks=request.ranks,
        arrangement="",
        memory=None,
    )
    if request.dry_run:
        mesh = scale.shape(request.ranks, request.ranks // request.hosts)
        held = memory_estimate.on_device(
            config,
            adapters,
            scale,
            policy.keywords["optimizer"],
            mesh=mesh,
            dtype=precision,
            attention=attention,
            reference=reference,
            micro_tokens=micro_tokens,
            width=max_new_tokens,
            head_elements=scorer.keywords["head_elements"],
            cache=plan.kv_bytes(),
        )
        shape = "replicate {} x shard {} x tensor {}".format(*mesh)
        plan = replace(plan, arrangement=shape, memory=held)
        print(request.config_text, *plan.lines(), *problems.notes, sep="\n")
        return 0
    hf.check_attention(attention)  # not in a dry run, which may be about another machine
    disable_progress_bar()  # transformers' bars, one a file: they would bury the lines of the run
    world = join(device, deadline=scale.deadline) if request.world is None else request.world
    if world.device.type == "cpu":
        keep_freed_memory()
    text = sha256(request.config_text.encode()).hexdigest()  # the fingerprint is blind to `scale`
    world.same((text, torch.__version__, world.device.type), what="configuration, torch and device")
    planning.check_shared(prompts, world.size)
    scale.shape(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))  # before anything is made
    key = prng.key(seed, device="cpu")
    drawn = train_problems(problems, prng.fold_in(key, DATA), 0, min(problems.size, prompts * cadence.steps))
    asked = partial(prepare, encode=encode, overlong_prompts=overlong_prompts)
    ready = partial(asked, source, problems, drawn, config, max_new_tokens)
    enter = partial(
        request.enter,
        request.run_dir,
        config_text=request.config_text,
        fingerprint=request.fingerprint,
        force=request.force or not has_progress(request.run_dir),  # a start that failed has left nothing to lose
        need_bytes=plan.need_bytes(),
    )
    if isinstance(model, str):  # all there to be looked at before a run folder is made
        folder, tokenizer, problems = world.together(ready, what="looking at model and data")
        world.agree(enter, what="opening the run folder")
    else:  # to be made, which takes time: not before the run folder is known to be ours
        world.agree(enter, what="opening the run folder")
        world.agree(source.folder, what="making the model")
        folder, tokenizer, problems = world.together(ready, what="looking at model and data")
    placing = ModelSpec(
        folder=folder,
        config=config,
        dtype=precision,
        attention=attention,
        adapters=adapters,
        scorer=partial(scorer, temperature=temperature),
        scale=scale,
        key=prng.fold_in(key, ADAPTERS),
    )
    placed = world.together(partial(load_and_shard, world, placing, reference=reference), what="loading the model")
    trained = policy(
        placed.scorer,
        world=world,
        data=placed.data,
        frozen=placed.frozen,
        noisy=placed.noisy,
        seed=seed,
        micro_tokens=micro_tokens,
    )
    pool = reward_pool()
    early = StreamingRewards(pool)
    seat = SamplerContext(
        folder=folder,
        config=config,
        dtype=precision,
        world=world,
        adapters=adapters,
        whole=placed.decoding,
        finished=early.finished,
    )
    asks = {"encode": encode, "max_new_tokens": max_new_tokens, "stop": stop}
    start = partial(sampler, seat, tokenizer, choose=partial(choose, temperature=temperature), **asks)
    drawing = world.together(start, what="starting the sampler")
    evaluating = evaluator and partial(
        async_eval.open_evaluator,
        partial(
            evaluator,
            # Its own, whatever trains.
            replace(seat, whole=partial(placing.whole, world.device, precision), finished=None),
            copy.deepcopy(tokenizer),  # a tokenizer is not made for two threads
            choose=sampling.greedy,
            **asks,
        ),
        evaluation.choose,
        reward_pool,
        prng.fold_in(key, EVALUATION),
        world,
    )
    probing = probe and partial(probe, key=prng.fold_in(key, PROBING), room=positions(config))
    with closing(drawing), pool, early:
        score = spread_score(pool.score, world)
        built = TrainingRun(
            run_dir=request.run_dir,
            key=key,
            seed=seed,
            world=world,
            policy=trained,
            adapters=adapters,
            sampler=AsyncSampler(
                DataParallelSampler(drawing, world, probing),
                partial(train_problems, problems, prng.fold_in(key, DATA)),
                max_staleness=max_staleness,
                deadline=sample_deadline,
            ),
            greedy=DataParallelSampler(replace(drawing, choose=sampling.greedy, finished=None), world),
            sampled=DataParallelSampler(replace(drawing, choose=evaluation.choose, finished=None), world),
            tokenizer=tokenizer,
            algo=Algorithm(
                collect=partial(collect, prompts=prompts),
                reward=partial(early.round, reward=reward, world=world),
                credit=credit,
                filters=filters,
                mark=mark,
                objective=objective,
                old_logp=from_sampler if found else old_logp,
                anchor=partial(compare_to_own_pass, reference=reference) if found else compare_as_given,
                kl_control=kl_control,
                entropy_control=entropy_control,
                group_size=group_size,
                epochs=epochs,
                minibatches=minibatches,
                split=trained.split,
                min_signal=min_signal,
            ),
            task=problems,
            held_out=problems.test,
            prompts=prompts,
            judges=judges,
            evaluation=evaluation,
            evaluator=evaluating,
            pool=pool,
            score=score,
            mirror=mirror,
            cadence=cadence,
            profile_steps=profile_steps,
            health=health,
            stop_on=stop_on,
            plan=[*replace(plan, train_rows=problems.size, ranks=world.size).lines(), *problems.notes],
            start_over=request.force,
            started=started,
        )
        code = request.work(built)
    if request.world is None:
        world.leave()
    return code
