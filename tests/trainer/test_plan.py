"""A run's numbers are checked before it starts, and what does not fit is said with what would."""

import math
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo_fn.core import partials, sampling
from grpo_fn.shell.policy.memory_estimate import Memory, Part
from grpo_fn.trainer import plan
from grpo_fn.trainer.checks import validate
from grpo_fn.trainer.plan import Plan

# -- what the sampler may do


def lying(logits, u, *, top_k, temperature):
    """Cuts the tail and reports the log-probabilities of what was not cut."""
    token, _ = sampling.nucleus(logits, u, temperature=temperature, top_k=top_k, top_p=1.0)
    return token, torch.log_softmax(logits / temperature, -1).gather(-1, token[..., None])[..., 0]


def min_p(logits, u, *, temperature, share):
    """Leaves out tokens less likely than a share of the likeliest."""
    x = logits / temperature
    return sampling.categorical(
        torch.where(x - x.amax(-1, keepdim=True) >= math.log(share), x, -torch.inf), u, temperature=1.0
    )


def backwards(logits, u, *, temperature):
    """As good as sampling.categorical, in another order."""
    token, logp = sampling.categorical(logits.flip(-1), u, temperature=temperature)
    return logits.shape[-1] - 1 - token, logp


@pytest.mark.parametrize("temperature", [0.05, 0.6, 1.0, 1.7, 10.0])
@pytest.mark.parametrize("f", [sampling.categorical, partial(sampling.nucleus, top_k=0, top_p=1.0), backwards])
def test_draws_from_the_full_support_are_taken(f, temperature):
    validate.check_full_support(partial(f, temperature=temperature), temperature, False)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_by_gumbel_max_are_taken_and_cut_ones_are_not(temperature):
    validate.check_full_support(partial(sampling.gumbel_max, temperature=temperature), temperature, False)
    cut = partial(sampling.gumbel_max_nucleus, temperature=temperature, top_k=0, top_p=0.95)
    with pytest.raises(ValueError, match=r"^token_sampler: got .* expected draws from softmax"):
        validate.check_full_support(cut, temperature, False)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    "cut",
    [
        *(partial(sampling.nucleus, top_k=0, top_p=p) for p in (0.1, 0.95, 0.999)),
        *(partial(sampling.nucleus, top_k=k, top_p=1.0) for k in (1, 50, 32000)),
        *(partial(lying, top_k=k) for k in (1, 50, 1000)),
        partial(min_p, share=0.05),
        partial(min_p, share=0.3),
    ],
)
def test_a_sampler_that_cuts_its_tail_is_refused_unless_the_bias_is_accepted(cut, temperature):
    token_sampler = partial(cut, temperature=temperature)
    with pytest.raises(
        ValueError, match=rf"^token_sampler: got .* expected draws from softmax\(logits / {temperature:g}\)"
    ):
        validate.check_full_support(token_sampler, temperature, False)
    validate.check_full_support(token_sampler, temperature, True)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_greedy_is_for_evaluation(temperature):
    """At temperature 1 its log-probabilities are right and only the draws give it away."""
    with pytest.raises(
        ValueError,
        match=r"sections\.Sampling\.token_sampler = @sampling\.categorical, or sections\.Sampling\.allow_biased",
    ):
        validate.check_full_support(sampling.greedy, temperature, False)


@given(st.floats(0.3, 3), st.floats(0.3, 3))
def test_a_sampler_at_another_temperature_than_the_trainers_is_refused(mine, trainers):
    token_sampler = partial(sampling.categorical, temperature=mine)
    if abs(mine / trainers - 1) > 0.01:
        with pytest.raises(ValueError, match="got log-probabilities up to"):
            validate.check_full_support(token_sampler, trainers, False)


def test_a_sampler_of_nan_is_refused():
    def broken(logits, u):
        token, logp = sampling.greedy(logits, u)
        return token, logp * torch.nan

    with pytest.raises(ValueError, match="got log-probabilities up to inf nats off"):
        validate.check_full_support(broken, 1.0, False)


# -- numbers


@given(st.integers(1, 60), st.integers(1, 60))
def test_minibatches_divide_the_prompts_or_the_nearest_that_do_are_named(prompts, minibatches):
    if prompts % minibatches == 0:
        return partials.check_divides(prompts, minibatches)
    with pytest.raises(ValueError, match=f"prompts {prompts} do not split into {minibatches} minibatches") as caught:
        partials.check_divides(prompts, minibatches)
    offered, closest = str(caught.value).split("expected prompts ")[1].split(", or minibatches ")
    offered = [int(n) for n in offered.split(" or ")]
    fits = [n for n in range(1, 200) if n % minibatches == 0]
    assert offered == [*[n for n in fits if n < prompts][-1:], *[n for n in fits if n > prompts][:1]]
    divisors = [m for m in range(1, prompts + 1) if prompts % m == 0]
    assert abs(int(closest) - minibatches) == min(abs(m - minibatches) for m in divisors)
    assert int(closest) in divisors
    return None


def test_the_message_reads_as_a_sentence():
    with pytest.raises(
        ValueError,
        match=r"^prompts 10 do not split into 4 minibatches of whole groups: "
        r"expected prompts 8 or 12, or minibatches 5$",
    ):
        partials.check_divides(10, 4)


@given(st.dictionaries(st.sampled_from(["steps", "prompts", "epochs"]), st.integers(-2, 3), min_size=1))
def test_numbers_below_one_are_named(numbers):
    low = [(name, n) for name, n in numbers.items() if n < 1]
    if not low:
        return partials.check_positive(**numbers)
    with pytest.raises(ValueError, match=f"{low[0][0]}: got {low[0][1]}, expected at least 1"):
        partials.check_positive(**numbers)
    return None


SMALL = {
    **{
        "prompts": 24,
        "group_size": 16,
        "minibatches": 2,
        "epochs": 3,
        "steps": 40,
        "train_rows": 480,
        "test_rows": 128,
    },
    **{"max_new_tokens": 32, "parameters": 10**6, "trained": 10**6, "kv_bytes_per_token": 2048, "max_rows": 256},
    **{"ranks": 1, "arrangement": "1 x 1 x 1", "memory": None},
}


def test_the_plan_says_what_follows_from_its_numbers():
    lines = {line.split("  ")[0]: line for line in Plan(**SMALL).lines()}
    assert lines["rows a step"].endswith("24 prompts x 16 samples = 384")
    assert lines["optimizer updates"].endswith("3 epochs x 2 minibatches = 6 a step, 240 in all")
    assert lines["problems drawn"].endswith("960 in 40 steps = 2.00 epochs of 480")
    assert lines["held-out problems"].endswith("128")
    assert lines["parameters"].endswith("1,000,000")
    assert lines["disk, one checkpoint"].endswith("0.012 GB")
    assert len(lines) == len(Plan(**SMALL).lines())


def test_adapters_are_counted_apart():
    (line,) = (x for x in Plan(**{**SMALL, "trained": 1000}).lines() if x.startswith("parameters"))
    assert line.endswith("1,000,000, of which 1,000 train")
    assert Plan(**{**SMALL, "trained": 1000}).checkpoint_bytes() == 3 * 4 * 1000


def test_a_dry_run_shows_the_memory_of_a_device():
    held = Memory(
        (Part("weights", 3 * 10**9), Part("reference copy", 10**9, host=True)), (), (Part("KV cache", 10**9),)
    )
    shown = Plan(**{**SMALL, "ranks": 16, "arrangement": "replicate 2 x shard 8 x tensor 1", "memory": held}).lines()
    assert shown[: len(Plan(**SMALL).lines())] == Plan(**SMALL).lines()
    head, *parts = shown[len(Plan(**SMALL).lines()) :]
    assert head == "memory, each of 16     replicate 2 x shard 8 x tensor 1; estimated:"
    assert [" ".join(x.split()) for x in parts[:4]] == [
        "weights 3.000 GB",
        "reference copy 1.000 GB on the host",
        "KV cache, sampling 1.000 GB",
        "at most at once 4.000 GB, and 1.000 GB on the host",
    ]


def test_ranks_share_the_prompts_and_so_the_cache():
    assert Plan(**{**SMALL, "ranks": 5, "max_rows": 10**6}).kv_bytes() == 5 * 16 * 32 * 2048
    assert Plan(**SMALL).kv_bytes() == 256 * 32 * 2048


def test_fewer_rows_than_the_limit_need_a_smaller_cache():
    assert Plan(**{**SMALL, "prompts": 2}).kv_bytes() == 32 * 32 * 2048


def test_disk_holds_two_checkpoints_and_the_model():
    assert Plan(**SMALL).need_bytes() == 2 * 12 * 10**6 + 4 * 10**6 + 2**24


class Config:
    hidden_size, num_hidden_layers, num_attention_heads = 64, 3, 8


class Grouped(Config):
    num_key_value_heads, head_dim = 2, 16


def test_keys_and_values_are_counted_per_layer_and_kv_head():
    assert plan.kv_bytes_per_token(Config(), 2) == 2 * 3 * 8 * 8 * 2
    assert plan.kv_bytes_per_token(Grouped(), 4) == 2 * 3 * 2 * 16 * 4
