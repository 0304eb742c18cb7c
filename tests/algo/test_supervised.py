"""Given tokens: their cross entropy, what each weighs, their share of a step, and that no component dilutes another."""

import math
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from batches import GARBAGE, UNMOVED, batches, dealt, scores, totals, with_garbage, with_padding
from catalogue import bound
from hypothesis import given, settings
from steps import CHOSEN, KEY, TokenPolicy, as_sampled, preset, rich_step, silent, unasked
from torch import Tensor
from torch.func import grad_and_value

from grpo_fn.algo import aggregation, controllers, supervised
from grpo_fn.algo import step as algorithm
from grpo_fn.algo.objective import Component, compare_as_given, update_policy
from grpo_fn.core.batch import count, given_batch, without_energy, without_look
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch, Rollout

TOKEN_WEIGHTS = bound(supervised, "logp", "row")
SHARES = bound(supervised, "steps")
AGGREGATIONS = bound(aggregation, "batch", "totals")
STAGES = [name for name in CHOSEN if name != "objective"]
FEW = settings(max_examples=max(3, settings.default.max_examples // 6))
PLAIN = partial(
    supervised.cross_entropy, token_weight=supervised.every_token_alike, loss_aggregation=aggregation.token_mean
)


def composed(phi: str, weigh: str) -> partial:
    return partial(supervised.cross_entropy, token_weight=TOKEN_WEIGHTS[phi], loss_aggregation=AGGREGATIONS[weigh])


objectives = st.builds(composed, st.sampled_from(sorted(TOKEN_WEIGHTS)), st.sampled_from(sorted(AGGREGATIONS)))


def learn(f, logp: Tensor, batch: Batch, denominators=None) -> tuple[Tensor, Tensor]:
    """The learning signal on logp, and the objective's value."""
    loss = partial(f, batch=batch, totals=denominators or totals(batch), gains=UNMOVED)
    signal, (value, _) = grad_and_value(loss, has_aux=True)(scores(logp))
    assert not signal.entropy.any()
    return signal.logp, value


def exactly(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


# -- the objective


def phi_of(name: str, logp: float) -> float:
    return {"every_token_alike": 1.0, "uncertain_tokens": math.exp(logp) * (1 - math.exp(logp))}[name]


@pytest.mark.parametrize("phi", ["every_token_alike", "uncertain_tokens"])
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
    signal, found = learn(composed(f"{phi}()", f"{weigh}()"), logp, batch)
    assert found.item() == pytest.approx(value, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(signal, slope, rtol=1e-9, atol=1e-12)


@given(objectives, batches(), st.data())
def test_splitting_given_rows_into_micro_batches_changes_nothing(f, data, draw):
    logp, batch = data
    cuts = sorted({0, len(logp), *draw.draw(st.lists(st.integers(0, len(logp)), max_size=3))})
    whole, value = learn(f, logp, batch)
    parts = [learn(f, logp[a:b], Batch(*(x[a:b] for x in batch)), totals(batch)) for a, b in pairwise(cuts)]
    exactly(torch.cat([signal for signal, _ in parts]), whole)
    exactly(sum(v for _, v in parts), value)


@given(objectives, batches(), st.integers(1, 3), st.sampled_from(GARBAGE))
def test_padding_and_garbage_behind_the_mask_change_nothing(f, data, extra, garbage):
    signal, value = learn(f, *data)
    wide, same = learn(f, *with_padding(*data, extra))
    exactly(wide[:, :-extra], signal)
    exactly(same, value)
    dirty, same = learn(f, *with_garbage(*data, garbage))
    assert torch.equal(dirty, signal)
    assert torch.equal(same, value)
    assert not signal[~data[1].mask].any()


@pytest.mark.parametrize("phi", TOKEN_WEIGHTS.values(), ids=list(TOKEN_WEIGHTS))
@given(batches())
def test_a_token_weight_is_between_0_and_1_and_0_behind_the_mask(phi, data):
    logp, batch = data
    weight = torch.func.vmap(phi)(logp, batch)
    assert ((weight >= 0) & (weight <= 1)).all()
    assert not weight[~batch.mask].any()


@pytest.mark.parametrize("share", SHARES.values(), ids=list(SHARES))
def test_a_share_is_between_0_and_1(share):
    assert all(0 <= share(step) <= 1 for step in range(12))


@given(st.integers(0, 5), st.integers(0, 9))
def test_the_decaying_share_rises_along_a_line_and_falls_along_a_cosine(warmup, decay):
    """The schedule of arXiv:2508.11408 as the authors' code has it."""
    mu = partial(supervised.decaying_share, peak=0.9, valley=0.05, warmup=warmup, decay=decay)
    rising, falling = [mu(n) for n in range(warmup)], [mu(warmup + n) for n in range(decay)]
    assert rising == pytest.approx([0.9 * n / warmup for n in range(warmup)])
    assert falling == pytest.approx([0.475 + 0.425 * math.cos(math.pi * n / decay) for n in range(decay)])
    assert mu(warmup + decay) == mu(10**9) == 0.05


# -- components of a step


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

    def learn(
        self,
        mu: float,
        *,
        minibatches: int = 1,
        micro_tokens: int = 10**6,
        devices: int = 1,
        enough: bool = True,
        **changes,
    ):
        """The signals of each update on every token, sampled rows first, and the figures."""
        how = preset("chord")
        stages = {name: getattr(how, name) for name in CHOSEN}
        algo = algorithm.StepAlgorithm(
            **{
                **supervised.SAMPLED_ONLY,
                **stages,
                "group_sampling": partial(as_sampled, self.step.groups),
                "reward": unasked,
                "teacher": algorithm.without_teacher,
                "energy": without_energy,
                "look": without_look,
                "old_logp": algorithm.from_trainer,
                "kl_control": controllers.constant_gain,
                "entropy_control": controllers.constant_gain,
                "supervised_share": partial(supervised.constant_share, mu=mu),
                "demonstrations": lambda steps: self.shown,
                "group_size": 3,
                "epochs": 1,
                "minibatches": minibatches,
                "split": partial(dealt, micro_tokens=micro_tokens, devices=devices),
                "anchor": compare_as_given,
                "min_groups_with_signal": 0 if enough else 10**6,
                **changes,
            }
        )
        policy = TokenPolicy(self.step, 0.0)
        _, carried, figures = algorithm.grpo_step(
            policy, policy, unasked, algorithm.AT_THE_START, key=KEY, algo=algo, span=silent
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
@given(SEEDS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_rows_added_to_one_component_dilute_no_other(seed, prompts, rows, more):
    fewer, larger, longer = (
        Mixed(seed, prompts, rows),
        Mixed(seed, prompts, rows + more),
        Mixed(seed, prompts + more, rows),
    )
    ((few,), _), ((many,), _), ((long,), _) = (each.learn(0.5) for each in (fewer, larger, longer))
    exactly(many[: fewer.sampled], few[: fewer.sampled])
    exactly(long[longer.sampled :], few[fewer.sampled :])


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
    (_, got), (_, wanted) = mixed.learn(0.5), alone.learn(0.0)
    for name, value in wanted.items():
        if name not in ("loss/objective", "system/micro_batches"):
            assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name


def test_a_step_without_signal_learns_from_its_given_rows_alone():
    mixed = Mixed(3, 2, 2)
    (signal,), figures = mixed.learn(0.5, enough=False)
    assert not signal[: mixed.sampled].any()
    assert signal[mixed.sampled :].any()
    assert figures["train/skipped_step"] == 0.0
    assert Mixed(3, 2, 0).learn(0.5, enough=False)[0] == []


def test_a_component_alone_is_a_supervised_update():
    batch = given_batch(shown(3, 4, 0))
    policy = TokenPolicy(rich_step(1, 3, group_size=1, width=4), 0.0)
    learns = [Component(batch, count(batch), PLAIN, 1.0)]
    found = update_policy(
        policy, learns, UNMOVED, split=partial(dealt, micro_tokens=5, devices=1), anchor=compare_as_given
    )
    exactly(policy.signals[0], -batch.mask.double() / batch.mask.sum())
    assert found.ratio.numel() == 0


# -- the supervised stage


def test_a_supervised_step_reads_the_next_demonstrations_and_samples_nothing():
    step = rich_step(1, 8, group_size=1, width=4)
    policy = TokenPolicy(step, 0.0)
    asked = []

    def stream(first: int, number: int) -> list[Problem]:
        asked.append((first, number))
        return [Problem(i, "", "", {}) for i in range(first, first + number)]

    algo = algorithm.StepAlgorithm(
        **{
            **supervised.SAMPLED_ONLY,
            "given": lambda problems: shown(len(problems), 4, problems[0].uid),
            "group_sampling": lambda explore, carried: algorithm.GroupBatch(
                groups := explore(carried.drawn, 4), groups, carried._replace(drawn=carried.drawn + 4), {}
            ),
            "objective": PLAIN,
            "epochs": 1,
            "minibatches": 2,
            "split": partial(dealt, micro_tokens=10**6, devices=1),
            "anchor": compare_as_given,
            "group_size": 1,
            "min_groups_with_signal": 1,
            **dict.fromkeys(["reward", "teacher", "energy", "look", "old_logp", *STAGES], unasked),
            "filters": [],
            "kl_control": controllers.constant_gain,
            "entropy_control": controllers.constant_gain,
        }
    )
    carried = algorithm.AT_THE_START
    for number in (1, 2):
        seen, carried, figures = supervised.supervised_step(
            policy, policy, stream, carried, key=KEY, algo=algo, span=silent
        )
        assert (carried.drawn, carried.steps) == (4 * number, number)
        assert seen.groups.reward.value.shape == (4, 1)
        assert "reward/mean" not in figures
        assert figures["sft/loss"] == pytest.approx(figures["loss/objective"], rel=0.5)
    assert asked == [(0, 4), (4, 4)]
    assert len(policy.signals) == 4  # two minibatches a step
    for signal in policy.signals:
        assert signal.sum() == pytest.approx(-1.0)  # each is a mean over its own tokens


def test_a_run_that_samples_has_no_demonstrations_to_read():
    with pytest.raises(ValueError, match="got 2 problems to read demonstrations of, wanted none"):
        supervised.nothing_given([Problem(0, "", "", {})] * 2)
