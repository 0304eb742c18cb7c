"""The YAML of a NeMo-RL GRPO run as a gin file (tools/import_config, docs/from_nemo_rl.md)."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from import_draft import (
    DIFFERS,
    LARGEST,
    LEFT,
    Draft,
    Number,
    Reader,
    Text,
    adamw,
    bounded,
    clipped,
    colocated,
    correct,
    corrected,
    normalized,
    penalty,
    schedule,
    token_loss,
    weigh,
)
from nemo_rl_options import NEMO_LEFT, NEMO_QUIET
from nemo_rl_yaml import interpolated

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": None}
KL_TYPES = {"k1": "k1_ratio", "k2": "k2", "k3": "k3_ratio"}
ESTIMATORS = ("grpo", "gdpo", "reinforce_plus_plus")


def from_nemo_rl(config: Mapping[str, Any], rows: int | None = None) -> Draft:
    """The YAML of a NeMo-RL GRPO run. Raises ValueError for what is refused there, and for Megatron alone."""
    key, draft = Reader(interpolated(config)), Draft()
    nemo_batches(key, draft, rows)
    nemo_loss(key, draft)
    nemo_advantage(key, draft)
    nemo_policy(key, draft)
    nemo_engine(key, draft)
    nemo_optimizer(key, draft)
    draft.knobs["step.Algorithm.old_logp"] = "@step.from_trainer"
    draft.macros["SEED"] = key.count("grpo.seed", 42, 0)
    draft.knobs["sections.Evaluation.every"] = max(0, key.count("grpo.val_period", 10, -1))
    draft.knobs["sections.Checkpoints.every"] = key.count("checkpointing.save_period", 10)
    draft.knobs["sections.Checkpoints.keep_best"] = key.count("checkpointing.keep_top_k", 3, 0)
    if "OpenMathInstruct-2" in (key.values.get("data.dataset_name"), key.values.get("data.train.dataset_name")):
        draft.includes.append("task/openmath.gin")
        key.taken |= {"data.dataset_name", "data.train.dataset_name"}
        nemo_evaluation(key, draft, 500)
    else:
        draft.includes.append("task/rows.gin")
        nemo_evaluation(key, draft, 256)
    key.rest(draft, NEMO_LEFT, NEMO_QUIET)
    return draft


def nemo_evaluation(key: Reader, draft: Draft, held_out: int) -> None:
    """How many held-out problems are answered, of those that the task's file holds out."""
    asked = key.count("grpo.max_val_samples", 256)
    draft.knobs["sections.Evaluation.problems"] = min(held_out, asked)
    if asked > held_out:
        draft.note(DIFFERS, "grpo.max_val_samples", f"{asked} there; the task's file here holds out {held_out}")


def nemo_batches(key: Reader, draft: Draft, rows: int | None) -> None:
    """Prompts, samples, optimizer steps on them, and lengths."""
    prompts, group = key.count("grpo.num_prompts_per_step", 32), key.count("grpo.num_generations_per_prompt", 16)
    update, micro = (
        key.count("policy.train_global_batch_size", prompts * group),
        key.count("policy.train_micro_batch_size", 4),
    )
    total = key.count("policy.max_total_sequence_length", 512)
    steps = key("grpo.max_num_steps", int, None)
    if steps is None or steps < 1:
        raise ValueError(f"grpo.max_num_steps: got {steps}, wanted a number of steps")
    if prompts * group % update or prompts % (parts := prompts * group // update):
        raise ValueError(
            f"policy.train_global_batch_size: got {update} for {prompts} prompts x {group} samples, wanted a divisor "
            "that leaves whole groups"
        )
    if (epochs := key("grpo.max_num_epochs", int, None)) is not None and rows is not None:
        steps = min(steps, ceil(epochs * rows / prompts))
    elif epochs is not None:
        draft.note(
            DIFFERS, "grpo.max_num_steps", f"{steps} here; there also at most {epochs} epochs of the rows (--rows)"
        )
    longest = key.count("policy.generation.max_new_tokens", total)
    draft.macros |= {"STEPS": steps, "MAX_NEW_TOKENS": longest}
    draft.knobs["train.train.model"] = "%MODEL"
    draft.knobs |= {
        "step.Algorithm.prompts": prompts,
        "step.Algorithm.group_size": group,
        "step.Algorithm.minibatches": parts,
    }
    draft.knobs |= {"sections.Sampling.max_new_tokens": "%MAX_NEW_TOKENS", "sections.Sampling.max_total_tokens": total}
    draft.knobs["sections.PolicyUpdate.micro_tokens"] = micro * total
    draft.note(
        DIFFERS,
        "policy.max_total_sequence_length",
        f"a prompt of {total} tokens or more is cut and has no loss there, and is refused here; "
        "sections.Data.overlong_prompts = @overlong.drop_both leaves it out",
    )
    if key("grpo.use_dynamic_sampling", bool, False):
        draft.knobs["step.Algorithm.group_sampling"] = "@group_sampling.dynamic"
        draft.knobs["group_sampling.dynamic.max_gen_batches"] = key.count("grpo.dynamic_sampling_max_gen_batches", 10)
    key.taken.add("grpo.dynamic_sampling_max_gen_batches")
    if key("grpo.overlong_filtering", bool, False):
        draft.knobs["step.Algorithm.filters"] = ["@masking.drop_truncated"]
    nemo_shaping(key, draft, longest)


def nemo_shaping(key: Reader, draft: Draft, longest: int) -> None:
    """DAPO's punishment of rows that run long, as a part of the reward."""
    name = "grpo.reward_shaping."
    asked, most = key.count(f"{name}overlong_buffer_length", 128), key.count(f"{name}max_response_length", longest)
    price = key.positive(f"{name}overlong_buffer_penalty", 1.0, zero=True)
    if not key(f"{name}enabled", bool, False):
        return
    if asked > most:
        raise ValueError(f"{name}overlong_buffer_length: got {asked}, wanted at most {most}")
    draft.knobs["combine.combine.parts"] = ["@math.correct", "@length.soft_overlong_punishment"]
    draft.knobs["combine.combine.weights"] = [1.0, price]
    draft.knobs |= {"length.soft_overlong_punishment.max_length": most}
    draft.knobs |= {"length.soft_overlong_punishment.cache_length": asked}
    if longest > most:
        draft.note(
            DIFFERS,
            f"{name}max_response_length",
            f"beyond {most} tokens the penalty grows on there, not here",
        )


def nemo_loss(key: Reader, draft: Draft) -> None:
    """Clip, weights and KL."""
    low, high = (key.positive(f"loss_fn.ratio_clip_{side}", 0.2, zero=True) for side in ("min", "max"))
    sequence = key("loss_fn.sequence_level_importance_ratios", bool, False)
    tokens = key("loss_fn.token_level_loss", bool, True)
    plain = key("loss_fn.force_on_policy_ratio", bool, False) or key("loss_fn.disable_ppo_ratio", bool, False)
    key.taken.add("loss_fn.disable_ppo_ratio")
    cap = key("loss_fn.ratio_clip_c", Number, None)
    if sequence and tokens:
        raise ValueError("loss_fn.sequence_level_importance_ratios: got it with token_level_loss, wanted that false")
    if sequence and cap is not None:
        raise ValueError("loss_fn.ratio_clip_c: got it with sequence_level_importance_ratios, wanted one of them")
    cispo = key("loss_fn.use_cispo", bool, False)
    if cispo and (plain or sequence or cap is not None or not tokens):
        raise ValueError(
            "loss_fn.use_cispo: got it with another ratio, a ratio_clip_c or token_level_loss false, wanted it without"
        )
    if cispo:
        token_loss(draft, "cispo", clip_high=high)
        draft.note(DIFFERS, "loss_fn.use_cispo", f"the ratio is at least {1 - low:g} there, not bounded below here")
    elif plain:
        token_loss(draft, "reinforce")
        draft.note(DIFFERS, "loss_fn.force_on_policy_ratio", "losses.reinforce: the same gradient, another value")
    else:
        clipped(draft, sequence, low, high, cap, "loss_fn.ratio_clip_c")
    weigh(draft, "token_mean" if tokens else "sequence_mean")
    beta = key.positive("loss_fn.reference_policy_kl_penalty", 0.0, zero=True)
    kind = key("loss_fn.reference_policy_kl_type", str, "k3")
    name = key.choice("loss_fn.reference_policy_kl_type", "k3", KL_TYPES)
    sampled = key("loss_fn.use_on_policy_kl_approximation", bool, False)
    if beta and kind == "k2":
        draft.note(
            DIFFERS, "loss_fn.reference_policy_kl_type", "k2 without its score-function term here; there with it"
        )
    if beta and kind != "k2" and not sampled:
        draft.note(
            DIFFERS,
            "loss_fn.reference_policy_kl_type",
            "weighed with exp(logp - its own value) there since June 2026 (before: kl.k3), with the ratio here: the "
            "gradient of a step's first update is the same",
        )
    if key("loss_fn.use_kl_in_reward", bool, False) and beta:
        raise ValueError(
            "loss_fn.use_kl_in_reward: got true, which takes each token's own KL from its advantage, wanted false; "
            "credit.reward_to_go has the KL still to come"
        )
    if kind == "k1" and beta:
        draft.note(
            DIFFERS, "loss_fn.reference_policy_kl_type", "k1 in a loss has no gradient in expectation: kl.k1_ratio"
        )
    penalty(draft, beta, name)
    nemo_correction(key, draft, sequence)


def nemo_correction(key: Reader, draft: Draft, sequence: bool) -> None:
    """What a sample of the engine is worth to the trainer."""
    place = "loss_fn.truncated_importance_sampling_"
    if not key("loss_fn.use_importance_sampling_correction", bool, False):
        return
    kind = key.choice(f"{place}type", "tis", {name: name for name in ("tis", "icepop", "seq-mask-tis")})
    low = key.positive(f"{place}ratio_min", 0.0, zero=True)
    high, mask = key.positive(f"{place}ratio", LARGEST, zero=False), None
    if kind == "seq-mask-tis":
        if sequence:
            raise ValueError(f"{place}type: got {kind} with sequence_level_importance_ratios, wanted another")
        if not low <= 1 <= high:
            raise ValueError(f"{place}ratio: got {low:g} to {high:g}, wanted 1 within")
        mask = corrected(draft, "sequence_masked_weight", low=low, high=high)
        low, high = 0.0, LARGEST
    name = "masked_weight" if kind == "icepop" else "truncated_weight"
    weight = bounded(draft, name, low if kind == "icepop" else 0.0, high, f"{place}ratio", sequence=sequence)
    correct(draft, weight, mask)


def nemo_advantage(key: Reader, draft: Draft) -> None:
    """Baseline and std; newer files have them under adv_estimator."""
    name = key.choice("grpo.adv_estimator.name", "grpo", {name: name for name in ESTIMATORS})
    place = "grpo.adv_estimator." if "grpo.adv_estimator.normalize_rewards" in key.values else "grpo."
    divided = key(f"{place}normalize_rewards", bool, True)
    others = key(f"{place}use_leave_one_out_baseline", bool, True)
    centered = key("grpo.adv_estimator.minus_baseline", bool, True)
    key.taken |= {
        f"{where}{knob}"
        for where in ("grpo.", "grpo.adv_estimator.")
        for knob in ("normalize_rewards", "use_leave_one_out_baseline")
    }
    if name == "reinforce_plus_plus":
        nemo_whitened(draft, centered)
        return
    stage = "outcome"
    if name == "gdpo":
        stage = "per_part"
        draft.knobs |= {
            "step.Algorithm.credit": "@credit.row_whitened",
            "credit.row_whitened.credit": "@credit.per_part",
        }
        draft.knobs |= {"credit.row_whitened.eps": 1e-6, "credit.per_part.weights": {"correct": 1.0, "boxed": 1.0}}
        draft.note(
            DIFFERS, "grpo.adv_estimator.name", "gdpo: credit.per_part.weights names the parts of base.gin's reward"
        )
    if not divided:
        compare = "leave_one_out" if others else "mean_centered"
    elif not others:
        compare = "group_normalized"
        normalized(draft, 1e-6)
    else:
        compare = "leave_one_out_others_std"
        draft.knobs["advantage.leave_one_out_others_std.eps"] = 1e-6
        draft.note(
            DIFFERS,
            f"{place}normalize_rewards",
            "eps 1e-6 as there; equal rewards have a std of exactly 0 here, where rounding leaves NeMo-RL a divisor",
        )
    draft.knobs.pop("credit.outcome.advantage", None)
    draft.knobs[f"credit.{stage}.advantage"] = f"@advantage.{compare}"


def nemo_whitened(draft: Draft, centered: bool) -> None:
    """REINFORCE++, with or without a prompt's mean as the baseline."""
    draft.knobs |= {"step.Algorithm.credit": "@credit.token_whitened", "credit.token_whitened.eps": 1e-8}
    if centered:
        draft.knobs["credit.token_whitened.credit"] = "@credit.outcome"
        draft.knobs["credit.outcome.advantage"] = "@advantage.mean_centered"
    else:
        draft.knobs |= {"credit.token_whitened.credit": "@credit.reward_to_go", "credit.reward_to_go.beta": 0.0}


def nemo_policy(key: Reader, draft: Draft) -> None:
    """Model, precision, adapters, arrangement, sampling."""
    model = key("policy.model_name", str, None)
    if model is not None:
        draft.macros["MODEL"] = Text(model)
    if key("policy.megatron_cfg.enabled", bool, False):
        raise ValueError("policy.megatron_cfg.enabled: got true, wanted a file for dtensor_cfg")
    key.taken |= {"policy.dtensor_cfg.enabled"}
    precision = key.choice("policy.precision", "bfloat16", PRECISIONS)
    draft.includes += [f"scale/{precision}.gin"] if precision else []
    for knob, name in (("cpu_offload", "offload"), ("activation_checkpointing", "activation_checkpointing")):
        if key(f"policy.dtensor_cfg.{knob}", bool, False):
            draft.includes.append(f"scale/{name}.gin")
    draft.knobs["mesh.Parallelism.tp"] = key.count("policy.dtensor_cfg.tensor_parallel_size", 1)
    draft.knobs["sections.Sampling.temperature"] = key.positive("policy.generation.temperature", 1.0, zero=False)
    stops = key("policy.generation.stop_strings", list, [])
    draft.knobs["sections.Sampling.stop"] = [Text(stop) for stop in stops if stop]
    lora(key, draft)


def nemo_engine(key: Reader, draft: Draft) -> None:
    """vLLM where the training is or on servers, and sampling ahead."""
    place = "policy.generation."
    ahead = key("grpo.async_grpo.enabled", bool, False)
    backend, beside = key(f"{place}backend", str, None), key(f"{place}colocated.enabled", bool, True)
    if ahead and (backend != "vllm" or beside):
        raise ValueError(f"grpo.async_grpo.enabled: got true, wanted {place}backend vllm with colocated.enabled false")
    if backend not in (None, "vllm"):
        draft.note(LEFT, f"{place}backend", f"{backend!r}: vLLM (files of engine/) or the local sampler draws here")
    elif backend and beside:
        name = f"{place}vllm_cfg.gpu_memory_utilization"
        share, ranks = key.positive(name, 0.6, zero=False), key.count(f"{place}vllm_cfg.tensor_parallel_size", 1)
        colocated(draft, share=share, ranks=ranks, name=name)
        eager = key(f"{place}vllm_cfg.enforce_eager", bool, False)
        draft.knobs["vllm_sampler.colocated_sampler.enforce_eager"] = eager
    elif backend:
        draft.includes.append("engine/vllm_dedicated.gin")
        draft.note(
            DIFFERS, f"{place}colocated.enabled", "start tools/launch/vllm_server.sh first; SERVERS says where they are"
        )
    if ahead:
        nemo_ahead(key, draft)


def nemo_ahead(key: Reader, draft: Draft) -> None:
    """The next batches sampled while the policy trains."""
    place = "grpo.async_grpo."
    if "objective.policy_objective.importance_correction" not in draft.knobs:
        raise ValueError(f"loss_fn.use_importance_sampling_correction: got false with {place}enabled, wanted true")
    draft.includes.append("engine/async_one_step.gin")
    draft.knobs["sections.Sampling.max_staleness"] = key.count(f"{place}max_trajectory_age_steps", 1)
    if key(f"{place}in_flight_weight_updates", bool, False):
        draft.knobs["vllm_servers.DedicatedEngine.pause"] = "keep"
    draft.note(
        DIFFERS, f"{place}max_trajectory_age_steps", "whole batches in their order here, not single trajectories"
    )


def lora(key: Reader, draft: Draft) -> None:
    """Adapters, where they are enabled."""
    name = "policy.dtensor_cfg.lora_cfg."
    targets, every = key(f"{name}target_modules", list, []), key(f"{name}match_all_linear", bool, True)
    rank, alpha = key.count(f"{name}dim", 8), key.positive(f"{name}alpha", 32, zero=False)
    dropout = key.positive(f"{name}dropout", 0.0, zero=True)
    if not key(f"{name}enabled", bool, False):
        return
    if dropout >= 1:
        raise ValueError(f"{name}dropout: got {dropout}, wanted less than 1")
    if not every and not targets:
        raise ValueError(f"{name}target_modules: got none without match_all_linear, wanted names")
    draft.includes.append("scale/lora.gin")
    draft.knobs |= {"lora.LoRA.rank": rank, "lora.LoRA.alpha": alpha, "lora.LoRA.dropout": dropout}
    draft.knobs["lora.LoRA.targets"] = "all-linear" if every else [Text(target) for target in targets]
    draft.note(DIFFERS, f"{name}match_all_linear", "all linear layers of the blocks; the head is not among them")


def nemo_optimizer(key: Reader, draft: Draft) -> None:
    """AdamW, and a warm-up where the schedule begins with one."""
    name = key("policy.optimizer.name", str, "torch.optim.AdamW")
    if name.rpartition(".")[2] not in ("AdamW", "FusedAdam"):
        raise ValueError(f"policy.optimizer.name: got {name!r}, wanted torch.optim.AdamW or a FusedAdam")
    betas = key("policy.optimizer.kwargs.betas", list, [0.9, 0.999])
    if len(betas) != 2 or not all(isinstance(beta, Number) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"policy.optimizer.kwargs.betas: got {betas}, wanted two numbers in [0, 1)")
    place = "policy.optimizer.kwargs."
    adamw(
        draft,
        "adamw",
        lr=key.positive(f"{place}lr", 5e-6, zero=True),
        beta1=betas[0],
        beta2=betas[1],
        eps=key.positive(f"{place}eps", 1e-8, zero=False),
        weight_decay=key.positive(f"{place}weight_decay", 0.01, zero=True),
    )
    if draft.knobs["optimizer.adamw.weight_decay"]:
        draft.note(DIFFERS, "weight_decay", "on matrices alone here, not on norms and biases")
    stages = key("policy.scheduler", list, [])
    updates = draft.knobs["step.Algorithm.minibatches"]  # of a step; schedules count steps there, updates here
    warm, odd = 0, []
    for stage in stages:
        name = str(stage.get("name", "")).rpartition(".")[2] if isinstance(stage, Mapping) else str(stage)
        kwargs = stage.get("kwargs", {}) if isinstance(stage, Mapping) else {}
        if name == "LinearLR" and isinstance(kwargs, Mapping) and isinstance(kwargs.get("total_iters"), int):
            warm = max(0, kwargs["total_iters"]) * updates
        elif name not in ("ConstantLR", ""):
            odd.append(name)
    if odd:
        draft.note(LEFT, "policy.scheduler", f"{odd}: constant after the warm-up")
    if warm:
        draft.note(
            DIFFERS,
            "policy.scheduler",
            f"from its start_factor in {warm // updates} steps there; from 1/{warm + 1} to 1 in {warm} updates here",
        )
    schedule(draft, "constant", warm, 0, 0.0)
    draft.knobs["sections.PolicyUpdate.max_grad_norm"] = key.positive("policy.max_grad_norm", 1.0, zero=True) or 1e9
