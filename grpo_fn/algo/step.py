"""One GRPO step (Shao et al. 2024, arXiv:2402.03300, Algorithm 1, lines 5 to 11) on one page."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.func import vmap

from grpo_fn.algo import metrics
from grpo_fn.algo.components import components_of_updates, given_beside
from grpo_fn.algo.controllers import next_gains
from grpo_fn.algo.credit import first_token
from grpo_fn.algo.group_sampling import GroupBatch
from grpo_fn.algo.objective import Component, update_policy
from grpo_fn.core import prng
from grpo_fn.core.batch import (
    check_reward_shapes,
    check_rollout,
    make_batch,
    reweigh_groups,
    scored_rows,
)
from grpo_fn.core.checks import check_divides, check_positive, check_signal
from grpo_fn.core.groups import by_group, row_keys
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch, Carry, Gains, Groups, Policy, Reward, Rollout, Sampler

Stream = Callable[[int, int], Sequence[Problem]]  # problems first, ..., first + count - 1
Span = Callable[[str], AbstractContextManager[object]]
MARKING = -1  # a child of the step's key beside those of the problems, whose uids are not negative


@dataclass(frozen=True, kw_only=True)
class Stages:
    """From a scored rollout to the learning signal."""

    credit: Callable[[Reward, Tensor, Tensor], Tensor]  # the advantage of every token, [P G T]
    baseline: Callable[[Tensor, Tensor, Tensor], Tensor]  # of one group: (advantage, energy, mask) -> advantage, [G T]
    energy_weight: Callable[[Tensor, Batch], Tensor]  # of one row: (logp_old, row) -> w [T]; energies count w^2 times
    distillation: Callable[[Tensor, Tensor, Tensor], Tensor]  # (advantage, log-prob gap to the teacher, mask), [P G T]
    distillation_share: Callable[[int], float]  # steps taken -> share of what distillation changes that a step takes
    reweighting: Callable[[Tensor, Batch], Tensor]  # of one group, at each update: (logp now, rows) -> advantage, [G T]
    filters: Sequence[Callable[[Rollout, Tensor], Tensor]]  # which samples may learn, [P G]; all of them have to agree
    token_mask: Callable[[Batch, Tensor], Tensor]  # tokens that the loss treats apart, [B T]
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]]  # scores; batch=, totals=, gains= -> loss, diagnostics


@dataclass(frozen=True, kw_only=True)
class StepKnobs(Stages):
    """What a configuration says of a step."""

    group_sampling: Callable[..., GroupBatch]  # (explore, carried, *, prompts) -> groups: which to learn from
    old_logp: Callable[[Policy, Rollout], Tensor]  # the denominator of the ratio: from_sampler or from_trainer
    kl_control: Callable[[float, float], float]  # gain, measured KL -> gain of the next step
    entropy_control: Callable[[float, float], float]  # gain, measured entropy -> gain of the next step
    supervised: Callable[..., tuple[Tensor, dict[str, Tensor]]]  # as objective, of given tokens; see `algo.supervised`
    supervised_share: Callable[[int], float]  # steps taken -> mu: (1 - mu) objective + mu supervised; 0 without any
    observation_coef: float  # of the cross entropy of what environments wrote between turns, as `supervised`; 0: none
    min_groups_with_signal: int  # that a step needs to be trained on
    group_size: int  # samples of each problem
    epochs: int  # passes over one rollout
    minibatches: int  # optimizer steps in a pass


@dataclass(frozen=True, kw_only=True)
class Algorithm(StepKnobs):
    """The `algorithm` section of a configuration: what makes a GRPO relative, its functions and its numbers.

    Raises:
        ValueError: a number is below 1, prompts do not split into whole minibatches, or more groups with signal are
            wanted than a step has.
    """

    prompts: int  # a step
    stage: Callable[..., tuple["Experience", Carry, dict[str, float]]]  # takes a step: grpo_step or supervised_step
    SUPPLIED: ClassVar = {
        **dict.fromkeys(["objective", "supervised"], ("batch", "totals", "gains")),
        "group_sampling": ("prompts",),
        "stage": ("key", "algo", "span"),
    }

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that do not fit together."""
        check_positive(
            group_size=self.group_size, epochs=self.epochs, minibatches=self.minibatches, prompts=self.prompts
        )
        check_divides(self.prompts, self.minibatches)
        check_signal(self.min_groups_with_signal, self.prompts)


@dataclass(frozen=True, kw_only=True)
class StepAlgorithm(StepKnobs):
    """An `Algorithm` in a run: its number of prompts bound, with what the run gives it."""

    reward: Callable[[Sequence[Problem], Rollout], Reward]
    teacher: Callable[[Groups, Tensor], Tensor | None]  # log-probs [B T], logp_old in rows not taught; without_teacher
    energy: Callable[[Rollout], Tensor]  # |d logp / d logits|^2 of the sampled tokens, [B T]; without_energy: zeros
    look: Callable[[Policy, Batch], Tensor]  # log-probs now for `reweighting`, [B T]; without_look: logp_old
    given: Callable[[Sequence[Problem]], Rollout]  # demonstrations of problems, one row each: tokens and which to learn
    demonstrations: Callable[[int], Rollout | None]  # steps taken -> rows for `supervised`; without_demonstrations
    anchor: Callable[[Batch, Tensor], Batch]  # a micro-batch and its log-probs now -> what it is compared with
    split: Callable[[Batch], list[Tensor]]  # the rows of micro-batches that fit the devices; see batch.trim_rows


class Experience(NamedTuple):
    """What one step learned from and how it judged it."""

    groups: Groups
    adv: Float[Tensor, "P G T"]
    batch: Batch
    ratio: Float[Tensor, "N"] = torch.zeros(0)  # of every token at every update, in no order
    energy: Float[Tensor, "B T"] = torch.zeros(0, 0)  # of each sampled token; zeros where no baseline reads it


def from_sampler(policy: Policy, rollout: Rollout) -> Float[Tensor, "B T"]:
    """logp_old = logp_sampled: exact when sampler and trainer compute alike, as the local sampler does.

    Args:
        policy: the policy that learns; not read.
        rollout: the step's samples, B = P * G rows.

    Returns:
        logp_old, [B, T], in nats.
    """
    return rollout.logp_sampled


def from_trainer(policy: Policy, rollout: Rollout) -> Float[Tensor, "B T"]:
    """logp_old from the trainer's own forward pass: no sampler mismatch in the ratio.

    One more pass, unless a run whose steps have one update lets that find it (`compare_to_own_pass`).
    The policy as it is before this step's first update: groups that waited a step count as its own.

    Args:
        policy: the policy that learns.
        rollout: the step's samples, B = P * G rows.

    Returns:
        logp_old, [B, T], in nats.
    """
    return policy.logp(rollout)


def without_teacher(groups: Groups, logp_old: Float[Tensor, "B T"]) -> None:
    """There is no teacher.

    Args:
        groups: P problems, their samples and rewards; not read.
        logp_old: log-probs under pi_old, [B, T], in nats; not read.
    """
    return None


def without_demonstrations(steps: int) -> None:
    """There are no given tokens to learn from beside the sampled ones.

    Args:
        steps: steps taken before; not read.
    """
    return None


def grpo_step(
    policy: Policy, sampler: Sampler, stream: Stream, carried: Carry, *, key: Tensor, algo: StepAlgorithm, span: Span
) -> tuple[Experience, Carry, dict[str, float]]:
    """One GRPO step: sample, score, compute advantages, update.

    A step in which fewer than `min_groups_with_signal` groups have a token with an advantage, filters applied, is
    refused: no update, no KL, no entropy bonus, `train/skipped_step` 1.

    Args:
        policy: pi_theta, updated in place.
        sampler: draws from pi_old; takes the new weights at the end.
        stream: (first, count) -> problems first, ..., first + count - 1.
        carried: what the step before left; AT_THE_START for the first.
        key: random key of the step, [2].
        algo: the functions and numbers of the step.
        span: name -> context manager that times a phase.

    Returns:
        What the step learned from, what it leaves for the next one, and its metrics by name.
    """
    explore = partial(sample_and_score, sampler, stream, key=key, algo=algo, span=span)
    groups, fresh, carried, figures = algo.group_sampling(explore, carried)  # o ~ pi_old(. | q), r
    sampler.rest()  # the device is the trainer's now
    with span("train"):
        logp_old, reference = algo.old_logp(policy, groups.rollout), policy.reference(groups.rollout)
        logp_ref = logp_old if reference is None else reference
        logp_teacher = logp_old if (taught := algo.teacher(groups, logp_old)) is None else taught
        energy = algo.energy(groups.rollout)
        adv, batch = compute_advantages(  # A
            groups, logp_old, logp_ref, logp_teacher, energy, carried.gains, key=key, steps=carried.steps, stages=algo
        )
        enough = int(groups_to_learn_from(batch, len(adv)).sum()) >= algo.min_groups_with_signal
        how = {"split": algo.split, "anchor": algo.anchor}
        updates = updates_of_step(groups, batch, carried.steps, enough=enough, algo=algo)
        learned = [
            update_policy(policy, reweighed_components(policy, update, algo), carried.gains, **how)
            for _ in range(algo.epochs)
            for update in updates
        ]
        batch = learned[0].batch if len(learned) == 1 else batch
    with span("sync"):
        sampler.load(policy)  # pi_old <- pi_theta
    found = metrics.summarise_updates(batch, learned, reference=reference is not None)
    gain_controls = {"kl_control": algo.kl_control, "entropy_control": algo.entropy_control}
    return (
        Experience(groups, adv, batch, torch.cat([batch.adv.new_zeros(0), *(one.ratio for one in learned)]), energy),
        carried._replace(gains=next_gains(carried.gains, found, **gain_controls), steps=carried.steps + 1),
        {
            **figures,
            **metrics.rollout_metrics(fresh.rollout),
            **metrics.reward_metrics(fresh.reward),
            **metrics.of_advantage(sample_advantages(adv, groups), groups.reward.valid),
            **({} if taught is None else metrics.teacher_metrics(taught - logp_old, batch.mask, groups.rollout.mask)),
            **({} if taught is None else {"teacher/share": algo.distillation_share(carried.steps)}),
            "train/skipped_step": float(not learned),
            "loss/kl_coef_multiplier": carried.gains.kl,
            "loss/entropy_coef_multiplier": carried.gains.entropy,
            **found,
        },
    )


def updates_of_step(
    groups: Groups, batch: Batch, steps: int, *, enough: bool, algo: StepAlgorithm
) -> list[list[Component]]:
    """The components of each optimizer step of a pass: of sampled rows, demonstrations and observations.

    Args:
        groups: P problems, their samples and rewards.
        batch: the sampled rows to learn from, each field [B, T].
        steps: steps taken before.
        enough: whether the sampled rows may be learned from; given ones always are.
        algo: the functions and numbers of the step.

    Returns:
        The components, that of the sampled rows first; none of a refused step.
    """
    mu = algo.supervised_share(steps)
    weights = {"objective": algo.supervised, "mu": mu, "observation_coef": algo.observation_coef}
    beside = given_beside(groups, algo.demonstrations(steps), **weights)
    return components_of_updates(batch, beside, objective=algo.objective, parts=algo.minibatches, enough=enough)


def reweighed_components(policy: Policy, update: list[Component], algo: StepAlgorithm) -> list[Component]:
    """The components of an optimizer step, the groups of sampled rows weighed by what the policy says of them now.

    Args:
        policy: pi_theta as this optimizer step finds it.
        update: its components, that of the sampled rows first.
        algo: its `look` and `reweighting`.

    Returns:
        The components, the first with other advantages.
    """
    batch = update[0].batch
    batch = reweigh_groups(batch, algo.look(policy, batch), len(batch.mask) // algo.group_size, algo.reweighting)
    return [update[0]._replace(batch=batch), *update[1:]]


def sample_and_score(
    sampler: Sampler, stream: Stream, first: int, problems: int, *, key: Tensor, algo: StepAlgorithm, span: Span
) -> Groups:
    """Sample the next problems of the stream and score what came.

    Args:
        sampler: draws the completions.
        stream: (first, count) -> problems first, ..., first + count - 1.
        first: number of the first problem.
        problems: number of problems, P.
        key: random key of the step, [2].
        algo: the functions and numbers of the step.
        span: name -> context manager that times a phase.

    Returns:
        The P problems with G samples each, and their rewards [P, G].

    Raises:
        ValueError: fields of the rollout or of the rewards do not fit together.
    """
    asked = tuple(stream(first, problems))
    with span("generate"):
        rollout = sampler.sample(asked, algo.group_size, key=key)
        check_rollout(rollout)
    with span("score"):
        reward = algo.reward(asked, rollout)
        check_reward_shapes(reward, len(asked), algo.group_size)
    return Groups(asked, rollout, reward)


def compute_advantages(
    groups: Groups,
    logp_old: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"],
    logp_teacher: Float[Tensor, "B T"],
    energy: Float[Tensor, "B T"],
    gains: Gains,
    *,
    key: Tensor,
    steps: int,
    stages: Stages,
) -> tuple[Float[Tensor, "P G T"], Batch]:
    """Every token's advantage, and the rows b = p * G + g to learn from.

    Args:
        groups: P problems, their samples and rewards.
        logp_old: log-probs under pi_old, [B, T], in nats.
        logp_ref: log-probs under the reference, [B, T], in nats.
        logp_teacher: log-probs under the teacher, [B, T], in nats; logp_old without one.
        energy: |d logp / d logits|^2 of each token, [B, T]; anything where no baseline reads it.
        gains: `gains.kl` multiplies logp_old - logp_ref.
        key: random key of the step, [2].
        steps: steps taken before.
        stages: the functions of the step.

    Returns:
        The advantage of each token, [P, G, T], and the rows to learn from, each field [B, T].

    Raises:
        ValueError: an advantage of a token to learn from is not finite.
    """
    _, rollout, reward = groups
    compared = (rollout.mask, logp_old - logp_ref, logp_teacher - logp_old, energy)
    mask, drift, gap, energy = (by_group(x, len(reward.value)) for x in compared)
    value = stages.credit(reward, gains.kl * drift, mask)
    scored = scored_rows(rollout, reward.valid, value, logp_old, logp_ref, logp_teacher)
    weight = by_group(vmap(stages.energy_weight)(logp_old, scored), len(reward.value))
    adv = vmap(stages.baseline)(value, weight.square() * energy, mask & reward.valid[..., None])
    changed, share = stages.distillation(adv, gap, mask), stages.distillation_share(steps)
    adv = changed if share == 1 else adv + share * (changed - adv)
    keep = torch.stack([reward.valid, *(f(rollout, adv) for f in stages.filters)]).all(0)
    batch = make_batch(rollout, keep, adv, logp_old, logp_ref, logp_teacher)
    selected = stages.token_mask(batch, row_keys(groups, prng.fold_in(key, MARKING)))
    return adv, batch._replace(selected=selected)


def groups_to_learn_from(batch: Batch, groups: int) -> Bool[Tensor, "P"]:
    """Groups that have a token with an advantage among those that validity and filters left to learn from.

    Args:
        batch: all rows of the step, each field [B, T].
        groups: number of groups, P.

    Returns:
        True for the groups with signal, [P].
    """
    return by_group(batch.mask & (batch.adv != 0), groups).any(-1).any(-1)


def sample_advantages(adv: Float[Tensor, "P G T"], groups: Groups) -> Float[Tensor, "P G"]:
    """Each sample's advantage, which is that of its first sampled token.

    Args:
        adv: advantage of each token, [P, G, T].
        groups: P problems, their samples and rewards.

    Returns:
        The advantage of each sample, [P, G].
    """
    return first_token(adv, by_group(groups.rollout.mask, len(adv)))


UNMOVED = Gains(kl=1.0, entropy=1.0)
AT_THE_START = Carry(drawn=0, waiting=None, gains=UNMOVED)
