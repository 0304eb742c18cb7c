"""The rest of a GRPOConfig: optimizer and schedule, precision and sharding, model and adapters, evaluation."""

from math import ceil

from import_draft import DIFFERS, LEFT, Draft, Reader, Text, adamw, schedule

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")
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


def per_step(value: float, updates: int, every: int) -> int:
    """So many optimizer steps, or such a share of all, in steps of ours with `every` optimizer steps each."""
    return max(1, ceil((value * updates if value < 1 else value) / every))
