"""A run's numbers are checked before it starts, and what does not fit is said with what would."""

from functools import partial

import hypothesis.strategies as st
import pytest
from catalogue import bound, each
from hypothesis import given

from grpo_fn import advantage, kl, objective, plan, weights
from grpo_fn.plan import Plan

LOSSES, KLS = (bound(room, "logp", "row") for room in (objective, kl))
WEIGHTS = bound(weights, "mask", "totals")
ADVANTAGES = bound(advantage, "reward", "valid")


def composed(loss: str, penalty: str, weigh: str, beta: float) -> partial:
    return partial(
        objective.policy_objective, token_loss=LOSSES[loss], kl=KLS[penalty], weigh=WEIGHTS[weigh], beta=beta
    )


@pytest.mark.parametrize("penalty", list(KLS))
@given(loss=st.sampled_from(sorted(LOSSES)), weigh=st.sampled_from(sorted(WEIGHTS)), beta=st.floats(1e-9, 10))
def test_a_reference_is_needed_exactly_when_beta_is_positive(penalty, loss, weigh, beta):
    assert plan.uses_reference(composed(loss, penalty, weigh, beta))
    assert not plan.uses_reference(composed(loss, penalty, weigh, 0.0))


@each(ADVANTAGES)
def test_a_group_of_one_has_nothing_to_compare_with(f):
    plan.check_advantage(f, 2)
    with pytest.raises(ValueError, match="group_size: got 1 with an advantage that compares within a group"):
        plan.check_advantage(f, 1)


def test_a_group_of_one_is_fine_for_an_advantage_that_is_the_reward():
    plan.check_advantage(lambda reward, valid: reward, 1)


@given(st.integers(1, 60), st.integers(1, 60))
def test_minibatches_divide_the_prompts_or_the_nearest_that_do_are_named(prompts, minibatches):
    if prompts % minibatches == 0:
        return plan.check_divides(prompts, minibatches)
    with pytest.raises(ValueError, match=f"prompts {prompts} do not split into {minibatches} minibatches") as caught:
        plan.check_divides(prompts, minibatches)
    offered, closest = str(caught.value).split("wanted prompts ")[1].split(", or minibatches ")
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
        match=r"^prompts 10 do not split into 4 minibatches of whole groups: wanted prompts 8 or 12, or minibatches 5$",
    ):
        plan.check_divides(10, 4)


@given(st.dictionaries(st.sampled_from(["steps", "prompts", "epochs"]), st.integers(-2, 3), min_size=1))
def test_numbers_below_one_are_named(numbers):
    low = [(name, n) for name, n in numbers.items() if n < 1]
    if not low:
        return plan.check_positive(**numbers)
    with pytest.raises(ValueError, match=f"{low[0][0]}: got {low[0][1]}, wanted at least 1"):
        plan.check_positive(**numbers)
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
    **{"max_new_tokens": 32, "parameters": 10**6, "kv_bytes_per_token": 2048, "weight_bytes": 4, "reference": False},
    **{"max_rows": 256},
}


def test_the_plan_says_what_follows_from_its_numbers():
    lines = {line.split("  ")[0]: line for line in Plan(**SMALL).lines()}
    assert lines["rows a step"].endswith("24 prompts x 16 samples = 384")
    assert lines["optimizer updates"].endswith("3 epochs x 2 minibatches = 6 a step, 240 in all")
    assert lines["problems drawn"].endswith("960 in 40 steps = 2.00 epochs of 480")
    assert lines["held-out problems"].endswith("128")
    assert lines["parameters"].endswith("1,000,000")
    assert lines["memory, weights"].endswith("0.004 GB")
    assert lines["memory, training"].split("  ")[-1].startswith("0.012 GB")
    assert "0.017 GB (at most 256 rows of 32 new tokens" in lines["memory, KV cache"]  # 256 * 32 * 2048 bytes
    assert lines["disk, one checkpoint"].endswith("0.012 GB")
    assert len(lines) == len(Plan(**SMALL).lines())


def test_a_reference_is_a_second_copy_of_the_weights():
    (line,) = (x for x in Plan(**{**SMALL, "reference": True}).lines() if x.startswith("memory, weights"))
    assert line.endswith("0.008 GB (with the reference copy)")


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
