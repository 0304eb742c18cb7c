"""Validate a configuration before anything expensive starts: its sections, its data, and what its functions declare."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from grpo_fn.algo.needs import needs
from grpo_fn.core.checks import check_positive
from grpo_fn.shell.logging import stopwatch
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.attention import check_attention, check_attention_choice
from grpo_fn.shell.model.blocks import torch_compile
from grpo_fn.shell.policy import memory_estimate, self_teachers
from grpo_fn.shell.world import find_device
from grpo_fn.tasks.task import Task, sample_tests
from grpo_fn.trainer.checks.algorithm import check_algorithm, check_curriculum_of_run, check_parts
from grpo_fn.trainer.checks.requirements import check_engines, check_sandboxes
from grpo_fn.trainer.checks.try_out import (
    judges_of_run,
    reward_parts,
    try_optimizer,
    try_rewards,
    try_schedule,
    try_task,
    try_token_sampler,
)
from grpo_fn.trainer.plan import Plan, ValidatedPlan, kv_bytes_per_token
from grpo_fn.trainer.sections import Settings, model_source
from grpo_fn.trainer.teachers import find_teachers, uses_teacher

TokenSampler = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def validate(settings: Settings) -> ValidatedPlan:
    """Check that the sections fit together, and find out what `build` needs to know. Loads data, no weights.

    Raises ValueError naming what was got and wanted.
    """
    s, algorithm = settings, settings.algorithm
    stopwatch.check_profile_steps(s.logging.profile_steps, s.steps)
    check_sandboxes([s.rewards.reward, *s.evaluation.graders])
    judges_of_run(s)
    try_token_sampler(s.sampling.token_sampler, s.sampling.temperature)
    check_algorithm(s)
    drawn = partial(s.sampling.token_sampler, temperature=s.sampling.temperature)
    check_full_support(drawn, s.sampling.temperature, s.sampling.allow_biased)
    check_deterministic(s.compute.deterministic, s.parallelism.compile)
    updates = algorithm.epochs * algorithm.minibatches
    try_optimizer(s.policy.optimizer)
    try_schedule(s.policy.schedule, updates * s.steps)
    dtype, source = hf.find_dtype(s.compute.dtype), model_source(s.model, "train.train.model")
    check_attention_choice(s.compute.attention, dtype, deterministic=s.compute.deterministic)
    config = source.config()
    task = sample_tests(try_task(s.data.task), s.evaluation.problems)
    check_positive(train_rows=task.size, held_out_problems=len(task.test))
    parts, scored = reward_parts(s.rewards.reward, task.test[0])
    try_rewards("sections.Rewards.reward", scored, task.test[0], s.rewards.pool)
    try_rewards("sections.Evaluation.graders", s.evaluation.graders, task.test[0], s.rewards.pool)
    declared = needs(vars(algorithm))
    check_parts(getattr(algorithm, "credit", None), parts)
    check_curriculum_of_run(s, task, parts)
    reference = "logp_ref" in declared
    return ValidatedPlan(
        source=source,
        config=config,
        dtype=dtype,
        task=task,
        reference=reference,
        frozen=reference or s.logging.start_kl_every > 0 or uses_teacher(s, self_teachers.start_model),
        teachers=find_teachers(s, config),
        parts=parts,
        demonstrations=None if s.demonstrations is None else try_task(s.demonstrations.task),
        plan=make_plan(s, config, dtype, task),
    )


def make_plan(settings: Settings, config: PretrainedConfig, dtype: torch.dtype, task: Task) -> Plan:
    """The numbers of the run."""
    s, algorithm = settings, settings.algorithm
    return Plan(
        prompts=algorithm.prompts,
        group_size=algorithm.group_size,
        minibatches=algorithm.minibatches,
        epochs=algorithm.epochs,
        steps=s.steps,
        train_rows=task.size,
        test_rows=len(task.test),
        max_new_tokens=s.sampling.max_new_tokens if s.episodes is None else s.sampling.max_total_tokens - 1,
        max_rows=s.sampling.max_rows,
        parameters=hf.parameter_count(hf.empty_model(config)),
        trained=memory_estimate.trained_parameters(config, s.lora),
        average=uses_teacher(s, self_teachers.moving_average),
        kv_bytes_per_token=kv_bytes_per_token(config, dtype.itemsize),
    )


def check_this_machine(settings: Settings) -> None:
    """Raise ValueError for engines and kernels that are not here; a dry run may be about another machine."""
    check_engines([settings.sampling.sampler, settings.evaluation.async_sampler])
    compute = settings.compute
    device, dtype = find_device(compute.device, 0), hf.find_dtype(compute.dtype)
    check_attention(compute.attention, device, dtype, deterministic=compute.deterministic)


def check_deterministic(deterministic: bool, compile_block: Callable[[nn.Module], None]) -> None:
    """Raise ValueError for deterministic kernels with compiled blocks, whose code depends on earlier calls."""
    if deterministic and torch_compile in (compile_block, getattr(compile_block, "func", None)):
        raise ValueError(
            "sections.Compute.deterministic: got True with compiled blocks, whose code is tuned to the sizes that it "
            "meets first; wanted mesh.Parallelism.compile = @blocks.eager, or False"
        )


def check_full_support(token_sampler: TokenSampler, temperature: float, allow_biased: bool) -> None:
    """Raise ValueError unless `token_sampler`, its knobs bound, draws from softmax(logits / temperature).

    The policy gradient and every importance ratio are about that distribution. A sampler that cuts its tail (top-p,
    top-k, min-p), draws at another temperature or always takes the likeliest token samples from a policy other than
    the one that the trainer differentiates. Found by drawing from a few known distributions; `allow_biased` skips it.
    """
    if allow_biased:
        return
    wrong = (draws_differ(token_sampler, logits, count, temperature) for logits, count in KNOWN)
    if found := next(filter(None, wrong), None):
        raise ValueError(
            f"token_sampler: {found}, wanted draws from softmax(logits / {temperature:g}) while training, or the "
            "gradient is that of another policy: sections.Sampling.token_sampler = @sampling.categorical, or "
            "sections.Sampling.allow_biased = True to train all the same"
        )


# Logits and how often to draw from them: a few tokens, drawn often enough to count each; a steep slope, where any min-p
# cuts a tail; nearly even ones over a large vocabulary, where any top-k does.
KNOWN = ((torch.linspace(-1, 1, 8), 4096), (torch.linspace(-20, 0, 64), 64), (torch.linspace(0, 1, 2**16), 64))
EIGHTS = 8  # of each vocabulary, to count draws in


def draws_differ(token_sampler: TokenSampler, logits: Tensor, count: int, temperature: float) -> str | None:
    """What is wrong with `count` draws at evenly spaced u, if they are not from softmax(logits / temperature)."""
    u = (torch.arange(count) + 0.5) / count
    token, logp = token_sampler(logits.expand(count, -1), u)
    true = torch.log_softmax(logits.double() / temperature, dim=-1)
    off = float((logp - true[token]).abs().nan_to_num(torch.inf).max())
    if off > 1e-4 + 1e-6 * float(logits.abs().max()) / temperature:  # float32 rounds logits / temperature
        return f"got log-probabilities up to {off:.2g} nats off"
    wanted = true.exp().reshape(EIGHTS, -1).sum(-1) * count
    seen = torch.bincount(token, minlength=len(logits)).reshape(EIGHTS, -1).sum(-1)
    far = (seen - wanted).abs() > 3 + 5 * wanted.sqrt()
    if far.any():
        i = int(far.nonzero()[0, 0])
        return f"got tokens of probability {float(wanted[i]) / count:.2g} drawn {int(seen[i])} times in {count}"
    return None
