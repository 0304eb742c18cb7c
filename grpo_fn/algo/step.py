"""One GRPO step (Shao et al. 2024, arXiv:2402.03300, Algorithm 1, lines 5 to 11) on one page.

The ratio's denominator is `(policy, rollout) -> logp_old`:

    policy    the policy that learns, pi_theta
    rollout   the step's samples, B = P * G rows
    returns   logp_old of each token, [B, T], in nats
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad_and_value

from grpo_fn.algo import metrics
from grpo_fn.algo.credit import ScoredStep, token_advantages
from grpo_fn.algo.group_sampling import GroupBatch
from grpo_fn.algo.objective import Objective, objective_value
from grpo_fn.core import prng
from grpo_fn.core.batch import (
    check_reward_shapes,
    check_rollout,
    check_tensor,
    count,
    make_batch,
    minibatches,
    reweigh_groups,
    row_keys,
    rows_as_rollout,
    scatter_rows,
    trim_rows,
)
from grpo_fn.core.partials import check_divides, check_positive, function_and_knobs, needs
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import (
    UNDECLARED,
    Batch,
    Carry,
    Gains,
    Groups,
    Policy,
    Reward,
    Rollout,
    Sampler,
    Scores,
    Totals,
    TrainablePolicy,
)

Stream = Callable[[int, int], Sequence[Problem]]  # problems first, ..., first + count - 1
Span = Callable[[str], AbstractContextManager[object]]
TOKEN_MASK_KEY = -1  # folded into the step's key for token_mask; uids are not negative, so no problem shares it
UNMOVED = Gains(kl=1.0, entropy=1.0)
AT_THE_START = Carry(drawn=0, waiting=None, gains=UNMOVED)


def from_sampler(policy: Policy, rollout: Rollout) -> Float[Tensor, "B T"]:
    """logp_old = logp_sampled: exact when sampler and trainer compute alike, as the local sampler does."""
    return rollout.logp_sampled


def from_trainer(policy: Policy, rollout: Rollout) -> Float[Tensor, "B T"]:
    """logp_old from the trainer's own forward pass: no sampler mismatch in the ratio.

    One more pass, unless the step has one update, whose own pass then gives it (`Algorithm.own_pass_suffices`).
    It is computed with the weights before this step's first update, for groups carried over from the step before, too.
    """
    return policy.logp(rollout)


class Term(NamedTuple):
    """One term of what an optimizer step minimises. Its denominators are its own, so it dilutes no other."""

    batch: Batch
    objective: Objective
    weight: float
    share: float = 0.0  # fraction of the loss; the sampled rows keep 1 - the sum of all shares
    sampled: bool = False  # by the policy; the others are given

    def loss(self, scores: Scores, *, batch: Batch, totals: Totals, gains: Gains) -> tuple[Tensor, dict[str, Tensor]]:
        """weight * objective of a micro-batch, a scalar, and the objective's diagnostics of each token, [B, T]."""
        value, diagnostics = objective_value(self.objective, scores, batch, totals, gains)
        return self.weight * value, diagnostics


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The `algorithm` section of a configuration: what makes a GRPO relative. None: that stage is not there.

    Raises:
        ValueError: a number is below 1, or prompts do not split into whole minibatches.
    """

    objective: Objective  # (scores, batch, totals, gains) -> a micro-batch's share of the loss, and diagnostics
    credit: Callable[[ScoredStep], Tensor] | None  # the advantage of every token, [P G T]; None: rewards teach nothing
    group_sampling: Callable[..., GroupBatch] | None = None  # (explore, carried, prompts) -> groups; None: the next
    old_logp: Callable[[Policy, Rollout], Tensor] = from_sampler  # the ratio's denominator, [B T]
    filters: Sequence[Callable[[Rollout, Tensor], Tensor]] = ()  # which samples may learn, [P G]; all have to agree
    token_mask: Callable[[Batch, Tensor], Tensor] | None = None  # tokens that the loss treats apart, [B T]
    reweighting: Callable[[Tensor, Batch], Tensor] | None = None  # of a group, each update: (logp now, rows) -> [G T]
    beside: Sequence[Callable[[ScoredStep], Term | None]] = ()  # given tokens to learn from beside the sampled ones
    control: Callable[[Gains, Mapping[str, float]], Gains] | None = None  # moves the coefficients by a step's metrics
    prompts: int  # a step
    group_size: int  # samples of each problem
    epochs: int = 1  # passes over one rollout
    minibatches: int = 1  # optimizer steps in a pass

    def __post_init__(self) -> None:
        check_positive(**{name: getattr(self, name) for name in ("prompts", "group_size", "epochs", "minibatches")})
        check_divides(self.prompts, self.minibatches)

    @cached_property
    def needs(self) -> frozenset[str]:
        """The inputs that its functions declare (`NEEDS`)."""
        return needs(vars(self))

    @cached_property
    def own_pass_suffices(self) -> bool:
        """Whether logp_old may come from the forward pass of the step's only update, as nothing reads it earlier."""
        from_own_pass = function_and_knobs(self.old_logp)[0] is from_trainer and self.epochs * self.minibatches == 1
        return from_own_pass and not (self.token_mask or self.reweighting)


class Experience(NamedTuple):
    """The groups, advantages and batch of a step, for records and replay."""

    groups: Groups
    adv: Float[Tensor, "P G T"]
    batch: Batch
    ratio: Float[Tensor, "N"] = torch.zeros(0)  # of every token at every update, in no order


def grpo_step(
    policy: Policy,
    sampler: Sampler,
    stream: Stream,
    carried: Carry,
    *,
    key: Tensor,
    algo: Algorithm,
    reward: Callable[[Sequence[Problem], Rollout], Reward],
    span: Span,
    teacher: Callable[[Groups, Tensor], Tensor] | None,
    demonstrations: Callable[[int], Rollout] | None,
) -> tuple[Experience, Carry, dict[str, float]]:
    """One GRPO step: sample, score, compute advantages, update, sync.

    A step whose credit leaves no token with an advantage, filters applied, is refused: no update, no KL, no entropy
    bonus, `train/skipped_step` 1.

    Args:
        policy: pi_theta, updated in place.
        sampler: draws from pi_old; takes the new weights at the end.
        stream: (first, count) -> problems first, ..., first + count - 1.
        carried: what the step before left; AT_THE_START for the first.
        key: random key of the step, [2].
        algo: the functions and numbers of the step.
        reward: (problems, rollout) -> rewards [P, G].
        span: name -> context manager that times a phase.
        teacher: (groups, logp_old) -> log-probs under the teacher, [B, T], logp_old in rows not taught; None: none.
        demonstrations: steps taken before -> given rows for `algo.beside`; None: none.

    Returns:
        The experience of the step, what it leaves for the next one, and its metrics by name.

    Raises:
        ValueError: a function of the step returns something of another shape, or reads what it does not declare.
    """

    def explore(first: int, count: int) -> Groups:
        problems = tuple(stream(first, count))
        with span("generate"):
            rollout = sampler.sample(problems, algo.group_size, key=key)
            check_rollout(rollout)
        with span("score"):
            rewards = reward(problems, rollout)
            check_reward_shapes(rewards, count, algo.group_size)
        return Groups(problems, rollout, rewards)

    if algo.group_sampling is None:  # the next problems, whatever comes of them
        fresh = groups = explore(carried.drawn, algo.prompts)  # o ~ pi_old(. | q), r
        carried, figures = carried._replace(drawn=carried.drawn + algo.prompts), {}
    else:
        groups, fresh, carried, figures = algo.group_sampling(explore, carried, algo.prompts)
    sampler.rest()  # the device is the trainer's now
    with span("train"):
        passes = {
            "logp_old": lambda: algo.old_logp(policy, groups.rollout),
            "logp_ref": lambda: policy.reference(groups.rollout),
            "energy": lambda: policy.energy(groups.rollout),
        }
        scored = ScoredStep(groups, passes, algo.needs, carried.gains, carried.steps, demonstrations)
        if teacher is not None:  # what it says is measured, whether or not something is learned from it
            scored.results["logp_teacher"] = teacher(groups, scored.rows("logp_old"))
        adv = token_advantages(scored, algo.credit)  # A
        # With dropout, the forward pass of an update has other log-probs than a pass without gradients.
        own_pass = algo.own_pass_suffices and "logp_old" not in scored.results and not policy.dropout
        batch = learning_rows(scored, adv, algo, own_pass=own_pass, key=key)
        terms = [Term(batch, algo.objective, 1.0, sampled=True), *filter(None, (f(scored) for f in algo.beside))]
        refused = without_signal(batch, algo)
        terms[0] = terms[0]._replace(weight=0.0 if refused else 1.0 - sum(term.share for term in terms))
        batches = zip(*(minibatches(term.batch, algo.minibatches) for term in terms), strict=True)
        updates = [[term._replace(batch=rows) for term, rows in zip(terms, parts, strict=True)] for parts in batches]
        learned = [
            update(policy, reweigh_terms(policy, part, algo), carried.gains, own_pass=own_pass)
            for _ in range(algo.epochs if len(terms) > 1 or not refused else 0)  # given rows are learned from anyway
            for part in updates
        ]
        batch = learned[0].batch if len(learned) == 1 else batch
    with span("sync"):
        sampler.load(policy)  # pi_old <- pi_theta
    figures |= metrics.step_metrics(batch, adv, groups, fresh, learned, scored)
    gains = carried.gains if algo.control is None else algo.control(carried.gains, figures)
    ratio = torch.cat([batch.adv.new_zeros(0), *(result.ratio for result in learned)])
    return Experience(groups, adv, batch, ratio), carried._replace(gains=gains, steps=carried.steps + 1), figures


def learning_rows(
    scored: ScoredStep, adv: Float[Tensor, "P G T"], algo: Algorithm, *, own_pass: bool, key: Tensor
) -> Batch:
    """The rows b = p * G + g to learn from: those that validity and filters leave, each field [B, T]."""
    groups, rollout = scored.groups, scored.groups.rollout
    keep = [scored.reward.valid, *(f(rollout, adv) for f in algo.filters)]
    for x in keep[1:]:
        check_tensor("step.Algorithm.filters", x, tuple(adv.shape[:2]), torch.bool)
    old = rollout.logp_sampled if own_pass else scored.rows("logp_old")  # the update puts its own in that place
    others = [scored.rows(x) if x in scored.needs else absent for x, absent in UNDECLARED.items()]
    batch = make_batch(rollout, torch.stack(keep).all(0), adv, old, *others)
    if algo.token_mask is None:
        return batch
    selected = algo.token_mask(batch, row_keys(groups, prng.fold_in(key, TOKEN_MASK_KEY)))
    check_tensor("step.Algorithm.token_mask", selected, tuple(batch.mask.shape), torch.bool)
    return batch._replace(selected=selected)


def without_signal(batch: Batch, algo: Algorithm) -> bool:
    """Whether a credit gave no advantage to any token that validity and filters left."""
    return algo.credit is not None and not bool((batch.mask & (batch.adv != 0)).any())


def reweigh_terms(policy: Policy, terms: Sequence[Term], algo: Algorithm) -> list[Term]:
    """The terms of an optimizer step, the sampled groups weighed by what the policy says of them now."""
    if algo.reweighting is None:
        return [*terms]
    batch = terms[0].batch
    # Before the update, as a group is whole until it is dealt out.
    batch = reweigh_groups(batch, policy.logp(rows_as_rollout(batch)), algo.group_size, algo.reweighting)
    return [terms[0]._replace(batch=batch), *terms[1:]]


def update(policy: TrainablePolicy, terms: Sequence[Term], gains: Gains, *, own_pass: bool) -> metrics.UpdateResult:
    """One optimizer step: the objective's gradient by the log-probs is a value, and goes back through the policy."""
    batch = terms[0].batch
    value, figures, mismatches, ratios = 0.0, [], [], [batch.adv.new_zeros(0)]
    parts = [(term, count(term.batch), rows) for term in terms for rows in policy.split_rows(term.batch)]
    policy.set_accumulation_steps(len(parts))
    for term, totals, rows in parts:
        micro = trim_rows(term.batch, rows)
        scores, pullback = policy.vjp(micro)  # log pi_theta
        if own_pass:
            micro = micro._replace(logp_old=scores.logp.detach())
        loss = partial(term.loss, batch=micro, totals=totals, gains=gains)
        signal, (part, diagnostics) = grad_and_value(loss, has_aux=True)(scores)
        pullback(signal)  # theta.grad += J^T dlogp
        value += float(part)  # the only wait for the device
        if term.sampled:
            diagnostics = metrics.of_tokens(scores, micro, diagnostics)
            mismatches.append(metrics.mismatch(scores.logp - micro.logp_sampled, micro.mask))
            ratios.append(diagnostics["ratio"].detach()[micro.mask].to(batch.adv.dtype))
        figures.append(metrics.diagnose(micro, diagnostics))
        if own_pass and term is terms[0]:
            batch = batch._replace(logp_old=scatter_rows(batch.logp_old, rows, micro.mask, micro.logp_old))
    stats, mismatch = metrics.merge_all(figures), metrics.merge_all(mismatches)
    return metrics.UpdateResult(value, stats, mismatch, torch.cat(ratios), policy.update(), batch, len(parts))
