"""A run's numbers are checked before it starts, and what does not fit is said with what would."""

import math
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from catalogue import AROUND_THE_SAMPLER, bound, corrections, each, token_losses
from hypothesis import given

from grpo_fn.algo import advantage, aggregation, credit, distillation, importance, kl, masking, objective
from grpo_fn.algo.step import from_sampler, from_trainer
from grpo_fn.core import checks, sampling
from grpo_fn.shell.policy.memory import Memory, Part
from grpo_fn.trainer import plan
from grpo_fn.trainer.checks import validate
from grpo_fn.trainer.plan import Plan

LOSSES, CORRECTIONS, KLS = token_losses(), corrections(), bound(kl, "logp", "row")
WEIGHTS = bound(aggregation, "batch", "totals")
ADVANTAGES = bound(advantage, "reward", "valid")


CENTERED = partial(credit.outcome, advantage=advantage.mean_centered)


def composed(loss: str, penalty: str, weigh: str, beta: float) -> partial:
    return partial(
        objective.policy_objective,
        token_loss=LOSSES[loss],
        importance_correction=importance.no_correction,
        kl=KLS[penalty],
        loss_aggregation=WEIGHTS[weigh],
        beta=beta,
        entropy_bonus=0.01,
    )


@pytest.mark.parametrize("penalty", list(KLS))
@given(loss=st.sampled_from(sorted(LOSSES)), weigh=st.sampled_from(sorted(WEIGHTS)), beta=st.floats(1e-9, 10))
def test_a_reference_is_needed_exactly_when_beta_is_positive(penalty, loss, weigh, beta):
    assert validate.uses_reference(composed(loss, penalty, weigh, beta), CENTERED, ())
    assert not validate.uses_reference(composed(loss, penalty, weigh, 0.0), CENTERED, ())


@given(beta=st.floats(1e-6, 10))
def test_a_reference_is_needed_for_a_kl_in_the_reward(beta):
    objective = composed(sorted(LOSSES)[0], sorted(KLS)[0], sorted(WEIGHTS)[0], 0.0)
    leave_one_out = advantage.leave_one_out
    for penalised in (
        partial(credit.reward_to_go, beta=beta),
        partial(credit.token_whitened, credit=partial(credit.reward_to_go, beta=beta), eps=1e-8),
    ):
        assert validate.uses_reference(objective, penalised, ())
    assert not validate.uses_reference(objective, partial(credit.reward_to_go, beta=0.0), ())
    within = partial(credit.outcome_minus_kl, advantage=leave_one_out, beta=beta)
    assert validate.uses_reference(objective, within, ())


# -- the pass before the update


OUTCOME = partial(credit.outcome, advantage=advantage.mean_centered)
TO_GO = partial(credit.reward_to_go, beta=0.1)
KL_COV = partial(masking.kl_cov_tokens, share=0.01)
CLIP_COV = partial(masking.clip_cov_tokens, low=1.0, high=5.0, share=0.01)
FURTHEST = partial(masking.second_moment_tokens, limit=0.04)


@pytest.mark.parametrize(
    ("old_logp", "updates", "how", "mark", "found"),
    [
        (from_trainer, 1, OUTCOME, masking.no_tokens, True),
        (partial(from_trainer), 1, OUTCOME, masking.no_tokens, True),
        (from_trainer, 2, OUTCOME, masking.no_tokens, False),
        (from_sampler, 1, OUTCOME, masking.no_tokens, False),
        (from_trainer, 1, TO_GO, masking.no_tokens, False),
        (from_trainer, 1, OUTCOME, KL_COV, False),
        (from_trainer, 1, OUTCOME, CLIP_COV, False),
        (from_trainer, 1, OUTCOME, FURTHEST, False),
    ],
)
def test_an_update_finds_the_old_policy_itself_where_it_was_not_needed_before(old_logp, updates, how, mark, found):
    assert validate.own_pass_suffices(old_logp, updates, how, distillation.no_teacher, mark, ()) is found


@pytest.mark.parametrize("mark", [masking.no_tokens, KL_COV, CLIP_COV, FURTHEST])
def test_a_selection_that_compares_the_sampler_with_itself_is_refused(mark):
    validate.check_selection(mark, from_trainer)
    if mark is not FURTHEST:
        validate.check_selection(mark, from_sampler)
        return
    with pytest.raises(ValueError, match=r"^token_mask: got a selection by logp_old - logp_sampled .*from_trainer$"):
        validate.check_selection(mark, partial(from_sampler))


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
    with pytest.raises(ValueError, match=r"^token_sampler: got .* wanted draws from softmax"):
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
        ValueError, match=rf"^token_sampler: got .* wanted draws from softmax\(logits / {temperature:g}\)"
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


# -- what stale samples ask of the objective

WITHOUT_A_RATIO = {"reinforce"}


def with_correction(loss: str, correct: str, beta: float = 0.3) -> partial:
    return partial(composed(loss, "k1_ratio()", "token_mean()", beta), importance_correction=CORRECTIONS[correct])


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("correct", list(CORRECTIONS))
def test_stale_samples_need_an_objective_that_asks_the_sampler(loss, correct):
    """Through a ratio to the sampler, a correction, or the loss itself; a KL to the sampler is none of them."""
    objective, name = with_correction(loss, correct), LOSSES[loss].func.__name__
    corrects = CORRECTIONS[correct].func.__name__ != "no_correction"
    by_the_mask = CORRECTIONS[correct].func.__name__ in BY_THE_POLICY
    fine = {
        from_sampler: name not in WITHOUT_A_RATIO or by_the_mask,
        from_trainer: corrects or name in AROUND_THE_SAMPLER,
    }
    for old_logp, good in fine.items():
        validate.check_stale(objective, old_logp, 0)
        if good:
            validate.check_stale(objective, old_logp, 3)
            continue
        with pytest.raises(
            ValueError,
            match=r"^max_staleness: got 3 .*from_trainer and .*importance_correction = @importance\.truncated_weight",
        ):
            validate.check_stale(objective, old_logp, 3)


BY_THE_POLICY = {"off_policy_sequence_mask", "weight_and_mask"}  # these ask the policy as it is, whatever logp_old is


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("correct", list(CORRECTIONS))
def test_a_correction_that_compares_the_sampler_with_itself_is_refused(loss, correct):
    objective, name = with_correction(loss, correct), CORRECTIONS[correct].func.__name__
    validate.check_correction(objective, from_trainer)
    if name in {"no_correction", *BY_THE_POLICY}:
        return validate.check_correction(objective, from_sampler)
    with pytest.raises(ValueError, match=r"^importance_correction: got a correction by logp_old - logp_sampled"):
        validate.check_correction(objective, from_sampler)
    return None


def test_an_objective_of_ones_own_that_knows_no_correction_is_none_of_its_business():
    def own(scores, *, batch, totals, gains):
        return (scores.logp * batch.adv).sum(), {}

    validate.check_correction(own, from_sampler)
    validate.check_stale(own, from_sampler, 0)
    with pytest.raises(ValueError, match="max_staleness: got 1"):
        validate.check_stale(own, from_sampler, 1)


@each(ADVANTAGES)
def test_a_group_of_one_has_nothing_to_compare_with(f):
    validate.check_credit(partial(credit.outcome, advantage=f), distillation.no_teacher, 2, ())
    with pytest.raises(ValueError, match="group_size: got 1 with an advantage that compares within a group"):
        validate.check_credit(partial(credit.outcome, advantage=f), distillation.no_teacher, 1, ())


def test_a_group_of_one_is_fine_where_the_batch_is_the_baseline():
    validate.check_credit(partial(credit.reward_to_go, beta=0.0), distillation.no_teacher, 1, ())
    validate.check_credit(
        partial(credit.token_whitened, credit=partial(credit.reward_to_go, beta=0.0), eps=1e-8),
        distillation.no_teacher,
        1,
        (),
    )


def test_a_group_of_one_is_fine_where_a_teacher_is_learned_from():
    validate.check_credit(credit.no_rewards, partial(distillation.teacher_gap, coef=1.0), 1, ())


def test_where_no_reward_is_learned_from_no_group_is_needed_and_no_signal_can_be_asked_for():
    for size in (1, 4):
        validate.check_credit(credit.no_rewards, distillation.no_teacher, size, ())
    validate.check_signal_wanted(credit.no_rewards, distillation.no_teacher, 0, ())
    validate.check_signal_wanted(credit.no_rewards, partial(distillation.teacher_gap, coef=1.0), 1, ())
    validate.check_signal_wanted(CENTERED, distillation.no_teacher, 1, ())
    with pytest.raises(ValueError, match="min_groups_with_signal: got 3 with advantages that are always 0"):
        validate.check_signal_wanted(credit.no_rewards, distillation.no_teacher, 3, ())


def test_advantages_by_a_teacher_need_the_old_policy_before_the_update():
    how = partial(distillation.teacher_gap, coef=1.0)
    assert not validate.own_pass_suffices(from_trainer, 1, OUTCOME, how, masking.no_tokens, ())


def test_a_credit_that_weighs_a_part_that_there_is_not_is_refused():
    weighs = partial(credit.per_part, advantage=advantage.mean_centered, weights={"correct": 1.0, "polite": 0.5})
    validate.check_credit(weighs, distillation.no_teacher, 4, ["correct", "polite"])
    with pytest.raises(ValueError, match=r"weights: got parts \['polite'\], wanted some of \['boxed', 'correct'\]"):
        validate.check_credit(weighs, distillation.no_teacher, 4, ["correct", "boxed"])


@given(st.integers(-3, 12), st.integers(1, 8))
def test_a_step_cannot_need_more_signal_than_it_has_groups(min_groups_with_signal, prompts):
    if 0 <= min_groups_with_signal <= prompts:
        return checks.check_signal(min_groups_with_signal, prompts)
    with pytest.raises(
        ValueError, match=f"min_groups_with_signal: got {min_groups_with_signal}, wanted 0 to prompts, {prompts}"
    ):
        checks.check_signal(min_groups_with_signal, prompts)
    return None


@given(st.integers(1, 60), st.integers(1, 60))
def test_minibatches_divide_the_prompts_or_the_nearest_that_do_are_named(prompts, minibatches):
    if prompts % minibatches == 0:
        return checks.check_divides(prompts, minibatches)
    with pytest.raises(ValueError, match=f"prompts {prompts} do not split into {minibatches} minibatches") as caught:
        checks.check_divides(prompts, minibatches)
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
        checks.check_divides(10, 4)


@given(st.dictionaries(st.sampled_from(["steps", "prompts", "epochs"]), st.integers(-2, 3), min_size=1))
def test_numbers_below_one_are_named(numbers):
    low = [(name, n) for name, n in numbers.items() if n < 1]
    if not low:
        return checks.check_positive(**numbers)
    with pytest.raises(ValueError, match=f"{low[0][0]}: got {low[0][1]}, wanted at least 1"):
        checks.check_positive(**numbers)
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
