"""The lens shows what each algorithm would have made of a step, as a user points it at a run."""

from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from batches import dealt, policy_objective
from fakes import WORDS, TablePolicy, first_step, table_scores
from hypothesis import given
from test_html_page import Reader
from test_token_page import Reader as TokenReader
from torch.func import grad

from grpo_fn.algo import credit, losses, objective
from grpo_fn.algo import masking as filters
from grpo_fn.algo.advantage import group_normalized, mean_centered
from grpo_fn.algo.step import Algorithm
from grpo_fn.core import prng
from grpo_fn.core.types import Gains, Scores
from grpo_fn.lab import lens, presets
from grpo_fn.rewards.combine import combine, score_serially
from grpo_fn.shell.logging import rollout_store
from grpo_fn.testing.strategies import tensors

UNMOVED = Gains(kl=1.0, entropy=1.0)
TABLE = torch.tensor([0.3, -0.2, 0.0, 0.5, -0.4, 0.2])
KEY = prng.key(5, device="cpu")


def algorithm(
    token_loss=losses.reinforce, advantage=mean_centered, loss_aggregation=objective.token_mean, **changes
) -> Algorithm:
    f = policy_objective(token_loss=token_loss, kl=objective.k2, loss_aggregation=loss_aggregation, beta=0.1)
    stages = {"objective": f, "credit": partial(credit.outcome, advantage=advantage)}
    return Algorithm(**{**stages, "prompts": 3, "group_size": 4, **changes})


ALGORITHMS = {
    "plain": algorithm(),
    "clipped": algorithm(partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.2)),
    "normalized": algorithm(
        advantage=partial(group_normalized, eps=1e-4, ddof=1), loss_aggregation=objective.sequence_mean
    ),
    "finished": algorithm(filters=[filters.drop_truncated]),
}


def likes_two(problem, completion) -> float:
    return completion.text.split().count("2") / completion.length


def step_of(algo: Algorithm):
    """A policy, and what it learned from in a step of `algo`."""
    cut = partial(dealt, micro_tokens=10**6, devices=1)
    policy = TablePolicy(TABLE, lr=0.5, reference_table=torch.zeros(WORDS), cut=cut)
    reward = partial(combine, parts=[likes_two], weights=[1.0], score=score_serially)
    return policy, first_step(policy, algo, key=KEY, reward=reward)[0]


def view(algo: Algorithm, experience) -> presets.View:
    old, ref = experience.batch.logp_old, experience.batch.logp_ref
    passes = {"logp_old": old, "logp_ref": ref, "logp_teacher": old, "energy": None}
    return presets.view(algo, experience.groups, passes, KEY, steps=0)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_view_is_the_signal_that_a_step_sends_back(name):
    policy, experience = step_of(ALGORITHMS[name])
    shown = view(ALGORITHMS[name], experience)
    scores = table_scores(TABLE.double(), shown.batch.tokens, experience.groups.rollout.mask)
    (signal,) = presets.signals(scores, {name: shown})
    sent, micro = policy.signals[0].logp, policy.seen[0]
    width = micro.tokens.shape[1]

    def is_row(b: int, i: int) -> bool:
        fields = ("tokens", "mask", "adv")
        return all(torch.equal(getattr(shown.batch, f)[b, :width], getattr(micro, f)[i]) for f in fields)

    order = [next(b for b in range(12) if is_row(b, i)) for i in range(len(sent))]
    assert not signal[sorted({*range(12)} - {*order})].any()
    torch.testing.assert_close(signal[order][:, :width], sent, rtol=1e-9, atol=1e-12)


def test_one_vmapped_call_is_a_gradient_for_each_view():
    _, experience = step_of(ALGORITHMS["plain"])
    views = {name: view(algo, experience) for name, algo in ALGORITHMS.items()}
    old = experience.batch.logp_old
    drift = 0.5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    scores = Scores(torch.where(experience.groups.rollout.mask, old + drift, 0.0), torch.zeros_like(old))
    got = presets.signals(scores, views)
    for signal, shown in zip(got, views.values(), strict=True):
        loss = partial(shown.objective, batch=shown.batch, totals=shown.totals, gains=UNMOVED)
        torch.testing.assert_close(signal, grad(lambda s, loss=loss: loss(s)[0])(scores).logp)
    assert not torch.allclose(got[0], got[1])


signals = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: tensors(shape, st.one_of(st.just(0.0), st.floats(-3, 3)))
)


@given(signals, st.floats(0.01, 100))
def test_cosines_are_symmetric_in_minus_one_to_one_and_a_louder_view_does_not_disagree(signal, factor):
    got = presets.cosines(signal)
    torch.testing.assert_close(got, got.T, rtol=0, atol=1e-12)
    assert (got.abs() <= 1 + 1e-9).all()
    silent = ~signal.flatten(1).any(-1)
    assert (got[silent] == 0).all()
    torch.testing.assert_close(got.diagonal(), (~silent).double())
    first = signal[:1] if signal[0].any() else torch.ones_like(signal[:1])
    torch.testing.assert_close(presets.disagreement(torch.cat([first, factor * first])), torch.zeros_like(first[0]))
    assert presets.disagreement(torch.cat([first, -first])).max() > 0


def test_moved_is_a_share_of_the_sampled_tokens():
    mask = torch.tensor([[False, True, True], [False, True, False]])
    signal = torch.tensor([[[9.0, 1.0, 0.0], [0.0, 2.0, 0.0]], [[0.0, 0.0, 0.0], [0.0, 0.0, 5.0]]])
    assert presets.nonzero_share(signal, mask).tolist() == [pytest.approx(2 / 3), 0.0]


# -- of a run


def test_every_preset_and_every_token_of_a_stored_step_is_on_a_page(whole: Path, capsys, tmp_path: Path) -> None:
    out, tokens = tmp_path / "page.html", tmp_path / "tokens.html"
    assert lens.main([str(whole), "--step", "4", "--out", str(out), "--token_report", str(tokens)]) == 0
    printed, page = capsys.readouterr().out, Reader(out.read_text())
    for name in presets.preset_names():
        assert name in printed
        assert any(name in text for text in page.texts)
    assert "gdpo: left out, weights: got parts ['boxed', 'correct']" in printed  # this run has others
    assert any("Where they disagree" in text for text in page.texts)
    assert not [text for text in page.texts if "</" in text], "markup that is shown as text"
    shown = TokenReader(tokens.read_text())
    rows = rollout_store.load_rows(whole / "rollouts" / "step_000004.jsonl.gz")
    assert len(shown.tokens) == sum(row["length"] for row in rows)
    assert {"dlogp", "entropy, nats"} <= {attrs.get("data-name") for _, attrs in shown.tags}


def test_on_policy_the_presets_without_a_clip_of_their_own_agree_on_direction(whole: Path) -> None:
    views = presets.view_step(whole, 2, policy=str(whole), on_policy=True, reference=None)
    cosine = dict(zip(views.names, presets.cosines(views.signal)[0].tolist(), strict=True))
    assert cosine["this run"] == pytest.approx(1.0)
    assert cosine["dr_grpo"] == pytest.approx(1.0)  # what the small run is
    assert cosine["cispo"] < 1 - 1e-6
    page = TokenReader(presets.own_signal_page(views, "t"))
    assert "entropy, nats" not in {attrs.get("data-name") for _, attrs in page.tags}  # it is not among what is stored


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["nowhere", "--step", "1"], "got nowhere without config.gin, expected a run folder"),
        (["RUN", "--step", "99"], "got --step 99, expected one whose rollout is stored: [1, 2, 3, 4, 5, 6]"),
    ],
)
def test_bad_input_is_one_line(whole: Path, capsys, argv: list[str], complaint: str) -> None:
    assert lens.main([word.replace("RUN", str(whole)) for word in argv]) == 2
    assert complaint in capsys.readouterr().err
    assert not (whole / "lens").exists()
