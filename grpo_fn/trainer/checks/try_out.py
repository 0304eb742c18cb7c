"""The functions of a configuration, called on a toy step before anything expensive starts.

One that cannot be called as the trainer calls it, or returns something else than the trainer needs, ends the run with
one line: the knob, the function by module and name, got and wanted.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from grpo_fn.algo.step import Algorithm, from_sampler
from grpo_fn.core.batch import count, tokens_of_group
from grpo_fn.core.groups import outcome_reward
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.types import Batch, Gains, Rollout, Scores

T = TypeVar("T")

GROUPS, TOKENS = 2, 3  # of the toy step; its samples have the configured group size, its first column is the prompt


def try_token_sampler(token_sampler: Callable[..., Any], temperature: float) -> None:
    """Raise ValueError unless the token sampler draws a token and its log-prob for every row.

    Args:
        token_sampler: (logits `[B, V]`, u `[B]`, *, temperature) -> (token `[B]`, logp `[B]`).
        temperature: that of the sampling.
    """
    logits, u = torch.linspace(-1, 1, 20).view(4, 5), torch.tensor([0.1, 0.4, 0.6, 0.9])

    def problem(found: Any) -> str | None:
        if not (isinstance(found, tuple) and len(found) == 2):
            return shown_type(found)
        return wrong_tensor(found[0], (4,), torch.long) or wrong_tensor(found[1], (4,), torch.float32)

    _try(
        "sections.Sampling.token_sampler",
        token_sampler,
        lambda: token_sampler(logits, u, temperature=temperature),
        problem,
        wanted="(token [B] of integers, logp [B] in nats) for (logits [B, V], u [B])",
    )


def try_objective(
    knob: str, objective: Callable[..., Any], group_size: int, *, names: Sequence[str], kind: str
) -> None:
    """Raise ValueError unless the objective, its functions included, gives a value, a gradient and its diagnostics.

    Args:
        knob: `step.Algorithm.objective` or `step.Algorithm.supervised`.
        objective: what the knob holds.
        group_size: samples of each problem.
        names: the diagnostics that are needed.
        kind: what its functions take and return, for the error.
    """
    batch = toy_batch(group_size)
    shape = tuple(batch.mask.shape)

    def value(scores: Scores) -> tuple[Tensor, Any]:
        return objective(scores, batch=batch, totals=count(batch), gains=Gains(1.0, 1.0))

    def problem(found: tuple[Scores, tuple[Tensor, Any]]) -> str | None:
        signal, (loss, seen) = found
        if not isinstance(seen, dict):
            return f"{shown_type(seen)} of diagnostics"
        if missing := [name for name in names if name not in seen]:
            return f"no diagnostic {', '.join(missing)}"
        parts = {"value": (loss, ()), "gradient": (signal.logp, shape), **{n: (seen[n], shape) for n in names}}
        wrong = {name: wrong_tensor(x, size, torch.float32) for name, (x, size) in parts.items()}
        return next((f"{name}: {text}" for name, text in wrong.items() if text), None)

    _try(
        knob,
        objective,
        lambda: grad_and_value(value, has_aux=True)(Scores(batch.logp_old + 0.1, torch.ones(shape))),
        problem,
        wanted=f"a finite value and gradient, and [B, T] of each of {', '.join(names)}: {kind}",
    )


def try_credit(algorithm: Algorithm, parts: Sequence[str]) -> None:
    """Raise ValueError unless what makes advantages and chooses rows and tokens returns what a step needs.

    Args:
        algorithm: its `credit`, `baseline`, `energy_weight`, `distillation`, `reweighting`, `filters`, `token_mask` and
            `group_size`.
        parts: the names of the reward's parts.
    """
    size, batch = algorithm.group_size, toy_batch(algorithm.group_size)
    mask = batch.mask.view(GROUPS, size, -1)
    value = torch.arange(GROUPS * size, dtype=torch.float32).view(GROUPS, size) / (GROUPS * size)
    reward = outcome_reward(value, torch.ones_like(value, dtype=torch.bool), dict.fromkeys(parts, value))
    groups = Batch(*(x.view(mask.shape) for x in batch))
    adv, logp = groups.adv, groups.logp_old + 0.1
    ended = torch.zeros(len(batch.mask), dtype=torch.bool)
    rollout = Rollout(batch.tokens, batch.mask, batch.logp_sampled, ended, ("",) * len(ended))
    keys = torch.arange(2 * len(ended)).view(-1, 2)
    asked = [
        ("credit", algorithm.credit, lambda f: f(reward, torch.zeros(mask.shape), mask), mask.shape, torch.float32),
        ("baseline", algorithm.baseline, lambda f: vmap(f)(adv, adv.abs(), mask), mask.shape, torch.float32),
        (
            "energy_weight",
            algorithm.energy_weight,
            lambda f: vmap(f)(batch.logp_old, batch),
            batch.mask.shape,
            torch.float32,
        ),
        ("distillation", algorithm.distillation, lambda f: f(adv, 0.1 * adv, mask), mask.shape, torch.float32),
        ("reweighting", algorithm.reweighting, lambda f: vmap(f)(logp, groups), mask.shape, torch.float32),
        *(("filters", one, lambda f: f(rollout, adv), (GROUPS, size), torch.bool) for one in algorithm.filters),
        ("token_mask", algorithm.token_mask, lambda f: f(batch, keys), batch.mask.shape, torch.bool),
    ]
    for knob, function, call, shape, dtype in asked:
        _try(
            f"step.Algorithm.{knob}",
            function,
            lambda call=call, function=function: call(function),
            lambda found, shape=shape, dtype=dtype: wrong_tensor(found, tuple(shape), dtype),
            wanted=f"{'booleans' if dtype is torch.bool else 'finite numbers'} of shape {list(shape)}",
        )


def reads_energy(baseline: Callable[[Tensor, Tensor, Tensor], Tensor]) -> bool:
    """Whether advantages move with the tokens' energies; only then does a step compute them.

    Args:
        baseline: (advantage, energy, mask) of one group -> advantage, [G, T] each.
    """
    value = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    energy = torch.tensor([[0.1, 0.7], [0.5, 0.2]], dtype=torch.float64)
    everything = torch.ones_like(value, dtype=torch.bool)
    return not torch.equal(baseline(value, energy, everything), baseline(value, 1 - energy, everything))


def weighs_energies(energy_weight: Callable[[Tensor, Batch], Tensor]) -> bool:
    """Whether a weight of energies is another than 1 where sampler and trainer differ.

    Args:
        energy_weight: (logp_old [T], row) -> weight [T].
    """
    rows = toy_batch(GROUPS)
    apart = (rows._replace(logp_sampled=rows.logp_old - gap) for gap in (0.1, -0.1, 1.0, -1.0, 20.0, -20.0))
    return any(bool((vmap(energy_weight)(rows.logp_old, one)[rows.mask] != 1).any()) for one in apart)


def check_energy_weight(algorithm: Algorithm) -> None:
    """Raise ValueError for weights of energies that no baseline reads, or that are all 1 with the logp_old there is.

    Args:
        algorithm: its `energy_weight`, `baseline` and `old_logp`.
    """
    if not weighs_energies(algorithm.energy_weight):
        return
    if not reads_energy(algorithm.baseline):
        raise ValueError(
            "step.Algorithm.energy_weight: got weights with a baseline that reads no energy, wanted "
            "step.Algorithm.energy_weight = @importance.no_correction, or "
            "step.Algorithm.baseline = @advantage.optimal_token_baseline"
        )
    if getattr(algorithm.old_logp, "func", algorithm.old_logp) is from_sampler:
        raise ValueError(
            "step.Algorithm.energy_weight: got weights by logp_old - logp_sampled and an old_logp that is logp_sampled "
            "itself, so every weight is 1: wanted step.Algorithm.old_logp = @step.from_trainer, or "
            "step.Algorithm.energy_weight = @importance.no_correction"
        )


def reads_logp(reweighting: Callable[[Tensor, Batch], Tensor]) -> bool:
    """Whether advantages move with the policy at an update; only then is it looked at before.

    Args:
        reweighting: (log-probs now, rows) of one group -> advantage, [G, T] each.
    """
    rows = toy_batch(GROUPS)
    return not torch.equal(reweighting(rows.logp_old, rows), reweighting(rows.logp_old - rows.adv, rows))


def toy_batch(group_size: int) -> Batch:
    """GROUPS groups of rows of one prompt token and TOKENS sampled ones; advantages of both signs, no two alike."""
    rows, width = GROUPS * group_size, 1 + TOKENS
    number = torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    mask = torch.arange(width).expand(rows, width) > 0
    logp = -1.0 - number / number.numel()
    adv = (number / number.numel() - 0.5) * mask
    return Batch(
        number.long(), mask, logp, logp, logp - 0.1, logp - 0.2, adv, ~mask & mask, tokens_of_group(mask, GROUPS)
    )


def wrong_tensor(found: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """What is wrong with a tensor that is to have this shape and kind of numbers, and to be finite; None if nothing."""
    if not isinstance(found, Tensor):
        return shown_type(found)
    kinds = (found.dtype is torch.bool, found.is_floating_point())
    if kinds != (dtype is torch.bool, dtype.is_floating_point):
        return f"a tensor of {str(found.dtype).removeprefix('torch.')}"
    if tuple(found.shape) != shape:
        return f"a tensor of shape {list(found.shape)}"
    return None if found.isfinite().all() else "a tensor with numbers that are not finite"


def shown_type(found: Any) -> str:
    """The type of what was returned, and its length where it is a tuple."""
    return f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, tuple) else "")


def own_functions(value: Any) -> Iterator[str]:
    """The functions in a knob's value, at any depth, as module.name; those of a user come without ours."""
    if callable(value):
        function, knobs = function_and_knobs(value)
        yield f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
        value = [*knobs.values()]
    for item in value if isinstance(value, list | tuple) else ():
        yield from own_functions(item)


def _try(knob: str, function: Any, call: Callable[[], T], problem: Callable[[T], str | None], *, wanted: str) -> None:
    names = [*own_functions(function)]
    users = [name for name in names if not name.startswith("grpo_fn.")]
    try:
        got = problem(call())
    except Exception as error:
        if isinstance(error, ValueError) and not users:
            raise  # ours say what they got and wanted
        got = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if got is not None:
        raise ValueError(f"{knob}: got {got} from {', '.join(users or names[:1])} on a toy step, wanted {wanted}")
