"""The configurations that compare_trl.py holds against TRL: one option after another, and what they do together.

All are of one small step: 8 completions a device at once, 2 of them a step, groups of 4, at most 8 tokens.
"""

from collections.abc import Iterator
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
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
TWICE = {"num_iterations": 2}  # the second update is off-policy: ratios leave 1
HALVES = {"steps_per_generation": 4}  # two optimizer steps of one rollout


class Case(NamedTuple):
    """A configuration, and whether some of its rewards are None."""

    config: dict[str, Any]
    unscored: bool = False

    @property
    def name(self) -> str:
        """What differs from BASE, in a line."""
        own = [f"{key}={value}" for key, value in self.config.items() if BASE.get(key, self) != value]
        return ", ".join([*own, *(["rewards of None"] if self.unscored else [])]) or "as BASE"


def cases() -> list[Case]:
    """All of them, each once."""
    found: dict[str, Case] = {}
    for case in (*alone(), *off_policy(), *of_vllm(), *of_batches()):
        found.setdefault(case.name, case)
    return list(found.values())


def case(*parts: dict[str, Any], unscored: bool = False, **own: Any) -> Case:
    config = dict(BASE)
    for part in (*parts, own):
        config |= part
    if config["loss_type"] == "cispo" and "epsilon_high" not in config:
        config["epsilon_high"] = 5.0
    return Case(config, unscored)


def alone() -> Iterator[Case]:
    """On-policy: what the advantages, the weights, the KL and the entropy do."""
    for loss, scale in product(LOSSES, ("group", "batch", "none")):
        yield case(loss_type=loss, scale_rewards=scale)
    for loss in LOSSES:
        yield case(loss_type=loss, mask_truncated_completions=True)
        yield case(loss_type=loss, beta=0.1)
        yield case(loss_type=loss, entropy_coef=0.05)
    for loss in ("grpo", "dapo", "dr_grpo"):
        yield case(loss_type=loss, unscored=True)
        yield case(loss_type=loss, beta=0.1, entropy_coef=0.05, unscored=True)
        yield case(loss_type=loss, top_entropy_quantile=0.5)
        yield case(loss_type=loss, multi_objective_aggregation="normalize_then_sum")
    for temperature in (0.7, 1.3):
        yield case(loss_type="dapo", temperature=temperature, beta=0.1, entropy_coef=0.05)
    yield case(loss_type="dapo", beta=0.1, use_bias_correction_kl=False)
    yield case(loss_type="dapo", scale_rewards=True)
    yield case(loss_type="dapo", scale_rewards=False)
    yield case(loss_type="dapo", use_adaptive_entropy=True, entropy_coef=0.05, entropy_target=0.5)
    yield case(loss_type="sapo", top_entropy_quantile=0.2, entropy_coef=0.05)
    yield case(loss_type="dapo", mask_truncated_completions=True, unscored=True)


def off_policy() -> Iterator[Case]:
    """The second update of a rollout: clips, bounds, ratios of rows, masks."""
    for loss, level in product(LOSSES, ("token", "sequence")):
        yield case(TWICE, loss_type=loss, importance_sampling_level=level)
    for loss in CLIPPED:
        yield case(TWICE, loss_type=loss, epsilon=0.1, epsilon_high=0.28)
        yield case(TWICE, loss_type=loss, delta=1.5)
    for level, unbiased in product(("token", "sequence"), (True, False)):
        config = {"importance_sampling_level": level, "use_bias_correction_kl": unbiased}
        yield case(TWICE, config, loss_type="grpo", beta=0.1)
        yield case(TWICE, config, loss_type="dapo", beta=0.1)
    yield case(TWICE, loss_type="grpo", delta=1.1)
    yield case(TWICE, loss_type="dapo", delta=1.15, epsilon_high=0.28)
    yield case(TWICE, loss_type="grpo", delta=0.9)
    yield case(TWICE, loss_type="grpo", delta=1.5, importance_sampling_level="sequence")
    yield case(TWICE, loss_type="cispo", epsilon_high=1.1)
    yield case(TWICE, loss_type="cispo", epsilon_high=0.9)
    yield case(TWICE, loss_type="cispo", delta=1.5)
    yield case(TWICE, loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=3.0)
    yield case(TWICE, loss_type="vespo", vespo_k_pos=1.0, vespo_lambda_pos=1.5, vespo_k_neg=2.0, vespo_lambda_neg=1.0)
    for loss in ("grpo", "dapo", "vespo"):
        yield case(TWICE, loss_type=loss, off_policy_mask_threshold=0.02)
        yield case(TWICE, loss_type=loss, mask_truncated_completions=True, beta=0.1, temperature=0.7)
    yield case(TWICE, loss_type="dapo", num_iterations=3)
    yield case(TWICE, loss_type="grpo", top_entropy_quantile=0.5, beta=0.1)
    yield case(TWICE, loss_type="luspo", importance_sampling_level="sequence", mask_truncated_completions=True)
    yield case(TWICE, loss_type="dapo", unscored=True, scale_rewards="batch")
    yield case(TWICE, loss_type="real")


def of_vllm() -> Iterator[Case]:
    """Samples of another engine, whose log-probs are not the trainer's."""
    engine = {"use_vllm": True}
    for loss, mode in product(("dapo", "grpo", "vespo", "cispo"), MODES):
        place = {"vllm_importance_sampling_mode": mode}
        yield case(engine, place, loss_type=loss)
        yield case(engine, place, TWICE, loss_type=loss, vllm_importance_sampling_clip_max=1.2)
    for mode in MODES:
        place = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": 0.9}
        yield case(engine, place, loss_type="dapo", vllm_importance_sampling_clip_max=1.2)
        yield case(engine, place, loss_type="dapo", vllm_importance_sampling_clip_max=None)
        yield case(engine, {"vllm_importance_sampling_mode": mode}, loss_type="dapo", vllm_importance_sampling_cap=1.1)
    for loss in ("dapo", "vespo"):
        yield case(engine, loss_type=loss, vllm_importance_sampling_correction=False)
        yield case(engine, TWICE, loss_type=loss, vllm_importance_sampling_correction=False)
    place = {"vllm_importance_sampling_mode": "token_truncate"}
    yield case(engine, place, loss_type="dapo", vllm_importance_sampling_clip_max=None)
    yield case(
        engine, loss_type="dapo", vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_max=None
    )
    yield case(engine, place, TWICE, loss_type="dapo", off_policy_mask_threshold=0.05)
    yield case(engine, place, TWICE, loss_type="vespo", off_policy_mask_threshold=0.05)
    yield case(engine, place, TWICE, loss_type="grpo", beta=0.1, importance_sampling_level="sequence")


def of_batches() -> Iterator[Case]:
    """Where rollouts and optimizer steps are not of one size."""
    for loss in LOSSES:
        yield case(HALVES, loss_type=loss)
        yield case(loss_type=loss, steps_per_generation=1)
    for loss in ("grpo", "dapo"):
        yield case(HALVES, TWICE, loss_type=loss, beta=0.1)
        yield case(HALVES, loss_type=loss, mask_truncated_completions=True, entropy_coef=0.05)
        yield case(loss_type=loss, steps_per_generation=1, scale_rewards="batch")
        yield case(loss_type=loss, steps_per_generation=1, num_iterations=2)
        yield case(loss_type=loss, gradient_accumulation_steps=1)
        yield case(loss_type=loss, gradient_accumulation_steps=4)
        yield case(loss_type=loss, gradient_accumulation_steps=1, steps_per_generation=4)
        yield case(loss_type=loss, gradient_accumulation_steps=1, entropy_coef=0.05)
    yield case(loss_type="bnpo", gradient_accumulation_steps=1)
    yield case(loss_type="dapo", per_device_train_batch_size=2, gradient_accumulation_steps=1, steps_per_generation=2)
    yield case(loss_type="dapo", per_device_train_batch_size=4, gradient_accumulation_steps=3, steps_per_generation=2)
    yield case(loss_type="dapo", generation_batch_size=32)
    yield case(loss_type="dapo", generation_batch_size=24)
