"""What is computed on the device is what the CPU computes: random bits, gradients, rows, head, precisions, blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from device_parts import Bench, built, distance, forget, full_float32, grpo_objective, peak, require, within
from device_runner import Figure, Setting
from device_shapes import MIDDLE, QWEN, folder, sized
from torch import Tensor
from torch.func import grad_and_value

from grpo_fn.algo.step import UNMOVED
from grpo_fn.core import prng
from grpo_fn.core.batch import count
from grpo_fn.core.types import Batch, Scores
from grpo_fn.shell.model import blocks, hf
from grpo_fn.shell.model.attention import AttentionSpec, choose_kernel
from grpo_fn.shell.model.logprob_model import dense_scores, linear_scores
from grpo_fn.shell.policy import optimizer
from grpo_fn.shell.policy.fsdp import FunctionalPolicy, full_tensor
from grpo_fn.shell.process import use_deterministic_kernels

TEMPERATURE = 0.7
SPREAD = 0.05  # of the weights: far enough from a fresh model's that every nonlinearity matters
CPU = torch.device("cpu")
OBJECTIVE = grpo_objective(0.1, 0.01)


# -- random bits


def randomness(setting: Setting) -> list[Figure]:
    """Every draw on the device has the bits that it has on the CPU."""
    for seed in (0, 42, 2**63 + 1):
        one, other = (draws(prng.key(seed, device=device)) for device in ("cpu", setting.device))
        same = all(torch.equal(a, b.cpu()) for a, b in zip(one, other, strict=True))
        require(same, f"prng: got other bits on {setting.device} than on the CPU from seed {seed}")
    return [Figure("bits as on the CPU", "yes")]


def draws(key: Tensor) -> list[Tensor]:
    """Of every kind and dtype, derived keys among them."""
    keys = prng.fold_in(prng.split(key, 5)[:, None], torch.arange(3, device=key.device))
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    unit = [prng.uniform(keys, 257, dtype=dtype, low=0.0, high=1.0) for dtype in floats]
    return [keys, *unit, prng.randint(keys, 65, low=-3, high=2**40), prng.permutation(key, 1000)]


# -- gradients


def rows_of(vocabulary: int, *, groups: int, size: int, prompt: int, new: int) -> tuple[Tensor, Tensor]:
    """Rows of groups that share a prompt, of different lengths; the first is as long as possible. On the CPU."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, vocabulary, (groups * size, prompt + new), generator=g)
    start = torch.randint(1, prompt + 1, (groups, 1), generator=g).repeat_interleave(size, 0)
    length = torch.randint(1, new + 1, (groups * size, 1), generator=g)
    start[0], length[0] = prompt, new
    column = torch.arange(prompt + new)
    shown = tokens[::size].repeat_interleave(size, 0)
    return torch.where(column < start, shown, tokens), (column >= start) & (column < start + length)


class Case(NamedTuple):
    """A model folder, a batch on the device, the oracle, and the learning signal that it leads to there."""

    model: str
    batch: Batch
    oracle: FunctionalPolicy
    signal: Scores


def new_case(setting: Setting) -> Case:
    """A middling model, and a batch whose old and reference policies are near its own."""
    model = folder(setting, sized(setting, MIDDLE), spread=SPREAD, dtype=torch.float32)
    oracle = FunctionalPolicy(
        hf.load_model(model, dtype=torch.float32, device=CPU, attention="sdpa"), temperature=TEMPERATURE
    )
    small = {"groups": 2, "size": 3, "prompt": 4, "new": 9}
    sizes = small if setting.tiny else {"groups": 4, "size": 4, "prompt": 24, "new": 40}
    tokens, mask = rows_of(oracle.model.config.vocab_size, **sizes)
    with torch.no_grad():
        logp = oracle.scores(oracle.params, tokens, mask).logp
    g = torch.Generator().manual_seed(2)
    old, ref, sampled = (logp + 0.3 * torch.randn(mask.shape, generator=g) for _ in range(3))
    adv = torch.randn(len(mask), 1, generator=g).expand(mask.shape)
    batch = Batch(tokens, mask, sampled, old, ref, ref, adv, torch.zeros_like(mask), mask.long())
    signal = climb(oracle, batch)
    there = [type(one)(*(x.to(setting.device) for x in one)) for one in (batch, signal)]
    return Case(model, there[0], oracle, there[1])


def climb(policy: Any, batch: Batch) -> Scores:
    """Pull the objective's gradient back, in one micro-batch; the learning signal."""
    scores, pullback = policy.vjp(batch)
    loss = partial(OBJECTIVE, batch=batch, totals=count(batch), gains=UNMOVED)
    signal, _ = grad_and_value(loss, has_aux=True)(scores)
    pullback(signal)
    return signal


def grads(bench: Bench) -> dict[str, Tensor]:
    """The accumulated gradients, under the model's names."""
    return copied({name: p.grad for name, p in bench.policy.named_tensors().items() if p.grad is not None})


def weights(bench: Bench) -> dict[str, Tensor]:
    """What trains."""
    return copied({name: p for name, p in bench.policy.named_tensors().items() if p.requires_grad})


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole, in float32, on the CPU, and no longer the policy's."""
    return {name: full_tensor(x).to("cpu", torch.float32, copy=True) for name, x in tensors.items()}


def gradients(setting: Setting) -> list[Figure]:
    """The whole path of training against `functional_call` and `torch.func.vjp` on the CPU."""
    model, batch, oracle, signal = new_case(setting)
    build = partial(built, setting, model, temperature=TEMPERATURE)
    with full_float32():
        climb((single := build(torch.float32)).policy, batch)
    largest, _ = distance(grads(single), oracle.grads)
    half = build(torch.bfloat16)
    # The oracle's own signal: a token near a clip would get another one from the rounding of its log-prob.
    once, again = (scores_and_gradients(half, batch, signal)[-1] for _ in range(2))
    (_, rounded), (repeated, _) = distance(once, oracle.grads), distance(again, once)
    longer, deterministic = (repeats(setting, half, on=on) for on in (False, True))
    return [
        within("float32, of the largest entry", largest, 1e-4, goal=1e-5),
        within("bfloat16 with float32 weights, of the norm", rounded, 0.1, goal=0.03),
        Figure("bfloat16 again, of the largest entry", repeated, at_most=0.0),
        # Attention of flash kernels adds key blocks of 128 up in any order, which shorter rows do not show.
        Figure("bfloat16 again, rows of 536 tokens", longer),
        Figure("the same with deterministic kernels", deterministic, at_most=0.0),
    ]


def repeats(setting: Setting, bench: Bench, *, on: bool) -> float:
    """How far gradients of long rows are from those of the same rows again; `on` has kernels be deterministic."""
    new = 9 if setting.tiny else 512
    tokens, mask = rows_of(bench.placing.config.vocab_size, groups=2, size=4, prompt=24, new=new)
    none = torch.zeros(mask.shape)
    signal = Scores(mask * torch.randn(mask.shape, generator=torch.Generator().manual_seed(6)), none)
    batch = Batch(tokens, mask, none, none, none, none, none, torch.zeros_like(mask), mask.long())
    there = [type(x)(*(y.to(setting.device) for y in x)) for x in (batch, signal)]
    before = torch.are_deterministic_algorithms_enabled()
    use_deterministic_kernels(on, setting.device)
    try:
        once, again = (scores_and_gradients(bench, *there)[-1] for _ in range(2))
    finally:
        use_deterministic_kernels(before, setting.device)
    return distance(again, once)[0]


def rows(setting: Setting) -> list[Figure]:
    """Scores and gradients of rows end to end against those of padded rows."""
    model, batch, _, signal = new_case(setting)
    figures: list[Figure] = []
    for dtype, most, goal in ((torch.float32, 1e-4, 1e-5), (torch.bfloat16, 0.1, 0.03)):
        query = torch.empty(1, 2, 64, dtype=dtype, device=setting.device)
        kernel = choose_kernel(query, AttentionSpec(None, 1.0, 0.0, None, "sdpa"))
        name = getattr(kernel, "func", kernel).__name__
        with full_float32():
            expected = scores_and_gradients(
                built(setting, model, dtype, packed=False, temperature=TEMPERATURE), batch, signal
            )
            bench = built(setting, model, dtype, temperature=TEMPERATURE)
            apart = furthest(scores_and_gradients(bench, batch, signal), expected)
            require(bench.policy.logprob_model.packs is True, "rows: got padded rows after all")
            what = f"packed rows, {str(dtype).removeprefix('torch.')}, {name}"
            figures.append(within(f"{what}, of the norm", apart, most, goal=goal))
    return figures


def scores_and_gradients(bench: Bench, batch: Batch, signal: Scores) -> list[dict[str, Tensor]]:
    """Log-probs, entropies, and the gradients that the signal is pulled back to; these are cleared."""
    scores, pullback = bench.policy.vjp(batch)
    pullback(signal)
    tensors = [{"logp": scores.logp.float()}, {"entropy": scores.entropy.float()}, grads(bench)]
    bench.policy.optimizer.zero_grad(set_to_none=True)
    return tensors


def furthest(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> float:
    """The largest of their distances, each of its norm."""
    return max(distance(a, b)[1] for a, b in zip(got, expected, strict=True))


# -- the head


def head(setting: Setting) -> list[Figure]:
    """linear_scores against dense_scores of float32, on the numbers of a half-B head."""
    tokens, vocabulary, width = (32, 2000, 64) if setting.tiny else (2048, QWEN["0.5b"].vocabulary, QWEN["0.5b"].hidden)
    g = torch.Generator(setting.device).manual_seed(3)
    drawn = partial(torch.randn, device=setting.device, generator=g)
    hidden, weight = drawn(tokens, width), drawn(vocabulary, width) / width**0.5
    target = torch.randint(0, vocabulary, (tokens,), device=setting.device, generator=g)
    signal = drawn(2, tokens)

    def dense_head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return dense_scores(hidden @ weight.T, target, temperature=TEMPERATURE)

    linear = partial(linear_scores, temperature=TEMPERATURE, elements=2**22 if not setting.tiny else 2**13)
    figures: list[Figure] = []
    for dtype, most, goal in ((torch.float32, 1e-4, 1e-5), (torch.bfloat16, 0.03, 0.01)):
        given = [hidden.to(dtype), weight.to(dtype)]
        with full_float32():
            dense, dense_peak = pulled(setting, dense_head, [x.float() for x in given], target, signal)
            got, got_peak = pulled(setting, linear, given, target, signal)
        apart = max(distance({"x": a.float()}, {"x": b})[1] for a, b in zip(got, dense, strict=True))
        name = str(dtype).removeprefix("torch.")
        figures.append(within(f"{name} against dense float32, of the norm", apart, most, goal=goal))
        if setting.device == "cuda":
            figures.append(Figure(f"{name}, share of the dense one's memory", got_peak / dense_peak, at_most=0.25))
    return figures


def pulled(
    setting: Setting, f: Callable[..., Any], given: list[Tensor], target: Tensor, signal: Tensor
) -> tuple[list[Tensor], float]:
    """Scores and the gradients of hidden states and weight, and the gigabytes that it took beside what was there."""
    leaves = [x.clone().requires_grad_() for x in given]
    before = torch.cuda.memory_allocated() / 1e9 if setting.device == "cuda" else 0.0
    forget(setting.device)
    scores = f(*leaves, target)
    torch.autograd.backward(scores, [s.to(y.dtype) for s, y in zip(signal, scores, strict=True)])
    return [*(x.detach() for x in scores), *(x.grad for x in leaves)], peak(setting.device) - before


# -- precisions and places


def float16(setting: Setting) -> list[Figure]:
    """Steps with the numbers of gin/scale/fp16.gin, until one is not skipped."""
    scaling = partial(optimizer.dynamic_loss_scale, interval=2000)
    model, batch, *_ = new_case(setting)
    bench = built(setting, model, torch.float16, lr=1e-3, scaling=scaling, initial_scale=2.0**16)
    before = weights(bench)
    for _ in range(20):
        climb(bench.policy, batch)
        if (figures := bench.policy.update())["optimizer/step"] > 0:
            break
    after = weights(bench)
    require(figures["optimizer/step"] > 0, f"float16: got no step in 20, the loss scale down to {bench.policy.scale:g}")
    require(all(bool(x.isfinite().all()) for x in after.values()), "float16: got weights that are not finite")
    moved = distance(after, before)[1]
    require(moved > 0, "float16: got the same weights after a step")
    return [
        Figure("steps skipped before it", figures["optimizer/overflows"]),
        Figure("gradient norm", figures["loss/grad_norm"]),
        Figure("weights moved, of the norm", moved),
    ]


def offload(setting: Setting) -> list[Figure]:
    """One update with everything on the host against one on the device."""
    model, batch, *_ = new_case(setting)
    moved = []
    for away in (True, False):
        bench = built(setting, model, torch.bfloat16, lr=1e-3, offload=away)
        before = weights(bench)
        climb(bench.policy, batch)
        bench.policy.update()
        moved.append({name: x - before[name] for name, x in weights(bench).items()})
    _, apart = distance(*moved)
    return [within("the update, of its norm", apart, 0.05, goal=0.01)]


def compiled(setting: Setting) -> list[Figure]:
    """Compiled blocks on batches of three widths, and how often they were compiled anew."""
    model, batch, _, signal = new_case(setting)
    width, first = batch.mask.shape[1], int(batch.mask.int().argmax(-1).max())  # the longest prompt's end
    widths = [width, (width + first + 1) // 2, first + 1]
    build = partial(built, setting, model, torch.bfloat16, temperature=TEMPERATURE)
    fast, plain = build(compile=partial(blocks.torch_compile, mode="default")), build()
    worst = 0.0
    for columns in widths:
        part, of_part = (type(one)(*(x[:, :columns] for x in one)) for one in (batch, signal))
        worst = max(worst, furthest(*(scores_and_gradients(bench, part, of_part) for bench in (fast, plain))))
    graphs = blocks.recompilations()
    return [
        within("scores and gradients, of the norm", worst, 0.1, goal=0.03),
        Figure("graphs built", float(graphs.built)),
        Figure("compiled again", float(graphs.again)),
    ]
