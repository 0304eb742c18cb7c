"""A GRPOConfig of TRL as a gin file (tools/import_config, docs/from_trl.md)."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from import_draft import (
    DIFFERS,
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
from trl_options import TRL_LEFT, TRL_QUIET

PROMPT_TOKENS = 512  # a prompt's length, for the size of micro-batches, where the original does not bound it

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")
WEIGHTS = {  # losses that are means over rows divide by all of them there, also by those that are masked whole
    **dict.fromkeys(("grpo", "sapo"), "sequence_mean_over_samples"),
    **dict.fromkeys(("dr_grpo", "luspo"), "constant_length_over_samples"),
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), "token_mean"),
}
VESPO = {  # TRL's option, our knob, and TRL's default
    "vespo_k_pos": ("k_positive", 2.0),
    "vespo_lambda_pos": ("lambda_positive", 3.0),
    "vespo_k_neg": ("k_negative", 3.0),
    "vespo_lambda_neg": ("lambda_negative", 2.0),
}
UNBOUNDED = 1e9  # where a bound is None
CORRECTIONS = {  # kind, and whether one weight is a row's
    "token_truncate": ("truncated_weight", False),
    "token_mask": ("masked_weight", False),
    "sequence_truncate": ("truncated_weight", True),
    "sequence_mask": ("masked_weight", True),
}


def from_trl(config: Mapping[str, Any], world: int, rows: int | None) -> Draft:
    """A GRPOConfig's fields. Raises ValueError for what TRL refuses."""
    key, draft = Reader(config), Draft()
    updates = trl_batches(key, draft, world, rows)
    trl_loss(key, draft)
    trl_engine(key, draft)
    trl_advantage(key, draft)
    trl_optimizer(key, draft, updates)
    trl_device(key, draft)
    trl_model(key, draft)
    draft.knobs["sections.Sampling.temperature"] = key.positive("temperature", 1.0, zero=False)
    if key("mask_truncated_completions", bool, False):
        draft.knobs["step.Algorithm.filters"] = ["@masking.drop_truncated"]
    draft.macros["SEED"] = key.count("seed", 42, 0)
    every = updates // draft.macros["STEPS"]
    draft.knobs["sections.Checkpoints.every"] = per_step(key.positive("save_steps", 500, zero=False), updates, every)
    trl_evaluation(key, draft, updates, every, rows)
    draft.knobs["sections.Checkpoints.keep_last"] = key.count("save_total_limit", 2)
    draft.includes.append("task/rows.gin")
    draft.note(LEFT, "dataset and reward functions", "not in this file: task/rows.gin and base.gin's verified answers")
    key.rest(draft, TRL_LEFT, TRL_QUIET)
    return draft


def trl_evaluation(key: Reader, draft: Draft, updates: int, every: int, rows: int | None) -> None:
    """How often held-out problems are answered; an epoch is as many steps as the rows are prompts."""
    asked = key.choice("eval_strategy", "no", {name: name for name in ("no", "steps", "epoch")})
    steps = key.positive("eval_steps", 500, zero=False)
    if asked == "steps":
        draft.knobs["sections.Evaluation.every"] = per_step(steps, updates, every)
    if asked == "epoch":
        if rows is None:
            raise ValueError("eval_strategy: got 'epoch', wanted --rows, the training rows, to count steps with")
        draft.knobs["sections.Evaluation.every"] = ceil(rows / draft.knobs["step.Algorithm.prompts"])


def trl_model(key: Reader, draft: Draft) -> None:
    """The model and its adapters, which a ModelConfig beside the GRPOConfig has."""
    if name := key("model_name_or_path", str, None):
        draft.macros["MODEL"] = Text(name)
    if implementation := key("attn_implementation", str, None):
        draft.knobs["sections.Compute.attention"] = Text(implementation)
    dtypes = [key(name, str, None) for name in ("dtype", "torch_dtype")]
    if any(dtypes):
        draft.note(LEFT, "dtype", f"{dtypes[0] or dtypes[1]}: what trains is kept in float32; scale/bf16.gin computes")
    adapters = key("use_peft", bool, False)
    rank, alpha = key.count("lora_r", 16), key.count("lora_alpha", 32)
    dropout, targets = key.positive("lora_dropout", 0.05, zero=True), key("lora_target_modules", (list, str), None)
    if adapters:
        draft.includes.append("scale/lora.gin")
        draft.knobs |= {"lora.LoRA.rank": rank, "lora.LoRA.alpha": float(alpha), "lora.LoRA.dropout": dropout}
        if isinstance(targets, list):
            draft.knobs["lora.LoRA.targets"] = [Text(target) for target in targets]
        elif targets is not None:
            draft.note(LEFT, "lora_target_modules", f"{targets!r}: lora.LoRA.targets is a list of names")


def per_step(value: float, updates: int, every: int) -> int:
    """So many optimizer steps, or such a share of all, in steps of ours with `every` optimizer steps each."""
    return max(1, ceil((value * updates if value < 1 else value) / every))


def trl_batches(key: Reader, draft: Draft, world: int, rows: int | None) -> int:
    """Prompts, minibatches and steps; returns the optimizer steps of the whole run.

    per_device_train_batch_size x world x gradient_accumulation_steps completions are one optimizer step;
    generation_batch_size of them are sampled at a time, and learned from num_iterations times.
    """
    device = key.count("per_device_train_batch_size", 8)
    accumulate = key.count("gradient_accumulation_steps", 1)
    group = key.count("num_generations", 8, 2)
    sampled, rounds = key.count("generation_batch_size", None), key.count("steps_per_generation", None)
    at_once, update = device * world, device * world * accumulate
    if sampled is not None and rounds is not None:
        raise ValueError("got generation_batch_size and steps_per_generation, wanted one of them")
    if sampled is None:
        sampled = at_once * (rounds or accumulate)
    if sampled % at_once or sampled % group:
        raise ValueError(
            f"generation_batch_size: got {sampled}, wanted a multiple of num_generations {group} and of "
            f"per_device_train_batch_size {device} x {world} processes (--world)"
        )
    if update % sampled and sampled % update:
        raise ValueError(
            f"generation_batch_size: got {sampled} with {update} completions an optimizer step, wanted one to be a "
            "multiple of the other: a step here samples, then makes whole optimizer steps of it"
        )
    prompts, wanted = max(sampled, update) // group, max(1, sampled // update)
    parts = max(n for n in range(1, wanted + 1) if prompts % n == 0)
    if parts != wanted:
        draft.note(
            DIFFERS,
            "gradient_accumulation_steps",
            f"{wanted} optimizer steps for {prompts} prompts would split groups; minibatches are whole groups: {parts}",
        )
    epochs = key.count("num_iterations", 1)
    longest = key.count("max_completion_length", 512)
    asked = key.count("max_prompt_length", PROMPT_TOKENS)
    draft.macros |= {"STEPS": trl_steps(key, prompts, parts * epochs, rows), "MAX_NEW_TOKENS": longest}
    draft.knobs |= {"train.train.model": "%MODEL", "sections.Evaluation.problems": 256}
    draft.knobs |= {
        "step.Algorithm.prompts": prompts,
        "step.Algorithm.group_size": group,
        "step.Algorithm.epochs": epochs,
    }
    draft.knobs |= {
        "step.Algorithm.minibatches": parts,
        "sections.PolicyUpdate.micro_tokens": device * (asked + longest),
    }
    draft.knobs["sections.Sampling.max_new_tokens"] = "%MAX_NEW_TOKENS"
    draft.note(
        DIFFERS,
        "per_device_train_batch_size",
        f"{device} x {world} processes x {accumulate} = {update} completions an optimizer step: {prompts} prompts x "
        f"{group} samples in {parts} minibatches here, for any number of ranks; micro_tokens alone bounds the memory",
    )
    return draft.macros["STEPS"] * parts * epochs


def trl_steps(key: Reader, prompts: int, updates: int, rows: int | None) -> int:
    """Steps of ours, with so many optimizer steps each."""
    given, epochs = key("max_steps", int, -1), key.positive("num_train_epochs", 3.0, zero=False)
    if given > 0:
        return ceil(given / updates)
    if rows is None:
        raise ValueError(f"max_steps: got none, with num_train_epochs {epochs:g}; wanted --rows, the training rows")
    return ceil(epochs * rows / prompts)


def trl_loss(key: Reader, draft: Draft) -> None:
    """Token loss, weights and KL."""
    kind = key("loss_type", str, "dapo")
    key.choice("loss_type", "dapo", WEIGHTS)
    level = key.choice("importance_sampling_level", "token", {"token": False, "sequence": True})
    low = key.positive("epsilon", 0.2, zero=True)
    high = key.positive("epsilon_high", low, zero=True)
    delta = key("delta", Number, None)
    taus = [key.positive(f"sapo_temperature_{sign}", tau, zero=False) for sign, tau in (("pos", 1.0), ("neg", 1.05))]
    vespo = {knob: key.positive(name, default, zero=False) for name, (knob, default) in VESPO.items()}
    if (level or delta is not None) and kind in ("cispo", "sapo", "vespo"):
        raise ValueError(f"loss_type: got {kind} with importance_sampling_level or delta, wanted it without")
    if level and delta is not None:
        raise ValueError("delta: got it with importance_sampling_level 'sequence', wanted one of them")
    if kind == "cispo":
        if high <= 1:
            raise ValueError(f"epsilon_high: got {high} with loss_type cispo, wanted more than 1: it is the cap itself")
        token_loss(draft, "cispo", clip_high=round(high - 1, 12))
        draft.note(DIFFERS, "epsilon_high", f"the cap {high} itself there, 1 + clip_high here")
    elif kind == "sapo":
        token_loss(draft, "sapo", **dict(zip(("tau_positive", "tau_negative"), taus, strict=True)))
    elif kind == "vespo":
        token_loss(draft, "vespo", **vespo)
        draft.note(DIFFERS, "loss_type", "vespo: the row's weight is to the sampler here, to the old policy there")
    else:
        clipped(draft, level, low, high, delta, "delta")
        if delta is not None and delta < 1 + high:
            draft.note(DIFFERS, "delta", f"below 1 + epsilon_high, it caps good tokens too, there, at {delta}")
    weigh(draft, WEIGHTS[kind])
    if kind == "luspo":
        draft.knobs["aggregation.constant_length_over_samples.max_length"] = 1
    if kind == "bnpo":
        draft.note(DIFFERS, "loss_type", "bnpo is the mean over each device's own tokens; here over the whole step's")
    if kind in ("dapo", "cispo", "vespo"):
        draft.note(DIFFERS, "loss_type", f"{kind} divides by the tokens of each optimizer step here, always (trl#6024)")
    beta = key.positive("beta", 0.0, zero=True)
    unbiased = key("use_bias_correction_kl", bool, True)
    penalty(draft, beta, "k3_ratio" if unbiased else "k3")
    if beta and unbiased and level:
        draft.note(DIFFERS, "use_bias_correction_kl", "a KL is weighed with its row's ratio there, its token's here")
    trl_entropy(key, draft, WEIGHTS[kind])


def trl_entropy(key: Reader, draft: Draft, weights: str) -> None:
    """The entropy bonus, a mean over tokens whatever the loss is divided by."""
    bonus = float(key("entropy_coef", Number, 0.0))
    draft.knobs["objective.policy_objective.entropy_bonus"] = bonus
    if bonus and weights != "token_mean":
        draft.note(DIFFERS, "entropy_coef", "a mean over tokens there; weighed as the loss is here")


def trl_engine(key: Reader, draft: Draft) -> None:
    """vLLM in the processes or on a server, and what its samples are worth to the trainer."""
    weight, mask, name = None, None, "off_policy_mask_threshold"
    if key(name, Number, None) is not None:
        mask = corrected(draft, "off_policy_sequence_mask", delta=key.positive(name, 0.5, zero=True))
    if key("use_vllm", bool, False):
        key.choice("vllm_mode", "colocate", {"server": trl_server, "colocate": trl_colocated})(key, draft)
        weight = trl_weight(key, draft)
        draft.knobs["step.Algorithm.old_logp"] = "@step.from_trainer"  # of the trainer, corrected or not
    correct(draft, weight, mask)


def trl_colocated(key: Reader, draft: Draft) -> None:
    name = "vllm_gpu_memory_utilization"
    share, ranks = key.positive(name, 0.3, zero=False), key.count("vllm_tensor_parallel_size", 1)
    colocated(draft, share=share, ranks=ranks, name=name)
    draft.knobs["vllm_sampler.colocated_sampler.max_model_len"] = key.count("vllm_max_model_length", None)


def trl_server(key: Reader, draft: Draft) -> None:
    host, port = key("vllm_server_host", str, "0.0.0.0"), key.count("vllm_server_port", 8000)
    url = key("vllm_server_base_url", str, f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}")
    draft.includes.append("engine/vllm_dedicated.gin")
    draft.macros["SERVERS"] = [Text(url)]
    draft.note(DIFFERS, "vllm_mode", "the server is tools/launch/vllm_server.sh here, `trl vllm-serve` there")


def trl_weight(key: Reader, draft: Draft) -> str | None:
    """The correction between vLLM and the trainer; vllm_importance_sampling_cap is clip_max's older name.

    A clip_max that is given as None is no bound. Raises ValueError where neither bound is there, as TRL does.
    """
    place = "vllm_importance_sampling_"
    if not key(f"{place}correction", bool, True):
        return None
    kind, sequence = key.choice(f"{place}mode", "sequence_mask", CORRECTIONS)
    open_end = f"{place}clip_max" in key.values and key.values[f"{place}clip_max"] is None
    cap = key.positive(f"{place}cap", UNBOUNDED if open_end else 3.0, zero=False)
    low, high = key.positive(f"{place}clip_min", 0.0, zero=True), key.positive(f"{place}clip_max", cap, zero=False)
    if high == UNBOUNDED and not low:
        raise ValueError(f"{place}clip_max: got None without a clip_min, wanted one of them")
    return bounded(draft, kind, low, high, f"{place}clip_max", sequence=sequence)


def trl_advantage(key: Reader, draft: Draft) -> None:
    """What rewards are divided by."""
    value = key("scale_rewards", (str, bool), "group")
    name = {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value
    if name == "group":
        normalized(draft, 1e-4)
    elif name == "none":
        draft.knobs["credit.outcome.advantage"] = "@advantage.mean_centered"
    elif name == "batch":
        draft.knobs["step.Algorithm.credit"] = "@credit.batch_scaled"
        draft.knobs |= {"credit.batch_scaled.credit": "@credit.outcome", "credit.batch_scaled.eps": 1e-4}
        draft.knobs["credit.outcome.advantage"] = "@advantage.mean_centered"
    elif name == "mean":
        draft.knobs["credit.outcome.advantage"] = "@advantage.max_rl"
        draft.note(DIFFERS, "scale_rewards", "(R - mean) / (mean + 1e-4) there; no eps here, and 0 where all are equal")
    else:
        raise ValueError(f"scale_rewards: got {value!r}, wanted group, batch, mean, none, true or false")


OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw")
OPTIMIZERS |= dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit")
SCHEDULES = {
    **{"linear": "linear_decay", "constant": "constant", "constant_with_warmup": "constant"},
    **{"cosine": "cosine_decay", "cosine_with_min_lr": "cosine_decay"},
}


def trl_optimizer(key: Reader, draft: Draft, updates: int) -> None:
    """AdamW and its schedule over so many optimizer steps."""
    name = key.choice("optim", "adamw_torch_fused", OPTIMIZERS)
    if name == "adamw_8bit":
        draft.note(DIFFERS, "optim", "torchao's 8-bit AdamW (pip install 'grpo-fn[adamw8bit]')")
    adamw(
        draft,
        name,
        lr=key.positive("learning_rate", 1e-6, zero=True),
        beta1=key.positive("adam_beta1", 0.9, zero=True),
        beta2=key.positive("adam_beta2", 0.999, zero=True),
        eps=key.positive("adam_epsilon", 1e-8, zero=False),
        weight_decay=key.positive("weight_decay", 0.0, zero=True),
    )
    trl_schedule(key, draft, updates)
    limit = key.positive("max_grad_norm", 1.0, zero=True)
    draft.knobs["sections.PolicyUpdate.max_grad_norm"] = limit or 1e9  # 0 is no clipping there


def trl_schedule(key: Reader, draft: Draft, updates: int) -> None:
    """The schedule with its warm-up; the floor of a cosine is in lr_scheduler_kwargs, as a rate or as a share of it."""
    kind = key("lr_scheduler_type", str, "linear")
    name = key.choice("lr_scheduler_type", "linear", SCHEDULES)
    floor = 0.0
    if kind == "cosine_with_min_lr":
        rate, place = key.positive("learning_rate", 1e-6, zero=True), "lr_scheduler_kwargs.min_lr"
        given = [(f"{place}_rate", 1.0), (place, rate)]
        shares = [key.positive(name, 0.0, zero=True) / (unit or 1.0) for name, unit in given if name in key.values]
        if len(shares) != 1 or shares[0] > 1:
            raise ValueError(
                f"{place}: got {shares} of the rate, wanted one of min_lr and min_lr_rate, at most the rate"
            )
        (floor,) = shares
    warm = key.positive("warmup_steps", 0, zero=True)
    share = key.positive("warmup_ratio", 0.0, zero=True)
    first = warm * updates if 0 < warm < 1 else warm or share * updates
    schedule(draft, name, 0 if kind == "constant" else ceil(first), updates, floor)


def trl_device(key: Reader, draft: Draft) -> None:
    """Precision, recomputation, compilation, sharding: files of scale/."""
    half = key("fp16", bool, False)
    if key("bf16", bool, not half) and half:
        raise ValueError("got bf16 and fp16, wanted one of them")
    wanted = {"fp16": half, "bf16": key("bf16", bool, not half), "compiled": key("torch_compile", bool, False)}
    mode = key("torch_compile_mode", str, None)
    if wanted["compiled"] and mode is not None:
        draft.knobs["blocks.torch_compile.mode"] = mode
    wanted["activation_checkpointing"] = key("gradient_checkpointing", bool, True)
    words = key("fsdp", (str, list, bool), "")
    if isinstance(words, bool):
        words = ["full_shard"] if words else []
    words = words if isinstance(words, list) else words.split()
    odd = [word for word in words if word not in (*STRATEGIES, "offload", "auto_wrap", "hybrid_shard_zero2")]
    if odd:
        raise ValueError(f"fsdp: got {odd}, wanted some of {', '.join((*STRATEGIES, 'offload', 'auto_wrap'))}")
    wanted |= {name: name in words for name in (*STRATEGIES, "offload")}
    if "hybrid_shard_zero2" in words:
        draft.note(
            LEFT, "fsdp", "hybrid_shard_zero2: scale/hybrid_shard.gin with mesh.Parallelism.reshard_after_forward=False"
        )
    draft.includes += [f"scale/{name}.gin" for name, there in wanted.items() if there]
    draft.note(DIFFERS, "bf16, fp16", "what trains is kept in float32, gradients are reduced in float32")
