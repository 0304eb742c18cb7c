"""The YAML of a NeMo-RL GRPO run as a gin file (tools/import_config, docs/from_nemo_rl.md)."""

import re
from collections.abc import Mapping
from math import isfinite, prod
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
    leaves,
    normalized,
    number,
    penalty,
    schedule,
    token_loss,
    weigh,
)

PLACE = re.compile(r"\$\{([^${}]*)\}")

NEMO_LEFT = {
    r"grpo\.async_grpo\..*": "engine/async_one_step.gin samples whole batches ahead, where it is on",
    r"grpo\.reward_scaling\..*": "weigh the parts of the reward: combine.combine.weights",
    r"grpo\.max_num_epochs": "STEPS says how long; max_num_steps has to be given",
    r"grpo\.val_(batch_size|at_start|at_end)": "evaluated before and after; sections.Sampling.max_rows",
    r"grpo\.batch_multiplier": "dynamic sampling samples `prompts` problems at a time",
    r"grpo\.max_rollout_turns": "one turn",
    r"grpo\.(seq_logprob_error_.*|skip_reference_.*|calculate_advantages_on_gpu|adv_estimator\.minus_baseline)": (
        "there is no such thing here"
    ),
    r"loss_fn\.truncated_importance_sampling.*": "nothing is corrected: @importance.no_correction",
    r"loss_fn\.kl_(input|output)_clamp_value": "x is capped before exp, its value is not",
    r"policy\.generation\.(top_p|top_k|stop_token_ids)": (
        "tokens are drawn from the whole distribution, to the tokenizer's and model's ends"
    ),
    r"policy\.generation\.(vllm_.*|colocated\.resources.*)": (
        "prompts and new tokens have a limit each here; the rest is as engine/*.gin has it, or a flag of "
        "tools/launch/vllm_server.sh"
    ),
    r"policy\.generation\.(colocated\..*|mcore_.*|sglang_.*)": "vLLM or the local sampler draws here",
    r"policy\.megatron_cfg\..*": "FSDP2 and tensor parallelism: the files of scale/",
    r"policy\.(dynamic_batching|sequence_packing)\..*": (
        "rows always lie end to end without padding, a group's prompt once (packed_input.pack_shared_prompts): "
        "micro_tokens"
    ),
    r"policy\.(logprob_(batch|chunk)_size|generation_batch_size|make_sequence_.*)": (
        "sections.PolicyUpdate.micro_tokens"
    ),
    r"policy\.(tokenizer|hf_config_overrides)\..*": "the model folder's own tokenizer, template and config",
    r"policy\.dtensor_cfg\.(_v2|custom_parallel_plan|sequence_parallel|context_parallel_size|clear_cache.*|env_vars)": (
        "the model's own plan of tensor parallelism; a row lies on one device"
    ),
    r"policy\.dtensor_cfg\.lora_cfg\.(exclude_modules|dropout_position|lora_A_init|use_triton)": (
        "PEFT's way: dropout before A, A uniform"
    ),
    r"policy\.optimizer\.kwargs\.(foreach|fused)": "fused; scale/adamw_foreach.gin for the other",
    r"policy\.offload_optimizer_for_logprob": "scale/offload.gin",
    r"data\..*": "a task: docs/tasks.md",
    r"env\..*": "base.gin's verified answers (math-verify) and box; reward_pool.RewardPool.workers",
    r"defaults.*": "the file that this one is laid over is not read: put the two together first",
    r"cluster\..*": "how many ranks there are is the launcher's: docs/cluster.md",
}
NEMO_QUIET = [r"logger\..*", r"checkpointing\..*", r"policy\.(refit_.*|draft\..*|megatron_.*|fp8.*)"]
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": None}
KL_TYPES = {"k1": "k1_ratio", "k2": "k2", "k3": "k3"}


def from_nemo_rl(config: Mapping[str, Any]) -> Draft:
    """The YAML of a NeMo-RL GRPO run. Raises ValueError for what is refused there, and for Megatron alone."""
    key, draft = Reader(interpolated(config)), Draft()
    nemo_batches(key, draft)
    nemo_loss(key, draft)
    nemo_advantage(key, draft)
    nemo_policy(key, draft)
    nemo_engine(key, draft)
    nemo_optimizer(key, draft)
    draft.knobs["step.Algorithm.old_logp"] = "@step.from_trainer"
    draft.macros["SEED"] = key.count("grpo.seed", 42, 0)
    draft.knobs["sections.Evaluation.every"] = key.count("grpo.val_period", 10, 0)
    draft.knobs["sections.Checkpoints.every"] = key.count("checkpointing.save_period", 10)
    draft.knobs["sections.Checkpoints.keep_best"] = key.count("checkpointing.keep_top_k", 3, 0)
    if "OpenMathInstruct-2" in (key.values.get("data.dataset_name"), key.values.get("data.train.dataset_name")):
        draft.includes.append("task/openmath.gin")
        key.taken |= {"data.dataset_name", "data.train.dataset_name"}
        draft.knobs["sections.Evaluation.problems"] = min(500, key.count("grpo.max_val_samples", 256))
    else:
        draft.includes.append("task/rows.gin")
        draft.knobs["sections.Evaluation.problems"] = min(256, key.count("grpo.max_val_samples", 256))
    key.rest(draft, NEMO_LEFT, NEMO_QUIET)
    return draft


def interpolated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves with ${a.b} and ${mul:x,y} replaced. Raises ValueError for one that leads nowhere, or round."""
    values = dict(leaves(config))

    def resolve(value: Any, depth: int) -> Any:
        if isinstance(value, list):
            return [resolve(item, depth) for item in value]
        if not isinstance(value, str) or not (found := PLACE.search(value)):
            return value
        if depth > 20:
            raise ValueError(f"got {value!r}, which refers to itself, wanted a value")
        if found[0] == value:
            return resolve(looked_up(found[1], depth), depth + 1)
        return resolve(value[: found.start()] + str(looked_up(found[1], depth)) + value[found.end() :], depth + 1)

    def looked_up(inside: str, depth: int) -> Any:
        name, _, args = inside.partition(":")
        if name == "mul":
            factors = [number(str(resolve(part.strip(), depth + 1))) for part in args.split(",")]
            if not all(isinstance(factor, float) and isfinite(factor) for factor in factors):
                raise ValueError(f"got ${{{inside}}}, wanted numbers to multiply")
            return prod(int(factor) if factor.is_integer() else factor for factor in factors)
        if inside not in values:
            raise ValueError(f"got ${{{inside}}}, wanted a key of the file")
        return values[inside]

    return {name: resolve(value, 0) for name, value in values.items()}


def nemo_batches(key: Reader, draft: Draft) -> None:
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
    if plain:
        token_loss(draft, "reinforce")
        draft.note(DIFFERS, "loss_fn.force_on_policy_ratio", "losses.reinforce: the same gradient, another value")
    else:
        clipped(draft, sequence, low, high, cap, "loss_fn.ratio_clip_c")
    weigh(draft, "token_mean" if tokens else "sequence_mean")
    beta = key.positive("loss_fn.reference_policy_kl_penalty", 0.0, zero=True)
    kind = key("loss_fn.reference_policy_kl_type", str, "k3")
    name = key.choice("loss_fn.reference_policy_kl_type", "k3", KL_TYPES)
    if key("loss_fn.use_on_policy_kl_approximation", bool, False) and kind == "k3":
        name = "k3_ratio"
        draft.note(DIFFERS, "loss_fn.use_on_policy_kl_approximation", "the ratio is differentiated here: kl.k3_ratio")
    if key("loss_fn.use_kl_in_reward", bool, False) and beta:
        raise ValueError("loss_fn.use_kl_in_reward: got true, wanted false; or take credit.outcome_minus_kl by hand")
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
    key.choice("grpo.adv_estimator.name", "grpo", {"grpo": None})
    place = "grpo.adv_estimator." if "grpo.adv_estimator.normalize_rewards" in key.values else "grpo."
    divided = key(f"{place}normalize_rewards", bool, True)
    others = key(f"{place}use_leave_one_out_baseline", bool, True)
    key.taken |= {
        f"{where}{knob}"
        for where in ("grpo.", "grpo.adv_estimator.")
        for knob in ("normalize_rewards", "use_leave_one_out_baseline")
    }
    if not divided:
        draft.knobs["credit.outcome.advantage"] = "@advantage.leave_one_out" if others else "@advantage.mean_centered"
    elif not others:
        normalized(draft, 1e-6)
    else:
        draft.knobs["credit.outcome.advantage"] = "@advantage.leave_one_out_others_std"
        draft.knobs["advantage.leave_one_out_others_std.eps"] = 1e-6
        draft.note(
            DIFFERS,
            f"{place}normalize_rewards",
            "eps 1e-6 as there; equal rewards have a std of exactly 0 here, where rounding leaves NeMo-RL a divisor",
        )


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
    key.choice("policy.optimizer.name", "torch.optim.AdamW", {"torch.optim.AdamW": None})
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
