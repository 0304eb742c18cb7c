"""Per-token estimates of KL(pi_theta || pi_ref), one row at a time. The caller vmaps over rows.

With x = logp_ref - logp, r = exp(logp - logp_old) and tokens drawn from pi_old, "unbiased" below means: summed over
a row's tokens, the expected gradient is that of sum_t KL(pi_theta(. | o_<t) || pi_ref(. | o_<t)) with the prefixes
o_<t held fixed. tests/algo/test_unbiased.py proves every such word by enumerating all outcomes.

The plain k1 = -x is missing on purpose: its expected gradient on-policy is E[grad log pi] = 0, so in a loss it only
adds noise. As a *reward* it is exact. https://joschu.net/blog/kl-approx.html names k1, k2 and k3 by their values.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_fn.algo.losses import capped_exp, log_ratio, ratio
from grpo_fn.core.types import Batch


def k3(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """k3 = exp(x) - x - 1, in nats: never negative, zero only where the two policies agree.

    The GRPO paper's penalty (arXiv:2402.03300, eq. 4). Its value is unbiased on-policy; its gradient is not: in
    expectation it is the gradient of the *other* divergence, KL(pi_ref || pi_theta), and its single-sample factor e^x
    grows without bound where pi_theta << pi_ref. Right to first order near pi_ref; some 40 % off between unrelated
    policies.

    Peers: verl `low_var_kl`, OpenRLHF `k3`, TRL without `use_bias_correction_kl`.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].

    Returns:
        The estimate at each token, [T]; 0 where ~mask.
    """
    # expm1(x) >= x holds in floating point too, whereas exp(x) - x - 1 cancels to small negative numbers.
    x = capped_exp(log_ratio(row.logp_ref, logp, row.mask))
    return torch.expm1(x) - x


k3.NEEDS = frozenset({"logp_ref"})


def k2(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """k2 = x^2 / 2, in nats squared: a biased value whose gradient is unbiased on-policy (r = 1), and cheap.

    In the loss of REINFORCE++ with baseline (arXiv:2501.03262v9, eq. 8).

    Peers: verl `mse`, and `k3+` in its gradient; OpenRLHF `k2`.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].

    Returns:
        The estimate at each token, [T]; 0 where ~mask.
    """
    return log_ratio(row.logp_ref, logp, row.mask) ** 2 / 2


k2.NEEDS = frozenset({"logp_ref"})


def k1_ratio(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """r * k1 = -r x, in nats, differentiated through r: unbiased in value and gradient, on- and off-policy.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].

    Returns:
        The estimate at each token, [T]; 0 where ~mask.
    """
    return ratio(logp, row.logp_old, row.mask) * log_ratio(logp, row.logp_ref, row.mask)


k1_ratio.NEEDS = frozenset({"logp_ref"})


def k3_ratio(logp: Float[Tensor, "T"], row: Batch) -> Float[Tensor, "T"]:
    """r * k3, in nats, differentiated through r: unbiased in value and gradient, on- and off-policy, never negative.

    DeepSeek-V3.2's "unbiased KL estimate" (arXiv:2512.02556, eq. 7). On-policy its gradient per token is
    (logp - logp_ref) grad log pi, that of k2 exactly; the difference from k3 is there although r is 1.

    Peers: TRL `use_bias_correction_kl`.

    Args:
        logp: log-probs of the row's tokens under the policy, [T], in nats.
        row: the row, each field [T].

    Returns:
        The estimate at each token, [T]; 0 where ~mask.
    """
    return ratio(logp, row.logp_old, row.mask) * k3(logp, row)


k3_ratio.NEEDS = frozenset({"logp_ref"})
