"""However a model is spread over ranks, it computes what one process computes as a pure function of its weights."""

import os
import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from crew import CPU, crew
from fakes import MODELS
from hypothesis import Phase, given, settings
from test_fsdp import (
    OBJECTIVES,
    PRODUCT,
    V,
    adamw_step,
    assert_same,
    batch_for,
    climb,
    clipped,
    doubled,
    identical,
    plain,
    rollout,
    shuffled_parts,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from grpo_fn.config import freeze, load_config
from grpo_fn.core import prng
from grpo_fn.core.batch import count
from grpo_fn.core.types import Batch, Scores
from grpo_fn.shell.model import blocks, hf, lora
from grpo_fn.shell.model.hf import part, set_tensor
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.policy.fsdp import AVERAGE, WEIGHTS, FSDPPolicy, FunctionalPolicy, full_tensor
from grpo_fn.shell.policy.load_and_shard import LoadedModel, ModelSpec, load_and_shard
from grpo_fn.shell.policy.mesh import Parallelism
from grpo_fn.shell.policy.optimizer import adamw, dynamic_loss_scale, muon
from grpo_fn.shell.world import World
from grpo_fn.trainer.teachers import moving_average

pytestmark = pytest.mark.xdist_group("sharded")
EXAMPLES = settings.default.max_examples
UNSHRUNK = [Phase.explicit, Phase.reuse, Phase.generate]  # an example costs a second: the first that fails will do
KEY = prng.key(3, device="cpu")
TEMPERATURE = 0.7
ADAPTERS = lora.LoRA(rank=2, alpha=4.0, dropout=0.0, targets="all-linear")
ATTENTION = {"gemma2_capped": "eager"}  # the one that knows of its soft cap
ACTIVATIONS = {f.__name__: f for f in (blocks.no_checkpointing, blocks.full_checkpointing)}
HOST = 2  # ranks of a host, as hybrid_shard.gin sees it
STEP = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
MUON = partial(muon, **STEP, eps=1e-8, momentum=0.95)
DYNAMIC = partial(dynamic_loss_scale, interval=2000)


class Meshed(Parallelism):
    """A Parallelism that makes each mesh once in a process: groups are not given back before it ends."""

    made: dict[tuple[int, ...], DeviceMesh] = {}  # noqa: RUF012

    def mesh(self, world: World) -> DeviceMesh:
        os.environ["LOCAL_WORLD_SIZE"] = str(min(HOST, world.size))
        shape = self.shape(world.size, min(HOST, world.size))
        if shape not in self.made:
            self.made[shape] = super().mesh(world)
        return self.made[shape]


@cache
def in_file(name: str) -> dict[str, Any]:
    """What gin/scale/NAME.gin makes of the knobs of Parallelism."""
    knobs = load_config(["run/arithmetic.gin", f"scale/{name}.gin"], []).root.knobs["parallelism"].knobs
    return freeze(knobs, {})


# Each as its file has it, then those that a file and another knob make.
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")},
    "no_shard_resharded": ("no_shard", {"reshard_after_forward": True}),
    "hybrid_shard_grad_op": ("hybrid_shard", {"reshard_after_forward": False}),
}
SIZES = {2: [name for name in STRATEGIES if not name.startswith("hybrid")], 4: list(STRATEGIES)}


class Case(NamedTuple):
    """A model and how it is spread."""

    model: str
    strategy: str
    activations: str = "no_checkpointing"
    adapted: bool = False


def scale_of(case: Case) -> Meshed:
    file, changes = STRATEGIES[case.strategy]
    how = {"activation_checkpointing": ACTIVATIONS[case.activations], "compile": blocks.eager}
    return Meshed(**{**in_file(file), **changes, **how})


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder with a folder of every model."""
    made = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        model(V).save_pretrained(made / name)
    return made


def cases(size: int) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        st.sampled_from(sorted(MODELS)),
        st.sampled_from(SIZES[size]),
        st.sampled_from(sorted(ACTIVATIONS)),
        st.booleans(),
    )


# -- one process


def enlivened(model: nn.Module) -> nn.Module:
    """The adapters' B, zero in the beginning, are something: otherwise no gradient reaches A."""
    for name, p in list(model.named_parameters()):
        if name.endswith(lora.B):
            g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = 0.03 * torch.randn(p.shape, generator=g)
            set_tensor(model, [name], noise.__getitem__, device=CPU)
    return model


@lru_cache(maxsize=16)
def whole_model(folder: str, attention: str, adapted: bool) -> nn.Module:
    model = hf.load_model(folder, dtype=torch.float32, device=CPU, attention=attention)
    if adapted:
        lora.reset(lora.attach(model, ADAPTERS), key=KEY, device=CPU)
    return enlivened(model)


def oracle(folders: Path, case: Case) -> FunctionalPolicy:
    model = whole_model(str(folders / case.model), ATTENTION.get(case.model, "sdpa"), case.adapted)
    return FunctionalPolicy(model, temperature=TEMPERATURE)


class Expected(NamedTuple):
    """What one process makes of a batch: gradients, their norm, and the weights after a step, and their log-probs."""

    grads: dict[str, Tensor]
    norm: float
    largest: float
    tolerance: float  # of the largest: 1e-6, or three times what rounding does to the oracle itself where that is more
    limit: float
    weights: dict[str, Tensor]
    logp: Tensor


def in_float64(alone: FunctionalPolicy, pull: Callable[[FunctionalPolicy], None]) -> dict[str, Tensor]:
    """The gradients that `pull` gives the same model in float64."""
    precise = FunctionalPolicy(deepcopy(alone.model).double(), temperature=TEMPERATURE)
    pull(precise)
    return precise.grads


def apart(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest difference, of the largest entry."""
    off = max(float((grads[name].double() - x).abs().max()) for name, x in exact.items())
    return off / max(float(x.abs().max()) for x in exact.values())


def share_of_rounding(alone: FunctionalPolicy, pull: Callable[[FunctionalPolicy], None]) -> float:
    """How far a step's gradients of ranks and of one process may be apart: three times the one process's rounding.

    Each is the float64 gradient, rounded in its own order: in 49 steps two ranks were at most 2.3 times as far
    from it as one process.
    """
    return max(1e-6, 3 * apart(alone.grads, in_float64(alone, pull)))


@lru_cache(maxsize=1024)
def expected(folders: Path, model: str, adapted: bool, which: str, seed: int, rows: int) -> Expected:
    alone = oracle(folders, Case(model, "", adapted=adapted))
    batch = batch_for(model, seed, rows)
    climb(alone, [batch], PRODUCT[which], count(batch))
    grads = alone.grads
    largest = max(float(g.abs().max()) for g in grads.values())

    def climb_precisely(policy: FunctionalPolicy) -> None:
        climb(policy, [doubled(batch)], PRODUCT[which], count(doubled(batch)))

    _, norm = clipped(grads, 1.0)
    limit = norm * (0.5 if seed % 2 else 2.0)
    # A step as large as the gradients are, not as their signs say: it does not turn the rounding of a tiny one into a
    # visible difference. (float64 is out of question: what is computed is computed in the mesh's dtype.)
    after, _ = adamw_step(alone.params, clipped(grads, limit)[0], {}, 1, **STEP, eps=largest)
    alone.params = after
    named = {name: p.detach().clone() for name, p in alone.model.named_parameters()}
    logp = alone.vjp(plain(batch.tokens, batch.mask))[0].logp
    tolerance = share_of_rounding(alone, climb_precisely)
    return Expected(grads, norm, largest, tolerance, limit, {**named, **after}, logp)


# -- what ranks do


def unmoved(step: int) -> float:
    return 1.0


def spec_of(folder: str, case: Case, dtype: torch.dtype = torch.float32) -> ModelSpec:
    return ModelSpec(
        folder=folder,
        config=AutoConfig.from_pretrained(folder),
        dtype=dtype,
        attention=ATTENTION.get(case.model, "sdpa"),
        adapters=ADAPTERS if case.adapted else None,
        logprob_model=partial(LogprobModel, temperature=TEMPERATURE, logits_chunk_elements=3 * V),
        parallelism=scale_of(case),
        key=KEY,
    )


def built(world: World, folder: str, case: Case, **knobs: Any) -> FSDPPolicy:
    """The policy, put in place as `train` does it."""
    dtype, reference = knobs.pop("dtype", torch.float32), knobs.pop("reference", False)
    spec = spec_of(folder, case, dtype)
    return policy_of(world, load_and_shard(world, spec, reference=reference, teachers={}), **knobs)


def policy_of(world: World, placed: LoadedModel, **knobs: Any) -> FSDPPolicy:
    enlivened(placed.logprob_model.model)
    chosen = {
        **{"micro_tokens": 30, "min_micro_batches": 1, "max_grad_norm": 1e9, "schedule": unmoved, "seed": 0},
        **{"optimizer": partial(adamw, **STEP, eps=1e-8), "loss_scale": None, "initial_scale": 1.0},
        **{"world": world, "data": placed.data, "reference_model": placed.reference_model},
    }
    return FSDPPolicy(placed.logprob_model, dropout_modules=placed.dropout_modules, **{**chosen, **knobs})


def gathered_grads(policy: FSDPPolicy) -> dict[str, Tensor]:
    # A gradient that is whole on this rank is no copy yet.
    return {name: full_tensor(x.grad).clone() for name, x in policy.named_tensors().items() if x.grad is not None}


def weights_of(policy: FSDPPolicy) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in policy.weights(trained=False)}


class Seen(NamedTuple):
    """What a rank saw of one step."""

    before: dict[str, Tensor]
    grads: dict[str, Tensor]
    figures: dict[str, float]
    weights: dict[str, Tensor]
    logp: Tensor


def one_step(
    world: World, folder: str, case: Case, micros: list[Batch], f: Callable, totals: Any, batch: Batch, knobs: Mapping
) -> Seen:
    policy = built(world, folder, case, **knobs)
    before = weights_of(policy)
    climb(policy, micros, f, totals)
    grads = gathered_grads(policy)
    figures = policy.update()
    return Seen(before, grads, figures, weights_of(policy), policy.logp(rollout(batch.tokens, batch.mask)))


def energies(world: World, folder: str, case: Case, tokens: Tensor, mask: Tensor) -> Tensor:
    """Before anything else is asked of the policy."""
    return built(world, folder, case).energy(rollout(tokens, mask))


def muon_steps(world: World, folder: str, case: Case) -> dict[str, Tensor]:
    """The weights after three steps on gradients that are the same to the last bit however they lie."""
    policy = built(world, folder, case, optimizer=MUON)
    for step in range(3):
        for name, p in policy.named_tensors().items():
            g = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
            mine = torch.randn(p.shape, generator=g)[part(p)].contiguous()
            like = {"run_check": False, "shape": p.shape, "stride": p.stride()}
            whole = not isinstance(p, DTensor)
            p.grad = mine if whole else DTensor.from_local(mine, p.device_mesh, p.placements, **like)
        policy.optimizer.step()
    return weights_of(policy)


def alike(found: list[Any]) -> Any:
    """What every rank found, which is the same to the last bit."""
    assert all(identical(one, found[0]) for one in found[1:])
    return found[0]


def alike_in_words(found: list[Any]) -> Any:
    """The same, where a NaN is to be equal to a NaN."""
    assert all(repr(one) == repr(found[0]) for one in found[1:])
    return found[0]


# -- what is read without a gradient


def test_energies_are_those_of_one_process(folders):
    case, batch = Case("gemma2_capped", "full_shard"), batch_for("gemma2_capped", 2, 7)
    seen = alike(crew(2).run(energies, str(folders / case.model), case, batch.tokens, batch.mask))
    torch.testing.assert_close(seen, oracle(folders, case).energy(batch.tokens, batch.mask), rtol=0, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategy"), [(4, "hybrid_shard"), (2, "no_shard")])
def test_muon_moves_a_matrix_to_the_last_bit_as_one_process_does(folders, size, strategy):
    asked = str(folders / "qwen3_untied"), Case("qwen3_untied", strategy)
    several, single = (alike(crew(n).run(muon_steps, *asked)) for n in (size, 1))
    for name, x in single.items():
        if ".layers." in name and x.ndim == 2:
            assert torch.equal(several[name], x), name
        else:  # AdamW's kernel ends a part otherwise than it goes through it
            torch.testing.assert_close(several[name], x, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategy", "adapted"), [(2, "full_shard", True), (4, "hybrid_shard", False)])
def test_a_step_of_muon_is_that_of_one_process(folders, size, strategy, adapted):
    """To the rounding of the gradients: what they are off by, the iteration in bfloat16 can make a digit of it."""
    case, batch = Case("qwen3_untied", strategy, adapted=adapted), batch_for("qwen3_untied", 1, 7)
    asked = (str(folders / case.model), case, [batch], PRODUCT[sorted(PRODUCT)[0]], count(batch), batch)
    several, single = (alike(crew(n).run(one_step, *asked, {"optimizer": MUON})) for n in (size, 1))
    moved = max(float((single.weights[name] - x).abs().max()) for name, x in single.before.items())
    assert moved > 1e-3
    for name, x in single.weights.items():
        assert float((several.weights[name] - x).abs().max()) <= 1e-2 * moved, name


# -- the central test


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", list(SIZES))
@settings(max_examples=max(3, EXAMPLES // 10), phases=UNSHRUNK)
@given(st.data())
def test_gradients_and_one_step_are_those_of_one_process(folders, size, data):
    case = data.draw(cases(size))
    which, seed = data.draw(st.sampled_from(sorted(PRODUCT))), data.draw(st.integers(0, 5))
    rows, parts = data.draw(st.integers(3, 9)), data.draw(st.sampled_from([1, 3]))
    check_step(folders, size, case, which, seed, rows, parts)


SPREAD = [  # every strategy recomputes and does not, has adapters and none; objectives and models take turns
    (size, Case(list(MODELS)[(i + again) % len(MODELS)], strategy, activations, (i + again) % 2 == 0))
    for size, strategies in SIZES.items()
    for i, strategy in enumerate(strategies)
    for again, activations in enumerate(reversed(ACTIVATIONS))
]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("size", "case", "which"), [(*spread, f) for spread, f in zip(SPREAD, cycle(OBJECTIVES), strict=False)], ids=str
)
def test_a_step_of_every_strategy_and_every_function_is_that_of_one_process(folders, size, case, which):
    check_step(folders, size, case, which, seed=1, rows=7, parts=3)


def check_step(folders: Path, size: int, case: Case, which: str, seed: int, rows: int, parts: int) -> None:
    right = expected(folders, case.model, case.adapted, which, seed, rows)
    batch = batch_for(case.model, seed, rows)
    micros = shuffled_parts(batch, parts, seed) if parts > 1 else [batch]
    knobs = {"optimizer": partial(adamw, **STEP, eps=right.largest), "max_grad_norm": right.limit}
    asked = (str(folders / case.model), case, micros, PRODUCT[which], count(batch), batch, knobs)
    seen = alike(crew(size).run(one_step, *asked))
    assert_same(seen.grads, right.grads, right.tolerance)
    assert seen.figures["loss/grad_norm"] == pytest.approx(right.norm, rel=1e-5)
    assert seen.weights.keys() == right.weights.keys() == seen.before.keys()
    frozen = right.weights.keys() - right.grads.keys()
    assert bool(frozen) == case.adapted
    for name, x in right.weights.items():
        rounding = 2e-7 * float(x.abs().max())  # of a float32 weight
        torch.testing.assert_close(seen.weights[name], x, rtol=0, atol=right.tolerance * STEP["lr"] + rounding)
        assert torch.equal(seen.weights[name], seen.before[name]) == (name in frozen), name
    torch.testing.assert_close(seen.logp, right.logp, rtol=0, atol=5e-6)


# -- rows, signals, scores


def pulled(world: World, folder: str, case: Case, batch: Batch, signal: Scores) -> tuple[Scores, dict, dict, bool]:
    """Scores, gradients, the figures of an update, and whether that changed any weight."""
    policy = built(world, folder, case)
    before = weights_of(policy)
    scores, pullback = policy.vjp(batch)
    pullback(signal)
    grads, figures = gathered_grads(policy), policy.update()
    return scores, grads, figures, identical(weights_of(policy), before)


@pytest.mark.slow
@pytest.mark.parametrize("size", list(SIZES))
@settings(max_examples=max(4, EXAMPLES // 20), phases=UNSHRUNK)
@given(st.data())
def test_any_number_of_rows_and_any_signal(folders, size, data):
    case, rows = data.draw(cases(size)), data.draw(st.integers(1, 9))
    signalled = data.draw(st.tuples(st.booleans(), st.booleans()))
    check_pulled(folders, size, case, rows, signalled, data.draw(st.integers(0, 9)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("signalled", [(True, False), (False, False)], ids=["logp", "none"])
def test_one_row_for_four_ranks_is_enough_whichever_scores_have_a_signal(folders, signalled):
    check_pulled(folders, 4, Case("qwen2_tied", "full_shard"), 1, signalled, 3)


def check_pulled(folders: Path, size: int, case: Case, rows: int, signalled: tuple[bool, bool], seed: int) -> None:
    batch, g = batch_for(case.model, seed, rows), torch.Generator().manual_seed(seed)
    signal = Scores(*(on * torch.randn(batch.mask.shape, generator=g) for on in signalled))  # behind the mask as well
    alone = oracle(folders, case)
    right, pullback = alone.vjp(batch)
    pullback(signal)
    scores, grads, figures, still = alike(crew(size).run(pulled, str(folders / case.model), case, batch, signal))
    for got, x in zip(scores, right, strict=True):
        torch.testing.assert_close(got, x, rtol=0, atol=5e-6)
        assert (got[~batch.mask] == 0).all()
    assert still == (not any(signalled))
    if any(signalled):
        wide = Scores(*(x.double() for x in signal))
        exact = in_float64(alone, lambda policy: policy.vjp(doubled(batch))[1](wide))
        # Float32 is held against float64, not against the other's rounding: in 216 draws one process was up to 1.75e-6
        # from packed rows, so that no 1e-6 between the two could hold. Ranks may be as far from float64 as the one
        # process is, and as a walk of 1,000 roundings by half a unit: sqrt(1000) eps / 2, or 16 eps. In those draws it
        # was 8 eps.
        assert_same(grads, exact, apart(alone.grads, exact) + 16 * torch.finfo(torch.float32).eps)
    else:
        assert not grads
        assert figures["loss/grad_norm"] == 0.0


# -- log-probs, teachers, reference, weights, restoring


class Taught(NamedTuple):
    """What a teacher says before and after a step, and a policy's scores and gradients relative to it."""

    before: Tensor
    after: Tensor
    trains: bool
    scores: Scores
    grads: dict[str, Tensor]


def taught(world: World, folders: Path, case: Case, teacher: str, batch: Batch, offload: bool) -> Taught:
    spec = spec_of(str(folders / case.model), case)
    folder = str(folders / teacher)
    how = replace(spec.parallelism, offload_reference=offload)
    frozen = replace(spec, folder=folder, config=AutoConfig.from_pretrained(folder), adapters=None, parallelism=how)
    placed = load_and_shard(world, spec, reference=False, teachers={"t": frozen})
    policy, seen = policy_of(world, placed), rollout(batch.tokens, batch.mask)
    policy.entropy_teacher = placed.teachers["t"]
    before = policy.logp_under(placed.teachers["t"], seen)
    scores, pullback = policy.vjp(batch)
    pullback(Scores(torch.zeros_like(scores.logp), torch.where(batch.mask, batch.adv, 0.0)))
    grads = gathered_grads(policy)
    policy.update()
    with placed.teachers["t"]() as model:
        trains = any(p.requires_grad or p.grad is not None for p in model.parameters())
    return Taught(before, policy.logp_under(placed.teachers["t"], seen), trains, scores, grads)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "strategy", "offload"), [(2, "full_shard", True), (2, "no_shard", False), (4, "hybrid_shard", False)]
)
def test_a_teacher_of_another_shape_says_the_same_and_teaches_the_same_on_any_number_of_ranks(
    folders, size, strategy, offload
):
    case, batch = Case("qwen3_untied", strategy), batch_for("qwen3_untied", 2, 7)
    got, one = (alike(crew(n).run(taught, folders, case, "qwen2_tied", batch, offload and n > 1)) for n in (size, 1))
    loaded = oracle(folders, Case("qwen2_tied", strategy)).vjp(plain(batch.tokens, batch.mask))[0].logp
    torch.testing.assert_close(got.before, loaded, rtol=0, atol=5e-6)
    assert torch.equal(got.before, got.after)
    assert not got.trains
    assert (one.scores.entropy[batch.mask] < 0).all()
    for x, y in zip(got.scores, one.scores, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=5e-6)
    assert_same(got.grads, one.grads, 1e-6)


RATE = 0.3


def averaged(
    world: World, folder: str, case: Case, batch: Batch
) -> tuple[list[dict[str, Tensor]], list[Tensor], dict[str, Tensor], bool]:
    """What trains before and after each of two updates, what the average says then, the average, and whether nothing
    of the policy moved while it was asked."""
    policy, seen = built(world, folder, case), rollout(batch.tokens, batch.mask)
    teacher = moving_average(policy, None, rate=RATE)
    trained = [{name: x.clone() for name, x in policy.weights(trained=True)}]
    said, unmoved = [policy.logp_under(teacher, seen)], True
    for _ in range(2):
        climb(policy, [batch], next(iter(PRODUCT.values())), count(batch))
        policy.update()
        before, own = weights_of(policy), policy.logp(seen)
        said.append(policy.logp_under(teacher, seen))
        trained.append({name: x.clone() for name, x in policy.weights(trained=True)})
        unmoved &= torch.equal(own, policy.logp(seen)) and identical(before, weights_of(policy))
    kept = {name.removeprefix(AVERAGE): x for name, x in policy.tensors().items() if name.startswith(AVERAGE)}
    return trained, said, {name: full_tensor(x).clone() for name, x in kept.items()}, unmoved


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "strategy", "adapted"), [(2, "full_shard", False), (1, "full_shard", True), (4, "hybrid_shard", False)]
)
def test_the_average_follows_what_trains_and_leaves_the_policy_alone(folders, size, strategy, adapted):
    case = Case("qwen3_untied", strategy, adapted=adapted)
    batch = batch_for(case.model, 2, 5)
    trained, said, kept, unmoved = alike(crew(size).run(averaged, str(folders / case.model), case, batch))
    assert unmoved
    assert kept.keys() == trained[0].keys()
    assert not identical(trained[0], trained[1])
    expected = trained[0]
    for now in trained[1:]:
        expected = {name: x + RATE * (now[name] - x) for name, x in expected.items()}
    for name, x in expected.items():
        torch.testing.assert_close(kept[name], x, rtol=1e-6, atol=1e-7)
    model = deepcopy(whole_model(str(folders / case.model), "sdpa", adapted))
    with torch.no_grad():
        for name, x in expected.items():
            hf.named_tensors(model)[name].copy_(x)
    averaged_oracle = FunctionalPolicy(model, temperature=TEMPERATURE)
    expected = averaged_oracle.vjp(plain(batch.tokens, batch.mask))[0].logp
    torch.testing.assert_close(said[2], expected, rtol=0, atol=1e-5)
    assert not torch.equal(said[0], said[2])


def references(world: World, folder: str, case: Case, batch: Batch) -> tuple[Tensor, ...]:
    """The policy's and the reference's log-probs before and after a step, and the policy's weights before it."""
    policy, seen = built(world, folder, case, reference=True), rollout(batch.tokens, batch.mask)
    at_first = policy.logp(seen), policy.reference(seen)
    climb(policy, [batch], next(iter(PRODUCT.values())), count(batch))
    policy.update()
    return *at_first, policy.logp(seen), policy.reference(seen)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "strategy", "adapted"), [(2, "full_shard", False), (2, "no_shard", True), (4, "hybrid_shard", True)]
)
def test_the_reference_is_the_model_as_it_was_loaded(folders, size, strategy, adapted):
    case = Case("qwen3_untied", strategy, adapted=adapted)
    batch = batch_for(case.model, 2, 7)  # three passes of the budget of 30 tokens a rank, on one rank; fewer on more
    first, reference, after, still = alike(crew(size).run(references, str(folders / case.model), case, batch))
    asked = plain(batch.tokens, batch.mask)
    mine, loaded = (oracle(folders, case._replace(adapted=way)).vjp(asked)[0].logp for way in (adapted, False))
    torch.testing.assert_close(first, mine, rtol=0, atol=5e-6)
    torch.testing.assert_close(reference, loaded, rtol=0, atol=5e-6)
    assert torch.equal(reference, still)
    assert (after - first).abs().max() > 1e-3
    assert adapted == ((first - reference).abs().max() > 1e-3).item()


def restored(world: World, folder: str, case: Case, table: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict]:
    """Log-probs and weights after a restore that comes when weights of before lie gathered."""
    policy = built(world, folder, case)
    policy.vjp(batch)
    policy.logp(rollout(batch.tokens, batch.mask))

    def fill(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
            local.copy_(table[name.removeprefix(WEIGHTS)][part(tensor)])

    with torch.no_grad():
        policy.restore(fill, policy.counters())
    logp = policy.logp(rollout(batch.tokens, batch.mask))
    policy.vjp(batch)[1](quiet(batch))  # after which nothing lies gathered any more
    return logp, weights_of(policy)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "strategy", "adapted"),
    [(2, "shard_grad_op", False), (2, "full_shard", True), (4, "hybrid_shard_grad_op", True)],
)
def test_a_restored_policy_computes_with_what_was_restored(folders, size, strategy, adapted):
    case, batch = Case("qwen2_tied", strategy, adapted=adapted), batch_for("qwen2_tied", 4, 5)
    alone = oracle(folders, case)
    alone.params = {name: 1.5 * x for name, x in alone.params.items()}
    logp, weights = alike(crew(size).run(restored, str(folders / case.model), case, alone.params, batch))
    for name, x in alone.params.items():
        assert torch.equal(weights[name], x)
    torch.testing.assert_close(logp, alone.vjp(plain(batch.tokens, batch.mask))[0].logp, rtol=0, atol=5e-6)


# -- precision


class Attempt(NamedTuple):
    """What an update did."""

    raised: str
    figures: dict[str, float]
    changed: bool
    dtypes: set[torch.dtype]


def attempts(
    world: World, folder: str, case: Case, batch: Batch, signals: list[Scores], knobs: Mapping
) -> list[Attempt]:
    """One update after another, each of one signal."""
    policy, found = built(world, folder, case, **knobs), []
    for signal in signals:
        before, raised, figures = weights_of(policy), "", {}
        policy.vjp(batch)[1](signal)
        try:
            figures = policy.update()
        except FloatingPointError as error:
            raised = str(error)
        kept = [*policy.tensors().values()]
        dtypes = {x.dtype for x in kept}
        assert all(p.grad is None for p in policy.model.parameters())
        found.append(Attempt(raised, figures, not identical(weights_of(policy), before), dtypes))
    return found


def quiet(batch: Batch) -> Scores:
    signal = torch.where(batch.mask, 0.1, 0.0)
    return Scores(signal, torch.zeros_like(signal))


def spoilt(batch: Batch, row: int, value: float) -> Scores:
    """A signal of which one token of one row is something else."""
    signal = quiet(batch)
    signal.logp[row, 2] = value
    return signal


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "row", "strategy", "adapted"),
    [(2, 0, "full_shard", False), (4, 3, "hybrid_shard", True)],
)
def test_an_overflow_on_one_rank_is_skipped_on_all_and_counted(folders, size, row, strategy, adapted):
    batch = batch_for("qwen2_tied", 0, 5)
    signals = [quiet(batch), spoilt(batch, row, 1e6), quiet(batch), spoilt(batch, row, float("inf")), quiet(batch)]
    knobs = {"dtype": torch.float16, "loss_scale": DYNAMIC, "initial_scale": 1024.0}
    case = Case("qwen2_tied", strategy, adapted=adapted)
    found = alike_in_words(crew(size).run(attempts, str(folders / case.model), case, batch, signals, knobs))
    assert [a.raised for a in found] == [""] * 5
    assert [a.changed for a in found] == [True, False, True, False, True]
    assert [a.figures["optimizer/overflows"] for a in found] == [0, 1, 1, 2, 2]
    assert [a.figures["optimizer/loss_scale"] for a in found] == [1024, 1024, 512, 512, 256]
    assert [a.figures["optimizer/step"] for a in found] == [1, 1, 2, 2, 3]
    assert found[0].figures["loss/grad_norm"] > 0
    assert all(a.dtypes == {torch.float32} for a in found)  # weights that train and their moments


@pytest.mark.parametrize(
    ("size", "value", "strategy"),
    [(2, float("nan"), "full_shard"), (2, float("inf"), "no_shard")],
)
def test_a_nan_on_one_rank_raises_on_all_when_the_scale_cannot_shrink(folders, size, value, strategy):
    batch = batch_for("qwen2_tied", 0, 5)
    signals = [quiet(batch), spoilt(batch, 1, value), quiet(batch)]
    asked = (str(folders / "qwen2_tied"), Case("qwen2_tied", strategy), batch, signals, {})
    first, broken, last = alike_in_words(crew(size).run(attempts, *asked))
    assert "expected a finite one" in broken.raised
    assert (first.raised, last.raised) == ("", "")
    assert (first.changed, broken.changed, last.changed) == (True, False, True)
    assert last.figures["optimizer/step"] == 2


def gradients_in(world: World, folder: str, case: Case, batch: Batch, f: Callable, knobs: Mapping) -> dict[str, Tensor]:
    policy = built(world, folder, case, **knobs)
    climb(policy, [batch], f, count(batch))
    return {name: x / policy.scale for name, x in gathered_grads(policy).items()}


# Unit roundoff times a few of the roundings that a gradient goes through.
ROUNDING = {torch.bfloat16: 16 * 2.0**-8, torch.float16: 16 * 2.0**-11}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("size", "dtype", "adapted", "model"),
    [
        *((1, torch.bfloat16, False, "qwen3_untied"), (2, torch.float16, False, "qwen2_tied")),
        *((2, torch.bfloat16, True, "gemma2_capped"), (4, torch.float16, True, "qwen3_untied")),
    ],
)
def test_half_precision_gradients_are_float32s_within_its_rounding(folders, size, dtype, adapted, model):
    case, batch = Case(model, "full_shard", adapted=adapted), batch_for(model, 1, 7)
    which = next(iter(PRODUCT))
    right = expected(folders, model, adapted, which, 1, 7).grads
    knobs = {"dtype": dtype, "initial_scale": 1024.0 if dtype is torch.float16 else 1.0}
    got = alike(crew(size).run(gradients_in, str(folders / model), case, batch, PRODUCT[which], knobs))
    assert {x.dtype for x in got.values()} == {torch.float32}
    one, other = (torch.cat([x[name].flatten() for name in right]) for x in (got, right))
    assert float((one - other).norm() / other.norm()) < ROUNDING[dtype]
    assert not torch.equal(one, other)


def small_step(world: World, folder: str, case: Case, batch: Batch, lr: float) -> tuple[dict, dict, dict]:
    how = partial(adamw, **{**STEP, "lr": lr, "weight_decay": 0.0}, eps=1e-12)
    policy = built(world, folder, case, dtype=torch.bfloat16, optimizer=how)
    before = weights_of(policy)
    policy.vjp(batch)[1](quiet(batch))
    grads = gathered_grads(policy)
    policy.update()
    return before, grads, weights_of(policy)


@pytest.mark.parametrize(("size", "adapted"), [(1, False), (2, True)])
def test_a_step_far_below_bfloat16s_spacing_is_not_lost(folders, size, adapted):
    case, batch, lr = Case("qwen2_tied", "full_shard", adapted=adapted), batch_for("qwen2_tied", 0, 5), 1e-6
    before, grads, after = alike(crew(size).run(small_step, str(folders / case.model), case, batch, lr))
    assert grads
    for name, g in grads.items():
        moved = (after[name] - before[name])[g.abs() > 1e-6]
        spacing = 1.2e-7 * float(before[name].abs().max())
        assert (moved.abs() - lr).abs().max() <= spacing, name  # Adam's first step is as long as the learning rate
        assert (before[name].abs().max() * 2**-9) > lr
