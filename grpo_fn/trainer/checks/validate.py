"""Validate a configuration before anything expensive starts, by calling its functions on small made-up inputs.

A user's own function declares nothing: whether an objective reads the reference, whether a token sampler
draws from softmax(logits / T), whether a correction corrects anything, shows in what the functions return.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad
from transformers import PretrainedConfig

from grpo_fn.algo.credit import Credit, no_rewards
from grpo_fn.algo.step import from_sampler, from_trainer
from grpo_fn.core.batch import count, tokens_of_group
from grpo_fn.core.checks import check_positive
from grpo_fn.core.groups import outcome_reward
from grpo_fn.core.types import Batch, Gains, Policy, Reward, Rollout, Scores
from grpo_fn.shell.logging import profiler
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.attention_kernels.attention_backend import check_attention, check_attention_choice
from grpo_fn.shell.model.blocks import torch_compile
from grpo_fn.shell.policy import memory_estimate, self_teachers
from grpo_fn.shell.world import find_device
from grpo_fn.tasks.task import Task, sample_tests
from grpo_fn.trainer.checks.check_curriculum import check_curriculum_of_run
from grpo_fn.trainer.checks.check_judges import judges_of_run
from grpo_fn.trainer.checks.check_teachers import find_teachers, reads_gap, uses_teacher
from grpo_fn.trainer.checks.requirements import check_engines, check_sandboxes
from grpo_fn.trainer.checks.supervised_stage import check_stage, is_supervised
from grpo_fn.trainer.checks.try_out import check_energy_weight, try_credit, try_token_sampler, weighs_energies
from grpo_fn.trainer.checks.try_rewards import reward_parts, try_rewards
from grpo_fn.trainer.checks.try_sources import try_optimizer, try_schedule, try_task
from grpo_fn.trainer.plan import Plan, kv_bytes_per_token
from grpo_fn.trainer.sections import Settings, model_source

Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]
OldLogp = Callable[[Policy, Rollout], Tensor]
TokenSampler = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Distillation = Callable[[Tensor, Tensor, Tensor], Tensor]
TokenMask = Callable[[Batch, Tensor], Tensor]


@dataclass(frozen=True)
class ValidatedPlan:
    """What validation found out about a run, for `build`."""

    source: hf.ModelSource
    config: PretrainedConfig
    dtype: torch.dtype  # of the computation
    task: Task
    reference: bool  # whether objective or credit read logp_ref
    frozen: bool  # whether a frozen copy of the start model is kept, as that reference or to measure the KL to it
    teachers: Mapping[str, tuple[hf.ModelSource, PretrainedConfig]]  # those that are loaded, by key
    parts: Sequence[str]  # of the reward
    shown: Task | None  # whose demonstrations are learned from beside the sampled completions
    own_pass: bool  # whether logp_old is what the step's one update finds in its own pass
    plan: Plan


def validate(settings: Settings) -> ValidatedPlan:
    """Check that the sections fit together, and find out what `build` needs to know. Loads data, no weights.

    Raises ValueError naming what was got and wanted.
    """
    s, algorithm = settings, settings.algorithm
    profiler.check_profile_steps(s.logging.profile_steps, s.steps)
    check_sandboxes([s.rewards.reward, *s.evaluation.graders])
    judges_of_run(s)
    try_token_sampler(s.sampling.token_sampler, s.sampling.temperature)
    check_stage(s)
    drawn = partial(s.sampling.token_sampler, temperature=s.sampling.temperature)
    check_full_support(drawn, s.sampling.temperature, s.sampling.allow_biased)
    check_deterministic(s.compute.deterministic, s.parallelism.compile)
    check_correction(algorithm.objective, algorithm.old_logp)
    check_selection(algorithm.token_mask, algorithm.old_logp)
    check_stale(algorithm.objective, algorithm.old_logp, s.sampling.max_staleness)
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
    try_credit(algorithm, parts)
    check_energy_weight(algorithm)
    if not is_supervised(algorithm):
        check_credit(algorithm.credit, algorithm.distillation, algorithm.group_size, parts)
        check_signal_wanted(algorithm.credit, algorithm.distillation, algorithm.min_groups_with_signal, parts)
    check_curriculum_of_run(s, task, parts)
    reference = uses_reference(algorithm.objective, algorithm.credit, parts)
    own_pass = own_pass_suffices(
        algorithm.old_logp, updates, algorithm.credit, algorithm.distillation, algorithm.token_mask, parts
    )
    return ValidatedPlan(
        source=source,
        config=config,
        dtype=dtype,
        task=task,
        reference=reference,
        frozen=reference or s.logging.start_kl_every > 0 or uses_teacher(s, self_teachers.start_model),
        teachers=find_teachers(s, config, also=reads_teacher(algorithm.objective)),
        parts=parts,
        shown=None if s.demonstrations is None else try_task(s.demonstrations.task),
        # What drops at random says another thing in the pass that trains; weights of energies come before it.
        own_pass=own_pass and (s.lora is None or s.lora.dropout == 0) and not weighs_energies(algorithm.energy_weight),
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
    """Raise ValueError for deterministic kernels together with compiled blocks, whose code depends on what came before.

    Args:
        deterministic: `sections.Compute.deterministic`.
        compile_block: `mesh.Parallelism.compile`, or a partial of it.
    """
    if deterministic and torch_compile in (compile_block, getattr(compile_block, "func", None)):
        raise ValueError(
            "sections.Compute.deterministic: got True with compiled blocks, whose code is tuned to the sizes that it "
            "meets first; wanted mesh.Parallelism.compile = @blocks.eager, or False"
        )


def check_credit(credit: Credit, distillation: Distillation, group_size: int, parts: Sequence[str]) -> None:
    """Raise ValueError when groups of one can carry no signal: normalised advantages compare within a group.

    `parts` are the names of the reward's parts; a credit that asks for others says so here. Groups of one will do with
    a teacher that is learned from, whose signal compares with nothing, and where rewards are measured only.
    """
    signal = has_signal(credit, distillation, parts)
    if group_size == 1 and learns_from_rewards(credit) and not signal:
        raise ValueError(
            "group_size: got 1 with an advantage that compares within a group (always 0), wanted 2 or more"
        )


def check_signal_wanted(credit: Credit, distillation: Distillation, least: int, parts: Sequence[str]) -> None:
    """Raise ValueError for `min_groups_with_signal` above 0, `least`, where no advantage is ever other than 0."""
    if least > 0 and not learns_from_rewards(credit) and not has_signal(credit, distillation, parts):
        raise ValueError(
            f"step.Algorithm.min_groups_with_signal: got {least} with advantages that are always 0, as neither rewards "
            "nor a teacher's gap are learned from, so that no step would be trained on; wanted 0"
        )


def learns_from_rewards(credit: Credit) -> bool:
    """Whether rewards go into advantages; with `credit.no_rewards` they are measured only."""
    return getattr(credit, "func", credit) is not no_rewards


def has_signal(credit: Credit, distillation: Distillation, parts: Sequence[str]) -> bool:
    """Whether some token of a small step with groups of one has an advantage."""
    reward, drift, everything = small_step(torch.zeros(2, 1, 1), parts)
    return bool(distillation(credit(reward, drift, everything), drift + 0.5, everything).any())


def small_step(drift: Tensor, parts: Sequence[str]) -> tuple[Reward, Tensor, Tensor]:
    """A step to ask a credit about: drift `[P, G, T]`, every token sampled, every sample rewarded differently."""
    value = torch.arange(drift.shape[0] * drift.shape[1], dtype=drift.dtype).reshape(drift.shape[:2])
    everything = torch.ones_like(drift, dtype=torch.bool)
    return outcome_reward(value, everything[..., 0], dict.fromkeys(parts, value)), drift, everything


def uses_reference(objective: Objective, credit: Credit, parts: Sequence[str]) -> bool:
    """Whether objective or credit look at logp_ref, by trials with made-up rows: then a frozen reference is kept."""
    mask = torch.tensor([[False, True, True], [False, True, True]])
    logp = torch.full((2, 3), -1.0, dtype=torch.float64)  # a small beta must not drown in rounding
    adv = torch.tensor([[1.0], [-1.0]]).expand(2, 3).to(logp)

    def value(logp_ref: Tensor) -> Tensor:
        batch = Batch(mask.long(), mask, logp, logp, logp_ref, logp, adv, mask, mask.long())
        entropy = torch.ones_like(logp)
        loss = partial(objective, batch=batch, totals=count(batch), gains=Gains(1.0, 1.0))
        return loss(Scores(logp, entropy))[0]

    return bool(value(logp - 1) != value(logp)) or reads_drift(credit, parts)


def reads_teacher(objective: Objective) -> bool:
    """Whether an objective moves with logp_teacher."""
    mask = torch.tensor([[False, True, True], [False, True, True]])
    logp = torch.full((2, 3), -1.0, dtype=torch.float64)

    def value(logp_teacher: Tensor) -> Tensor:
        batch = Batch(mask.long(), mask, logp, logp, logp, logp_teacher, torch.ones_like(logp), mask, mask.long())
        return objective(Scores(logp, -logp), batch=batch, totals=count(batch), gains=Gains(1.0, 1.0))[0]

    return bool(value(logp - 1) != value(logp))


def reads_drift(credit: Credit, parts: Sequence[str]) -> bool:
    """Whether a credit moves with logp_old - logp_ref."""
    drift = torch.tensor([[[0.3], [0.1]], [[0.2], [0.7]]], dtype=torch.float64)
    with_drift, without = (credit(*small_step(x, parts)) for x in (drift, 0 * drift))
    return not torch.equal(with_drift, without)


def own_pass_suffices(
    old_logp: OldLogp,
    updates: int,
    credit: Credit,
    distillation: Distillation,
    token_mask: TokenMask,
    parts: Sequence[str],
) -> bool:
    """Whether the trainer's logp_old can be what a step's one update finds in its own pass, instead of one before it.

    It can where nothing needs it earlier: neither a credit that moves with logp_old - logp_ref, nor advantages that
    move with logp_teacher - logp_old, nor what selects tokens by it.
    """
    early = reads_drift(credit, parts) or reads_gap(distillation) or selects(token_mask, apart=True)
    return updates == 1 and getattr(old_logp, "func", old_logp) is from_trainer and not early


def check_selection(token_mask: TokenMask, old_logp: OldLogp) -> None:
    """Raise ValueError for a token selection that can select nothing, as it compares the sampler with itself.

    That is one that selects tokens where logp_old differs from logp_sampled, and none where they are the same.
    """
    itself = getattr(old_logp, "func", old_logp) is from_sampler
    if itself and selects(token_mask, apart=True) and not selects(token_mask, apart=False):
        raise ValueError(
            "token_mask: got a selection by logp_old - logp_sampled and an old_logp that is logp_sampled itself, so no "
            "token is ever selected: wanted step.Algorithm.old_logp = @step.from_trainer"
        )


def selects(token_mask: TokenMask, *, apart: bool) -> bool:
    """Whether it selects a token of some small batch, logp_old apart from logp_sampled or not."""
    return any(bool(token_mask(*marking_batch(scale, apart=apart)).any()) for scale in (0.1, 1.0, 10.0))


def marking_batch(scale: float, *, apart: bool) -> tuple[Batch, Tensor]:
    """Rows to ask about marks: log-probs and advantages far apart, every token but the first sampled."""
    number = torch.arange(32, dtype=torch.float64).view(4, 8)
    mask, logp = number % 8 > 0, -scale * (number * 7 % 32)
    adv = torch.where(number * 5 % 3 > 0, scale, -scale)
    sampled = 1.5 * logp if apart else logp
    return Batch(mask.long(), mask, sampled, logp, logp, logp, adv, ~mask & mask, mask.long()), torch.arange(8).view(
        4, 2
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


def check_stale(objective: Objective, old_logp: OldLogp, max_staleness: int) -> None:
    """Raise ValueError when samples of an older policy may come and nothing in the objective corrects for that.

    Something does when the learning signal moves with logp_sampled: a correction, the ratio where logp_old is the
    sampler's, a loss around the sampler (dppo_tv, vespo). KL and bonus are left out of the question.
    """
    if max_staleness > 0 and len({probe_objective(objective, old_logp, gap).signal for gap in GAPS}) == 1:
        raise ValueError(
            f"max_staleness: got {max_staleness} with an objective that does not ask how likely the sampler found its "
            "samples, so stale ones would be learned from as if they were fresh: wanted max_staleness 0, or "
            "step.Algorithm.old_logp = @step.from_trainer and "
            "objective.policy_objective.importance_correction = @importance.truncated_weight"
        )


def check_correction(objective: Objective, old_logp: OldLogp) -> None:
    """Raise ValueError for a correction that can correct nothing, as it compares the sampler with itself.

    That is one that gives weights other than 1 to samples of another policy when the trainer's log-probs are logp_old,
    and never with the `old_logp` there is.
    """
    able, does = (any(probe_objective(objective, f, gap).corrected for gap in GAPS) for f in (from_trainer, old_logp))
    if able and not does:
        raise ValueError(
            "importance_correction: got a correction by logp_old - logp_sampled and an old_logp that is logp_sampled "
            "itself, so every weight is 1: wanted step.Algorithm.old_logp = @step.from_trainer, or "
            "objective.policy_objective.importance_correction = @importance.no_correction"
        )


GAPS = (0.0, 0.1, -0.1, 1.0, -1.0, 20.0, -20.0)  # logp - logp_sampled, nats: within any clip or mask, and beyond


class ObjectiveProbe(NamedTuple):
    """What an objective makes of a few samples."""

    signal: tuple[float, ...]  # on each sampled token
    corrected: bool  # whether some weight is not 1


def constant_policy(logp: Tensor) -> Policy:
    """A policy that says the same of every rollout, and can do nothing else."""

    def unable(*given: object) -> None:
        raise NotImplementedError

    others = dict.fromkeys(("vjp", "set_accumulation_steps", "update"), unable)
    return SimpleNamespace(logp=lambda rollout: logp, reference=lambda rollout: None, **others)


def probe_objective(objective: Objective, old_logp: OldLogp, gap: float) -> ObjectiveProbe:
    """Two samples, one good and one bad, which the sampler found exp(-gap) times as likely as the trainer does."""
    mask = torch.tensor([[False, True, True], [False, True, True]])
    now = torch.full((2, 3), -30.0, dtype=torch.float64)  # so far down that no gap makes a probability above 1
    rollout = Rollout(mask.long(), mask, now - gap, ~mask[:, 1], ("", ""))
    old = old_logp(constant_policy(now), rollout)
    adv = torch.tensor([[1.0], [-1.0]]).expand(2, 3).to(now)
    batch = Batch(
        mask.long(), mask, rollout.logp_sampled, old, now, now, adv, torch.zeros_like(mask), tokens_of_group(mask, 1)
    )
    loss = partial(objective, batch=batch, totals=count(batch), gains=Gains(0.0, 0.0))  # the token loss alone
    signal, seen = grad(loss, has_aux=True)(Scores(now, torch.ones_like(now)))
    weight = seen.get("correction", torch.ones_like(now))
    return ObjectiveProbe(tuple(signal.logp[mask].tolist()), bool((weight != 1)[mask].any()))
