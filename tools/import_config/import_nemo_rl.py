"""The YAML of a NeMo-RL GRPO run as a gin file (tools/import_config, docs/migrating/from_nemo_rl.md)."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from config_file import interpolated
from import_draft import LOSS, UNBOUNDED, Draft, Text, bounded, clipped, correct, normalized
from peer_options import LARGEST, Reader, table

NEMO_RL = table("nemo_rl.yaml")
LORA, SHAPING, AHEAD = "policy.dtensor_cfg.lora_cfg.", "grpo.reward_shaping.", "grpo.async_grpo."
TIS, ADAM, KL = "loss_fn.truncated_importance_sampling_", "policy.optimizer.kwargs.", "loss_fn.reference_policy_kl_"
TEACHERS = "on_policy_distillation.teacher_model_by_agent_name"


def from_nemo_rl(config: Mapping[str, Any], rows: int | None = None) -> Draft:
    """The YAML of a NeMo-RL GRPO run. Raises ValueError for what is refused there, and for Megatron alone."""
    if "distillation" in config:
        raise ValueError(
            "distillation: got NeMo-RL's distillation of a teacher's top logits, wanted its GRPO with adv_estimator "
            "opd; algo/opd.gin has the reverse KL of the sampled token (docs/algorithms/distillation.md)"
        )
    key, draft = Reader(interpolated(config), NEMO_RL), Draft()
    key.carry(draft)
    nemo_batches(key, draft, rows)
    nemo_loss(key, draft)
    if key("loss_fn.use_importance_sampling_correction"):
        nemo_correction(key, draft)
    nemo_advantage(key, draft)
    nemo_policy(key, draft)
    nemo_engine(key, draft)
    nemo_optimizer(key, draft)
    nemo_task(key, draft)
    key.rest(draft)
    return draft


def nemo_batches(key: Reader, draft: Draft, rows: int | None) -> None:
    """Prompts, samples, optimizer steps on them, and lengths."""
    prompts, group = key("grpo.num_prompts_per_step"), key("grpo.num_generations_per_prompt")
    update, total = key("policy.train_global_batch_size", prompts * group), key("policy.max_total_sequence_length")
    steps, epochs = key("grpo.max_num_steps"), key("grpo.max_num_epochs")
    if steps is None or steps < 1:
        raise ValueError(f"grpo.max_num_steps: got {steps}, wanted a number of steps")
    if prompts * group % update or prompts % (parts := prompts * group // update):
        raise ValueError(
            f"policy.train_global_batch_size: got {update} for {prompts} prompts x {group} samples, wanted a divisor "
            "that leaves whole groups"
        )
    if epochs is not None and rows is not None:
        steps = min(steps, ceil(epochs * rows / prompts))
    elif epochs is not None:
        said = f"{steps} here; there also at most {epochs} epochs of the rows (--rows)"
        draft.differs("grpo.max_num_steps", said)
    longest = key("policy.generation.max_new_tokens", total)
    draft.macros |= {"STEPS": steps, "MAX_NEW_TOKENS": longest}
    draft.bind("train.train", model="%MODEL")
    draft.bind("step.Algorithm", minibatches=parts, old_logp="@step.from_trainer")
    draft.bind("sections.Sampling", max_new_tokens="%MAX_NEW_TOKENS")
    draft.bind("sections.PolicyUpdate", micro_tokens=key("policy.train_micro_batch_size") * total)
    draft.differs(
        "policy.max_total_sequence_length",
        f"a prompt of {total} tokens or more is cut and has no loss there, and is refused here; "
        "sections.Data.overlong_prompts = @overlong.drop_both leaves it out",
    )
    if key(f"{SHAPING}enabled"):  # DAPO's punishment of rows that run long, as a part of the reward
        most, buffer = key(f"{SHAPING}max_response_length", longest), key(f"{SHAPING}overlong_buffer_length")
        if buffer > most:
            raise ValueError(f"{SHAPING}overlong_buffer_length: got {buffer}, wanted at most {most}")
        parts = ["@math.correct", draft.bind("length.soft_overlong_punishment", max_length=most)]
        draft.bind("combine.combine", parts=parts, weights=[1.0, key(f"{SHAPING}overlong_buffer_penalty")])
        if longest > most:
            said = f"beyond {most} tokens the penalty grows on there, not here"
            draft.differs(f"{SHAPING}max_response_length", said)


def nemo_loss(key: Reader, draft: Draft) -> None:
    """Clip and KL."""
    low, high, cap = (key(f"loss_fn.ratio_clip_{side}") for side in ("min", "max", "c"))
    sequence, tokens = key("loss_fn.sequence_level_importance_ratios"), key("loss_fn.token_level_loss")
    plain = key("loss_fn.force_on_policy_ratio") or key("loss_fn.disable_ppo_ratio")
    if sequence and tokens:
        raise ValueError("loss_fn.sequence_level_importance_ratios: got it with token_level_loss, wanted that false")
    if sequence and cap is not None:
        raise ValueError("loss_fn.ratio_clip_c: got it with sequence_level_importance_ratios, wanted one of them")
    if key("loss_fn.use_cispo"):
        if plain or sequence or cap is not None or not tokens:
            other = "another ratio, a ratio_clip_c or token_level_loss false"
            raise ValueError(f"loss_fn.use_cispo: got it with {other}, wanted it without")
        loss = draft.bind("losses.cispo", clip_high=high)
        draft.differs("loss_fn.use_cispo", f"the ratio is at least {1 - low:g} there, not bounded below here")
    elif plain:
        loss = "@losses.reinforce"
        draft.differs("loss_fn.force_on_policy_ratio", "losses.reinforce: the same gradient, another value")
    else:
        loss = clipped(draft, low, high, cap, "loss_fn.ratio_clip_c", sequence=sequence)
    draft.bind(LOSS, token_loss=loss)
    if not key(f"{KL}penalty"):
        return
    kind, sampled = key(f"{KL}type"), key("loss_fn.use_on_policy_kl_approximation")
    if kind == "k2":
        draft.differs(f"{KL}type", "k2 without its score-function term here; there with it")
    elif not sampled:
        draft.differs(
            f"{KL}type",
            "weighed with exp(logp - its own value) there since June 2026 (before: kl.k3), with the ratio here: the "
            "gradient of a step's first update is the same",
        )
    if sampled:
        said = "weighed with the ratio to the sampler there, to the old policy here"
        draft.differs("loss_fn.use_on_policy_kl_approximation", said)
    if key("loss_fn.use_kl_in_reward"):
        raise ValueError(
            "loss_fn.use_kl_in_reward: got true, which takes each token's own KL from its advantage, wanted false; "
            "credit.reward_to_go has the KL still to come"
        )
    if kind == "k1":
        draft.differs(f"{KL}type", "k1 in a loss has no gradient in expectation: kl.k1_ratio")


def nemo_correction(key: Reader, draft: Draft) -> None:
    """What a sample of the engine is worth to the trainer."""
    sequence, mask = key("loss_fn.sequence_level_importance_ratios"), None
    kind, low, high = key(f"{TIS}type"), key(f"{TIS}ratio_min"), key(f"{TIS}ratio")
    if kind == "seq-mask-tis":
        if sequence:
            raise ValueError(f"{TIS}type: got {kind} with sequence_level_importance_ratios, wanted another")
        if not low <= 1 <= high:
            raise ValueError(f"{TIS}ratio: got {low:g} to {high:g}, wanted 1 within")
        mask, high = draft.bind("importance.sequence_masked_weight", low=low, high=high), LARGEST
    name, low = ("masked_weight", low) if kind == "icepop" else ("truncated_weight", 0.0)
    correct(draft, bounded(draft, name, low, high, f"{TIS}ratio", sequence=sequence), mask)


def nemo_advantage(key: Reader, draft: Draft) -> None:
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
        draft.differs("grpo.adv_estimator.name", "gdpo: credit.per_part.weights names the parts of base.gin's reward")
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
        advantage = normalized(draft, 1e-6)
    draft.bind("credit.per_part" if name == "gdpo" else "credit.outcome", advantage=advantage)


def nemo_teacher(key: Reader, draft: Draft) -> str:
    """On-policy distillation: the gap to a teacher is the advantage, rewards are measured only."""
    names = {name for name in key.values if name.startswith(f"{TEACHERS}.")}
    models = sorted({str(key.values[name] or "") for name in names})
    if len(models) != 1 or not models[0]:
        raise ValueError(
            f"{TEACHERS}: got {models} with adv_estimator opd, wanted one model; several are sections.Teacher.models "
            "(docs/algorithms/distillation.md)"
        )
    key.taken |= {*names, "on_policy_distillation.enabled"}
    draft.macros["TEACHER"] = Text(models[0])
    return draft.bind("distillation.teacher_gap", coef=1.0)


def nemo_policy(key: Reader, draft: Draft) -> None:
    """What is not trained here, adapters, stops."""
    if key("policy.megatron_cfg.enabled"):
        raise ValueError("policy.megatron_cfg.enabled: got true, wanted a file for dtensor_cfg")
    if not key("policy.dtensor_cfg.enabled"):
        raise ValueError("policy.dtensor_cfg.enabled: got false without megatron_cfg, wanted true")
    draft.bind("sections.Sampling", stop=[Text(stop) for stop in key("policy.generation.stop_strings", []) if stop])
    if key(f"{LORA}enabled"):
        targets, every = key(f"{LORA}target_modules", []), key(f"{LORA}match_all_linear")
        if not every and not targets:
            raise ValueError(f"{LORA}target_modules: got none without match_all_linear, wanted names")
        draft.bind("lora.LoRA", targets="all-linear" if every else [Text(name) for name in targets])
        draft.differs(f"{LORA}match_all_linear", "all linear layers of the blocks; the head is not among them")


def nemo_engine(key: Reader, draft: Draft) -> None:
    """vLLM where the training is or on servers, and sampling ahead: the next batches while the policy trains."""
    place, ahead = "policy.generation.", key(f"{AHEAD}enabled")
    backend, beside = key(f"{place}backend"), key(f"{place}colocated.enabled")
    if ahead and (backend != "vllm" or beside):
        raise ValueError(f"{AHEAD}enabled: got true, wanted {place}backend vllm with colocated.enabled false")
    if backend not in (None, "vllm"):
        draft.left(f"{place}backend", f"{backend!r}: vLLM (files of engine/) or the local sampler draws here")
    elif backend and not beside:
        said = "start tools/launch/vllm_server.sh first; SERVERS says where they are"
        draft.differs(f"{place}colocated.enabled", said)
    if ahead and f"{LOSS}.importance_correction" not in draft.knobs:
        raise ValueError(f"loss_fn.use_importance_sampling_correction: got false with {AHEAD}enabled, wanted true")
    if ahead:
        draft.differs(f"{AHEAD}max_trajectory_age_steps", "whole batches in their order here, not single trajectories")


def nemo_optimizer(key: Reader, draft: Draft) -> None:
    """AdamW, and a warm-up where the schedule begins with one."""
    name, betas = key("policy.optimizer.name"), key(f"{ADAM}betas", [0.9, 0.999])
    if name.rpartition(".")[2] not in ("AdamW", "FusedAdam"):
        raise ValueError(f"policy.optimizer.name: got {name!r}, wanted torch.optim.AdamW or a FusedAdam")
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"{ADAM}betas: got {betas}, wanted two numbers in [0, 1)")
    optimizer = draft.bind("optimizer.adamw", beta1=float(betas[0]), beta2=float(betas[1]))
    if key(f"{ADAM}weight_decay"):
        draft.differs("weight_decay", "on matrices alone here, not on norms and biases")
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
        draft.left("policy.scheduler", f"{odd}: constant after the warm-up")
    if warm:
        draft.differs(
            "policy.scheduler",
            f"from its start_factor in {warm // updates} steps there; from 1/{warm + 1} to 1 in {warm} updates here",
        )
    schedule, limit = draft.bind("optimizer.constant", warmup=warm), key("policy.max_grad_norm") or UNBOUNDED
    draft.bind("sections.PolicyUpdate", optimizer=optimizer, schedule=schedule, max_grad_norm=limit)


def nemo_task(key: Reader, draft: Draft) -> None:
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
