"""Strategies and checks that a function of your own can be run through: the ones that the package's own are.

    from grpo_fn import testing

    def test_my_reward():
        testing.check_reward(my_reward)

A check draws as many examples as the hypothesis profile in force says, raises where an invariant is broken, and says
which one, on what, and what was got and expected. Knobs are bound before, as a gin file does: `partial(f, eps=1e-4)`.
Each module of checks holds its invariants one by one as well, in INVARIANTS.

Needs hypothesis (`pip install hypothesis`).
"""

from grpo_fn.testing.advantages import check_advantage
from grpo_fn.testing.aggregations import check_weights
from grpo_fn.testing.curricula import check_curriculum
from grpo_fn.testing.environments import check_environment, policy_messages
from grpo_fn.testing.kls import check_kl
from grpo_fn.testing.losses import check_token_loss
from grpo_fn.testing.rewards import check_reward
from grpo_fn.testing.strategies import batches, finite_floats, groups, loss_rows, masks, rollouts, tensors
from grpo_fn.testing.texts import BOMBS, HOSTILE, completions, text_problems

__all__ = [
    "BOMBS",
    "HOSTILE",
    "batches",
    "check_advantage",
    "check_curriculum",
    "check_environment",
    "check_kl",
    "check_reward",
    "check_token_loss",
    "check_weights",
    "completions",
    "finite_floats",
    "groups",
    "loss_rows",
    "masks",
    "policy_messages",
    "rollouts",
    "tensors",
    "text_problems",
]
