"""The variance of the estimators, by enumerating every outcome: the table of docs/algorithms/bias.md."""

import re
from functools import partial
from pathlib import Path

import bias_table as bias
import catalogue
import hypothesis.strategies as st
import pytest
import tiny_worlds as tiny
import torch
import variance_table as variance
from hypothesis import given, settings

from grpo_fn.algo import advantage, credit, turn_credit

PROJECT = Path(__file__).resolve().parents[2]
FEW = settings(max_examples=max(2, settings.default.max_examples // 20))
MEAN, OTB = "the mean, of `mean_centered`", "by energy so far, of `optimal_token_baseline`"
seeds = st.integers(0, 2**60)
KINDS = (
    (advantage, ("reward", "valid")),
    (advantage, ("value", "energy", "mask")),
    (credit, ("scored",)),
    (turn_credit, ("scored",)),
)
WITHOUT_A_LINE = {
    "outcome": "what every advantage of the table goes through",
    "outcome_minus_kl": "a KL is another objective",
    "per_part": "the sum of parts is another objective",
    "token_baseline": "what `optimal_token_baseline` goes through",
}


def world(seed: int) -> tiny.World:
    return tiny.World(*(x[None] for x in tiny.world(seed, 0.0)))


@FEW
@given(seeds)
def test_the_energy_of_a_token_is_the_squared_norm_of_its_score(seed):
    logits = tiny.world(seed, 0.0).theta[0]
    slopes = torch.func.jacfwd(tiny.logps)(logits)
    torch.testing.assert_close(tiny.energies(logits), slopes.square().sum((-1, -2)), rtol=1e-10, atol=1e-12)


@FEW
@given(seeds, st.sampled_from(["reward", "solved"]))
def test_the_mean_of_the_update_is_what_the_bias_table_has(seed, worth):
    how = variance.in_groups(variance.compared(advantage.leave_one_out), worth, 3)
    (mean, _), worlds = torch.func.vmap(partial(variance.moments, how))(world(seed)), world(seed)
    objective = {"reward": bias.minus_reward, "solved": bias.failure}[worth]
    torch.testing.assert_close(mean, bias.gradient(objective)(worlds), rtol=1e-10, atol=1e-12)


@FEW
@given(seeds, st.sampled_from(["reward", "solved"]))
def test_a_baseline_that_is_an_expectation_changes_no_mean(seed, worth):
    objective = {"reward": bias.minus_reward, "solved": bias.failure}[worth]
    wanted = bias.gradient(objective)(world(seed))
    for how in variance.expected(worth).values():
        mean, _ = torch.func.vmap(partial(variance.moments, how))(world(seed))
        torch.testing.assert_close(mean, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("worth", ["reward", "solved"])
def test_the_optimal_token_baseline_lowers_the_variance_in_every_world(worth):
    """Where it is the expectation that groups estimate; in groups of 4 it lowers that of what they do estimate."""
    found = variance.figures(variance.expected(worth), variance.worlds(0.0))
    for other in (variance.NOTHING, MEAN):
        assert (found[OTB][0] < found[other][0]).all()
    found = variance.figures(variance.baselines(worth, 4), variance.worlds(0.0))
    assert (found[variance.OTB][0] < found[variance.NOTHING][0]).all()
    assert found[variance.OTB][0].mean() < found["`mean_centered`"][0].mean()


@FEW
@given(seeds, st.sampled_from(["reward", "solved"]))
def test_no_baseline_changes_the_mean_of_tokens_weighed_with_their_ratios(seed, worth):
    away = tiny.World(*(x[None] for x in tiny.world(seed, variance.AWAY)))
    means = [torch.func.vmap(partial(variance.moments, how))(away).mean for how in variance.weighted(worth).values()]
    for mean in means[1:]:
        torch.testing.assert_close(mean, means[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("worth", ["reward", "solved"])
def test_energies_weighed_with_squared_ratios_lower_the_variance_of_rows_of_another_policy(worth):
    """In every world below the mean and no baseline, and on average below energies that are not weighed."""
    found = variance.figures(variance.weighted(worth), variance.worlds(variance.AWAY))
    lowered = found[variance.WEIGHTED][0]
    assert (lowered < found[variance.NOTHING][0]).all()
    assert (lowered < found["the mean"][0]).all()
    assert lowered.mean() < found["by energy so far"][0].mean()


def test_every_advantage_baseline_and_credit_has_a_line_or_a_reason():
    """One that is new is measured in tools/tables/variance_table.py, or named above with what speaks against it."""
    known = {name for module, positional in KINDS for name in catalogue.functions(module, *positional)}
    named = " ".join(name for _, estimators, _ in variance.sections() for name in estimators)
    measured = known & set(re.findall(r"`(\w+)`", named))
    assert measured | set(WITHOUT_A_LINE) == known
    assert not measured & set(WITHOUT_A_LINE)


def test_the_docs_show_what_the_tool_measures():
    """To the digits shown. Large groups and what is slow to measure are left to the test of the whole table."""
    shown = (PROJECT / "docs" / "algorithms" / "bias.md").read_text(encoding="utf-8")
    for title, estimators, away in variance.sections():
        _, found, rest = shown.partition(f"**{title}**\n")
        assert found
        of_section = rest.partition("\n**")[0].splitlines()
        quick = {n: how for n, how in estimators.items() if how.size < 8 and how.over is torch.func.vmap}
        assert not quick or not set(variance.rows(quick, away)) - set(of_section)
