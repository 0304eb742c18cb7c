"""An engine that does not compute what the policy does is found out after the push."""

from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import hypothesis.strategies as st
import pytest
import torch
from fakes import MODELS, VOCABULARY, tokenizer
from hypothesis import given, settings
from policies import CPU, local
from torch import Tensor, nn

from grpo_fn.core import prng, sampling
from grpo_fn.shell.model.hf import bare_prompt
from grpo_fn.shell.sampler.interface import DataParallelSampler
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler
from grpo_fn.shell.sampler.probe import PROMPT_TOKENS, Mismatch, Outside, Probe, count_outside, p_value, probe_prompt
from grpo_fn.shell.world import alone

KEY = prng.key(3, device="cpu")
POSITIONS = 64
PROBE = Probe(max_gap=0.05)


def sampler(model: nn.Module, temperature: float = 0.7) -> LocalSampler:
    token_sampler = partial(sampling.categorical, temperature=temperature)
    limits = {"max_new_tokens": 16, "stop": (), "max_rows": 8}
    return LocalSampler(model=model, tokenizer=tokenizer(), token_sampler=token_sampler, encode=bare_prompt, **limits)


def asked(spread: DataParallelSampler, policy: object) -> dict[str, float]:
    return PROBE(spread, policy, key=KEY, max_positions=POSITIONS, dtype=torch.float32)


def model(name: str = "qwen2_tied") -> nn.Module:
    made = MODELS[name](VOCABULARY)
    made.generation_config.eos_token_id = VOCABULARY - 1
    return made


def test_the_same_weights_pass():
    same = model("gemma2_capped")
    figures = asked(DataParallelSampler(sampler(same), alone(CPU)), local(same))
    assert 0 <= figures["engine/probe_gap_mean"] <= figures["engine/probe_gap_max"] < 1e-4


@pytest.mark.slow
@settings(deadline=None)
@given(name=st.sampled_from(list(MODELS)), place=st.integers(0, 99), by=st.sampled_from([0.3, -0.5]))
def test_one_weight_left_behind_is_noticed(name, place, by):
    """Whichever it is; one that does nothing to the log-probs is no difference."""
    fresh, stale = model(name), model(name)
    parameters = [x for x in fresh.parameters() if x.ndim > 1]
    with torch.no_grad():
        moved = parameters[place % len(parameters)]
        moved.add_(by * torch.randn(moved.shape, generator=torch.Generator().manual_seed(place)))
    with pytest.raises(Mismatch, match=r"engine 0 of 1: got log-probs that are .* expected at most 0\.001"):
        asked(DataParallelSampler(sampler(stale), alone(CPU)), local(fresh))


def test_another_temperature_is_noticed_and_log_probs_that_are_no_numbers_are():
    same, broken = model(), model()
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    for drawing, policy, match in (
        (sampler(same, temperature=1.0), same, "another temperature"),
        (sampler(same), broken, "nan nats"),
    ):
        with pytest.raises(Mismatch, match=match):
            asked(DataParallelSampler(drawing, alone(CPU)), local(policy, temperature=0.7))


def test_a_model_whose_weights_are_no_numbers_is_refused_for_its_weights():
    broken = model()
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="expected weights without NaN and inf"):
        asked(DataParallelSampler(sampler(broken), alone(CPU)), local(model(), temperature=0.7))


@given(positions=st.none() | st.integers(24, 300))
def test_the_prompt_is_longer_than_a_block_of_prefixes_where_there_is_space(positions):
    ids = bare_prompt(tokenizer(), probe_prompt(sampler(model()), positions))
    assert len(ids) >= (PROMPT_TOKENS if positions is None else min(PROMPT_TOKENS, positions - 12))
    assert positions is None or len(ids) <= positions


def test_after_every_load_and_among_the_figures():
    same = model()
    policy, calls = local(same), []

    def probe(spread: DataParallelSampler, policy: object) -> dict[str, float]:
        calls.append(policy)
        return {"engine/probe_gap_mean": float(len(calls))}

    spread, name = DataParallelSampler(sampler(same), alone(CPU), probe), "engine/probe_gap_mean"
    for expected in (1.0, None, 2.0):
        if expected is not None:
            spread.load(policy)
        assert spread.figures().get(name) == expected
    assert calls == [policy, policy]


def test_the_limit_follows_the_dtype():
    """A temperature a few hundredths off: far more than float32 rounds, and what 16 bits may be apart."""
    same = model()
    spread = DataParallelSampler(sampler(same, temperature=0.69), alone(CPU))
    with pytest.raises(Mismatch, match=r"expected at most 0\.001 \(probe\.FLOAT32_GAP\)"):
        asked(spread, local(same, temperature=0.7))
    figures = PROBE(spread, local(same, temperature=0.7), key=KEY, max_positions=POSITIONS, dtype=torch.bfloat16)
    assert 1e-3 < figures["engine/probe_gap_mean"] < 0.05


def draws_of_the_first(kept: int, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """From the likeliest tokens alone, with the log-probs of the whole distribution."""
    logits = logits / 0.7
    cut = torch.where(logits < logits.topk(kept).values[:, -1:], -torch.inf, logits)
    token, _ = sampling.categorical(cut, u, temperature=1.0)
    return token, logits.log_softmax(-1).gather(1, token[:, None])[:, 0]


def test_tokens_that_are_never_drawn_are_noticed():
    same, asking = model(), {"key": KEY, "max_positions": POSITIONS, "dtype": torch.float32}
    cut, whole = (
        DataParallelSampler(replace(sampler(same), token_sampler=partial(draws_of_the_first, n)), alone(CPU))
        for n in (20, VOCABULARY)
    )
    with pytest.raises(Mismatch, match=r"engine 0 of 1: got draws .* expected at least 1e-09: it leaves tokens out"):
        asked(cut, local(same))
    assert PROBE.compare_log_probs(cut, local(same), **asking)["engine/probe_gap_max"] < 1e-4
    assert asked(whole, local(same))["engine/probe_draws_p_value"] > 1e-9


@pytest.mark.parametrize("odd", [{"max_gap": 0.0}, {"max_gap": float("nan")}])
def test_limits_that_nothing_passes_are_refused(odd):
    with pytest.raises(ValueError, match="probe: got max_gap"):
        replace(PROBE, **odd)


# -- the exact test of draws


chances = st.floats(0.0, 1.0)


@given(st.lists(st.tuples(st.integers(1, 3), chances), min_size=1, max_size=3), st.data())
def test_a_p_value_is_the_probability_of_all_outcomes_that_are_as_far_out(counts, data) -> None:
    found = [Outside(n, data.draw(st.integers(0, n)), chance) for n, chance in counts]
    each = [chance for n, chance in counts for _ in range(n)]
    total, below, above = sum(one.seen for one in found), 0.0, 0.0
    for outcome in product((0, 1), repeat=len(each)):
        mass = prod(q if hit else 1 - q for hit, q in zip(outcome, each, strict=True))
        below += mass * (sum(outcome) <= total)
        above += mass * (sum(outcome) >= total)
    assert p_value(found) == pytest.approx(min(1.0, 2 * min(below, above)), abs=1e-12)


def test_a_count_is_of_the_second_half_beside_the_tokens_of_the_first() -> None:
    tokens = torch.tensor([3, 3, 5, 5, 7, 9])
    logp = torch.tensor([0.25, 0.25, 0.5, 0.5, 0.125, 0.125]).log()
    found = count_outside(tokens, logp)
    assert found[:2] == (3, 2)
    assert found.chance == pytest.approx(0.25, abs=1e-6)


def test_draws_from_the_distribution_are_refused_as_seldom_as_the_level_says() -> None:
    """Of 400 tests at the level of 5 %, 20 are expected; 45 or more have a chance below 1e-6."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, generator=generator) * 4
    logp = logits.log_softmax(-1)
    low = 0
    for _ in range(400):
        token = torch.multinomial(logp.exp(), 64, replacement=True, generator=generator)
        low += p_value([count_outside(token, logp[token])]) < 0.05
    assert low < 45
    sure = torch.zeros(256, dtype=torch.long)
    assert p_value([count_outside(sure, torch.zeros(256))]) == 1.0  # a peak is no reason to refuse
