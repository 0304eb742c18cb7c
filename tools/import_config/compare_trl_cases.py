"""The configurations that compare_trl.py holds against TRL: one option after another, and what they do together.

All are of one small step: 8 completions a device at once, 2 of them a step, groups of 4, at most 8 tokens.
"""

from itertools import product
from typing import Any, NamedTuple

BASE: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LEVELS = ("token", "sequence")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
TWICE = {"num_iterations": 2}  # the second update is off-policy: ratios leave 1
HALVES = {"steps_per_generation": 4}  # two optimizer steps of one rollout
PLACE = "vllm_importance_sampling_"
VLLM = {"use_vllm": True}
TRUNCATED = {"use_vllm": True, f"{PLACE}mode": "token_truncate"}


class Case(NamedTuple):
    """A configuration, and whether some of its rewards are None."""

    config: dict[str, Any]
    unscored: bool = False

    @property
    def name(self) -> str:
        """What differs from BASE, in a line."""
        own = [f"{key}={value}" for key, value in self.config.items() if BASE.get(key, self) != value]
        return ", ".join([*own, *(["rewards of None"] if self.unscored else [])]) or "as BASE"


def grid(*parts: dict[str, Any], unscored: bool = False, **own: Any) -> list[Case]:
    """A case of every combination; what is no tuple has one value."""
    axes = {
        key: value if isinstance(value, tuple) else (value,) for part in (*parts, own) for key, value in part.items()
    }
    configs = [BASE | dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    caps = [{"epsilon_high": c.get("epsilon_high", 5.0)} if c["loss_type"] == "cispo" else {} for c in configs]
    return [Case(config | cap, unscored) for config, cap in zip(configs, caps, strict=True)]


ALONE = [  # on-policy: what the advantages, the weights, the KL and the entropy do
    grid(loss_type=LOSSES, scale_rewards=("group", "batch", "none")),
    grid(loss_type=LOSSES, mask_truncated_completions=True),
    grid(loss_type=LOSSES, beta=0.1),
    grid(loss_type=LOSSES, entropy_coef=0.05),
    grid(loss_type=("grpo", "dapo", "dr_grpo"), unscored=True),
    grid(loss_type=("grpo", "dapo", "dr_grpo"), beta=0.1, entropy_coef=0.05, unscored=True),
    grid(loss_type=("grpo", "dapo", "dr_grpo"), top_entropy_quantile=0.5),
    grid(loss_type=("grpo", "dapo", "dr_grpo"), multi_objective_aggregation="normalize_then_sum"),
    grid(loss_type="dapo", temperature=(0.7, 1.3), beta=0.1, entropy_coef=0.05),
    grid(loss_type="dapo", beta=0.1, use_bias_correction_kl=False),
    grid(loss_type="dapo", scale_rewards=(True, False)),
    grid(loss_type="dapo", use_adaptive_entropy=True, entropy_coef=0.05, entropy_target=0.5),
    grid(loss_type="sapo", top_entropy_quantile=0.2, entropy_coef=0.05),
    grid(loss_type="dapo", mask_truncated_completions=True, unscored=True),
]
OFF_POLICY = [  # the second update of a rollout: clips, bounds, ratios of rows, masks
    grid(TWICE, loss_type=LOSSES, importance_sampling_level=LEVELS),
    grid(TWICE, loss_type=CLIPPED, epsilon=0.1, epsilon_high=0.28),
    grid(TWICE, loss_type=CLIPPED, delta=1.5),
    grid(
        TWICE,
        importance_sampling_level=LEVELS,
        use_bias_correction_kl=(True, False),
        loss_type=("grpo", "dapo"),
        beta=0.1,
    ),
    grid(TWICE, loss_type="grpo", delta=(1.1, 0.9)),
    grid(TWICE, loss_type="dapo", delta=1.15, epsilon_high=0.28),
    grid(TWICE, loss_type="grpo", delta=1.5, importance_sampling_level="sequence"),
    grid(TWICE, loss_type="cispo", epsilon_high=(1.1, 0.9)),
    grid(TWICE, loss_type="cispo", delta=1.5),
    grid(TWICE, loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=3.0),
    grid(TWICE, loss_type="vespo", vespo_k_pos=1.0, vespo_lambda_pos=1.5, vespo_k_neg=2.0, vespo_lambda_neg=1.0),
    grid(TWICE, loss_type=("grpo", "dapo", "vespo"), off_policy_mask_threshold=0.02),
    grid(TWICE, loss_type=("grpo", "dapo", "vespo"), mask_truncated_completions=True, beta=0.1, temperature=0.7),
    grid(loss_type="dapo", num_iterations=3),
    grid(TWICE, loss_type="grpo", top_entropy_quantile=0.5, beta=0.1),
    grid(TWICE, loss_type="luspo", importance_sampling_level="sequence", mask_truncated_completions=True),
    grid(TWICE, loss_type="dapo", scale_rewards="batch", unscored=True),
    grid(TWICE, loss_type="real"),
]
ENGINE = [  # samples of another engine, whose log-probs are not the trainer's
    grid(VLLM, {f"{PLACE}mode": MODES}, loss_type=("dapo", "grpo", "vespo", "cispo")),
    grid(VLLM, TWICE, {f"{PLACE}mode": MODES, f"{PLACE}clip_max": 1.2}, loss_type=("dapo", "grpo", "vespo", "cispo")),
    grid(VLLM, {f"{PLACE}mode": MODES, f"{PLACE}clip_min": 0.9, f"{PLACE}clip_max": (1.2, None)}, loss_type="dapo"),
    grid(VLLM, {f"{PLACE}mode": MODES, f"{PLACE}cap": 1.1}, loss_type="dapo"),
    grid(VLLM, loss_type=("dapo", "vespo"), **{f"{PLACE}correction": False}),
    grid(VLLM, TWICE, loss_type=("dapo", "vespo"), **{f"{PLACE}correction": False}),
    grid(VLLM, {f"{PLACE}mode": ("token_truncate", "token_mask"), f"{PLACE}clip_max": None}, loss_type="dapo"),
    grid(TRUNCATED, TWICE, loss_type=("dapo", "vespo"), off_policy_mask_threshold=0.05),
    grid(TRUNCATED, TWICE, loss_type="grpo", beta=0.1, importance_sampling_level="sequence"),
]
BATCHES = [  # where rollouts and optimizer steps are not of one size
    grid(HALVES, loss_type=LOSSES),
    grid(loss_type=LOSSES, steps_per_generation=1),
    grid(HALVES, TWICE, loss_type=("grpo", "dapo"), beta=0.1),
    grid(HALVES, loss_type=("grpo", "dapo"), mask_truncated_completions=True, entropy_coef=0.05),
    grid(loss_type=("grpo", "dapo"), steps_per_generation=1, scale_rewards="batch"),
    grid(loss_type=("grpo", "dapo"), steps_per_generation=1, num_iterations=2),
    grid(loss_type=("grpo", "dapo"), gradient_accumulation_steps=(1, 4)),
    grid(loss_type=("grpo", "dapo"), gradient_accumulation_steps=1, steps_per_generation=4),
    grid(loss_type=("grpo", "dapo"), gradient_accumulation_steps=1, entropy_coef=0.05),
    grid(loss_type="bnpo", gradient_accumulation_steps=1),
    grid(loss_type="dapo", per_device_train_batch_size=2, gradient_accumulation_steps=1, steps_per_generation=2),
    grid(loss_type="dapo", per_device_train_batch_size=4, gradient_accumulation_steps=3, steps_per_generation=2),
    grid(loss_type="dapo", generation_batch_size=(32, 24)),
]
CASES = [*{case.name: case for cases in (*ALONE, *OFF_POLICY, *ENGINE, *BATCHES) for case in cases}.values()]
