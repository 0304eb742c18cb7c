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


@pytest.mark.parametrize("name", EXACT)
@FEW
@given(seeds)
def test_the_mean_of_an_exact_estimator_is_the_gradient(name, seed):
    how, minimised = EXACT[name]
    w = tiny.world(seed, 0.0)
    mean, variance = estimators.moments(how, w)
    torch.testing.assert_close(mean, estimators.gradient(minimised, w), rtol=1e-10, atol=1e-12)
    assert variance > 0


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
