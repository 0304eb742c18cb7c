"""A GRPOConfig of TRL as a gin file (docs/migrating.md): what trl.yaml cannot say."""

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

from grpo_fn.import_config.draft import (
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

TRL = read_table("trl.yaml")
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")
TEACHERS = {  # options by which TRL's configurations of distillation differ from a GRPOConfig
    *("teacher_model_name_or_path", "teacher_model_revision", "teacher_model_init_kwargs", "use_teacher_server"),
    *("lmbda", "seq_kd", "distillation_objective", "iw_opd_gamma", "iw_opd_epsilon", "loss_top_k", "loss_add_tail"),
}


def from_trl(config: Mapping[str, Any], world: int, rows: int | None) -> Draft:
    """A GRPOConfig's fields. Raises ValueError for what TRL refuses."""
    if taught := sorted(TEACHERS & config.keys()):
        raise ValueError(
            f"got {', '.join(taught)}, of a DistillationConfig, GKDConfig or IWOPDConfig, expected a GRPOConfig; "
            "algo/opd.gin and algo/iw_opd.gin with scale/teacher.gin learn from a teacher (docs/migrating.md)"
        )
    key, draft = OptionReader(config, TRL), Draft()
    key.carry(draft)
    batches = trl_batches(key, draft, world, rows)
    trl_loss(key, draft, batches, world)
    trl_engine(key, draft)
    trl_advantage(key, draft, batches)
    trl_optimizer(key, draft, batches.updates)
    trl_device(key, draft)
    draft.bind("sections.Checkpoints", every=batches.in_steps(key("save_steps")))
    if key("eval_strategy") == "steps":
        draft.bind("sections.Evaluation", every=batches.in_steps(key("eval_steps")))
    if key("eval_strategy") == "epoch":
        if rows is None:
            raise ValueError("eval_strategy: got 'epoch', expected --rows, the training rows, to count steps with")
        draft.bind("sections.Evaluation", every=ceil(rows / draft.knobs["step.Algorithm.prompts"]))
    draft.includes.append("task/rows.gin")
    key.rest(draft)
    return draft


class Batches(NamedTuple):
    """Optimizer steps, and completions there: sampled at a time, of one step, of its micro-batches."""

    updates: int  # of the whole run
    every: int  # of a grpo_fn step
    sampled: int
    update: int
    micro: int  # of all processes

    def in_steps(self, value: float) -> int:
        """So many optimizer steps, or such a share of all, in grpo_fn's steps."""
        return max(1, ceil((value * self.updates if value < 1 else value) / self.every))


def trl_batches(key: OptionReader, draft: Draft, world: int, rows: int | None) -> Batches:
    """Prompts, minibatches and steps.

    per_device_train_batch_size x world x gradient_accumulation_steps completions are one optimizer step;
    generation_batch_size of them are sampled at a time, and learned from num_iterations times.
    """
    device, accumulate = key("per_device_train_batch_size"), key("gradient_accumulation_steps")
    group, epochs = key("num_generations"), key("num_iterations")
    sampled, rounds = key("generation_batch_size"), key("steps_per_generation")
    at_once, update = device * world, device * world * accumulate
    sampled = sampled or at_once * (rounds or accumulate)
    if sampled % at_once or sampled % group:
        raise ValueError(
            f"generation_batch_size: got {sampled}, expected a multiple of num_generations {group} and of "
            f"per_device_train_batch_size {device} x {world} processes (--world)"
        )
    if update % sampled and sampled % update:
        raise ValueError(
            f"generation_batch_size: got {sampled} with {update} completions an optimizer step, expected one to be a "
            "multiple of the other: a step here samples, then makes whole optimizer steps of it"
        )
    if sampled < update and epochs > 1:
        raise ValueError(
            f"num_iterations: got {epochs} with {sampled} completions sampled at a time and {update} an optimizer "
            "step, which has the same ones several times there; expected whole optimizer steps of what is sampled"
        )
    prompts, splits = max(sampled, update) // group, max(1, sampled // update)
    parts = max(n for n in range(1, splits + 1) if prompts % n == 0)
    if parts != splits:
        draft.differs(
            "gradient_accumulation_steps",
            f"{splits} optimizer steps for {prompts} prompts would split groups; minibatches are whole groups: {parts}",
        )
    elif parts > 1:
        draft.differs("steps_per_generation", "TRL shuffles completions into its minibatches; whole groups here")
    steps, passes = key("max_steps"), key("num_train_epochs")
    if steps <= 0 and rows is None:
        raise ValueError(f"max_steps: got none, with num_train_epochs {passes:g}; expected --rows, the training rows")
    steps = ceil(steps / (parts * epochs) if steps > 0 or rows is None else passes * rows / prompts)
    draft.macros["STEPS"] = steps
    draft.bind("step.Algorithm", prompts=prompts, minibatches=parts)
    draft.bind("sections.Evaluation", problems=256)
    tokens = key("max_prompt_length") + key("max_completion_length")
    draft.bind("sections.PolicyUpdate", micro_tokens=device * tokens)
    draft.differs(
        "per_device_train_batch_size",
        f"{device} x {world} processes x {accumulate} = {update} completions an optimizer step: {prompts} prompts x "
        f"{group} samples in {parts} minibatches here, for any number of ranks; micro_tokens alone bounds the memory",
    )
    return Batches(steps * parts * epochs, parts * epochs, sampled, update, at_once)


def trl_loss(key: OptionReader, draft: Draft, batches: Batches, world: int) -> None:
    """Token loss, weights and KL."""
    kind, sequence = key("loss_type"), key("importance_sampling_level") == "sequence"
    low, delta = key("epsilon"), key("delta")
    high = key("epsilon_high", low)
    if kind == "cispo":
        if high <= 1:
            raise ValueError(
                f"epsilon_high: got {high} with loss_type cispo, expected more than 1: it is the cap itself"
            )
        loss = draft.bind("losses.cispo", clip_high=round(high - 1, 12))
    elif kind in ("sapo", "vespo"):
        loss = "@losses.sapo" if kind == "sapo" else "@losses.vespo"
    else:
        if delta is not None and 1 < delta < 1 + high:  # there it bounds good tokens alone, and the clip the bad ones
            high, delta = round(delta - 1, 12), round(1 + high, 12)
        loss = clip_loss(draft, low, high, delta, "delta", sequence=sequence)
    draft.bind(LOSS, token_loss=loss)
    weights = draft.knobs[f"{LOSS}.loss_aggregation"]
    if weights == "@objective.constant_length_over_samples":
        draft.bind(weights[1:], max_length=1 if kind == "luspo" else "%MAX_NEW_TOKENS")
    if kind in ("dapo", "cispo", "vespo") and batches.sampled != batches.update:
        draft.differs(
            "loss_type",
            f"{kind} divides by the tokens of each optimizer step here; there by those of the generation batch, times "
            f"{batches.update / batches.sampled:g}",
        )
    if key("entropy_coef") and (weights != "@objective.token_mean" or batches.update > batches.micro or world > 1):
        draft.differs(
            "entropy_coef",
            "a mean over the tokens of each micro-batch there, whatever the loss is; weighed as the loss is here",
        )


def trl_engine(key: OptionReader, draft: Draft) -> None:
    """vLLM in the processes or on a server, and what its samples are worth to the trainer."""
    mask = None if key("off_policy_mask_threshold") is None else "@corrections.off_policy_sequence_mask"
    if key("use_vllm") and key("vllm_mode") == "server":
        host = key("vllm_server_host")
        url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{key('vllm_server_port')}"
        draft.macros["SERVERS"] = [key("vllm_server_base_url", url)]
    elif key("use_vllm"):
        draft.bind("vllm_sampler.colocated_sampler", max_model_len=key("vllm_max_model_length"))
    bind_correction(draft, trl_weight(key, draft) if key("use_vllm") else None, mask)


def trl_weight(key: OptionReader, draft: Draft) -> str | None:
    """The correction between vLLM and the trainer; VESPO's own row weight is to the sampler, and takes none beside it.

    A clip_max that is given as None is no bound. Raises ValueError, as TRL does, for a truncation without one.
    """
    place = "vllm_importance_sampling_"
    if not key(f"{place}correction"):
        return None
    unit, _, kind = key(f"{place}mode").partition("_")
    cap = key(f"{place}cap")
    if cap is None and key.values.get(f"{place}clip_max", 0) is None:
        cap = UNBOUNDED
    low, high = key(f"{place}clip_min"), key(f"{place}clip_max", cap)
    if kind == "truncate" and high == UNBOUNDED and not low:
        raise ValueError(f"{place}clip_max: got None without a clip_min, expected one of them")
    if key("loss_type") == "vespo":
        return None
    kind = "truncated_weight" if kind == "truncate" else "masked_weight"
    return bound_weight(draft, kind, low, high, f"{place}clip_max", sequence=unit == "sequence")


def trl_advantage(key: OptionReader, draft: Draft, batches: Batches) -> None:
    """What rewards are divided by."""
    value = key("scale_rewards", "group")
    name = {True: "group", False: "none"}.get(value, value)
    if name not in ("group", "batch", "none"):
        raise ValueError(f"scale_rewards: got {value!r}, expected group, batch, none, true or false")
    advantage = normalize_advantage(draft, 1e-4) if name == "group" else "@advantage.mean_centered"
    credit = draft.bind("credit.outcome", advantage=advantage)
    if name == "batch":
        draft.bind("step.Algorithm", credit=draft.bind("credit.batch_scaled", credit=credit, eps=1e-4))
        if batches.sampled < batches.update:
            draft.differs("scale_rewards", "the std of each generation batch there, of the whole step here")


def trl_optimizer(key: OptionReader, draft: Draft, updates: int) -> None:
    """AdamW and its schedule over so many optimizer steps; a cosine's floor is a rate, or a share of the rate."""
    kind, floor, place = key("lr_scheduler_type"), 0.0, "lr_scheduler_kwargs.min_lr"
    if kind == "cosine_with_min_lr":
        units = {f"{place}_rate": 1.0, place: key("learning_rate")}
        shares = [key(name) / (unit or 1.0) for name, unit in units.items() if name in key.values]
        if len(shares) != 1 or shares[0] > 1:
            raise ValueError(
                f"{place}: got {shares} of the rate, expected one of min_lr and min_lr_rate, at most the rate"
            )
        floor = shares[0]
    warm = key("warmup_steps")
    warm = warm * updates if 0 < warm < 1 else warm or key("warmup_ratio") * updates
    schedule = draft.knobs["sections.PolicyUpdate.schedule"][1:]
    draft.bind(schedule, warmup=0 if kind == "constant" else ceil(warm))
    if schedule != "optimizer.constant":
        draft.bind(schedule, total=updates, final=floor)
    draft.bind("sections.PolicyUpdate", max_grad_norm=key("max_grad_norm") or UNBOUNDED)  # 0 is no clipping there


def trl_device(key: OptionReader, draft: Draft) -> None:
    """Precision, sharding, adapters."""
    if key("fp16") and key("bf16", False):
        raise ValueError("got bf16 and fp16, expected one of them")
    words = key("fsdp", "")
    if isinstance(words, bool):
        words = ["full_shard"] if words else []
    words = words.split() if isinstance(words, str) else words
    odd = [word for word in words if word not in (*STRATEGIES, "offload", "auto_wrap", "hybrid_shard_zero2")]
    if odd:
        raise ValueError(f"fsdp: got {odd}, expected some of {', '.join((*STRATEGIES, 'offload', 'auto_wrap'))}")
    if "hybrid_shard_zero2" in words:
        instead = "scale/hybrid_shard.gin with mesh.Parallelism.reshard_after_forward=False"
        draft.leave_out("fsdp", f"hybrid_shard_zero2: {instead}")
    draft.includes += [f"scale/{name}.gin" for name in (*STRATEGIES, "offload") if name in words]
    if key("use_peft"):
        draft.includes.append("scale/lora.gin")
        targets = key("lora_target_modules")
        if isinstance(targets, list):
            draft.bind("lora.LoRA", targets=[Text(name) for name in targets])
        elif targets is not None:
            draft.leave_out("lora_target_modules", f"{targets!r}: lora.LoRA.targets is a list of names")
