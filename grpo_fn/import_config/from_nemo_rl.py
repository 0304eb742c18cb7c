"""The YAML of a NeMo-RL GRPO run as a gin file (docs/migrating.md)."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from grpo_fn.import_config.draft import (
    LARGEST,
    LOSS,
    UNBOUNDED,
    Draft,
    OptionReader,
    Text,
    bind_correction,
    bound_weight,
    clip_loss,
    normalize_advantage,
    read_table,
)
from grpo_fn.import_config.peer_file import fill_references

NEMO_RL = read_table("nemo_rl.yaml")
LORA, SHAPING, ADAM = "policy.dtensor_cfg.lora_cfg.", "grpo.reward_shaping.", "policy.optimizer.kwargs."
TIS = "loss_fn.truncated_importance_sampling_"
TEACHERS = "on_policy_distillation.teacher_model_by_agent_name"


def from_nemo_rl(config: Mapping[str, Any], rows: int | None = None) -> Draft:
    """The YAML of a NeMo-RL GRPO run. Raises ValueError for what is refused there, and for Megatron alone."""
    if "distillation" in config:
        raise ValueError(
            "distillation: got NeMo-RL's distillation of a teacher's top logits, expected its GRPO with adv_estimator "
            "opd; algo/opd.gin has the reverse KL of the sampled token (docs/algorithms/sft.md)"
        )
    key, draft = OptionReader(fill_references(config), NEMO_RL), Draft()
    key.carry(draft)
    nemo_batches(key, draft, rows)
    nemo_loss(key, draft)
    if key("loss_fn.use_importance_sampling_correction"):
        nemo_correction(key, draft)
    nemo_advantage(key, draft)
    draft.bind("sections.Sampling", stop=[Text(stop) for stop in key("policy.generation.stop_strings", []) if stop])
    if key(f"{LORA}enabled"):
        names = [Text(name) for name in key(f"{LORA}target_modules", [])]
        draft.bind("lora.LoRA", targets="all-linear" if key(f"{LORA}match_all_linear") else names)
    nemo_optimizer(key, draft)
    nemo_task(key, draft)
    key.rest(draft)
    return draft


def nemo_batches(key: OptionReader, draft: Draft, rows: int | None) -> None:
    """Prompts, samples, optimizer steps on them, and lengths."""
    prompts, group = key("grpo.num_prompts_per_step"), key("grpo.num_generations_per_prompt")
    update, total = key("policy.train_global_batch_size", prompts * group), key("policy.max_total_sequence_length")
    steps, epochs = key("grpo.max_num_steps"), key("grpo.max_num_epochs")
    if steps is None or steps < 1:
        raise ValueError(f"grpo.max_num_steps: got {steps}, expected a number of steps")
    if prompts * group % update or prompts % (parts := prompts * group // update):
        raise ValueError(
            f"policy.train_global_batch_size: got {update} for {prompts} prompts x {group} samples, expected a divisor "
            "that leaves whole groups"
        )
    if epochs is not None and rows is not None:
        steps = min(steps, ceil(epochs * rows / prompts))
    elif epochs is not None:
        draft.differs("grpo.max_num_steps", f"{steps} here; there also at most {epochs} epochs of the rows (--rows)")
    longest = key("policy.generation.max_new_tokens", total)
    draft.macros |= {"STEPS": steps, "MAX_NEW_TOKENS": longest}
    draft.bind("step.Algorithm", minibatches=parts, old_logp="@step.from_trainer")
    draft.bind("sections.PolicyUpdate", micro_tokens=key("policy.train_micro_batch_size") * total)
    if key(f"{SHAPING}enabled"):  # DAPO's punishment of rows that run long, as a part of the reward
        most, buffer = key(f"{SHAPING}max_response_length", longest), key(f"{SHAPING}overlong_buffer_length")
        if buffer > most:
            raise ValueError(f"{SHAPING}overlong_buffer_length: got {buffer}, expected at most {most}")
        parts = ["@math.correct", draft.bind("format.soft_overlong_punishment", max_length=most)]
        draft.bind("combine.combine", parts=parts, weights=[1.0, key(f"{SHAPING}overlong_buffer_penalty")])
        if longest > most:
            draft.differs(f"{SHAPING}max_response_length", f"beyond {most} tokens the penalty grows on there, not here")


def nemo_loss(key: OptionReader, draft: Draft) -> None:
    """The clip."""
    low, high, cap = (key(f"loss_fn.ratio_clip_{side}") for side in ("min", "max", "c"))
    if key("loss_fn.use_cispo"):
        loss = draft.bind("losses.cispo", clip_high=high)
    elif key("loss_fn.force_on_policy_ratio") or key("loss_fn.disable_ppo_ratio"):
        loss = "@losses.reinforce"
    else:
        sequence = key("loss_fn.sequence_level_importance_ratios")
        loss = clip_loss(draft, low, high, cap, "loss_fn.ratio_clip_c", sequence=sequence)
    draft.bind(LOSS, token_loss=loss)


def nemo_correction(key: OptionReader, draft: Draft) -> None:
    """What a sample of the engine is worth to the trainer."""
    sequence, mask = key("loss_fn.sequence_level_importance_ratios"), None
    kind, low, high = key(f"{TIS}type"), key(f"{TIS}ratio_min"), key(f"{TIS}ratio")
    if kind == "seq-mask-tis":
        if not low <= 1 <= high:
            raise ValueError(f"{TIS}ratio: got {low:g} to {high:g}, expected 1 within")
        mask = draft.bind("corrections.masked_weight", ratio="@corrections.row_ratio", low=low, high=high)
        high = LARGEST
    name, low = ("masked_weight", low) if kind == "icepop" else ("truncated_weight", 0.0)
    bind_correction(draft, bound_weight(draft, name, low, high, f"{TIS}ratio", sequence=sequence), mask)


def nemo_advantage(key: OptionReader, draft: Draft) -> None:
    """Baseline and std; newer files have them under adv_estimator."""
    name = key("grpo.adv_estimator.name")
    place = "grpo.adv_estimator." if "grpo.adv_estimator.normalize_rewards" in key.values else "grpo."
    if name == "opd":
        draft.bind("step.Algorithm", credit=nemo_teacher(key, draft))
        return
    if name == "reinforce_plus_plus":
        if key("grpo.adv_estimator.minus_baseline"):  # a prompt's mean
            credit = draft.bind("credit.outcome", advantage="@advantage.mean_centered")
        else:
            credit = draft.bind("credit.reward_to_go", beta=0.0)
        draft.bind("step.Algorithm", credit=draft.bind("credit.token_whitened", credit=credit, eps=1e-8))
        return
    if name == "gdpo":
        whitened = draft.bind("credit.row_whitened", credit="@credit.per_part", eps=1e-6)
        draft.bind("credit.per_part", weights={"correct": 1.0, "boxed": 1.0})
        draft.bind("step.Algorithm", credit=whitened)
    others = key(f"{place}use_leave_one_out_baseline")
    if not key(f"{place}normalize_rewards"):
        advantage = "@advantage.leave_one_out" if others else "@advantage.mean_centered"
    elif others:
        advantage = draft.bind("advantage.leave_one_out_others_std", eps=1e-6)
        draft.differs(
            f"{place}normalize_rewards",
            "eps 1e-6 as there; equal rewards have a std of exactly 0 here, where rounding leaves NeMo-RL a divisor",
        )
    else:
        advantage = normalize_advantage(draft, 1e-6)
    draft.bind("credit.per_part" if name == "gdpo" else "credit.outcome", advantage=advantage)


def nemo_teacher(key: OptionReader, draft: Draft) -> str:
    """On-policy distillation: the gap to a teacher is the advantage, rewards are measured only."""
    names = {name for name in key.values if name.startswith(f"{TEACHERS}.")}
    models = sorted({str(key.values[name] or "") for name in names})
    if len(models) != 1 or not models[0]:
        raise ValueError(
            f"{TEACHERS}: got {models} with adv_estimator opd, expected one model; several are sections.Teacher.models "
            "(docs/algorithms/sft.md)"
        )
    key.taken |= {*names, "on_policy_distillation.enabled"}
    draft.macros["TEACHER"] = Text(models[0])
    return draft.bind("distillation.teacher_gap", coef=1.0)


def nemo_optimizer(key: OptionReader, draft: Draft) -> None:
    """AdamW, and a warm-up where the schedule begins with one."""
    name, betas = key("policy.optimizer.name"), key(f"{ADAM}betas", [0.9, 0.999])
    if name.rpartition(".")[2] not in ("AdamW", "FusedAdam"):
        raise ValueError(f"policy.optimizer.name: got {name!r}, expected torch.optim.AdamW or a FusedAdam")
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"{ADAM}betas: got {betas}, expected two numbers in [0, 1)")
    optimizer = draft.bind("optimizer.adamw", beta1=float(betas[0]), beta2=float(betas[1]))
    updates = draft.knobs["step.Algorithm.minibatches"]  # of a step; schedules count steps there, updates here
    warm, odd = 0, []
    for stage in key("policy.scheduler", []):
        own = stage if isinstance(stage, Mapping) else {"name": stage}
        kind, kwargs = str(own.get("name", "")).rpartition(".")[2], own.get("kwargs")
        if kind == "LinearLR" and isinstance(kwargs, Mapping) and isinstance(kwargs.get("total_iters"), int):
            warm = max(0, kwargs["total_iters"]) * updates
        elif kind not in ("ConstantLR", ""):
            odd.append(kind)
    if odd:
        draft.leave_out("policy.scheduler", f"{odd}: constant after the warm-up")
    if warm:
        draft.differs(
            "policy.scheduler",
            f"from its start_factor in {warm // updates} steps there; from 1/{warm + 1} to 1 in {warm} updates here",
        )
    schedule, limit = draft.bind("optimizer.constant", warmup=warm), key("policy.max_grad_norm") or UNBOUNDED
    draft.bind("sections.PolicyUpdate", optimizer=optimizer, schedule=schedule, max_grad_norm=limit)


def nemo_task(key: OptionReader, draft: Draft) -> None:
    """The task's file, and how many of the problems that it holds out are answered how often."""
    names = {"data.dataset_name", "data.train.dataset_name"}
    task, held_out = "task/rows.gin", 256
    if any(key.values.get(name) == "OpenMathInstruct-2" for name in names):
        task, held_out = "task/openmath.gin", 500
        key.taken |= names
    draft.includes.append(task)
    problems = key("grpo.max_val_samples")
    draft.bind("sections.Evaluation", every=max(0, key("grpo.val_period")), problems=min(held_out, problems))
    if problems > held_out:
        draft.differs("grpo.max_val_samples", f"{problems} there; the task's file here holds out {held_out}")
