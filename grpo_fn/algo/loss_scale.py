"""How far the learning signal is scaled up before it is pulled back, so that float16 gradients do not vanish.

One signature: `(scale, good_steps, finite) -> (scale, good_steps)`, after each attempted optimizer step. A scale that
does not shrink after a step that was not finite says that scaling is not what is wrong.
"""


def constant(scale: float, good_steps: int, finite: bool) -> tuple[float, int]:
    """The scale as it is: for float32 and bfloat16, whose gradients need none."""
    return scale, good_steps + 1 if finite else 0


def dynamic(
    scale: float,
    good_steps: int,
    finite: bool,
    *,
    growth: float,
    backoff: float,
    interval: int,
    low: float,
    high: float,
) -> tuple[float, int]:
    """Times `backoff` after an overflow, times `growth` after `interval` finite steps in a row, within low .. high.

    Micikevicius et al., Mixed Precision Training (arXiv:1710.03740), section 3.2, dynamic form. Powers of two for
    growth and backoff change no bit of a gradient that neither overflows nor vanishes.
    """
    if not finite:
        return max(low, scale * backoff), 0
    if good_steps + 1 < interval:
        return scale, good_steps + 1
    return min(high, scale * growth), 0
