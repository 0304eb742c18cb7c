"""The module trained in place computes what the oracle computes: scores, gradients of every objective, and one step."""

from copy import deepcopy
from functools import lru_cache, partial
from itertools import cycle, product

import hypothesis.strategies as st
import pytest
import torch
from batches import UNMOVED, split
from catalogue import bound, token_losses
from fakes import MODELS, qwen2_tied, qwen3_untied
from hypothesis import given, settings
from policies import DEFAULTS, handed_over, local
from torch import Tensor, nn
from torch.func import grad_and_value

from grpo_fn.algo import corrections, objective, supervised
from grpo_fn.core.batch import count, tokens_of_group
from grpo_fn.core.types import Batch, Rollout, Scores
from grpo_fn.shell.model.logprob_model import has_linear_head
from grpo_fn.shell.policy.fsdp import FSDPPolicy, FunctionalPolicy
from grpo_fn.shell.policy.optimizer import adamw, linear_decay, muon

V = 12
LOSSES = token_losses()
KLS = bound(objective, "logp", "row")
WEIGHTS = bound(objective, "batch", "totals")
EXAMPLES = settings.default.max_examples


def composed(loss: str, penalty: str, weigh: str) -> partial:
    """The objective of these three with a KL penalty and an entropy bonus."""
    three = {"token_loss": LOSSES[loss], "kl": KLS[penalty], "loss_aggregation": WEIGHTS[weigh]}
    correct = partial(corrections.truncated_weight, ratio=corrections.token_ratio, cap=2.0)
    return partial(objective.policy_objective, **three, importance_correction=correct, beta=0.1, entropy_bonus=0.01)


# Gemma2 computes its norms and angles in float32 whatever its weights are in; the others lose nothing in float64.
IN_FLOAT64 = {name: 1e-6 if name == "gemma2_capped" else 1e-12 for name in MODELS}
# Every function in some objective.
OBJECTIVES = {"-".join(names): composed(*names) for names in zip(LOSSES, cycle(KLS), cycle(WEIGHTS), strict=False)}
GIVEN = {  # objectives of given tokens
    name: partial(supervised.cross_entropy, token_weight=phi, loss_aggregation=objective.token_mean)
    for name, phi in bound(supervised, "logp", "row").items()
}
OBJECTIVES |= GIVEN
PRODUCT = {"-".join(names): composed(*names) for names in product(LOSSES, KLS, WEIGHTS)} | GIVEN


def tokens_and_mask(seed: int, rows: int, prompt: int = 2, width: int = 9) -> tuple[Tensor, Tensor]:
    """Random rows `[prompt | completion | padding]` of different lengths; row 0 is as long as possible."""
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(1, width - prompt + 1, (rows, 1), generator=g)
    length[0] = width - prompt
    column = torch.arange(width)
    mask = (column >= prompt) & (column < prompt + length)
    return torch.randint(0, V, (rows, width), generator=g), mask


@lru_cache(maxsize=64)
def batch_for(name: str, seed: int, rows: int = 6) -> Batch:
    """Rows whose old and reference policies are near the model `name`, as they are in training."""
    tokens, mask = tokens_and_mask(seed, rows)
    logp = FunctionalPolicy(MODELS[name](V), temperature=0.7).vjp(plain(tokens, mask))[0].logp
    g = torch.Generator().manual_seed(seed + 1)
    old, ref, sampled = (
        torch.where(mask, logp + 0.3 * torch.randn(mask.shape, generator=g), torch.nan) for _ in range(3)
    )
    adv = torch.randn(rows, 1, generator=g).expand(mask.shape)
    selected = mask & (torch.rand(mask.shape, generator=g) < 0.3)
    return Batch(tokens, mask, sampled, old, ref, ref, adv, selected, tokens_of_group(mask, 2 - len(mask) % 2))


def doubled(batch: Batch) -> Batch:
    """The same in float64."""
    return Batch(*(x.double() if x.is_floating_point() else x for x in batch))


def plain(tokens: Tensor, mask: Tensor) -> Batch:
    """A batch to be scored only."""
    nothing = torch.zeros(mask.shape)
    return Batch(tokens, mask, nothing, nothing, nothing, nothing, nothing, torch.zeros_like(mask), mask.long())


def rollout(tokens: Tensor, mask: Tensor) -> Rollout:
    return Rollout(tokens, mask, torch.zeros(mask.shape), torch.zeros(len(mask), dtype=torch.bool), ("",) * len(mask))


def climb(policy, micros: list[Batch], f, totals) -> None:
    """Accumulate the gradient of objective `f` over micro-batches."""
    if isinstance(policy, FSDPPolicy):
        policy.set_accumulation_steps(len(micros))
    for micro in micros:
        scores, pullback = policy.vjp(micro)
        pullback(grad_and_value(partial(f, batch=micro, totals=totals, gains=UNMOVED), has_aux=True)(scores)[0])


def grads(policy: FSDPPolicy | FunctionalPolicy) -> dict[str, Tensor]:
    if isinstance(policy, FunctionalPolicy):
        return policy.grads
    return {name: p.grad for name, p in policy.model.named_parameters()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Agreement to `tolerance` of the largest entry of all gradients together."""
    assert got.keys() == expected.keys()
    scale = max(float(x.abs().max()) for x in expected.values())
    assert scale > 0
    for name, x in expected.items():
        assert float((got[name] - x).abs().max()) <= tolerance * scale, name


def shuffled_parts(batch: Batch, parts: int, seed: int) -> list[Batch]:
    """The rows in random order, cut at random places into so many parts."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch.tokens), generator=g)
    cuts = 1 + torch.randperm(len(order) - 1, generator=g)[: parts - 1].sort().values
    return [Batch(*(x[rows] for x in batch)) for rows in order.tensor_split(cuts)]


# -- the central test


@pytest.mark.parametrize(("name", "which"), list(zip(cycle(MODELS), OBJECTIVES, strict=False)))
def test_gradients_of_every_function_are_the_oracles_in_float32(name, which):
    check_gradients(name, OBJECTIVES[which], seed=len(which) % 2)


@pytest.mark.slow
@pytest.mark.parametrize(("i", "loss"), list(enumerate(LOSSES)))
def test_gradients_of_every_loss_with_every_aggregation_and_penalty_are_the_oracles_in_float32(i, loss):
    """Two functions together; models take turns, and penalties, so that each meets every loss and every aggregation."""
    for j, aggregation in enumerate(WEIGHTS):
        penalty, name = ([*some][(i + j) % len(some)] for some in (KLS, MODELS))
        check_gradients(name, composed(loss, penalty, aggregation), seed=j % 2)


def check_gradients(name: str, f: partial, seed: int) -> None:
    batch, oracle = batch_for(name, seed), FunctionalPolicy(MODELS[name](V), temperature=0.7)
    climb(oracle, [batch], f, count(batch))
    policy = local(MODELS[name](V))
    climb(policy, shuffled_parts(batch, 3, seed), f, count(batch))
    assert_same(grads(policy), grads(oracle), 1e-6)


@settings(max_examples=max(10, EXAMPLES // 2))
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(PRODUCT)),
    st.integers(0, 20),
    st.integers(1, 8),
    st.integers(1, 80),
    st.sampled_from([0.5, 1.0, 1.7]),
)
def test_float64_gradients_agree_at_any_temperature_size_and_budget(name, which, seed, rows, micro_tokens, temperature):
    batch = doubled(batch_for(name, seed, rows))
    oracle = FunctionalPolicy(MODELS[name](V).double(), temperature=temperature)
    mine = local(MODELS[name](V).double(), temperature=temperature)
    climb(oracle, [batch], PRODUCT[which], count(batch))
    climb(mine, split(batch, micro_tokens, 1), PRODUCT[which], count(batch))
    assert_same(grads(mine), grads(oracle), IN_FLOAT64[name])


@pytest.mark.parametrize("least", [1, 2, 9])
def test_an_update_accumulates_as_many_micro_batches_as_expected_where_there_are_rows(least):
    batch, policy = batch_for("qwen2_tied", 0, 6), local(qwen2_tied(V), micro_tokens=10**6, min_micro_batches=least)
    parts = policy.split_rows(batch)
    learning = batch.mask.any(-1).nonzero()[:, 0].tolist()
    assert sorted(row for part in parts for row in part.tolist() if row >= 0 and batch.mask[row].any()) == learning
    assert len(parts) >= min(least, len(learning))
    assert least > 1 or len(parts) == 1


@settings(max_examples=max(5, EXAMPLES // 4))
@given(st.sampled_from(sorted(MODELS)), st.integers(0, 20), st.booleans())
def test_any_cotangent_is_pulled_back_alike(name, seed, silent):
    batch = doubled(batch_for(name, seed))
    g = torch.Generator().manual_seed(seed)
    signal = Scores(*(torch.randn(batch.mask.shape, generator=g).double() for _ in range(2)))  # behind the mask as well
    if silent:
        signal = signal._replace(logp=torch.zeros_like(signal.logp))
    oracle, mine = FunctionalPolicy(MODELS[name](V).double(), temperature=0.7), local(MODELS[name](V).double())
    for policy in (oracle, mine):
        policy.vjp(batch)[1](signal)
    assert_same(grads(mine), grads(oracle), IN_FLOAT64[name])


@pytest.mark.parametrize("name", list(MODELS))
def test_scores_and_energies_are_the_oracles_and_zero_where_nothing_was_sampled(name):
    tokens, mask = tokens_and_mask(3, 7)  # the budget of 30 tokens takes three rows at a time
    mine, oracle = local(MODELS[name](V)), FunctionalPolicy(MODELS[name](V), temperature=0.7)
    found, right = (
        [*p.vjp(plain(tokens, mask))[0], p.energy(*asked)]
        for p, asked in ((mine, (rollout(tokens, mask),)), (oracle, (tokens, mask)))
    )
    for got, expected in zip(found, right, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-6)
        assert (got[~mask] == 0).all()
        assert not got.requires_grad
    assert (found[0][mask] < 0).all()
    assert (found[2][mask] > 0).all()


def test_scores_are_those_of_a_loop_over_prefixes():
    model, (tokens, mask) = qwen3_untied(V), tokens_and_mask(5, 3)
    got = local(model).vjp(plain(tokens, mask))[0]
    with torch.no_grad():
        for b, t in mask.nonzero().tolist():
            p = (model(input_ids=tokens[b : b + 1, :t]).logits[0, -1] / 0.7).softmax(-1)
            torch.testing.assert_close(got.logp[b, t], p[tokens[b, t]].log(), rtol=0, atol=1e-5)
            torch.testing.assert_close(got.entropy[b, t], torch.special.entr(p).sum(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_head_is_linear_when_it_is_a_product_alone_however_small_the_logits(size):
    untied = [qwen3_untied(V) for _ in range(3)]
    untied[0].lm_head = nn.Linear(16, V, bias=True)
    untied[1].lm_head.register_forward_hook(lambda module, args, logits: logits * 0.5)
    untied[2].lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    models = [*(MODELS[name](V) for name in ("qwen2_tied", "qwen3_untied", "gemma2_capped")), *untied]
    with torch.no_grad():
        for model in models:
            model.get_output_embeddings().weight.mul_(size)
    assert [has_linear_head(model) for model in models] == [True, True, *[False] * 4]


# -- one optimizer step


def clipped(gradients: dict[str, Tensor], limit: float) -> tuple[dict[str, Tensor], float]:
    """Gradients scaled so that their global norm is at most `limit`, as torch rounds it, and the norm before."""
    norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
    return {name: g * min(1.0, limit / (norm + 1e-6)) for name, g in gradients.items()}, norm


def adamw_step(params, gradients, moments, step, *, lr, beta1, beta2, eps, weight_decay):
    """AdamW (arXiv:1711.05101, Algorithm 2) as pure arithmetic; only matrices decay."""
    after, kept = {}, {}
    for name, theta in params.items():
        g = gradients[name]
        m, v = moments.get(name, (torch.zeros_like(theta), torch.zeros_like(theta)))
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        kept[name] = (m, v)
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        decay = weight_decay if theta.ndim > 1 else 0.0
        after[name] = theta - lr * (m_hat / (v_hat.sqrt() + eps) + decay * theta)
    return after, kept


@pytest.mark.parametrize(("name", "limit"), [("qwen2_tied", 1e9), ("qwen3_untied", 0.05)])
def test_steps_are_written_out_adamw_on_the_oracles_gradients(name, limit):
    # float64: Adam divides a gradient by its size, which turns the rounding of a small one into a visible step.
    schedule = partial(linear_decay, warmup=2, total=3, final=0.1)
    mine = local(MODELS[name](V).double(), max_grad_norm=limit, schedule=schedule)
    oracle = FunctionalPolicy(MODELS[name](V).double(), temperature=0.7)
    f, moments = OBJECTIVES[next(iter(OBJECTIVES))], {}
    for step in range(3):
        batch = doubled(batch_for(name, step))
        for policy in (mine, oracle):
            climb(policy, [batch], f, count(batch))
        gradients, norm = clipped(oracle.grads, limit)
        said = mine.update()
        rate = DEFAULTS["lr"] * schedule(step)
        oracle.params, moments = adamw_step(oracle.params, gradients, moments, step + 1, **{**DEFAULTS, "lr": rate})
        oracle.grads = {name: torch.zeros_like(g) for name, g in oracle.grads.items()}
        assert said == pytest.approx(
            {
                **{"loss/grad_norm": norm, "optimizer/lr": rate, "optimizer/step": step + 1},
                **{"optimizer/loss_scale": 1.0, "optimizer/overflows": 0.0},
            }
        )
        for weight, theta in mine.model.named_parameters():
            torch.testing.assert_close(theta.detach(), oracle.params[weight], rtol=0, atol=1e-9 * rate)
        assert all(p.grad is None for p in mine.model.parameters())


def step_once(policy: FSDPPolicy, seed: int = 0) -> dict[str, float]:
    batch = batch_for("qwen2_tied", seed)
    climb(policy, [batch], OBJECTIVES[next(iter(OBJECTIVES))], count(batch))
    return policy.update()


def snapshot(policy: FSDPPolicy) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in policy.weights(trained=False)}


def identical(a, b) -> bool:
    """Equal to the last bit, through any nesting."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_gradient_raises_and_changes_nothing(broken):
    policy, untouched = local(qwen2_tied(V)), local(qwen2_tied(V))
    for p in (policy, untouched):
        step_once(p)
    scores, pullback = policy.vjp(batch_for("qwen2_tied", 1))
    signal = torch.zeros_like(scores.logp)
    signal[0, 2] = broken
    pullback(Scores(signal, torch.zeros_like(signal)))
    with pytest.raises(FloatingPointError, match=r"got a gradient norm of (nan|inf) at optimizer step 1"):
        policy.update()
    for _ in range(2):
        assert identical(policy.tensors(), untouched.tensors())
        assert step_once(policy, 2) == step_once(untouched, 2)


def test_a_step_without_any_signal_changes_no_weight_and_rows_without_a_sampled_token_score_nothing():
    policy, batch = local(qwen2_tied(V)), batch_for("qwen2_tied", 1)
    step_once(policy)
    before = snapshot(policy)
    scores, pullback = policy.vjp(batch)
    pullback(Scores(*(torch.zeros_like(x) for x in scores)))
    assert policy.update()["loss/grad_norm"] == 0.0
    assert identical(snapshot(policy), before)
    scores, pullback = policy.vjp(plain(batch.tokens, torch.zeros_like(batch.mask)))
    assert not scores.logp.any()
    pullback(Scores(*(torch.ones_like(x) for x in scores)))
    assert policy.update()["loss/grad_norm"] == 0.0


# -- logp, reference, weights


@pytest.mark.parametrize("name", list(MODELS))
def test_logp_is_what_vjp_scores_and_follows_the_weights(name):
    tokens, mask = tokens_and_mask(0, 7)  # the budget of 30 tokens takes three rows at a time
    policy = local(MODELS[name](V))
    for _ in range(2):
        got = policy.logp(rollout(tokens, mask))
        assert not got.requires_grad
        torch.testing.assert_close(got, policy.vjp(plain(tokens, mask))[0].logp, rtol=0, atol=2e-6)
        policy.vjp(plain(tokens, mask))[1](Scores(mask.float(), torch.zeros(mask.shape)))
        policy.update()


def test_the_reference_stays_where_the_policy_began():
    seen = rollout(*tokens_and_mask(0, 4))
    assert local(qwen2_tied(V)).reference(seen) is None
    policy = local(qwen2_tied(V), reference=True)
    began = policy.logp(seen)
    step_once(policy)
    assert torch.equal(policy.reference(seen), began)
    assert not torch.equal(policy.logp(seen), began)


def test_every_weight_is_named_once_and_shared():
    tied, untied = local(qwen2_tied(V)), local(qwen3_untied(V))
    assert dict(tied.weights(trained=False)).keys() == dict(tied.model.named_parameters()).keys()
    assert "lm_head.weight" in dict(untied.weights(trained=False))
    own = dict(tied.model.named_parameters())
    assert all(x.data_ptr() == own[name].data_ptr() for name, x in tied.weights(trained=False))


@pytest.mark.parametrize("make", [partial(adamw, **DEFAULTS), partial(muon, **DEFAULTS, momentum=0.95)])
def test_restored_policies_go_on_bit_for_bit(make):
    first = local(qwen2_tied(V), schedule=partial(linear_decay, warmup=2, total=9, final=0.1), optimizer=make)
    for seed in range(2):
        step_once(first, seed)
    other = qwen2_tied(V)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    second = local(other, schedule=first.schedule, optimizer=make)
    second.restore(handed_over(deepcopy(first.tensors())), first.counters())
    assert identical(second.tensors(), first.tensors())
    assert second.counters() == first.counters()
    assert step_once(first, 3) == step_once(second, 3)
    assert identical(second.tensors(), first.tensors())


# -- rows are alone


@settings(max_examples=max(5, EXAMPLES // 4))
@given(st.sampled_from(sorted(MODELS)), st.integers(0, 99), st.integers(0, 5), st.integers(0, V - 1))
def test_neither_padding_nor_neighbours_change_a_rows_scores(name, seed, extra, filler):
    policy, (tokens, mask) = local(MODELS[name](V)), tokens_and_mask(seed, 4)
    got = policy.vjp(plain(tokens, mask))[0]
    wide = torch.nn.functional.pad(mask, (0, extra))
    after = wide.flip(-1).cumsum(-1).flip(-1) == 0  # the padding, distinguished from prompts by what follows
    filled = torch.where(after, filler, torch.nn.functional.pad(tokens, (0, extra)))
    for b in range(4):
        alone = policy.vjp(plain(filled[b : b + 1], wide[b : b + 1]))[0]
        for x, y in zip(alone, got, strict=True):
            torch.testing.assert_close(x[0, : mask.shape[1]], y[b], rtol=0, atol=5e-6)
            assert (x[0, mask.shape[1] :] == 0).all()


@pytest.mark.parametrize("make", [local, partial(FunctionalPolicy, temperature=0.7)])
def test_a_row_that_begins_with_a_sampled_token_is_refused(make):
    tokens, mask = tokens_and_mask(0, 3)
    mask[1, 0] = True
    with pytest.raises(ValueError, match="first token is marked as sampled; expected at least one prompt token"):
        make(qwen2_tied(V)).vjp(plain(tokens, mask))
