"""Given tokens: their cross entropy, what each weighs, their share of a step, and that no term dilutes another."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from batches import GARBAGE, UNMOVED, batches, dealt, scores, totals, with_garbage, with_padding
from catalogue import bound
from hypothesis import assume, given, settings
from steps import KEY, Step, TokenPolicy, as_sampled, learn, old_of, preset, rich_step, silent, steps, unasked
from torch import Tensor
from torch.func import grad_and_value

from grpo_fn.algo import objective, supervised
from grpo_fn.algo import step as algorithm
from grpo_fn.algo.credit import ScoredStep
from grpo_fn.core.batch import observed_tokens, outcome_reward
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch, Rollout
from grpo_fn.testing.steps import scored_step

TOKEN_WEIGHTS = {"None": None, **bound(supervised, "logp", "row")}
AGGREGATIONS = bound(objective, "batch", "totals")
FEW = settings(max_examples=max(3, settings.default.max_examples // 6))
PLAIN = partial(supervised.cross_entropy, token_weight=None, loss_aggregation=objective.token_mean)


def composed(phi: str, weigh: str) -> partial:
    return partial(supervised.cross_entropy, token_weight=TOKEN_WEIGHTS[phi], loss_aggregation=AGGREGATIONS[weigh])


objectives = st.builds(composed, st.sampled_from(sorted(TOKEN_WEIGHTS)), st.sampled_from(sorted(AGGREGATIONS)))


def signal_of(f, logp: Tensor, batch: Batch, denominators=None) -> tuple[Tensor, Tensor]:
    """The learning signal on logp, and the objective's value."""
    loss = partial(f, batch=batch, totals=denominators or totals(batch), gains=UNMOVED)
    signal, (value, _) = grad_and_value(loss, has_aux=True)(scores(logp))
    assert not signal.entropy.any()
    return signal.logp, value


def exactly(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


# -- the objective


def phi_of(name: str, logp: float) -> float:
    return {"None": 1.0, "uncertain_tokens()": math.exp(logp) * (1 - math.exp(logp))}[name]


@pytest.mark.parametrize("phi", ["None", "uncertain_tokens()"])
@given(batches(), st.sampled_from(["token_mean", "sequence_mean"]))
def test_cross_entropy_is_the_scalar_loop(phi, data, weigh):
    """arXiv:2508.11408: -phi(p) log p of each token, phi a constant; a mean over tokens, or over rows of row means."""
    logp, batch = data
    rows = [[t for t, on in enumerate(row) if on] for row in batch.mask.tolist()]
    tokens, filled = sum(map(len, rows)), sum(bool(row) for row in rows)
    value, slope = 0.0, torch.zeros_like(logp)
    for b, row in enumerate(rows):
        for t in row:
            w = 1 / tokens if weigh == "token_mean" else 1 / (filled * len(row))
            value -= w * phi_of(phi, logp[b, t].item()) * logp[b, t].item()
            slope[b, t] = -w * phi_of(phi, logp[b, t].item())
    signal, found = signal_of(composed(phi, f"{weigh}()"), logp, batch)
    assert found.item() == pytest.approx(value, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(signal, slope, rtol=1e-9, atol=1e-12)


@given(objectives, batches(), st.data())
def test_splitting_given_rows_into_micro_batches_changes_nothing(f, data, draw):
    logp, batch = data
    cuts = sorted({0, len(logp), *draw.draw(st.lists(st.integers(0, len(logp)), max_size=3))})
    whole, value = signal_of(f, logp, batch)
    parts = [signal_of(f, logp[a:b], Batch(*(x[a:b] for x in batch)), totals(batch)) for a, b in pairwise(cuts)]
    exactly(torch.cat([signal for signal, _ in parts]), whole)
    exactly(sum(v for _, v in parts), value)


@given(objectives, batches(), st.integers(1, 3), st.sampled_from(GARBAGE))
def test_padding_and_garbage_behind_the_mask_change_nothing(f, data, extra, garbage):
    signal, value = signal_of(f, *data)
    wide, same = signal_of(f, *with_padding(*data, extra))
    exactly(wide[:, :-extra], signal)
    exactly(same, value)
    dirty, same = signal_of(f, *with_garbage(*data, garbage))
    assert torch.equal(dirty, signal)
    assert torch.equal(same, value)
    assert not signal[~data[1].mask].any()


@given(st.integers(0, 5), st.integers(0, 9))
def test_the_decaying_share_rises_along_a_line_and_falls_along_a_cosine(warmup, decay):
    """The schedule of arXiv:2508.11408 as the authors' code has it."""
    mu = partial(supervised.decaying_share, peak=0.9, valley=0.05, warmup=warmup, decay=decay)
    rising, falling = [mu(n) for n in range(warmup)], [mu(warmup + n) for n in range(decay)]
    assert rising == pytest.approx([0.9 * n / warmup for n in range(warmup)])
    assert falling == pytest.approx([0.475 + 0.425 * math.cos(math.pi * n / decay) for n in range(decay)])
    assert mu(warmup + decay) == mu(10**9) == 0.05


# -- demonstrations beside sampled rows


def shown(rows: int, width: int, first: int) -> Rollout:
    """Given rows of every length, numbered on from `first`."""
    mask = (torch.arange(width) > 0) & (torch.arange(width) <= 1 + torch.arange(rows)[:, None] % (width - 1))
    tokens = torch.zeros(rows, width, dtype=torch.long)
    tokens[:, 0] = first + torch.arange(rows)
    ended = torch.zeros(rows, dtype=torch.bool)
    return Rollout(tokens, mask, torch.zeros(rows, width, dtype=torch.float64), ended, ("",) * rows)


class Mixed:
    """A step of sampled rows and of given ones after them, and a policy for which each token is a parameter."""

    def __init__(self, seed: int, prompts: int, rows: int) -> None:
        sampled = rich_step(seed, prompts, group_size=3)
        more = rich_step(seed + 1, rows, group_size=1)
        fields = zip(sampled[1:], more[1:], strict=True)
        self.step = sampled._replace(**dict(zip(sampled._fields[1:], map(torch.cat, fields), strict=True)))
        self.sampled = len(sampled.logp)
        self.shown = shown(rows, sampled.logp.shape[1], self.sampled) if rows else None

    def learn(self, mu: float, *, micro_tokens: int = 10**6, devices: int = 1, **changes):
        """The signals of each update on every token, sampled rows first, and the figures."""
        share = partial(supervised.constant_share, mu=mu)
        term = partial(supervised.demonstrations, objective=PLAIN, share=share)
        numbers = {"prompts": len(self.step.groups.problems), "group_size": 3, "epochs": 1}
        stages = {
            "group_sampling": partial(as_sampled, self.step.groups),
            "old_logp": partial(old_of, self.step),
            "beside": [] if self.shown is None else [term],
        }
        policy = TokenPolicy(self.step, 0.0, partial(dealt, micro_tokens=micro_tokens, devices=devices))
        _, carried, figures = algorithm.grpo_step(
            policy,
            policy,
            unasked,
            algorithm.AT_THE_START,
            key=KEY,
            algo=replace(preset("chord"), **numbers | stages | changes),
            reward=unasked,
            span=silent,
            teacher=None,
            demonstrations=lambda steps: self.shown,
        )
        assert carried.steps == 1
        return policy.signals, figures


SEEDS = st.integers(0, 2**31)


@FEW
@given(SEEDS, st.integers(1, 3), st.integers(1, 5), st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_chord_is_the_sum_of_its_parts_each_over_its_own_tokens(seed, prompts, rows, mu):
    """arXiv:2508.11408: (1 - mu) GRPO + mu SFT, by a loop over the given tokens."""
    mixed, alone = Mixed(seed, prompts, rows), Mixed(seed, prompts, 0)
    (got,), figures = mixed.learn(mu)
    (grpo,), before = alone.learn(0.0)
    exactly(got[: mixed.sampled], (1 - mu) * grpo)
    given_tokens = [(b, t) for b, row in enumerate(mixed.shown.mask.tolist()) for t, on in enumerate(row) if on]
    slope = torch.zeros_like(got[mixed.sampled :])
    for b, t in given_tokens:
        slope[b, t] = -mu / len(given_tokens)
    exactly(got[mixed.sampled :], slope)
    nll = -sum(mixed.step.logp[mixed.sampled + b, t].item() for b, t in given_tokens) / len(given_tokens)
    assert figures["sft/loss"] == pytest.approx(nll)
    assert figures["loss/objective"] == pytest.approx((1 - mu) * before["loss/objective"] + mu * nll)
    assert figures["sft/tokens"] == len(given_tokens)


@FEW
@given(SEEDS, st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), st.integers(1, 60), st.integers(1, 3))
def test_micro_batches_of_a_mixture_add_up(seed, prompts, rows, minibatches, micro_tokens, devices):
    mixed = Mixed(seed, prompts * minibatches, rows * minibatches)
    whole, figures = mixed.learn(0.3, minibatches=minibatches)
    parts, same = mixed.learn(0.3, minibatches=minibatches, micro_tokens=micro_tokens, devices=devices)
    assert len(whole) == minibatches
    exactly(torch.stack(parts), torch.stack(whole))
    for name in ("loss/objective", "sft/loss", "loss/ratio_mean", "loss/entropy"):
        assert same[name] == pytest.approx(figures[name], rel=1e-9, abs=1e-12), name


@FEW
@given(SEEDS, st.integers(1, 3), st.integers(1, 3))
def test_given_rows_stay_out_of_the_figures_of_sampled_ones(seed, prompts, rows):
    mixed, alone = Mixed(seed, prompts, rows), Mixed(seed, prompts, 0)
    (_, got), (_, expected) = mixed.learn(0.5), alone.learn(0.0)
    assume(not expected["train/skipped_step"])  # without signal there is no figure of a loss: the next test
    for name, value in expected.items():
        if name not in ("loss/objective", "system/micro_batches"):
            assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name


def test_a_step_without_signal_learns_from_its_given_rows_alone():
    mixed, alone = Mixed(3, 2, 2), Mixed(3, 2, 0)
    for each in (mixed, alone):
        reward = each.step.groups.reward
        value = torch.ones_like(reward.value)
        groups = each.step.groups._replace(reward=outcome_reward(value, reward.valid, reward.parts))
        each.step = each.step._replace(groups=groups)
    (signal,), figures = mixed.learn(0.5)
    assert not signal[: mixed.sampled].any()
    assert signal[mixed.sampled :].any()
    assert figures["train/skipped_step"] == 0.0
    assert alone.learn(0.5)[0] == []
    assert Mixed(3, 2, 2).learn(0.5)[0][0][: mixed.sampled].any()


def test_demonstrations_are_those_of_the_steps_before_and_their_share_is():
    scored = replace(scored_step(*nothing_sampled(), steps=5), demonstrations=lambda steps: shown(steps, 4, 0))
    mu = partial(supervised.decaying_share, peak=0.9, valley=0.1, warmup=10, decay=0)
    term = supervised.demonstrations(scored, objective=PLAIN, share=mu)
    assert len(term.batch.mask) == 5
    assert (term.weight, term.share, term.sampled) == (0.45, 0.45, False)


def nothing_sampled():
    """Reward and mask of a group of one."""
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    return outcome_reward(torch.zeros(1, 1), mask[..., 0], {}), mask


@pytest.mark.parametrize("mu", [-0.1, 1.5])
def test_a_share_beyond_0_and_1_is_refused(mu):
    scored = scored_step(*nothing_sampled(), steps=3)
    with pytest.raises(
        ValueError, match=rf"supervised\.demonstrations\.share: got {mu} after 3 steps, expected 0 to 1"
    ):
        supervised.demonstrations(scored, objective=PLAIN, share=partial(supervised.constant_share, mu=mu))


# -- observations beside sampled rows: ECHO, arXiv:2605.24517

COEF = 0.1


def places_between(step: Step) -> list[tuple[int, int]]:
    """(row, token) of what stands between two sampled tokens of a row whose reward is valid, by a loop."""
    places = []
    valid = step.groups.reward.valid.flatten().tolist()
    for b, row in enumerate(step.groups.rollout.mask.tolist()):
        sampled = [t for t, on in enumerate(row) if on]
        places += [(b, t) for t in range(sampled[0], sampled[-1]) if not row[t] and valid[b]]
    return places


def observing(step: Step, **how) -> Tensor:
    beside = [partial(supervised.observations, objective=PLAIN, coef=COEF)]
    return learn(preset("echo"), step, beside=beside, **how).signals


@FEW
@given(steps(st.integers(1, 3)))
def test_observations_add_their_cross_entropy_and_leave_sampled_tokens_alone(step: Step):
    """L_GRPO + lambda L_Env, by a loop over the observed tokens."""
    places = places_between(step)
    expected = learn(preset("echo"), step).signals
    for b, t in places:
        expected[0, b, t] -= COEF / len(places)
    torch.testing.assert_close(observing(step), expected, rtol=1e-12, atol=1e-12)


@given(steps(st.integers(1, 2)))
def test_a_step_without_observations_has_no_such_term(step: Step):
    groups = step.groups
    scored = ScoredStep(groups, {}, frozenset(), UNMOVED, 0)
    term = supervised.observations(scored, objective=PLAIN, coef=COEF)
    assert (term is None) == (not places_between(step))
    if term is not None:
        assert sorted(map(tuple, term.batch.mask.nonzero().tolist())) == sorted(places_between(step))
        assert (term.weight, term.share) == (COEF, 0.0)


@given(steps(st.integers(1, 2)), st.integers(1, 3))
def test_padding_and_prompts_are_no_observations(step: Step, extra: int):
    mask = step.groups.rollout.mask
    wide = torch.nn.functional.pad(mask, (extra, extra))
    between = observed_tokens(wide)
    assert torch.equal(between[:, extra:-extra], observed_tokens(mask))
    assert not between[:, :extra].any()
    assert not between[:, -extra:].any()
    assert not (between & wide).any()


# -- the supervised stage


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_supervised_step_reads_the_next_demonstrations_and_samples_nothing(minibatches):
    policy = TokenPolicy(rich_step(1, 8, group_size=1, width=4), 0.0)
    calls = []

    def stream(first: int, number: int) -> list[Problem]:
        calls.append((first, number))
        return [Problem(i, "", "", {}) for i in range(first, first + number)]

    def given_of(problems) -> Rollout:
        return shown(len(problems), 4, problems[0].uid)

    algo = supervised.Stage(objective=PLAIN, prompts=4, minibatches=minibatches)
    carried = algorithm.AT_THE_START
    for number in (1, 2):
        experience, carried, figures = supervised.supervised_step(
            policy, policy, stream, carried, algo=algo, given=given_of, span=silent
        )
        assert (carried.drawn, carried.steps) == (4 * number, number)
        assert experience.groups.reward.value.shape == (4, 1)
        assert "reward/mean" not in figures
        assert figures["sft/loss"] == pytest.approx(figures["loss/objective"], rel=0.5)
    assert calls == [(0, 4), (4, 4)]
    assert len(policy.signals) == 2 * minibatches
    for signal in policy.signals:
        assert signal.sum() == pytest.approx(-1.0)  # each is a mean over its own tokens
