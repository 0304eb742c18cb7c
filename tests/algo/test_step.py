"""The box, on a policy that is one table: what happens in which order, what is learned, and what is reported."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from batches import dealt, policy_objective
from fakes import WORDS, TablePolicy, TableSampler, problem
from hypothesis import given, settings
from torch import Tensor

from grpo_fn.algo import corrections, credit, group_sampling, losses, masking, objective
from grpo_fn.algo.advantage import group_normalized, leave_one_out, mean_centered
from grpo_fn.algo.credit import ScoredStep
from grpo_fn.algo.metrics import sample_advantages
from grpo_fn.algo.step import (
    AT_THE_START,
    Algorithm,
    Experience,
    Term,
    from_sampler,
    from_trainer,
    grpo_step,
)
from grpo_fn.core import prng
from grpo_fn.core.batch import by_group, given_batch, outcome_reward
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Carry, Gains, Reward, Rollout
from grpo_fn.rewards.combine import combine, score_serially

TABLE = torch.tensor([0.3, -0.2, 0.0, 0.5, -0.4, 0.2])
KEY = prng.key(3, device="cpu")
COSTLY = settings(max_examples=max(5, settings.default.max_examples // 8))
FEW = settings(max_examples=max(2, settings.default.max_examples // 20))
KEYS = {
    *(f"generation/{name}" for name in ("rows", "tokens", "truncated", "length_mean", "length_min", "length_max")),
    *(f"reward/{name}" for name in ("mean", "min", "max", "std", "correct_rate", "invalid", "likes_two", "likes_one")),
    *(f"advantage/{name}" for name in ("mean", "min", "max", "std", "zero_variance_groups")),
    "train/skipped_step",
    *(f"loss/{name}" for name in ("objective", "kl", "entropy", "clip_low", "clip_high", "grad_norm")),
    *("loss/kl_coef_multiplier", "loss/entropy_coef_multiplier"),
    *(f"loss/ratio_{name}" for name in ("mean", "min", "max", "capped")),
    *(f"loss/{name}" for name in ("logprob_diff_mean", "logprob_diff_max", "mismatch_kl", "mismatch_ess")),
    *("loss/correction_mean", "loss/importance_masked_frac", "optimizer/lr", "optimizer/step"),
    "system/micro_batches",
}
NO_REFERENCE = (KEYS - {"loss/kl"}) | {"loss/approx_kl"}
ALWAYS = {"loss/objective", "loss/grad_norm", "loss/kl_coef_multiplier", "loss/entropy_coef_multiplier"}
MEASURED_WHILE_LEARNING = {name for name in KEYS if name.startswith("loss/")} - ALWAYS


def likes_two(problem: Problem, completion: Completion) -> float:
    return completion.text.split().count("2") / completion.length


def likes_one(problem: Problem, completion: Completion) -> float:
    return float("1" in completion.text.split())


def broken(problem: Problem, completion: Completion) -> None:
    """Nothing can be scored."""


def constant(problem: Problem, completion: Completion) -> float:
    return 0.3


def outcome(advantage) -> partial:
    return partial(credit.outcome, advantage=advantage)


LIKES = (likes_two, likes_one)


def score(*parts) -> partial:
    """The sum of the parts, the second for half."""
    return partial(combine, parts=parts, weights=[1.0, 0.5][: len(parts)], score=score_serially)


def algo(beta: float = 0.0, entropy_bonus: float = 0.0, n: int = 3, **changes) -> Algorithm:
    f = policy_objective(kl=objective.k3_ratio, beta=beta, entropy_bonus=entropy_bonus)
    numbers = {"prompts": n, "group_size": 4}
    return Algorithm(**{**numbers, "objective": f, "credit": outcome(mean_centered), **changes})


def pair(
    lr: float = 0.5,
    reference: Tensor | None = None,
    table: Tensor = TABLE,
    micro_tokens: int = 20,
    devices: int = 1,
    dropout: bool = False,
) -> tuple[TablePolicy, TableSampler]:
    cut = partial(dealt, micro_tokens=micro_tokens, devices=devices)
    policy = TablePolicy(table, lr=lr, reference_table=reference, cut=cut)
    policy.dropout = dropout
    return policy, TableSampler(policy)


def stream(first: int, count: int) -> list[Problem]:
    return [problem(10 + i, "?") for i in range(first, first + count)]


def onwards(
    policy,
    sampler,
    how: Algorithm,
    carried: Carry,
    key: Tensor = KEY,
    span=lambda name: nullcontext(),
    reward=None,
    parts: Sequence = LIKES,
) -> tuple[Experience, Carry, dict[str, float]]:
    run = {"reward": reward or score(*parts), "teacher": None, "demonstrations": None}
    return grpo_step(policy, sampler, stream, carried, key=key, algo=how, span=span, **run)


def step(policy, sampler, how: Algorithm, **options) -> tuple[Experience, dict[str, float]]:
    """The first step."""
    experience, _, figures = onwards(policy, sampler, how, AT_THE_START, **options)
    return experience, figures


def row_adv(experience: Experience) -> Tensor:
    """[P, G]"""
    return sample_advantages(experience.adv, experience.groups)


# -- order


@pytest.mark.parametrize(("old_logp", "passes"), [(from_sampler, []), (from_trainer, ["logp"])])
def test_a_step_samples_scores_trains_and_syncs(old_logp, passes):
    policy, sampler = pair(micro_tokens=10**6)
    log = policy.log

    @contextmanager
    def span(name: str) -> Iterator[None]:
        log.append(f"<{name}")
        yield
        log.append(f"{name}>")

    def reward(*arguments) -> Reward:
        log.append("reward")
        return score(*LIKES)(*arguments)

    step(policy, sampler, algo(old_logp=old_logp, minibatches=3), span=span, reward=reward)
    climb = ["vjp", "pullback", "update"]
    assert log == [
        *("<generate", "sample", "generate>", "<score", "reward", "score>", "rest"),
        *("<train", *passes, *climb, *climb, *climb, "train>", "<sync", "load", "sync>"),
    ]


def test_a_reweighting_is_shown_before_each_update_what_the_policy_says_then():
    policy, sampler = pair(micro_tokens=10**6)
    shown = []

    def noted(logp, group):
        shown.append(logp)
        return group.adv

    step(policy, sampler, algo(minibatches=3, reweighting=noted))
    climb = ["logp", "vjp", "pullback", "update"]
    assert [call for call in policy.log if call in climb] == climb * 3
    assert len(shown) == 3


@pytest.mark.parametrize(("name", "call"), [("logp_ref", "reference"), ("energy", "energy")])
def test_a_pass_is_made_once_however_often_a_credit_reads_it(name, call):
    passes = []

    def reading(scored: ScoredStep) -> Tensor:
        assert torch.equal(scored.rows(name), scored.rows(name))
        passes.append(scored.rows(name))
        return outcome(mean_centered)(scored)

    reading.NEEDS = frozenset({name})
    policy, sampler = pair(reference=torch.zeros(WORDS))
    experience, _ = step(policy, sampler, algo(credit=reading))
    assert policy.log.count(call) == 1
    if name == "energy":
        torch.testing.assert_close(passes[0], policy_energy(experience.groups.rollout))


def policy_energy(rollout: Rollout) -> Tensor:
    """|d log p / d logits|^2 of each token, from the derivative."""
    scores = torch.func.jacrev(lambda table: table.log_softmax(-1))(TABLE.double()).square().sum(-1)
    return torch.where(rollout.mask, scores[rollout.tokens], 0.0)


@COSTLY
@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_every_epoch_takes_one_update_for_each_minibatch(epochs, minibatches, micro_tokens):
    policy, sampler = pair(micro_tokens=micro_tokens)
    seen: dict[int, set[tuple[float, ...]]] = defaultdict(set)  # the totals that each update was made with
    how = algo(n=4, epochs=epochs, minibatches=minibatches)

    def noted(scores, batch, totals, gains):
        seen[len(policy.steps)].add(tuple(map(float, totals)))
        return how.objective(scores, batch, totals, gains)

    experience, figures = step(policy, sampler, replace(how, objective=noted))
    assert len(policy.steps) == len(seen) == epochs * minibatches == figures["optimizer/step"]
    # Of all its micro-batches the same.
    tokens, rows, samples, groups = zip(*(only for (only,) in seen.values()), strict=True)
    assert sum(tokens) == epochs * int(experience.groups.rollout.mask.sum())
    assert set(rows) == set(samples) == {16 / minibatches}
    assert set(groups) == {len(experience.groups.problems) / minibatches}
    assert sum(len(micro.tokens) for micro in policy.seen) == epochs * 16
    assert torch.equal(sampler.table, policy.table)


# -- what is learned


def by_hand(table: Tensor, rollout: Rollout, adv: Tensor) -> Tensor:
    """The on-policy gradient, one token after the other: -A (onehot - p) averaged over all sampled tokens."""
    p, adv = table.double().softmax(-1), adv.double().flatten(0, 1)
    terms = [
        -adv[b, t] * (torch.eye(WORDS, dtype=torch.float64)[rollout.tokens[b, t]] - p)
        for b, t in rollout.mask.nonzero().tolist()
    ]
    return torch.stack(terms).mean(0)


@pytest.mark.parametrize("advantage", [mean_centered, leave_one_out, partial(group_normalized, eps=1e-4, ddof=0)])
@pytest.mark.parametrize("old_logp", [from_sampler, from_trainer])
@COSTLY
@given(seed=st.integers(0, 99), micro_tokens=st.integers(1, 80))
def test_an_on_policy_step_climbs_the_policy_gradient(advantage, old_logp, seed, micro_tokens):
    policy, sampler = pair(micro_tokens=micro_tokens)
    how = algo(credit=outcome(advantage), old_logp=old_logp)
    experience, figures = step(policy, sampler, how, key=prng.key(seed, device="cpu"))
    _, rollout, reward = experience.groups
    groups = [advantage(v, ok) for v, ok in zip(reward.value, reward.valid, strict=True)]
    torch.testing.assert_close(row_adv(experience), torch.stack(groups))
    expected = by_hand(TABLE, rollout, experience.adv)
    torch.testing.assert_close(policy.steps[0], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(policy.table, TABLE.double() - 0.5 * expected, rtol=1e-9, atol=1e-12)
    assert figures["loss/ratio_min"] == pytest.approx(1.0, abs=1e-12)
    assert figures["loss/ratio_max"] == pytest.approx(1.0, abs=1e-12)
    assert figures["loss/logprob_diff_max"] == pytest.approx(0.0, abs=1e-12)
    assert figures["loss/clip_low"] == figures["loss/clip_high"] == 0.0
    assert figures["loss/grad_norm"] == pytest.approx(float(expected.norm()))
    p = TABLE.double().softmax(-1)
    assert figures["loss/entropy"] == pytest.approx(float(torch.special.entr(p).sum()))


def own_forward_pass(policy: TablePolicy, rollout: Rollout) -> Tensor:
    """As from_trainer, but a pass of its own whatever the step is."""
    return policy.logp(rollout)


@pytest.mark.parametrize("reference", [None, torch.linspace(-1, 1, WORDS)])
@COSTLY
@given(seed=st.integers(0, 99), micro_tokens=st.integers(1, 80))
def test_one_update_has_the_bits_of_a_pass_before_it(reference, seed, micro_tokens):
    """The trainer's logp_old is then the one of the update's own pass, and no other is made."""
    correct = partial(corrections.truncated_weight, ratio=corrections.token_ratio, cap=1.1)
    results = []
    for old_logp in (own_forward_pass, from_trainer):
        policy, sampler = pair(reference=reference, micro_tokens=micro_tokens)
        sampler.table = sampler.table.roll(1)  # older weights: logp_sampled is not logp_old
        changes = {"beta": 0.0 if reference is None else 0.3, "old_logp": old_logp}
        experience, figures = step(
            policy, sampler, with_correction(correct, **changes), key=prng.key(seed, device="cpu")
        )
        results.append((policy, experience, figures))
    (one, explicit, expected), (other, own, got) = results
    assert torch.equal(one.table, other.table)
    assert expected == got
    assert "logp" in one.log
    assert "logp" not in other.log
    mask = explicit.batch.mask
    if not expected["train/skipped_step"]:
        assert torch.equal(own.batch.logp_old[mask], explicit.batch.logp_old[mask])
        if reference is not None:
            assert torch.equal(own.batch.logp_ref[mask], explicit.batch.logp_ref[mask])


def reads_logp_old(scored: ScoredStep) -> Tensor:
    return scored.by_group(scored.rows("logp_old")).nan_to_num()


@pytest.mark.parametrize(
    ("changes", "dropout"),
    [
        ({}, True),
        ({"epochs": 2}, False),
        ({"minibatches": 3}, False),
        ({"token_mask": lambda batch, key: batch.mask & (batch.logp_old < -1.5)}, False),
        ({"credit": reads_logp_old}, False),
    ],
    ids=["dropout", "epochs", "minibatches", "token_mask", "credit"],
)
def test_the_own_pass_of_an_update_stands_in_for_no_other_pass_than_its_own(changes, dropout):
    """Where something reads logp_old before, where a second update follows, and where dropout says something else."""
    results = []
    for old_logp in (own_forward_pass, from_trainer):
        policy, sampler = pair(dropout=dropout)
        sampler.table = sampler.table.roll(1)
        step(policy, sampler, algo(old_logp=old_logp, **changes))
        results.append(policy)
    assert results[0].log == results[1].log
    assert results[1].log.count("logp") == 1
    assert torch.equal(results[0].table, results[1].table)


# -- what is reported


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_step_reports_the_same_figures_every_time(beta):
    policy, sampler = pair(reference=torch.zeros(WORDS) if beta else None)
    for epochs in (1, 2):
        _, figures = step(policy, sampler, algo(beta=beta, epochs=epochs))
        assert figures.keys() == (KEYS if beta else NO_REFERENCE)
        assert all(type(x) is float and x == x for x in figures.values())


def test_a_step_in_which_nothing_could_be_scored_changes_nothing_and_says_so():
    policy, sampler = pair()
    experience, figures = step(policy, sampler, algo(minibatches=3, credit=None), parts=[broken])
    assert torch.equal(policy.table, TABLE.double())
    assert "vjp" not in policy.log
    assert policy.log[-1] == "load"
    assert not experience.adv.any()
    assert figures["reward/invalid"] == figures["advantage/zero_variance_groups"] == 1.0
    assert figures["loss/objective"] == figures["loss/grad_norm"] == 0.0
    assert figures["optimizer/step"] == 3.0
    gone = {"reward/likes_two", "reward/likes_one", *MEASURED_WHILE_LEARNING}
    assert figures.keys() == (KEYS - gone) | {"reward/broken"}


# -- steps without signal


def test_a_step_without_signal_is_refused_and_said():
    policy, sampler = pair(reference=torch.zeros(WORDS))
    how = algo(beta=1.0, entropy_bonus=1.0)
    before = policy.table.clone()
    _, carried, figures = onwards(policy, sampler, how, AT_THE_START, parts=[constant])
    assert figures["train/skipped_step"] == 1.0
    assert torch.equal(policy.table, before)
    assert {"vjp", "update"}.isdisjoint(policy.log)
    assert carried == AT_THE_START._replace(drawn=3, steps=1)
    assert "loss/kl" not in figures


def drop_all_with_an_advantage(rollout: Rollout, adv: Tensor) -> Tensor:
    """As drop_truncated does where every sample that differs from its group ran into the limit."""
    return (adv == 0).all(-1)


@pytest.mark.parametrize(("filters", "trained"), [([], True), ([drop_all_with_an_advantage], False)])
def test_signal_counts_after_filters(filters, trained):
    """dppo_tv's penalty would move the weights of a step in which no token that may learn has an advantage."""
    policy, sampler = pair()
    sampler.load(
        TablePolicy(TABLE.flip(0), lr=0.0, reference_table=None)
    )  # another policy's samples: there is something to penalise
    f = partial(algo().objective, token_loss=partial(losses.dppo_tv, delta=0.2, kappa=1.0))
    before = policy.table.clone()
    _, figures = step(policy, sampler, algo(objective=f, filters=filters))
    assert figures["advantage/zero_variance_groups"] < 1
    assert figures["train/skipped_step"] == float(not trained)
    assert torch.equal(policy.table, before) == (not trained)


# -- filters, marks, entropy, controllers


def test_a_sample_that_a_filter_leaves_out_stays_in_the_baseline():
    policy, sampler = pair()
    experience, _ = step(policy, sampler, algo(filters=[masking.drop_truncated]))
    rollout, adv = experience.groups.rollout, row_adv(experience)
    assert rollout.truncated.any()
    assert adv.flatten()[rollout.truncated].any()
    torch.testing.assert_close(adv.sum(-1), torch.zeros(3), rtol=0, atol=1e-6)
    shown = rollout._replace(mask=rollout.mask & ~rollout.truncated[:, None])
    torch.testing.assert_close(policy.steps[0], by_hand(TABLE, shown, experience.adv))


def test_marks_reach_the_loss_and_their_keys_are_the_rows_own():
    keys: list[Tensor] = []

    def first_words(batch, key):
        keys.append(key)
        return batch.mask & (prng.uniform(key, batch.mask.shape[1], dtype=torch.float32, low=0.0, high=1.0) < 0.5)

    selected = []
    for n in (2, 3):
        policy, sampler = pair(micro_tokens=10**6)
        step(policy, sampler, algo(n=n, token_mask=first_words))
        (micro,) = policy.seen
        selected.append(int(micro.selected.sum()))
        assert 0 < selected[-1] < int(micro.mask.sum())
    assert torch.equal(keys[0], keys[1][:8])
    assert len(keys[1].unique(dim=0)) == 12


def test_controllers_are_asked_once_a_step_and_move_the_coefficients():
    calls = []

    def halving(gain: float, measured: float) -> float:
        calls.append((gain, measured))
        return gain / 2

    reference = torch.tensor([1.0, -1.0, 0.0, 0.5, 0.0, -0.5])
    control = partial(objective.next_gains, kl_control=halving, entropy_control=None)
    how = algo(beta=1.0, control=control, credit=None)
    policy, sampler = pair(lr=0.0, reference=reference)
    _, carried, figures = onwards(policy, sampler, how, AT_THE_START, parts=[constant])
    assert calls == [(1.0, figures["loss/kl"])]
    assert carried.gains == Gains(kl=0.5, entropy=1.0)
    _, _, figures = onwards(policy, sampler, how, carried._replace(drawn=0), parts=[constant])
    assert figures["loss/kl_coef_multiplier"] == 0.5
    torch.testing.assert_close(policy.steps[1], policy.steps[0] / 2)  # the same rows, half the penalty


# -- dynamic sampling


def rarely(problem: Problem, completion: Completion) -> float:
    """Only some groups have two kinds of samples under it."""
    return float(completion.text.startswith("2 3"))


def dynamic(max_gen_batches: int = 20) -> Algorithm:
    sampling = partial(group_sampling.dynamic, max_gen_batches=max_gen_batches)
    return algo(n=4, group_sampling=sampling)


def test_dynamic_sampling_learns_from_groups_with_signal_alone_and_wastes_none():
    policy, sampler = pair()
    carried, learned, drawn = AT_THE_START, [], 0
    for _ in range(4):
        experience, carried, figures = onwards(policy, sampler, dynamic(), carried, parts=[rarely])
        assert (experience.adv != 0).any(-1).any(-1).all()
        learned += [p.uid - 10 for p in experience.groups.problems]
        drawn += int(figures["generation/batches"]) * 4
        assert carried.drawn == drawn
        assert figures["advantage/zero_variance_groups"] == figures["generation/zero_variance_fill"] == 0.0
        assert figures["generation/rows"] == 16 * figures["generation/batches"]
    waiting = [] if carried.waiting is None else [p.uid - 10 for p in carried.waiting.problems]
    # Every group with signal is learned from once, in the order of the stream: none twice, none lost.
    order = [*learned, *waiting]
    assert order == sorted(set(order))
    assert len(order) < drawn
    assert len(learned) == 16


def test_without_enough_signal_the_step_is_filled_up():
    policy, sampler = pair()
    how = dynamic(max_gen_batches=1)
    experience, carried, figures = onwards(policy, sampler, how, AT_THE_START, parts=[rarely])
    assert len(experience.groups.problems) == 4
    assert figures["generation/zero_variance_fill"] == 4 - 4 * figures["generation/accepted"] > 0
    assert carried.waiting is None
    signal = (experience.adv != 0).any(-1).any(-1).tolist()
    assert signal == sorted(signal, reverse=True)


@FEW
@given(seed=st.integers(0, 50), cut=st.integers(1, 3))
def test_dynamic_sampling_remembers_nothing_but_its_carry(seed, cut):
    """A run that stops after `cut` steps and one that does not end with the same table."""
    key, tables = prng.key(seed, device="cpu"), []
    for stops in ((), (cut,)):
        policy, sampler = pair()
        carried = AT_THE_START
        for i in range(4):
            if i in stops:
                table = policy.table
                policy, sampler = pair(table=table)
            _, carried, _ = onwards(policy, sampler, dynamic(), carried, key=key, parts=[rarely])
        tables.append(policy.table)
    assert torch.equal(*tables)


# -- minibatches and epochs


@pytest.mark.parametrize("old_logp", [from_sampler, from_trainer])
def test_every_update_of_a_step_is_measured_against_the_policy_that_sampled(old_logp):
    policy, sampler = pair(lr=5.0, micro_tokens=10**6)
    step(policy, sampler, algo(n=4, epochs=3, minibatches=2, old_logp=old_logp))
    logprobs = TABLE.double().log_softmax(-1)
    assert len(policy.seen) == 6
    for micro in policy.seen:
        got, expected = micro.logp_old[micro.mask].double(), logprobs[micro.tokens[micro.mask]]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


# -- trainer against sampler

OTHER = torch.tensor([0.1, 0.4, -0.3, 0.2, 0.0, -0.6])


def apart(rollout: Rollout, rows: slice = slice(None)) -> Tensor:
    """log pi_trainer - log pi_sampler of every sampled token, in float64, the sampler at OTHER."""
    tokens = rollout.tokens[rows][rollout.mask[rows]]
    return (TABLE.double().log_softmax(-1) - OTHER.double().log_softmax(-1))[tokens]


def stale(**cut) -> tuple[TablePolicy, TableSampler]:
    """A policy and a sampler that has other weights."""
    policy, sampler = pair(lr=20.0, **cut)
    sampler.table = OTHER.double()
    return policy, sampler


@pytest.mark.parametrize(("old_logp", "rows"), [(from_sampler, slice(8)), (from_trainer, slice(None))])
@pytest.mark.parametrize("micro_tokens", [7, 10**6])
def test_the_mismatch_is_the_samplers_and_not_the_policys_own_movement(old_logp, rows, micro_tokens):
    """Of every token where the trainer is asked before the first update, else of the first minibatch."""
    policy, sampler = stale(micro_tokens=micro_tokens)
    how = algo(n=4, epochs=3, minibatches=2, old_logp=old_logp)
    experience, figures = step(policy, sampler, how)
    assert figures["loss/ratio_max"] > 1.5  # it has moved far
    x = apart(experience.groups.rollout, rows)
    w = x.exp()
    expected = {
        "loss/logprob_diff_mean": x.abs().mean(),
        "loss/logprob_diff_max": x.abs().max(),
        "loss/mismatch_kl": (w - 1 - x).mean(),
        "loss/mismatch_ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
    }
    assert {name: figures[name] for name in expected} == pytest.approx(
        {k: float(v) for k, v in expected.items()}, abs=1e-6
    )


def test_a_first_minibatch_without_scores_reports_no_mismatch():
    def first_half_unscorable(problem: Problem, completion: Completion) -> float | None:
        return None if problem.uid < 12 else likes_two(problem, completion)

    for old_logp, measured in ((from_sampler, False), (from_trainer, True)):
        policy, sampler = stale()
        how = algo(n=4, minibatches=2, old_logp=old_logp)
        _, figures = step(policy, sampler, how, parts=[first_half_unscorable])
        assert ("loss/mismatch_kl" in figures) == measured
        assert "loss/correction_mean" in figures


def with_correction(correct, **changes) -> Algorithm:
    how = algo(**{"old_logp": from_trainer, **changes})
    return replace(how, objective=partial(how.objective, importance_correction=correct))


@COSTLY
@given(seed=st.integers(0, 99), micro_tokens=st.integers(1, 80))
def test_a_step_on_anothers_samples_climbs_the_weighed_gradient(seed, micro_tokens):
    policy, sampler = stale(micro_tokens=micro_tokens)
    how = with_correction(partial(corrections.truncated_weight, ratio=corrections.token_ratio, cap=1.2))
    experience, figures = step(policy, sampler, how, key=prng.key(seed, device="cpu"))
    rollout = experience.groups.rollout
    w = torch.zeros(rollout.mask.shape, dtype=torch.float64)
    w[rollout.mask] = apart(rollout).exp().clamp(max=1.2)
    expected = by_hand(TABLE, rollout, experience.adv * by_group(w, 3))
    torch.testing.assert_close(policy.steps[0], expected, rtol=1e-5, atol=1e-7)  # the sampler speaks float32
    assert figures["loss/correction_mean"] == pytest.approx(float(w[rollout.mask].mean()), abs=1e-6)
    assert figures["loss/importance_masked_frac"] == 0.0


# -- the seams


def test_a_reward_laid_out_the_other_way_is_refused():
    def turned(asked: Sequence[Problem], rollout: Rollout) -> Reward:
        good = score(*LIKES)(asked, rollout)
        return outcome_reward(good.value.T, good.valid.T, {name: x.T for name, x in good.parts.items()})

    policy, sampler = pair()
    with pytest.raises(ValueError, match=r"got reward value \(4, 3\), expected problems by samples, \(3, 4\)"):
        step(policy, sampler, algo(), reward=turned)
    assert "update" not in policy.log


def test_a_reward_that_is_not_finite_is_refused():
    policy, sampler = pair()
    with pytest.raises(ValueError, match="got advantages that are not finite"):
        step(policy, sampler, algo(), parts=[lambda problem, completion: float("inf")])
    assert "update" not in policy.log


def test_a_sampler_that_returns_broken_rows_is_refused_before_anything_is_scored():
    policy, sampler = pair()
    whole = sampler.sample

    def silent(*args, **kwargs) -> Rollout:
        rollout = whole(*args, **kwargs)
        return rollout._replace(mask=torch.zeros_like(rollout.mask))

    sampler.sample = silent
    with pytest.raises(ValueError, match="got row 0 without a sampled token"):
        step(policy, sampler, algo())
    assert policy.log[-1] == "sample"


OTHER_SHAPE = {
    "credit": (lambda scored: scored.reward.value, r"got shape \[3, 4\], expected floating-point .* \[3, 4, 6\]"),
    "filters": ([lambda rollout, adv: adv != 0], r"got shape \[3, 4, 6\], expected booleans of shape \[3, 4\]"),
    "token_mask": (lambda batch, key: batch.mask[0], r"got shape \[6\], expected booleans of shape \[12, 6\]"),
    "objective": (
        lambda scores, batch, totals, gains: scores.logp,
        r"got shape \[.*\], expected float.* of shape \[\]",
    ),
}


@pytest.mark.parametrize("knob", OTHER_SHAPE)
def test_a_function_that_returns_something_else_is_refused_before_the_first_update(knob):
    function, message = OTHER_SHAPE[knob]
    policy, sampler = pair()
    with pytest.raises(ValueError, match=rf"step\.Algorithm\.{knob}: {message}"):
        step(policy, sampler, algo(**{knob: function}))
    assert "update" not in policy.log


# -- terms beside the sampled rows


def pull(scores, batch, totals, gains):
    """A term of its own diagnostics: the mean log-prob of its rows."""
    nll = -torch.where(batch.mask, scores.logp, 0.0)
    return nll.sum() / totals.tokens, {"nll": nll.detach(), "token_weight": torch.ones_like(nll)}


def test_a_term_beside_takes_its_share_from_the_sampled_rows_and_no_more():
    tables = {}
    for share in (0.0, 0.25):
        policy, sampler = pair()

        def beside(scored: ScoredStep, share=share) -> Term:
            return Term(given_batch(scored.groups.rollout), pull, 0.0, share)

        step(policy, sampler, algo(beside=[beside]))
        tables[share] = policy.steps[0]
    torch.testing.assert_close(tables[0.25], 0.75 * tables[0.0], rtol=1e-9, atol=1e-12)
