"""Properties that a step expects of a token loss, `(logp [T], row) -> [T]` or also diagnostics: one function each.

An invariant takes the function, its knobs bound, and raises where it is broken. Rows are drawn in float64.
"""

from collections.abc import Callable
from itertools import product

import hypothesis.strategies as st
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from grpo_fn.core.types import Batch
from grpo_fn.testing.harness import assert_same, check_claim, holds_for
from grpo_fn.testing.strategies import GARBAGE, batches, loss_rows, one_row, with_garbage, with_padding

Row = tuple[Tensor, Batch]
TokenLoss = Callable[[Tensor, Batch], Tensor | tuple[Tensor, dict[str, Tensor]]]
DIAGNOSTICS = {"ratio", "clip_low", "clip_high"}


def check_token_loss(loss: TokenLoss) -> None:
    """Check that every invariant of INVARIANTS holds for a token loss.

    Args:
        loss: (logp [T], row) -> loss [T], or that and diagnostics, [T] each; its knobs bound.

    Raises:
        AssertionError: an invariant does not hold, on the example that is shown.
    """
    for invariant in INVARIANTS:
        invariant(loss)


def in_full(f: TokenLoss) -> Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]:
    """The function with its diagnostics, of which it may have none."""

    def full(logp: Tensor, row: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        result = f(logp, row)
        return result if isinstance(result, tuple) else (result, {})

    return full


def loss_gradient(f: TokenLoss, logp: Tensor, row: Batch) -> Tensor:
    """The gradient of a row's summed loss."""
    return grad(lambda x: in_full(f)(x, row)[0].sum())(logp)


@holds_for(loss_rows())
def reports_known_diagnostics(f: TokenLoss, drawn: Row) -> None:
    """One finite number a token under each name, if any; the two clips are 0 or 1, and not 1 at once."""
    loss, seen = in_full(f)(*drawn)
    check_claim(loss.shape == drawn[0].shape, f"got a loss of shape {tuple(loss.shape)}, expected one number a token")
    check_claim(set(seen) <= DIAGNOSTICS, f"got diagnostics {sorted(seen)}, expected some of {sorted(DIAGNOSTICS)}")
    for name, x in seen.items():
        check_claim(x.shape == drawn[0].shape, f"got {name} of shape {tuple(x.shape)}, expected one number a token")
        check_claim(bool(x.isfinite().all()), f"got {name} {x}, expected finite numbers")
    low, high = (seen.get(name, torch.zeros_like(loss)) for name in ("clip_low", "clip_high"))
    check_claim({*low.tolist(), *high.tolist()} <= {0.0, 1.0}, f"got clips {low} and {high}, expected 0 or 1")
    check_claim(not (low * high).any(), f"got clips {low} and {high}, expected one of them at most")


@holds_for(st.tuples(loss_rows(), st.sampled_from(GARBAGE)))
def what_is_behind_the_mask_has_no_say(f: TokenLoss, example: tuple[Row, float]) -> None:
    """nan, infinities and large numbers there change nothing; there is no loss there and no gradient."""
    drawn, garbage = example
    (loss, seen), dirty, mask = in_full(f)(*drawn), with_garbage(*drawn, garbage), drawn[1].mask
    gradient = loss_gradient(f, *drawn)
    check_claim(bool((loss[~mask] == 0).all()), f"got {loss}, expected exactly 0 where not {mask}")
    check_claim(bool((gradient[~mask] == 0).all()), f"got a gradient {gradient}, expected exactly 0 where not {mask}")
    there = f"with {garbage} behind the mask"
    again, figures = in_full(f)(*dirty)
    assert_same(again, loss, f"the loss {there}", tolerance=0.0)
    assert_same(loss_gradient(f, *dirty), gradient, f"its gradient {there}", tolerance=0.0)
    for name, x in figures.items():
        assert_same(x, seen[name], f"{name} {there}", tolerance=0.0)


@holds_for(st.tuples(loss_rows(), st.integers(1, 3)))
def padding_changes_nothing(f: TokenLoss, example: tuple[Row, int]) -> None:
    """Columns on the right that nothing was sampled in."""
    drawn, extra = example
    loss, seen = in_full(f)(*with_padding(*drawn, extra))
    alone, expected = in_full(f)(*drawn)
    check_claim(bool((loss[-extra:] == 0).all()), f"got {loss}, expected exactly 0 in the last {extra}")
    assert_same(loss[:-extra], alone, f"the loss with {extra} columns of padding", tolerance=1e-12)
    for name, x in seen.items():
        assert_same(x[:-extra], expected[name], f"{name} with {extra} columns of padding", tolerance=1e-12)


@holds_for(batches())
def rows_do_not_leak(f: TokenLoss, drawn: Row) -> None:
    """vmapped over rows, as the objective calls it, it gives each row what it gets alone, also when B == T."""
    logp, batch = drawn
    alone = [in_full(f)(x, one_row(batch, b)) for b, x in enumerate(logp)]
    together, seen = vmap(in_full(f))(logp, batch)
    assert_same(together, torch.stack([loss for loss, _ in alone]), "the loss vmapped over rows", tolerance=1e-12)
    for name, x in seen.items():
        expected = torch.stack([found[name] for _, found in alone])
        assert_same(x, expected, f"{name} vmapped over rows", tolerance=1e-12)


@holds_for(st.tuples(loss_rows(), st.integers(0, 2**31)))
def reverse_and_forward_gradient_agree(f: TokenLoss, example: tuple[Row, int]) -> None:
    """grad against jvp, along a random direction."""
    (logp, row), seed = example
    direction = torch.randn(len(logp), generator=torch.Generator().manual_seed(seed), dtype=logp.dtype)
    _, forward = jvp(lambda x: in_full(f)(x, row)[0].sum(), (logp,), (direction,))
    found = (loss_gradient(f, logp, row) * direction).sum()
    assert_same(found, forward, "grad along a direction, and jvp", tolerance=1e-10)


def policies_worlds_apart_stay_finite(f: TokenLoss) -> None:
    """A thousand nats between policies, in both dtypes: one nan would reach every weight of the model."""
    for dtype in (torch.float32, torch.float64):
        zero, mask = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=torch.bool)
        for gap, adv, selected in product((-1e3, 1e3), (-1.0, 0.0, 1.0), (False, True)):
            there = torch.tensor([0.0, gap], dtype=dtype)
            for old, ref, logp in product((zero, there), (zero, there), (zero, there)):
                row = Batch(zero.long(), mask, old, old, ref, ref, zero + adv, mask & selected, mask.long())
                both = torch.stack([in_full(f)(logp, row)[0], loss_gradient(f, logp, row)])
                finite = bool(both.isfinite().all())
                check_claim(finite, f"got loss and gradient {both}, {gap:g} nats away, A = {adv:g}")


@holds_for(loss_rows(drift=3.0))
def float32_gives_what_float64_gives(f: TokenLoss, drawn: Row) -> None:
    """And stays in float32."""
    low = drawn[0].float()
    half = Batch(*(x.float() if x.is_floating_point() else x for x in drawn[1]))
    full = Batch(*(x.double() if x.is_floating_point() else x for x in half))  # the very same numbers
    loss, seen = in_full(f)(low, half)
    for name, x in {"loss": loss, **seen}.items():
        check_claim(x.dtype == torch.float32, f"got {name} in {x.dtype}, expected torch.float32 as its input")
    assert_same(loss.double(), in_full(f)(low.double(), full)[0], "the loss in float32", tolerance=1e-4)


INVARIANTS = (
    reports_known_diagnostics,
    what_is_behind_the_mask_has_no_say,
    padding_changes_nothing,
    rows_do_not_leak,
    reverse_and_forward_gradient_agree,
    policies_worlds_apart_stay_finite,
    float32_gives_what_float64_gives,
)
