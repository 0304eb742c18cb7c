"""K policies in one process: the same model at K places in weight space, stepped together by `torch.func.vmap`.

    python experiments/vmap_sweep/idea.py --repeats 7

Every policy has a seed, a learning rate and a batch of its own. A step is forward, backward through the clipped-ratio
objective, and AdamW. `Together` does it for all K with weights stacked to [K, ...]; `Alone` does it for one, and K of
those in turn are what a sweep of separate runs costs. First each slice is proven equal to its separate run, then both
are timed.

Attention is eager under vmap: on CPU vmap over scaled_dot_product_attention goes through a slow fallback.
"""

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from experiments.tiny.models import Sizes, random_model
from grpo_fn.algo import losses, objective
from grpo_fn.algo import objective as kls
from grpo_fn.algo.step import UNMOVED
from grpo_fn.core import prng
from grpo_fn.core.types import Batch, Scores, Totals
from grpo_fn.shell.model import lora
from grpo_fn.shell.policy import optimizer

CONFIG = Sizes(vocabulary=352, positions=128).config()
WIDTH, PROMPT = 48, 24  # tokens of a row; of them the prompt's
BETA1, BETA2, EPS = 0.9, 0.99, 1e-6  # eps: see difference
TOLERANCE = 1e-5
LOSS = partial(
    objective.policy_objective,
    gains=UNMOVED,
    token_loss=partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.2),
    importance_correction=None,
    kl=kls.k3,
    loss_aggregation=partial(objective.constant_length, max_length=WIDTH - PROMPT),
    beta=0.0,
    entropy_bonus=0.0,
)

Params = dict[str, Tensor]


class State(NamedTuple):
    """What a policy is: what trains, AdamW's moments, and updates so far. Stacked, every tensor has K first."""

    params: Params
    m: Params
    v: Params
    t: Tensor


def built(attention: str, *, adapters: bool, dtype: torch.dtype) -> nn.Module:
    """The model of gin/run/arithmetic.gin with random weights; with LoRA adapters, they alone train."""
    model = random_model(CONFIG, seed=0)
    model.set_attn_implementation(attention)
    if adapters:
        lora.attach(model, lora.LoRA(rank=8, alpha=32.0, dropout=0.0, targets=lora.ALL_LINEAR))
    return model.to(dtype)


def starts(model: nn.Module, policies: int) -> list[State]:
    """K policies that differ in their seed: each weight that trains is moved a little, by its own draw."""
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for k in range(policies):
        key = prng.fold_in(prng.key(0, device="cpu"), k)
        params = {
            name: p
            + 0.02 * (prng.uniform(prng.fold_in(key, i), p.numel(), dtype=p.dtype, low=-1.0, high=1.0).view_as(p))
            for i, (name, p) in enumerate(named.items())
        }
        zeros = {name: torch.zeros_like(p) for name, p in params.items()}
        found.append(State(params, zeros, dict(zeros), torch.zeros((), dtype=torch.int64)))
    return found


def batches(policies: int, rows: int, dtype: torch.dtype) -> list[Batch]:
    """K fixed batches: tokens, log-probs and advantages of nothing in particular, half of every row sampled."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(policies):
        tokens = torch.randint(0, CONFIG.vocab_size, (rows, WIDTH), generator=generator)
        mask = (torch.arange(WIDTH) >= PROMPT).expand(rows, WIDTH).clone()
        old = -5.9 + 0.1 * torch.randn(rows, WIDTH, generator=generator, dtype=dtype)
        adv = torch.randn(rows, 1, generator=generator, dtype=dtype).expand(rows, WIDTH).clone()
        old, adv = torch.where(mask, old, 0.0), torch.where(mask, adv, 0.0)
        found.append(Batch(tokens, mask, old, old, old, old, adv, torch.zeros_like(mask), mask.long()))
    return found


def loss(model: nn.Module, fixed: Params, params: Params, batch: Batch) -> Tensor:
    """The objective as a pure function of what trains. Every row samples its last tokens, so nothing is gathered."""
    inputs = {"input_ids": batch.tokens, "position_ids": torch.arange(WIDTH)[None], "use_cache": False}
    logits = functional_call(model, {**fixed, **params}, (), inputs).logits[:, PROMPT - 1 : -1]
    logp = logits.log_softmax(-1)
    chosen = logp.gather(-1, batch.tokens[:, PROMPT:, None])[..., 0]
    scores = Scores(*(pad(x, (PROMPT, 0)) for x in (chosen, -(logp.exp() * logp).sum(-1))))
    rows = torch.tensor(len(batch.tokens))
    return LOSS(scores, batch=batch, totals=Totals(rows * (WIDTH - PROMPT), rows, rows, rows))[0]


def adamw(state: State, gradient: Params, lr: Tensor) -> State:
    """AdamW without decay as a pure function: a learning rate of its own for each slice."""
    t = state.t + 1
    m = {name: BETA1 * x + (1 - BETA1) * gradient[name] for name, x in state.m.items()}
    v = {name: BETA2 * x + (1 - BETA2) * gradient[name] ** 2 for name, x in state.v.items()}
    step = {name: m[name] / (1 - BETA1**t) / ((v[name] / (1 - BETA2**t)).sqrt() + EPS) for name in m}
    return State({name: x - lr * step[name] for name, x in state.params.items()}, m, v, t)


class Together:
    """K policies stepped by one vmapped function. Frozen weights are shared, what trains is stacked."""

    def __init__(self, model: nn.Module, states: Sequence[State]) -> None:
        self.model = model
        self.fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        self.state = stacked(states)

    def gradients(self, batch: Batch) -> Params:
        """Of every policy on its own batch, [K, ...]."""
        return vmap(grad(partial(loss, self.model, self.fixed)))(self.state.params, batch)

    @torch.no_grad()
    def step(self, batch: Batch, lr: Tensor) -> None:
        self.state = vmap(adamw)(self.state, self.gradients(batch), lr)


class Alone:
    """One policy as a run of its own has it: parameters of a module, backward(), torch's fused AdamW."""

    def __init__(self, model: nn.Module, state: State, lr: float) -> None:
        self.model = copy.deepcopy(model)
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name, p in self.named.items():
            p.data.copy_(state.params[name])
        self.optimizer = optimizer.adamw(
            self.named.values(), lr=lr, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=0.0
        )

    def gradients(self, batch: Batch) -> Params:
        """On its batch."""
        self.optimizer.zero_grad(set_to_none=True)
        loss(self.model, {}, {}, batch).backward()
        return {name: p.grad for name, p in self.named.items()}

    def step(self, batch: Batch) -> None:
        self.gradients(batch)
        self.optimizer.step()


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of tensors to one tree of [K, ...]."""
    return tree_map(lambda *leaves: torch.stack(leaves), *trees)


class Difference(NamedTuple):
    """The largest over all slices and weights."""

    gradient: float  # float32: norm of the difference over the norm
    weight: float  # float64, absolute, after some steps


def difference(policies: int, *, adapters: bool, rows: int, steps: int) -> Difference:
    """How far each slice is from its separate run, which attends through SDPA.

    Weights are compared in float64 (norms and softmax stay in float32 inside the model) and with an eps of 1e-6: AdamW
    divides each gradient by its own size, so that one which is zero but for rounding, that of a key's bias, would move
    its weight by lr in a direction that rounding decides, in any two programs.
    """
    found = []
    for dtype in (torch.float32, torch.float64):
        model = built("eager", adapters=adapters, dtype=dtype)
        apart = built("sdpa", adapters=adapters, dtype=dtype)
        states, batch = starts(model, policies), batches(policies, rows, dtype)
        rates = torch.logspace(-4, -3, policies, dtype=dtype)
        many = Together(model, states)
        each = [Alone(apart, state, lr) for state, lr in zip(states, rates.tolist(), strict=True)]
        if dtype == torch.float32:
            mine = many.gradients(stacked(batch))
            theirs = [one.gradients(b) for one, b in zip(each, batch, strict=True)]
            found.append(max(relative({n: g[k] for n, g in mine.items()}, other) for k, other in enumerate(theirs)))
            continue
        for _ in range(steps):
            many.step(stacked(batch), rates)
            for one, b in zip(each, batch, strict=True):
                one.step(b)
        weights_of = many.state.params
        found.append(max(gap(weights_of[n][k], p) for k, one in enumerate(each) for n, p in one.named.items()))
    return Difference(*found)


def relative(a: Params, b: Params) -> float:
    """||a - b|| / ||b|| over all tensors together."""
    off, size = (sum(float(x.double().square().sum()) for x in xs) for xs in ([a[n] - b[n] for n in b], b.values()))
    return (off / size) ** 0.5


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two numbers."""
    return float((a - b).detach().abs().max())


class Timing(NamedTuple):
    """Milliseconds of a step of all K policies, medians."""

    together: float
    eager: float  # one after the other, eager attention
    sdpa: float  # one after the other, as a run attends


def timing(policies: int, *, adapters: bool, rows: int, repeats: int) -> Timing:
    """The three in turn, so that what else the machine does falls on all of them alike."""
    model, apart = (built(kind, adapters=adapters, dtype=torch.float32) for kind in ("eager", "sdpa"))
    states, batch = starts(model, policies), batches(policies, rows, torch.float32)
    whole, rates = stacked(batch), torch.full((policies,), 1e-4)
    many = Together(model, states)
    eager, sdpa = ([Alone(kind, state, 1e-4) for state in states] for kind in (model, apart))

    def in_turn(each: list[Alone]) -> None:
        for one, b in zip(each, batch, strict=True):
            one.step(b)

    ways = [partial(many.step, whole, rates), partial(in_turn, eager), partial(in_turn, sdpa)]
    for way in ways:
        way()
    taken = [[milliseconds(way) for way in ways] for _ in range(repeats)]
    return Timing(*map(statistics.median, zip(*taken, strict=True)))


def milliseconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=int, nargs="+", default=[1, 2, 4, 8], metavar="K")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 32], metavar="B", help="of a policy's batch")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each, of which the median counts")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prove, then time; 1 when a slice is not its separate run."""
    args = flags().parse_args(argv)
    torch.set_num_threads(args.threads)
    for adapters in (False, True):
        found = difference(4, adapters=adapters, rows=4, steps=5)
        say(f"{kind(adapters)}: gradients differ by {found.gradient:.1e}, in float64 weights by {found.weight:.1e}")
        if max(found) > TOLERANCE:
            say(f"got {max(found):.1e}, expected at most {TOLERANCE:.0e}: a slice is not its separate run")
            return 1
    say("| model | rows | K | together, ms | apart, eager, ms | apart, SDPA, ms | eager / together | SDPA / together |")
    say("|" + "---|" * 8)
    for adapters, rows, policies in itertools.product((False, True), args.rows, args.policies):
        t = timing(policies, adapters=adapters, rows=rows, repeats=args.repeats)
        cells = [kind(adapters), rows, policies, *(f"{x:.0f}" for x in t)]
        say("| " + " | ".join(map(str, [*cells, f"{t.eager / t.together:.2f}", f"{t.sdpa / t.together:.2f}"])) + " |")
    return 0


def kind(adapters: bool) -> str:
    """What trains, and how many numbers that is."""
    model = built("eager", adapters=adapters, dtype=torch.float32)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{'LoRA r=8' if adapters else 'all weights'} ({count:,})"


def say(text: str) -> None:
    """A line of the result."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
