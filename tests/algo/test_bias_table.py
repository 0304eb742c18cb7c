"""Bias and noise of the estimators, by enumerating every outcome: the tables of docs/algorithms/bias.md."""

import re
from pathlib import Path

import bias_table as bias
import catalogue
import estimators
import hypothesis.strategies as st
import pytest
import tiny_worlds as tiny
import torch
from hypothesis import given, settings

from grpo_fn.algo import advantage, corrections, credit, losses, masking, objective

PROJECT = Path(__file__).resolve().parents[2]
FEW = settings(max_examples=max(2, settings.default.max_examples // 20))
seeds = st.integers(0, 2**60)
KINDS = (
    (advantage, ("reward", "valid")),
    (advantage, ("value", "energy", "mask")),
    (losses, ("logp", "row")),
    (corrections, ("logp", "row")),
    (objective, ("logp", "row")),
    (objective, ("batch", "totals")),
    (credit, ("scored",)),
    (masking, ("rollout", "adv")),
)
WITHOUT_A_LINE = {
    "outcome": "what every advantage of the tables goes through",
    "token_baseline": "what `optimal_token_baseline` goes through",
    "turn_returns": "of turns, which the rows of the tables do not have",
    "group_in_group": "of turns, which the rows of the tables do not have",
    "rejected_row": "of rows whose sampler differs from the policy, which those of the tables do not",
    "outlier_row": "of rows whose sampler differs from the policy, which those of the tables do not",
}
EXACT = {  # estimators whose mean is the gradient of the objective
    "leave_one_out": (estimators.Estimator(), estimators.minus_reward),
    "success": (estimators.Estimator(size=3, together=False, worth="solved"), estimators.failure),
    "reward_to_go": (bias.step_credits()["no baseline: `reward_to_go`"], estimators.minus_reward),
    "teacher_gap": (bias.teacher_gaps()["`teacher_gap` alone"], estimators.token_kl),
    **{name: (bias.kl_in_loss()[f"`{name}`"], estimators.token_kl) for name in ("k2", "k1_ratio", "k3_ratio")},
    "KL to go": (bias.kl_anywhere()["`reward_to_go`"], estimators.row_kl),
    "KL less others'": (bias.kl_anywhere()["`outcome_minus_kl` of `leave_one_out`, groups of 2"], estimators.row_kl),
}


@FEW
@given(seeds)
def test_the_energy_of_a_token_is_the_squared_norm_of_its_score(seed):
    logits = tiny.world(seed, 0.0).theta[0]
    slopes = torch.func.jacfwd(tiny.logps)(logits)
    torch.testing.assert_close(tiny.energies(logits), slopes.square().sum((-1, -2)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", EXACT)
@FEW
@given(seeds)
def test_the_mean_of_an_exact_estimator_is_the_gradient(name, seed):
    how, minimised = EXACT[name]
    w = tiny.world(seed, 0.0)
    mean, variance = estimators.moments(how, w)
    torch.testing.assert_close(mean, estimators.gradient(minimised, w), rtol=1e-10, atol=1e-12)
    assert variance > 0


@FEW
@given(seeds, st.sampled_from([1, 2]))
def test_the_variance_of_a_mean_over_rows_falls_with_their_number(seed, size):
    w = tiny.world(seed, 0.0)
    alone, more = (
        estimators.moments(estimators.Estimator(bias.to_go, n, together=False), w)[1] for n in (size, 2 * size)
    )
    torch.testing.assert_close(alone, 2 * more, rtol=1e-10, atol=1e-12)


def variance(w: tiny.World, p: int, reward: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of one row's update, each token weighed with its ratio, against E[x_t R] / E[x_t], x the weight of a token."""
    chance, score = tiny.chances(w.old[p]), torch.func.jacfwd(tiny.logps)(w.theta[p])
    share = chance[:, None] * weight
    baseline = reward @ share / share.sum(0).clamp(min=1e-300)
    ratio = (tiny.logps(w.theta[p]) - tiny.logps(w.old[p])).exp()
    update = torch.einsum("nt,ntij->nij", ratio * (reward[:, None] - baseline), score)
    return chance @ (update - torch.einsum("n,nij->ij", chance, update)).square().sum((1, 2))


@pytest.mark.parametrize("worth", ["reward", "solved"])
@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_energies_with_squared_ratios_lower_the_variance_in_every_world(worth, drift):
    """Were the group without end: below no baseline and the mean, on average below energies that are not weighed."""
    found = []
    for w in (tiny.world(seed, drift) for seed in range(tiny.POLICIES)):
        sums = torch.zeros(4)
        for p in range(tiny.PROMPTS):
            energy, ratio = tiny.energies(w.theta[p]), (tiny.logps(w.theta[p]) - tiny.logps(w.old[p])).exp()
            so_far = [torch.where(tiny.MASK, x.cumsum(1), 0.0) for x in (ratio**2 * energy, energy)]
            weights = [*so_far, tiny.MASK.double(), torch.zeros(energy.shape).double()]
            sums = sums + torch.stack([variance(w, p, getattr(w, worth)[p], weight) for weight in weights])
        found.append(sums)
    squared, plain, mean, nothing = torch.stack(found).T
    assert (squared < mean).all()
    assert (squared < nothing).all()
    assert squared.mean() < plain.mean() if drift else squared.equal(plain)


def test_every_function_has_a_line_or_a_reason():
    """One that is new is measured in tools/tables/bias_table.py, or named above with what speaks against it."""
    known = {name for module, positional in KINDS for name in catalogue.functions(module, *positional)}
    named = " ".join(name for section in bias.sections() for name in section.estimators)
    measured = known & set(re.findall(r"`(\w+)`", named))
    assert measured | set(WITHOUT_A_LINE) == known
    assert not measured & set(WITHOUT_A_LINE)


def test_the_page_shows_what_the_tool_measures():
    """The first lines of each section; `python tools/tables docs/algorithms/bias.md --check` measures all."""
    shown = (PROJECT / "docs" / "algorithms" / "bias.md").read_text(encoding="utf-8")
    for section in bias.sections():
        _, there, rest = shown.partition(f"**{section.title}**\n")
        assert there
        few = section._replace(estimators=dict([*section.estimators.items()][:3]))
        of_section = rest.partition("\n**")[0].splitlines()
        assert not set(bias.lines(few)) - set(of_section)
        assert len([line for line in of_section if line.startswith("| ")]) == 1 + len(section.estimators)


@pytest.mark.parametrize("preset", ["gspo", "luspo"])
def test_a_preset_by_the_ratio_of_a_row_has_a_line_with_its_clip_and_its_length_weight(preset):
    said = (PROJECT / "gin" / "algo" / f"{preset}.gin").read_text(encoding="utf-8")
    low, high = (re.search(rf"^    {knob} = (\S+)$", said, re.MULTILINE)[1] for knob in ("clip_low", "clip_high"))
    weight = "`{}`".format(*re.search(r"loss_aggregation = @objective[.](\w+)", said).groups())
    if of := re.search(r"^objective[.]\w+[.]max_length = (\d+)$", said, re.MULTILINE):
        weight += f" {of[1]}"
    assert f"{preset.upper()}: `sequence_ratio` {low}, {high}, {weight}" in bias.token_losses()
