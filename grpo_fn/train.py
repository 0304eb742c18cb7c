"""The configurable root: `train` takes what gin bound, section by section; validate, plan, build, run."""

import os
import time
from collections.abc import Mapping
from typing import Any

from grpo_fn.algo.curricula import Curriculum
from grpo_fn.algo.step import Algorithm
from grpo_fn.algo.supervised import Stage
from grpo_fn.shell.checkpoint.run_dir import check_run, open_run
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy.mesh import Parallelism
from grpo_fn.shell.sampler.interface import EngineRefused as EngineRefused  # for the command line, which catches it
from grpo_fn.shell.world import Elsewhere, LostRank, join_world, leave_lost
from grpo_fn.trainer import sections
from grpo_fn.trainer.build import RunRequest, build
from grpo_fn.trainer.first_row import planned_first_row
from grpo_fn.trainer.loop import run_training
from grpo_fn.trainer.plan import ValidatedPlan, dry_run_lines, opening_lines, planned_device, report_start
from grpo_fn.trainer.state import check_steps, has_progress
from grpo_fn.trainer.validate import check_this_machine, try_environment, validate

# What may differ when a run resumes: over which devices the model is spread, what is recorded, which rules warn, and
# how many steps there are; not what is computed in a step.
CHANGEABLE = ("parallelism", "logging", "health", "steps")
# What a macro stands for in a configuration that binds none: algo/dr_grpo.gin uses MAX_NEW_TOKENS of any run file.
MACROS = {
    "STEPS": "grpo_fn.train.train.steps",
    "SEED": "grpo_fn.train.train.seed",
    "MAX_NEW_TOKENS": "grpo_fn.trainer.sections.Sampling.max_new_tokens",
}


def launch(request: RunRequest, kwargs: Mapping[str, Any]) -> int:
    """Run `train` with the configured arguments; returns the exit code. Ends with EXIT_LOST when a rank is gone.

    Raises EngineRefused when an engine must not be sampled from.
    """
    try:
        return train(request, **kwargs)
    except (Elsewhere, LostRank) as error:
        return leave_lost(error, then="the same command resumes from the newest checkpoint")


def train(
    request: RunRequest,
    *,
    model: str | hf.ModelSource,
    steps: int,
    seed: int,
    lora: LoRA | None,
    teacher: sections.Teacher | None,
    demonstrations: sections.Demonstrations | None,
    data: sections.Data,
    compute: sections.Compute,
    sampling: sections.Sampling,
    episodes: sections.Episodes | None,
    curriculum: Curriculum | None,
    rewards: sections.Rewards,
    algorithm: Algorithm | Stage,
    policy: sections.PolicyUpdate,
    parallelism: Parallelism,
    evaluation: sections.Evaluation,
    checkpoints: sections.Checkpoints,
    logging: sections.Logging,
    health: sections.Health,
) -> int:
    """Train a policy on a task and leave a run folder.

    Args:
        request: the command line.
        model: a Hugging Face folder or hub name, a GGUF file, or something that makes a model
            (`experiments.tiny.models.TinyModel`).
        steps: of the algorithm; each samples `algorithm.prompts` problems.
        seed: of everything random.
        lora: adapters; None trains all parameters.
        teacher: frozen models to learn from, beside rewards or instead of them; None: rewards alone.
        demonstrations: given completions to learn from beside the sampled ones; None: none.
        data: the task, and how prompts become tokens.
        compute: device, dtype, attention and head of the model.
        sampling: sampler, temperature and limits of the training completions.
        episodes: an environment that answers turns of the policy, and tools; None: every row is one turn.
        curriculum: which levels or rows of the task a step samples, by pass rates; None: the stream in its order.
        rewards: the reward and the processes that compute it.
        algorithm: prompts and group size, advantage, objective, filters: the GRPO step; or a supervised stage.
        policy: optimizer, schedule, micro-batches, gradient clipping.
        parallelism: over which ranks the model is spread, and how.
        evaluation: what is measured on held-out problems, and when.
        checkpoints: when the run is saved, and which checkpoints stay.
        logging: samples, token pages, checksums, profiles, mirrors.
        health: the rules that warn or end the run.

    Returns:
        0 when all steps are done, EXIT_STOPPED when a signal asked to stop, EXIT_UNHEALTHY when a rule of `health.stop`
        did.

    Raises:
        ValueError: for numbers, data, folders, rules or a model that do not fit together; no weights are loaded before.
    """
    started = time.perf_counter()
    settings = sections.Settings(
        model=model,
        steps=steps,
        seed=seed,
        lora=lora,
        teacher=teacher,
        demonstrations=demonstrations,
        data=data,
        compute=compute,
        sampling=sampling,
        episodes=episodes,
        curriculum=curriculum,
        rewards=rewards,
        algorithm=algorithm,
        policy=policy,
        parallelism=parallelism,
        evaluation=evaluation,
        checkpoints=checkpoints,
        logging=logging,
        health=health,
    )
    plan = validate(settings)
    try_environment(episodes, plan.task.test[0])  # not in validate: a replay may be without the tool
    if request.dry_run:
        return dry_run(request, settings, plan)
    check_this_machine(settings)
    world = join_world(compute.device, deadline=parallelism.collective_timeout)
    report = report_start(world, started)
    hosts = world.size // int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    for line in opening_lines(settings, plan, request.run_dir, world.device, ranks=world.size, hosts=hosts):
        report(line)
    if world.size > 1:
        report(f"all {world.size} ranks have met")
    with build(settings, plan, request, world, enter=open_run, started=started, report=report) as run:
        code = run_training(run)
    world.leave()
    return code


def dry_run(request: RunRequest, settings: sections.Settings, plan: ValidatedPlan) -> int:
    """Print what the run would be. Raises ValueError for a folder that it could not resume in."""
    if not request.force and has_progress(request.run_dir):
        check_run(request.run_dir, config_text=request.config.text, fingerprint=request.config.fingerprint)
    check_steps(request.run_dir, settings.steps)
    spread, device = {"ranks": request.ranks, "hosts": request.hosts}, planned_device(settings.compute.device)
    lines = dry_run_lines(settings, plan, **spread)
    summary = opening_lines(settings, plan, request.run_dir, device, **spread)
    print(*lines, "", *planned_first_row(settings, plan), "", *summary, sep="\n")
    return 0
