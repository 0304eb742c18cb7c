"""Controllers: coefficients that follow a measurement.

A controller is `(gain, measured) -> gain`, called once a step with what the step measured.

A gain multiplies a coefficient of the algorithm: beta of the KL, in the loss and in the credit, or entropy_bonus. It is
1 in the first step. What is measured is `loss/kl` (k3, the mean over tokens, in nats) or `loss/entropy` (its mean over
tokens, in nats).
"""

from collections.abc import Callable, Mapping

from grpo_fn.core.types import Gains

# Knobs as tests try them.
EXAMPLES = {"target": (0.5,), "rate": (0.1,), "limit": (0.2,), "step": (0.05,), "highest": (2.0,)}


def adaptive_kl(gain: float, measured: float, *, target: float, rate: float, limit: float) -> float:
    """gain (1 + rate e), e = measured / target - 1 clipped to [-limit, limit]: more KL than wanted raises its price.

    The proportional controller of Ziegler et al. (arXiv:1909.08593, section 2.2), with rate 0.1 and limit 0.2 there.
    Their KL is a whole sequence's, ours a token's. The gain stays positive.

    Use it when: runs should be compared at one KL.
    Peers: verl `AdaptiveKLController`, OpenRLHF: rate = rows / horizon, KL of a sequence.

    Args:
        gain: the factor of this step, dimensionless.
        measured: mean KL of this step, in nats a token.
        target: KL wanted, in nats a token.
        rate: relative change of the gain per unit of e.
        limit: largest |e|.

    Returns:
        The gain of the next step.

    Raises:
        ValueError: target is not above 0, or rate * limit not in [0, 1).
    """
    if target <= 0 or not 0 <= rate * limit < 1:
        raise ValueError(f"target, rate, limit: got {target}, {rate}, {limit}, wanted target > 0, 0 <= rate limit < 1")
    return gain * (1 + rate * min(limit, max(-limit, measured / target - 1)))


def adaptive_entropy(gain: float, measured: float, *, target: float, step: float, highest: float) -> float:
    """gain + step below the target entropy, gain - step above it, within [0, highest]: a bonus as large as it must be.

    After Skywork-OR1 (arXiv:2505.22312, section 3.2.5), which begins at 0 and switches the bonus off while entropy is
    above the target; here it only comes down by steps.

    Use it when: entropy falls too far, and no bonus fits the whole run.
    Peers: there the bonus is off while entropy is above the target.

    Args:
        gain: the factor of this step, dimensionless.
        measured: mean entropy of this step, in nats a token.
        target: entropy wanted, in nats a token.
        step: change of the gain at each step.
        highest: largest gain.

    Returns:
        The gain of the next step.

    Raises:
        ValueError: step is not above 0, or highest is below 0.
    """
    if step <= 0 or highest < 0:
        raise ValueError(f"step, highest: got {step}, {highest}, wanted step > 0 and highest >= 0")
    return min(highest, max(0.0, gain + (step if measured < target else -step)))


def next_gains(
    gains: Gains,
    figures: Mapping[str, float],
    *,
    kl_control: Callable[[float, float], float] | None,
    entropy_control: Callable[[float, float], float] | None,
) -> Gains:
    """The gains of the next step, for `step.Algorithm.control`; those of a step that learned nothing stay.

    Args:
        gains: those of this step.
        figures: metrics of this step, by name.
        kl_control: (gain, measured KL) -> gain of the KL in the next step; None: it stays.
        entropy_control: (gain, measured entropy) -> gain of the entropy bonus in the next step; None: it stays.

    Returns:
        The gains of the next step.
    """
    kl = figures.get("loss/kl", figures.get("loss/approx_kl"))
    if kl is None:
        return gains
    return Gains(
        gains.kl if kl_control is None else kl_control(gains.kl, kl),
        gains.entropy if entropy_control is None else entropy_control(gains.entropy, figures["loss/entropy"]),
    )
