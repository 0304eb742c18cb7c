"""The box, on a policy that is one table: what happens in which order, what is learned, and what is reported."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from fakes import LIMIT, PROMPT, WORDS, TablePolicy, TableSampler, problem
from hypothesis import given, settings
from torch import Tensor

from grpo_fn import kl, objective, prng, weights
from grpo_fn.advantage import centered, group_normalized, leave_one_out
from grpo_fn.algorithm import Algo, alone, from_sampler, grpo_step, recomputed
from grpo_fn.problem import Completion, Problem
from grpo_fn.rewards.combine import combine, serial
from grpo_fn.types import Policy, Reward, Rollout, Sampler, Totals

TABLE = torch.tensor([0.3, -0.2, 0.0, 0.5, -0.4, 0.2])
KEY = prng.key(3, device="cpu")
COSTLY = settings(max_examples=max(5, settings.default.max_examples // 4))
KEYS = {
    *(f"generation/{name}" for name in ("rows", "tokens", "truncated", "length_mean", "length_min", "length_max")),
    *(f"reward/{name}" for name in ("mean", "min", "max", "std", "correct_rate", "invalid", "likes_two", "likes_one")),
    *(f"advantage/{name}" for name in ("mean", "min", "max", "std", "no_signal")),
    *(f"loss/{name}" for name in ("objective", "kl", "entropy", "clip_low", "clip_high", "grad_norm")),
    *(f"loss/ratio_{name}" for name in ("mean", "min", "max")),
    *("loss/logp_gap_mean", "loss/logp_gap_max", "optimizer/lr", "optimizer/step"),
}
MEASURED_WHILE_LEARNING = {name for name in KEYS if name.startswith("loss/")} - {"loss/objective", "loss/grad_norm"}


def likes_two(problem: Problem, completion: Completion) -> float:
    return completion.text.split().count("2") / completion.length


def likes_one(problem: Problem, completion: Completion) -> float:
    return float("1" in completion.text.split())


def broken(problem: Problem, completion: Completion) -> None:
    """Nothing can be scored."""


def constant(problem: Problem, completion: Completion) -> float:
    return 0.3


def algo(beta: float = 0.0, parts: Sequence = (likes_two, likes_one), **changes) -> Algo:
    f = partial(
        objective.policy_objective,
        token_loss=partial(objective.clipped_ratio, clip_low=0.2, clip_high=0.2),
        kl=kl.k3_ratio,
        weigh=weights.token_mean,
        beta=beta,
    )
    reward = partial(combine, parts=parts, weights=[1.0, 0.5][: len(parts)], score=serial)
    numbers = {"group_size": 4, "epochs": 1, "minibatches": 1, "micro_tokens": 20}
    return Algo(
        **{**numbers, "reward": reward, "advantage": centered, "objective": f, "old_logp": from_sampler, **changes}
    )


def pair(lr: float = 0.5, reference: Tensor | None = None, table: Tensor = TABLE) -> tuple[TablePolicy, TableSampler]:
    policy = TablePolicy(table, lr=lr, reference_table=reference)
    return policy, TableSampler(policy)


def problems(n: int = 3) -> list[Problem]:
    return [problem(10 + i, "?") for i in range(n)]


def step(policy, sampler, how: Algo, n: int = 3, key: Tensor = KEY, all_reduce=alone, span=lambda name: nullcontext()):
    return grpo_step(policy, sampler, problems(n), key=key, algo=how, all_reduce=all_reduce, span=span)


# -- order


def test_the_fakes_speak_the_protocols():
    assert isinstance(pair()[0], Policy)
    assert isinstance(pair()[1], Sampler)


@pytest.mark.parametrize(("old_logp", "asked"), [(from_sampler, []), (recomputed, ["logp"])])
def test_a_step_samples_scores_trains_and_syncs(old_logp, asked):
    policy, sampler = pair()
    log = policy.log

    @contextmanager
    def span(name: str) -> Iterator[None]:
        log.append(f"<{name}")
        yield
        log.append(f"{name}>")

    scored = algo().reward
    how = algo(
        old_logp=old_logp, micro_tokens=10**6, minibatches=3, reward=lambda *a: (log.append("reward"), scored(*a))[1]
    )
    step(policy, sampler, how, span=span)
    climb = ["vjp", "pullback", "update"]
    assert log == [
        *("<generate", "sample", "generate>", "<score", "reward", "score>"),
        *("<train", *asked, "reference", *climb, *climb, *climb, "train>", "<sync", "load", "sync>"),
    ]


@COSTLY
@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_every_epoch_takes_one_update_for_each_minibatch(epochs, minibatches, micro_tokens):
    policy, sampler = pair()
    seen: list[Totals] = []
    experience, figures = step(
        policy,
        sampler,
        algo(epochs=epochs, minibatches=minibatches, micro_tokens=micro_tokens),
        n=4,
        all_reduce=lambda totals: (seen.append(totals), totals)[1],
    )
    assert len(policy.steps) == len(seen) == epochs * minibatches == figures["optimizer/step"]
    assert sum(int(t.tokens) for t in seen) == epochs * int(experience.rollout.mask.sum())
    assert sum(int(t.rows) for t in seen) == epochs * 16
    assert sum(len(micro.tokens) for micro in policy.seen) == epochs * 16
    assert torch.equal(sampler.table, policy.table)


# -- what is learned


def by_hand(table: Tensor, rollout: Rollout, adv: Tensor) -> Tensor:
    """The on-policy gradient, one token after the other: -A (onehot - p) averaged over all sampled tokens."""
    p = table.double().softmax(-1)
    terms = [
        -adv.flatten()[b] * (torch.eye(WORDS, dtype=torch.float64)[rollout.tokens[b, t]] - p)
        for b, t in rollout.mask.nonzero().tolist()
    ]
    return torch.stack(terms).mean(0)


@pytest.mark.parametrize("advantage", [centered, leave_one_out, partial(group_normalized, eps=1e-4, ddof=0)])
@pytest.mark.parametrize("old_logp", [from_sampler, recomputed])
@COSTLY
@given(seed=st.integers(0, 99), micro_tokens=st.integers(1, 80))
def test_an_on_policy_step_climbs_the_policy_gradient(advantage, old_logp, seed, micro_tokens):
    policy, sampler = pair()
    how = algo(advantage=advantage, old_logp=old_logp, micro_tokens=micro_tokens)
    experience, figures = step(policy, sampler, how, key=prng.key(seed, device="cpu"))
    reward = experience.reward
    groups = [advantage(v, ok) for v, ok in zip(reward.value, reward.valid, strict=True)]
    torch.testing.assert_close(experience.adv, torch.stack(groups))
    wanted = by_hand(TABLE, experience.rollout, experience.adv.double())
    torch.testing.assert_close(policy.steps[0], wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(policy.table, TABLE.double() - 0.5 * wanted, rtol=1e-9, atol=1e-12)
    assert figures["loss/ratio_min"] == pytest.approx(1.0, abs=1e-12)
    assert figures["loss/ratio_max"] == pytest.approx(1.0, abs=1e-12)
    assert figures["loss/logp_gap_max"] == pytest.approx(0.0, abs=1e-12)
    assert figures["loss/clip_low"] == figures["loss/clip_high"] == 0.0
    assert figures["loss/grad_norm"] == pytest.approx(float(wanted.norm()))
    p = TABLE.double().softmax(-1)
    assert figures["loss/entropy"] == pytest.approx(float(torch.special.entr(p).sum()))


@pytest.mark.parametrize("advantage", [centered, leave_one_out, partial(group_normalized, eps=1e-9, ddof=0)])
def test_groups_of_equal_rewards_teach_nothing(advantage):
    policy, sampler = pair()
    _, figures = step(policy, sampler, algo(parts=[constant], advantage=advantage, epochs=2))
    assert all(not signal.logp.any() for signal in policy.signals)
    assert all(not gradient.any() for gradient in policy.steps)
    assert torch.equal(policy.table, TABLE.double())
    assert (figures["advantage/no_signal"], figures["reward/std"]) == (1.0, pytest.approx(0.0, abs=1e-9))


def test_entropy_and_unsampled_tokens_get_no_signal():
    policy, sampler = pair(reference=torch.zeros(WORDS))
    step(policy, sampler, algo(beta=0.1))
    assert any(signal.logp.any() for signal in policy.signals)
    for micro, signal in zip(policy.seen, policy.signals, strict=True):
        assert not signal.entropy.any()
        assert not signal.logp[~micro.mask].any()
        assert signal.logp.isfinite().all()  # the sampler leaves nan where nothing was sampled


@COSTLY
@given(st.integers(0, 99), st.integers(1, 80), st.integers(1, 80))
def test_the_size_of_micro_batches_does_not_matter(seed, one, other):
    results = []
    for micro_tokens in (one, other):
        policy, sampler = pair(reference=torch.zeros(WORDS))
        how = algo(beta=0.1, epochs=2, minibatches=3, micro_tokens=micro_tokens)
        _, figures = step(policy, sampler, how, key=prng.key(seed, device="cpu"))
        results.append((policy.table, figures))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-9, atol=1e-9)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6, abs=1e-9)


def test_other_ranks_count_in_the_denominator():
    def twice(totals: Totals) -> Totals:
        return Totals(*(2 * x for x in totals))

    (here, sampler), (there, other) = pair(), pair()
    _, whole = step(here, sampler, algo())
    _, half = step(there, other, algo(), all_reduce=twice)
    torch.testing.assert_close(there.steps[0], here.steps[0] / 2)
    assert half["loss/objective"] == pytest.approx(whole["loss/objective"] / 2)


def test_a_second_epoch_is_off_policy_against_the_same_old_policy():
    policy, sampler = pair(lr=20.0)
    _, figures = step(policy, sampler, algo(epochs=2))
    assert figures["loss/ratio_max"] > 1.2
    assert figures["loss/clip_low"] + figures["loss/clip_high"] > 0
    first, second = policy.seen[0], policy.seen[len(policy.seen) // 2]
    torch.testing.assert_close(first.logp_old, second.logp_old, rtol=0, atol=0, equal_nan=True)


def test_without_a_reference_the_old_policy_stands_in():
    policy, sampler = pair()
    _, figures = step(policy, sampler, algo())
    for micro in policy.seen:
        torch.testing.assert_close(micro.logp_ref, micro.logp_old, rtol=0, atol=0, equal_nan=True)
    assert figures["loss/kl"] == pytest.approx(0.0, abs=1e-12)


def test_a_reference_pulls_the_policy_towards_itself():
    reference = torch.tensor([1.0, -1.0, 0.0, 0.5, 0.0, -0.5])
    policy, sampler = pair(reference=reference, lr=1.0)
    kls = [
        step(policy, sampler, algo(beta=1.0, parts=[constant]), n=8, key=prng.fold_in(KEY, i))[1]["loss/kl"]
        for i in range(30)
    ]
    assert kls[0] > 0.1
    assert max(kls[-5:]) < 0.01


def test_thirty_steps_find_out_what_pays():
    policy, sampler = pair(lr=4.0)
    figures = [step(policy, sampler, algo(parts=[likes_two]), n=8, key=prng.fold_in(KEY, i))[1] for i in range(30)]
    assert figures[0]["reward/mean"] < 0.3
    assert figures[-1]["reward/mean"] > 0.9
    assert float(policy.table.softmax(-1)[2]) > 0.9


# -- what is reported


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_step_reports_the_same_figures_every_time(beta):
    policy, sampler = pair(reference=torch.zeros(WORDS) if beta else None)
    for epochs in (1, 2):
        _, figures = step(policy, sampler, algo(beta=beta, epochs=epochs))
        assert figures.keys() == KEYS
        assert all(type(x) is float and x == x for x in figures.values())


def test_a_step_in_which_nothing_could_be_scored_changes_nothing_and_says_so():
    policy, sampler = pair()
    experience, figures = step(policy, sampler, algo(parts=[broken], minibatches=3))
    assert torch.equal(policy.table, TABLE.double())
    assert "vjp" not in policy.log
    assert policy.log[-1] == "load"
    assert not experience.adv.any()
    assert figures["reward/invalid"] == figures["advantage/no_signal"] == 1.0
    assert figures["loss/objective"] == figures["loss/grad_norm"] == 0.0
    assert figures["optimizer/step"] == 3.0
    gone = {"reward/likes_two", "reward/likes_one", *MEASURED_WHILE_LEARNING}
    assert figures.keys() == (KEYS - gone) | {"reward/broken"}


def test_a_row_that_could_not_be_scored_moves_nobody():
    def sometimes(problem: Problem, completion: Completion) -> float | None:
        return None if completion.length == LIMIT else likes_two(problem, completion)

    policy, sampler = pair()
    experience, _ = step(policy, sampler, algo(parts=[sometimes]))
    valid = experience.reward.valid.flatten()
    assert 0 < int(valid.sum()) < len(valid)
    shown = experience.rollout._replace(mask=experience.rollout.mask & valid[:, None])
    torch.testing.assert_close(policy.steps[0], by_hand(TABLE, shown, experience.adv.double()))


def test_the_experience_is_what_was_sampled_and_how_it_was_judged():
    policy, sampler = pair()
    experience, figures = step(policy, sampler, algo())
    assert experience.rollout.tokens.shape == (12, PROMPT + LIMIT)
    assert experience.adv.shape == experience.reward.value.shape == (3, 4)
    assert figures["reward/mean"] == pytest.approx(float(experience.reward.value.mean()))
    assert figures["generation/tokens"] == float(experience.rollout.mask.sum())


# -- the seams


def test_a_reward_laid_out_the_other_way_is_refused():
    def turned(asked: Sequence[Problem], rollout: Rollout) -> Reward:
        good = algo().reward(asked, rollout)
        return Reward(good.value.T, good.valid.T, {name: x.T for name, x in good.parts.items()})

    policy, sampler = pair()
    with pytest.raises(ValueError, match=r"got reward value \(4, 3\), wanted problems by samples, \(3, 4\)"):
        step(policy, sampler, algo(reward=turned))
    assert "update" not in policy.log


def test_a_reward_that_is_not_finite_is_refused():
    policy, sampler = pair()
    with pytest.raises(ValueError, match="got advantages that are not finite"):
        step(policy, sampler, algo(parts=[lambda problem, completion: float("inf")]))
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
    assert "reference" not in policy.log
