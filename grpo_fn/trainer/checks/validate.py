"""Validate a configuration before anything expensive starts: its sections, its data, and what its functions declare."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from grpo_fn.algo import credit as credits
from grpo_fn.algo import distillation, supervised
from grpo_fn.algo.curricula import Curriculum, begin_curriculum, choose_uids, update_curriculum
from grpo_fn.algo.step import Algorithm, from_sampler
from grpo_fn.algo.supervised import Stage
from grpo_fn.core import prng
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.partials import check_positive, describe_function, function_and_knobs, needs, uses_of
from grpo_fn.shell.logging import stopwatch
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.attention import check_attention, check_attention_choice
from grpo_fn.shell.model.blocks import torch_compile
from grpo_fn.shell.policy import memory_estimate
from grpo_fn.shell.world import find_device
from grpo_fn.tasks.task import Task, sample_tests
from grpo_fn.trainer.checks.requirements import check_engines, check_sandboxes
from grpo_fn.trainer.checks.try_out import (
    judges_of_run,
    reward_parts,
    shown_type,
    try_optimizer,
    try_rewards,
    try_schedule,
    try_task,
    try_token_sampler,
)
from grpo_fn.trainer.plan import Plan, ValidatedPlan, kv_bytes_per_token
from grpo_fn.trainer.sections import Settings, model_source
from grpo_fn.trainer.teachers import find_teachers, moving_average, start_model, uses_teacher

TokenSampler = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def validate(settings: Settings) -> ValidatedPlan:
    """Check that the sections fit together, and find out what `build` needs to know. Loads data, no weights.

    Raises ValueError naming what was got and expected.
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
    check_attention_choice(s.compute.attention, dtype)
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
        frozen=reference or s.logging.start_kl_every > 0 or uses_teacher(s, start_model),
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
        average=uses_teacher(s, moving_average),
        kv_bytes_per_token=kv_bytes_per_token(config, dtype.itemsize),
    )


def check_this_machine(settings: Settings) -> None:
    """Raise ValueError for engines and kernels that are not here; a dry run may be about another machine."""
    check_engines([settings.sampling.sampler, settings.evaluation.async_sampler])
    compute = settings.compute
    device, dtype = find_device(compute.device, 0), hf.find_dtype(compute.dtype)
    check_attention(compute.attention, device, dtype)


def check_deterministic(deterministic: bool, compile_block: Callable[[nn.Module], None]) -> None:
    """Raise ValueError for deterministic kernels with compiled blocks, whose code depends on earlier calls."""
    if deterministic and torch_compile in (compile_block, getattr(compile_block, "func", None)):
        raise ValueError(
            "sections.Compute.deterministic: got True with compiled blocks, whose code is tuned to the sizes that it "
            "meets first; expected mesh.Parallelism.compile = @blocks.eager, or False"
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
    if fault := next(filter(None, wrong), None):
        raise ValueError(
            f"token_sampler: {fault}, expected draws from softmax(logits / {temperature:g}) while training, or the "
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
    expected = true.exp().reshape(EIGHTS, -1).sum(-1) * count
    drawn = torch.bincount(token, minlength=len(logits)).reshape(EIGHTS, -1).sum(-1)
    far = (drawn - expected).abs() > 3 + 5 * expected.sqrt()
    if far.any():
        i = int(far.nonzero()[0, 0])
        return f"got tokens of probability {float(expected[i]) / count:.2g} drawn {int(drawn[i])} times in {count}"
    return None


# -- the algorithm

# Positional arguments of the function in a knob of this name, among the knobs of grpo_fn's own functions at any depth.
ARGUMENTS = {
    **{"objective": ("scores", "batch", "totals", "gains"), "credit": ("scored",), "beside": ("scored",)},
    **{"group_sampling": ("explore", "carried", "prompts"), "old_logp": ("policy", "rollout")},
    **{"filters": ("rollout", "adv"), "token_mask": ("batch", "keys"), "reweighting": ("logp", "rows")},
    **{"control": ("gains", "figures"), "token_loss": ("logp", "row"), "kl": ("logp", "row")},
    **{"importance_correction": ("logp", "row"), "energy_weight": ("logp", "row"), "token_weight": ("logp", "row")},
    **{"loss_aggregation": ("batch", "totals"), "share": ("steps",), "advantage": ("reward", "valid")},
}


def check_algorithm(settings: Settings) -> None:
    """Raise ValueError for functions of the algorithm that do not fit one another or the run."""
    algorithm, steps = settings.algorithm, settings.steps
    section = "supervised.Stage." if isinstance(algorithm, supervised.Stage) else "step.Algorithm."
    for knob, value in functions_of(vars(algorithm), section):
        check_signature(knob, value)
        if knob.endswith(".share"):
            check_step_share(knob, value, steps)
    if isinstance(algorithm, supervised.Stage):
        for name in ("teacher", "demonstrations"):
            if getattr(settings, name) is not None:
                raise ValueError(
                    f"train.train.{name}: got one in a supervised stage, expected None: sections.Data.task has the "
                    "demonstrations of the stage"
                )
        return
    check_provided(settings, algorithm.needs)
    check_sampler_logp(algorithm, settings.sampling.max_staleness)
    check_group_size(algorithm)
    for term in uses_of(supervised.observations, algorithm.beside):
        coef = function_and_knobs(term)[1].get("coef", 0.0)
        if not 0 <= coef < math.inf:
            raise ValueError(f"supervised.observations.coef: got {coef}, expected a finite number of at least 0")


def functions_of(knobs: Any, path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function among some knobs, with the knobs that lead to it; also those in grpo_fn's own functions."""
    for name, value in knobs.items():
        for function in value if isinstance(value, list | tuple) else [value]:
            if callable(function):
                yield f"{path}{name}", function
                inner, inner_knobs = function_and_knobs(function)
                if inner.__module__.startswith("grpo_fn."):  # a user's function has knobs of its own meaning
                    yield from functions_of(inner_knobs, f"{path}{name}.")


def check_signature(knob: str, function: Callable[..., Any]) -> None:
    """Raise ValueError for a function that cannot be called with the positional arguments of its knob."""
    names = ARGUMENTS.get(knob.rpartition(".")[2])
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    if names is None:
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        name = describe_function(function_and_knobs(function)[0]).removesuffix("{}")
        raise ValueError(
            f"{knob}: got {name}{signature} ({error}), expected a function of ({', '.join(names)})"
        ) from error


def check_step_share(knob: str, share: Callable[[int], float], steps: int) -> None:
    """Raise ValueError for a share of a step that is none, at any step of the run."""
    for step in range(steps):
        if not 0 <= (value := share(step)) <= 1:
            raise ValueError(f"{knob}: got {value} after {step} steps, expected a share, 0 to 1")


def check_provided(settings: Settings, declared: frozenset[str]) -> None:
    """Raise ValueError for what the algorithm declares and the run has not, and for demonstrations without a use."""
    shown = settings.demonstrations
    if "logp_teacher" in declared and settings.teacher is None:
        raise ValueError(
            "train.train.teacher: got None with an algorithm that learns from a teacher, expected one: "
            "--gin_file scale/teacher.gin --gin_param TEACHER='FOLDER', or the policy itself: --gin_file "
            "scale/self_teacher.gin"
        )
    if "demonstrations" in declared and shown is None:
        raise ValueError(
            "train.train.demonstrations: got None with an algorithm that learns from given completions too, expected "
            "some: --gin_file task/demonstrations.gin --gin_param DEMONSTRATIONS='FILE'"
        )
    if "episodes" in declared and settings.episodes is None:
        raise ValueError(
            "train.train.episodes: got None with an algorithm that learns from what environments write, expected "
            "@sections.Episodes(), or step.Algorithm.beside without @supervised.observations"
        )
    if shown is not None and "demonstrations" not in declared:
        raise ValueError(
            "train.train.demonstrations: got some with an algorithm that does not learn from them, expected None, or "
            "step.Algorithm.beside = [@supervised.demonstrations]: --gin_file algo/chord.gin"
        )
    if shown is not None and shown.rows % settings.algorithm.minibatches:
        raise ValueError(
            f"sections.Demonstrations.rows: got {shown.rows} for {settings.algorithm.minibatches} minibatches, "
            "expected a multiple"
        )


def check_sampler_logp(algorithm: Algorithm, max_staleness: int) -> None:
    """Raise ValueError for functions that compare the sampler with itself, and for uncorrected stale samples."""
    declared, learned = algorithm.needs, needs(algorithm.objective)
    itself = function_and_knobs(algorithm.old_logp)[0] is from_sampler
    if itself and "trainer_logp" in declared:
        raise ValueError(
            "step.Algorithm.old_logp: got @step.from_sampler with a function that compares logp_old with the sampler's "
            "log-probs, which are then the same (importance_correction, energy_weight or token_mask), so that its "
            "weights are all 1: expected step.Algorithm.old_logp = @step.from_trainer, or None in that function's place"
        )
    corrects = "trainer_logp" in learned or "logp_sampled" in learned or (itself and "fresh_samples" not in learned)
    if max_staleness > 0 and not corrects:
        raise ValueError(
            f"max_staleness: got {max_staleness} with an objective that does not ask how likely the sampler found its "
            "samples, so stale ones would be learned from as if they were fresh: expected max_staleness 0, or "
            "step.Algorithm.old_logp = @step.from_trainer and "
            "objective.policy_objective.importance_correction = @corrections.truncated_weight"
        )


def check_group_size(algorithm: Algorithm) -> None:
    """Raise ValueError for groups of one that are compared within."""
    declared = needs(algorithm.credit)
    # A teacher's gap is a signal of its own, unless it only reweighs advantages.
    gap = "logp_teacher" in declared and not any(uses_of(distillation.teacher_reweighted, algorithm.credit))
    if algorithm.group_size == 1 and "groups" in declared and not gap:
        raise ValueError(
            "group_size: got 1 with an advantage that compares within a group (always 0), expected 2 or more"
        )


def check_parts(credit: Callable[..., Any] | None, parts: Sequence[str]) -> None:
    """Raise ValueError for a credit that weighs parts which the reward does not have."""
    for use in uses_of(credits.per_part, credit):
        weights = function_and_knobs(use)[1].get("weights", {})
        unknown = sorted(weights.keys() - {*parts})
        if unknown or not weights:
            raise ValueError(f"weights: got parts {unknown}, expected some of {sorted(parts)}")


# -- whether the curriculum fits the task, the sampler and the rewards, by a first step of it


KNOB = "train.train.curriculum"


def check_curriculum_of_run(settings: Settings, task: Task, parts: Sequence[str]) -> None:
    """Raise ValueError for a curriculum that is none, or that task, sampler, stage or rewards do not fit."""
    curriculum = settings.curriculum
    if curriculum is None:
        return
    if not isinstance(curriculum, Curriculum):
        hint = " (bound without ()?)" if callable(curriculum) else ""
        raise ValueError(
            f"{KNOB}: got {shown_type(curriculum)}{hint}, expected None or a Curriculum: "
            "@curricula.learnability_bandit()"
        )
    if isinstance(settings.algorithm, Stage):
        raise ValueError(f"{KNOB}: got one in a supervised stage, which samples nothing, expected None")
    if settings.sampling.max_staleness:
        raise ValueError(
            f"{KNOB}: got one with sections.Sampling.max_staleness {settings.sampling.max_staleness}, which asks for "
            "problems before the pass rates are known that choose them, expected max_staleness 0, or None"
        )
    state = begin_curriculum(curriculum, len(task.arms), prng.key(0, device="cpu"))
    prompts = settings.algorithm.prompts
    uids = choose_uids(curriculum, state, prng.key(1, device="cpu"), 0, 0, prompts)
    value = (torch.arange(2 * prompts) % 3 / 2).view(prompts, 2)
    reward = outcome_reward(value, torch.ones_like(value, dtype=torch.bool), dict.fromkeys(parts, value))
    update_curriculum(curriculum, state, uids, curriculum.pass_rate(reward))
