"""What a function of a user's own has to declare, and what a run says of one that reads more than it declares."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import policy_objective
from fakes import WORDS, TablePolicy, first_step
from torch import Tensor

from grpo_fn.algo import credit, losses
from grpo_fn.algo.advantage import mean_centered
from grpo_fn.algo.credit import ScoredStep
from grpo_fn.algo.step import Algorithm, Experience
from grpo_fn.core import prng
from grpo_fn.core.batch import outcome_reward, rows_as_rollout
from grpo_fn.core.partials import needs
from grpo_fn.core.types import Batch, Groups, Reward, Rollout, Undeclared

KEY = prng.key(3, device="cpu")
TABLE = torch.tensor([0.3, -0.2, 0.0, 0.5, -0.4, 0.2])
TEACHER = TABLE.flip(0)
OUTCOME = partial(credit.outcome, advantage=mean_centered)
POLICY = policy_objective()
PLAIN = Algorithm(objective=POLICY, credit=OUTCOME, prompts=3, group_size=4)


def lengths(problems, rollout: Rollout) -> Reward:
    value = rollout.mask.sum(-1).double().view(len(problems), -1)
    return outcome_reward(value, torch.ones_like(value, dtype=torch.bool), {"length": value})


def taught(groups: Groups, logp_old: Tensor) -> Tensor:
    return TablePolicy(TEACHER, lr=0.0, reference_table=None).logp(groups.rollout)


def run(algo: Algorithm) -> tuple[TablePolicy, Experience, dict[str, float]]:
    """A step of a policy that keeps a reference, with a teacher."""
    policy = TablePolicy(TABLE, lr=0.5, reference_table=torch.zeros(WORDS))
    return policy, *first_step(policy, algo, key=KEY, reward=lengths, teacher=taught)


def refused(algo: Algorithm, name: str) -> None:
    """The step ends with the error that names what is not declared, and no update was taken."""
    policy = TablePolicy(TABLE, lr=0.5, reference_table=torch.zeros(WORDS))
    message = rf'reads {name} and does not declare it.*your_function\.NEEDS = frozenset\({{"{name}"}}\)'
    with pytest.raises(ValueError, match=message):
        first_step(policy, algo, key=KEY, reward=lengths, teacher=None if name == "logp_teacher" else taught)
    assert "update" not in policy.log


# -- a credit


def credit_of(name: str, *, declared: bool):
    """A credit that adds what it reads to the outcome."""

    def custom(scored: ScoredStep) -> Tensor:
        read = scored.by_group(scored.rows(name))
        return OUTCOME(scored) + torch.where(scored.mask, read, 0.0)

    if declared:
        custom.NEEDS = frozenset({name})
    return custom


def rows_of(experience: Experience, name: str) -> Tensor:
    """What the credit should have read, [B, T]."""
    rollout = rows_as_rollout(experience.batch)
    table = {"logp_ref": torch.zeros(WORDS), "logp_teacher": TEACHER}.get(name)
    if table is None:
        return TablePolicy(TABLE, lr=0.0, reference_table=None).energy(rollout)
    return TablePolicy(table, lr=0.0, reference_table=None).logp(rollout)


@pytest.mark.parametrize("name", ["logp_ref", "logp_teacher", "energy"])
def test_a_credit_reads_what_it_declares(name):
    _, experience, _ = run(replace(PLAIN, credit=credit_of(name, declared=True)))
    _, plain, _ = run(PLAIN)
    mask = experience.batch.mask
    added = (experience.batch.adv - plain.batch.adv)[mask]
    torch.testing.assert_close(added, rows_of(experience, name)[mask].to(added.dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["logp_ref", "logp_teacher", "energy"])
def test_a_credit_that_reads_what_it_does_not_declare_is_refused(name):
    refused(replace(PLAIN, credit=credit_of(name, declared=False)), name)


# -- a token loss, a KL, an objective


def loss_of(name: str, *, declared: bool):
    """A token loss that pulls the policy to what it reads; it returns the loss alone."""

    def custom(logp: Tensor, row: Batch) -> Tensor:
        return torch.where(row.mask, (logp - getattr(row, name)) ** 2, 0.0)

    if declared:
        custom.NEEDS = frozenset({name})
    return custom


@pytest.mark.parametrize("knobs", [{}, {"beta": 0.1}], ids=["token_loss", "kl"])
@pytest.mark.parametrize("name", ["logp_ref", "logp_teacher"])
def test_a_loss_that_reads_what_it_does_not_declare_is_refused_before_an_update(name, knobs):
    part = "kl" if knobs else "token_loss"
    own, declaration_error = (loss_of(name, declared=declared) for declared in (True, False))
    policy, _, _ = run(replace(PLAIN, objective=partial(POLICY, **{part: own}, **knobs)))
    assert not policy.table.isnan().any()
    refused(replace(PLAIN, objective=partial(POLICY, **{part: declaration_error}, **knobs)), name)


READS = {  # ways to read log-probs x of the shape of logp, whose value may not even show
    "compared": lambda logp, x: torch.where(x > logp, 0.0, 1.0) * logp,
    "compared, the other way round": lambda logp, x: torch.where(logp < x, 0.0, 1.0) * logp,
    "a condition": lambda logp, x: torch.where(torch.isnan(x), 0.0, logp),
    "chosen": lambda logp, x: torch.where(logp > 0, x, logp),
    "a method": lambda logp, x: x.exp() * 0 + logp,
    "with itself": lambda logp, x: x * x + logp,
    "negated": lambda logp, x: -x + logp,
    "from a number": lambda logp, x: 1.0 - x + logp,
    "indexed": lambda logp, x: x[0] + logp,
    "stacked": lambda logp, x: torch.stack([logp, x]).sum(0),
    "detached": lambda logp, x: logp + x.detach(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_no_way_of_reading_goes_unseen(read):
    def custom(logp: Tensor, row: Batch) -> Tensor:
        return torch.where(row.mask, read(logp, row.logp_ref), 0.0)

    refused(replace(PLAIN, objective=partial(POLICY, token_loss=custom)), "logp_ref")
    custom.NEEDS = frozenset({"logp_ref"})
    run(replace(PLAIN, objective=partial(POLICY, token_loss=custom)))


@pytest.mark.parametrize("name", ["logp_ref", "logp_teacher"])
def test_a_token_mask_and_a_reweighting_declare_what_they_read(name):
    def marked(batch: Batch, key: Tensor) -> Tensor:
        return batch.mask & (getattr(batch, name) > -1.0)

    def reweighed(logp: Tensor, rows: Batch) -> Tensor:
        return torch.where(getattr(rows, name) > -1.0, rows.adv, 0.0)

    for change in ({"token_mask": marked}, {"reweighting": reweighed}):
        refused(replace(PLAIN, **change), name)
        next(iter(change.values())).NEEDS = frozenset({name})
        run(replace(PLAIN, **change))


def test_undeclared_log_probs_survive_copying_and_pickling():
    _, experience, _ = run(PLAIN)
    assert isinstance(experience.batch.logp_ref, Undeclared)
    for same in (copy.deepcopy(experience.batch), pickle.loads(pickle.dumps(experience.batch))):
        assert same.logp_teacher.name == "logp_teacher"
        assert torch.equal(same.adv, experience.batch.adv)


# -- declarations


def test_a_declaration_may_depend_on_the_knobs():
    assert needs(partial(credit.reward_to_go, beta=0.0)) == frozenset()
    assert needs(partial(credit.reward_to_go, beta=0.1)) == {"logp_ref"}
    assert needs(partial(credit.outcome_minus_kl, advantage=mean_centered, beta=0.0)) == {"groups"}
    assert needs(partial(POLICY, beta=0.0)) == frozenset()
    assert needs(partial(POLICY, beta=0.1)) == {"logp_ref"}
    assert needs(partial(POLICY, beta=0.1, kl=lambda logp, row: logp)) == frozenset()


def test_a_kl_of_coefficient_0_needs_no_reference():
    policy, _, figures = run(replace(PLAIN, credit=partial(credit.reward_to_go, beta=0.0)))
    assert "reference" not in policy.log
    assert "loss/approx_kl" in figures
    policy, _, figures = run(replace(PLAIN, objective=partial(POLICY, beta=0.1)))
    assert "reference" in policy.log
    assert "loss/kl" in figures


# -- a token loss of a user's own and the figures of a step


def test_a_token_loss_may_return_the_loss_alone_and_the_step_has_its_figures():
    def custom(logp: Tensor, row: Batch) -> Tensor:
        return torch.where(row.mask, -row.adv * (logp - row.logp_old).exp(), 0.0)

    policy, experience, figures = run(replace(PLAIN, objective=partial(POLICY, token_loss=custom), epochs=2))
    wide = partial(losses.clipped_ratio, clip_low=1.0, clip_high=1e9)
    same, _, expected = run(replace(PLAIN, objective=partial(POLICY, token_loss=wide), epochs=2))
    torch.testing.assert_close(policy.table, same.table, rtol=1e-9, atol=1e-12)
    assert figures == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert figures["loss/clip_low"] == figures["loss/clip_high"] == 0.0
    assert figures["loss/correction_mean"] == 1.0
    assert {"loss/approx_kl", "loss/entropy", "loss/ratio_mean", "loss/ratio_max"} <= figures.keys()
    assert len(experience.ratio) == 2 * int(experience.batch.mask.sum())


def test_a_teacher_that_nothing_reads_is_measured_and_not_learned_from():
    policy, experience, figures = run(PLAIN)
    assert isinstance(experience.batch.logp_teacher, Undeclared)
    gap = (TEACHER.double().log_softmax(-1) - TABLE.double().log_softmax(-1))[experience.batch.tokens]
    assert figures["teacher/reverse_kl"] == pytest.approx(-float(gap[experience.batch.mask].mean()), abs=1e-6)
    assert policy.steps
