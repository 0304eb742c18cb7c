"""Turn the configuration of another trainer into a gin file, and list what it could not carry.

python tools/import_config.py grpo_math_1B.yaml > run.gin                  NeMo-RL: the YAML of a GRPO run
python tools/import_config.py trl.json --world 8 --rows 7473 > run.gin     TRL: the fields of a GRPOConfig

A TRL file is JSON, YAML, or Python: a dict literal, or a call GRPOConfig(...) of literals. --world is the number of
processes and --rows that of training rows, which TRL's own file does not hold. What means something else here, what was
left out and what nobody knows is written to stderr and into the gin file as comments. docs/from_trl.md and
docs/from_nemo_rl.md say the same in words. Exit codes: 0 done, 2 bad input.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite, prod
from pathlib import Path
from typing import Any

DIFFERS, LEFT, UNKNOWN = "means something else here", "not carried", "unknown"
LARGEST = 1e15  # no number of a configuration is larger
PROMPT_TOKENS = 512  # a prompt's length, for the size of micro-batches, where the original does not bound it
PLACE = re.compile(r"\$\{([^${}]*)\}")
Number = (int, float)


class Text(str):
    """Text of the original: never a reference, whatever it begins with."""


@dataclass
class Draft:
    """A gin file in the making."""

    includes: list[str] = field(default_factory=lambda: ["base.gin", "algo/grpo.gin"])
    macros: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)  # a value that begins with @ or % is a reference
    notes: list[tuple[str, str, str]] = field(default_factory=list)  # (kind, key, what there is to say)

    def note(self, kind: str, key: str, text: str) -> None:
        self.notes.append((kind, key, text))

    def text(self, source: str) -> str:
        """The file."""
        head = f"From {source}, by tools/import_config.py. Read what follows before you compare with the original."
        lines = [f"# {line}" for line in (one_line(head), *self.listed())]
        lines += ["from __gin__ import dynamic_registration", ""]
        lines += [*sorted(self._imports()), "", *(f'include "{name}"' for name in dict.fromkeys(self.includes)), ""]
        lines += [f"{name} = {literal(value)}" for name, value in self.macros.items()]
        return "\n".join([*lines, "", *(f"{name} = {literal(value)}" for name, value in self.knobs.items()), ""])

    def listed(self) -> Iterator[str]:
        """The notes, a line each: what differs, what was left, what is unknown."""
        for kind in (DIFFERS, LEFT, UNKNOWN):
            for key, said in [(key, said) for k, key, said in self.notes if k == kind]:
                yield one_line(f"{kind}: {key}: {said}")

    def _imports(self) -> Iterator[str]:
        values = [literal(value) for value in self.knobs.values()]
        named = {name.partition(".")[0] for name in self.knobs}
        named |= {module for value in values for module in re.findall(r"(?:^|[\[ ])@(\w+)\.", value)}
        for module in named:
            where = next(place for place, names in ROOMS.items() if module in names)
            yield f"from {where} import {module}"


def one_line(text: str) -> str:
    """The text as it may stand in a comment."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode()


PURE = "advantage algorithm collect credit filters kl loop losses objective train weights"
ROOMS = {"grpo_fn": PURE.split(), "grpo_fn.rewards": ["combine", "length", "math"]}
ROOMS |= {"grpo_fn.shell": ["local_sampler", "lora", "optimizer", "policy", "scale"]}


def literal(value: Any) -> str:
    """A value as gin reads it; text that begins with @ or % stays a reference."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, Text) or not isinstance(value, str):
        return repr(str(value)) if isinstance(value, Text) else repr(value)
    return value if re.fullmatch(r"@[\w.]+|%[A-Z_]+", value) else repr(value)


class Reader:
    """The original's keys, each taken once; those that nobody took are listed in the end."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.values = dict(leaves(config))
        self.taken: set[str] = set()

    def __call__(self, key: str, wanted: type | tuple[type, ...], default: Any) -> Any:
        """The value, or `default` where there is none. Raises ValueError for another type."""
        self.taken.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        if isinstance(value, str) and str not in kinds and set(kinds) & {int, float}:  # YAML reads 1e-6 as text
            value = number(value)
        if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
            value = int(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{key}: got {value!r}, wanted {' or '.join(kind.__name__ for kind in kinds)}")
        if isinstance(value, Number) and not abs(value) <= LARGEST:
            raise ValueError(f"{key}: got {value!r}, wanted a number of at most {LARGEST:g}")
        return value

    def count(self, key: str, default: int, least: int = 1) -> int:
        """A whole number from `least`."""
        value = self(key, int, default)
        if value is not None and value < least:
            raise ValueError(f"{key}: got {value}, wanted at least {least}")
        return value

    def positive(self, key: str, default: float, *, zero: bool) -> float:
        """A number above 0, or from 0 where `zero`."""
        value = float(self(key, Number, default))
        if value < 0 or (value == 0 and not zero):
            raise ValueError(f"{key}: got {value}, wanted {'0 or more' if zero else 'more than 0'}")
        return value

    def choice(self, key: str, default: str, known: Mapping[str, Any]) -> Any:
        """What `known` has for the name."""
        value = self(key, str, default)
        if value not in known:
            raise ValueError(f"{key}: got {value!r}, wanted one of {', '.join(known)}")
        return known[value]

    def rest(self, draft: Draft, reasons: Mapping[str, str], quiet: Sequence[str]) -> None:
        """Note every key that was not taken: those of one reason together, those that nobody knows one by one."""
        why = {**reasons, "|".join(quiet): "about logging, files or processes"}
        left: dict[str, list[str]] = {}
        for key in sorted(self.values.keys() - self.taken):
            said = f"{key} = {self.values[key]!r}"
            because = next((why[name] for name in why if fits(name, key)), None)
            if because is None:
                draft.note(UNKNOWN, key, repr(self.values[key]))
            else:
                left.setdefault(because, []).append(said)
        for because, keys in left.items():
            draft.note(LEFT, ", ".join(keys), because)


def fits(pattern: str, key: str) -> bool:
    """Whether a key, or an empty mapping under it, is meant."""
    return any(re.fullmatch(pattern, name) for name in (key, f"{key}."))


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in nested mappings."""
    for key, value in config.items():
        if not isinstance(key, str):
            raise ValueError(f"got the key {key!r} in {prefix or 'the file'}, wanted text")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def number(text: str) -> Any:
    """A number written as text, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


# -- TRL

TRL_LEFT = {
    "use_vllm|vllm_.*": (
        "the trainer's own module samples here; its log-probs are the trainer's, so nothing is corrected"
    ),
    "top_p|top_k|min_p|repetition_penalty|generation_kwargs|cache_implementation": (
        "tokens are drawn from the whole distribution, of which the trainer's log-probs are those"
    ),
    "reward_weights|multi_objective_aggregation": (
        "the reward functions are not in this file: combine.combine.parts, weights"
    ),
    "sync_ref_model|ref_model_.*": "the reference is the model that the run began with",
    "top_entropy_quantile": "there is no mask by entropy; losses.clip_cov and losses.kl_cov choose tokens",
    "off_policy_mask_threshold": "rows are as old as one step at most",
    "deepspeed": "a file of its own: files of scale/ (shard_grad_op is ZeRO-2, full_shard ZeRO-3, offload)",
    "fsdp_config|accelerator_config|parallelism_config|ddp_.*": "scale.Scale and the files of scale/",
    "model_init_kwargs.*": "train.train.dtype, train.train.attention",
    "chat_template_kwargs.*": "the tokenizer's own template is used",
    "use_liger_kernel|use_liger_loss|liger_.*": "log-probs are computed in chunks anyway: scorer.Scorer.head_elements",
    "max_tool_calling_iterations|tools.*|environment.*": "one turn, without tools",
    "num_generations_eval": "evaluation is greedy; eval/samples.gin draws",
    "shuffle_dataset|data_seed|dataloader_.*": "the order is a function of SEED, every row once an epoch",
    "disable_dropout": "the model's own dropout is always off",
    "label_smoothing_factor|neftune_noise_alpha|group_by_length|auto_find_batch_size|optim_args|optim_target_modules": (
        "there is no such thing here"
    ),
}
TRL_QUIET = [
    r"output_dir|overwrite_output_dir|run_name|report_to|logging_.*|log_.*|num_completions_to_print|push_to_hub.*|hub_.*",
    r"project|trackio_.*|disable_tqdm|remove_unused_columns|do_train|do_eval|do_predict|local_rank|save_strategy|save_only_model",
    r"save_safetensors|load_best_model_at_end|metric_for_best_model|greater_is_better|resume_from_checkpoint|full_determinism",
    r"ds3_gather_for_generation|per_device_eval_batch_size|eval_on_start|eval_delay|ignore_data_skip|wandb_.*|tf32|seed_.*",
    r"gradient_checkpointing_kwargs.*|torch_compile_.*|include_.*|prediction_loss_only|skip_memory_metrics|use_cpu|no_cuda",
]
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")
WEIGHTS = {"grpo": "sequence_mean", "dr_grpo": "constant_length", "dapo": "token_mean", "bnpo": "token_mean"}
WEIGHTS |= {"cispo": "token_mean", "sapo": "sequence_mean"}


def from_trl(config: Mapping[str, Any], world: int, rows: int | None) -> Draft:
    """A GRPOConfig's fields. Raises ValueError for what TRL refuses, and for a loss that there is not here."""
    key, draft = Reader(config), Draft()
    updates = trl_batches(key, draft, world, rows)
    trl_loss(key, draft)
    trl_advantage(key, draft)
    trl_optimizer(key, draft, updates)
    trl_device(key, draft)
    draft.knobs["train.train.temperature"] = key.positive("temperature", 1.0, zero=False)
    if key("mask_truncated_completions", bool, False):
        draft.knobs["train.train.filters"] = ["@filters.finished"]
    draft.macros["SEED"] = key.count("seed", 42, 0)
    every = updates // draft.macros["STEPS"]
    draft.knobs["loop.Cadence.save_every"] = per_step(key.positive("save_steps", 500, zero=False), updates, every)
    if key("eval_strategy", str, "no") == "steps":
        draft.knobs["loop.Cadence.eval_every"] = per_step(key.positive("eval_steps", 500, zero=False), updates, every)
    else:
        key.taken.add("eval_steps")
    draft.knobs["loop.Cadence.keep_last"] = key.count("save_total_limit", 2)
    draft.includes.append("task/rows.gin")
    draft.note(LEFT, "dataset and reward functions", "not in this file: task/rows.gin and base.gin's verified answers")
    key.rest(draft, TRL_LEFT, TRL_QUIET)
    return draft


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
    longest = key.count("max_completion_length", 256)
    asked = key.count("max_prompt_length", PROMPT_TOKENS)
    draft.macros |= {"STEPS": trl_steps(key, prompts, parts * epochs, rows), "MAX_NEW_TOKENS": longest}
    draft.knobs |= {"train.train.model": "%MODEL", "train.train.eval_problems": 256}
    draft.knobs |= {"train.train.prompts": prompts, "train.train.group_size": group, "train.train.epochs": epochs}
    draft.knobs |= {"train.train.minibatches": parts, "train.train.micro_tokens": device * (asked + longest)}
    draft.knobs["local_sampler.LocalSampler.max_new_tokens"] = "%MAX_NEW_TOKENS"
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
    taus = (key.positive(f"sapo_temperature_{sign}", tau, zero=False) for sign, tau in (("pos", 1.0), ("neg", 1.05)))
    if (level or delta is not None) and kind in ("cispo", "sapo"):
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
    else:
        clipped(draft, level, low, high, delta, "delta")
    weigh(draft, WEIGHTS[kind])
    if kind == "bnpo":
        draft.note(DIFFERS, "loss_type", "bnpo is the mean over each device's own tokens; here over the whole step's")
    if kind in ("dapo", "cispo"):
        draft.note(DIFFERS, "loss_type", f"{kind} divides by the tokens of each optimizer step here, always (trl#6024)")
    beta = key.positive("beta", 0.0, zero=True)
    unbiased = key("use_bias_correction_kl", bool, False)
    penalty(draft, beta, "k3_ratio" if unbiased else "k3")


def clipped(draft: Draft, sequence: bool, low: float, high: float, cap: float | None, name: str) -> None:
    """PPO's clip of a token's ratio or a row's, with a bound for bad tokens where `cap` is one."""
    if sequence:
        token_loss(draft, "sequence_ratio", clip_low=low, clip_high=high)
    elif cap is None:
        token_loss(draft, "clipped_ratio", clip_low=low, clip_high=high)
    elif cap <= 1:
        raise ValueError(f"{name}: got {cap}, wanted more than 1")
    else:
        token_loss(draft, "dual_clip", clip_low=low, clip_high=high, cap=float(cap))


def token_loss(draft: Draft, name: str, **knobs: float) -> None:
    draft.knobs["objective.policy_objective.token_loss"] = f"@losses.{name}"
    draft.knobs |= {f"losses.{name}.{knob}": value for knob, value in knobs.items()}


def weigh(draft: Draft, name: str) -> None:
    draft.knobs["objective.policy_objective.weigh"] = f"@weights.{name}"
    if name == "constant_length":
        draft.knobs["weights.constant_length.max_length"] = "%MAX_NEW_TOKENS"


def penalty(draft: Draft, beta: float, name: str) -> None:
    """The KL to the reference, in the loss."""
    draft.knobs["objective.policy_objective.beta"] = beta
    draft.knobs["objective.policy_objective.kl"] = f"@kl.{name}"
    if beta and name == "k3":
        draft.note(
            DIFFERS,
            "KL",
            "k3 in the loss, as there, weighed as the loss is; its gradient is not the KL's (kl.k3_ratio repairs it)",
        )


def trl_advantage(key: Reader, draft: Draft) -> None:
    """What rewards are divided by."""
    value = key("scale_rewards", (str, bool), "group")
    name = {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value
    if name == "group":
        normalized(draft, 1e-4)
    elif name == "none":
        draft.knobs["credit.outcome.advantage"] = "@advantage.centered"
    elif name == "batch":
        draft.knobs |= {"train.train.credit": "@credit.row_whitened", "credit.row_whitened.credit": "@credit.outcome"}
        draft.knobs |= {"credit.row_whitened.eps": 1e-4, "credit.outcome.advantage": "@advantage.centered"}
        draft.note(DIFFERS, "scale_rewards", "the std of the rewards there (ddof 1), of R - mean here (ddof 0)")
    elif name == "mean":
        draft.knobs["credit.outcome.advantage"] = "@advantage.max_rl"
        draft.note(DIFFERS, "scale_rewards", "(R - mean) / (mean + 1e-4) there; no eps here, and 0 where all are equal")
    else:
        raise ValueError(f"scale_rewards: got {value!r}, wanted group, batch, mean, none, true or false")


def normalized(draft: Draft, eps: float) -> None:
    draft.knobs["credit.outcome.advantage"] = "@advantage.group_normalized"
    draft.knobs |= {"advantage.group_normalized.eps": eps, "advantage.group_normalized.ddof": 1}
    draft.note(
        DIFFERS, "std of advantages", f"eps {eps:g} and ddof 1 as there; a group of equal rewards is exactly 0 here"
    )


OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw")
OPTIMIZERS |= dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit")
SCHEDULES = {"linear": 0.0, "cosine": 0.0, "constant": None, "constant_with_warmup": None}


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
    kind = key("lr_scheduler_type", str, "linear")
    final = key.choice("lr_scheduler_type", "linear", SCHEDULES)
    warm = key.positive("warmup_steps", 0, zero=True)
    share = key.positive("warmup_ratio", 0.0, zero=True)
    first = warm * updates if 0 < warm < 1 else warm or share * updates
    schedule(draft, 0 if kind == "constant" else ceil(first), updates, final)
    if kind == "cosine":
        draft.note(DIFFERS, "lr_scheduler_type", "there is no cosine: linear to 0 over the same steps")
    limit = key.positive("max_grad_norm", 1.0, zero=True)
    draft.knobs["policy.Sharded.max_grad_norm"] = limit or 1e9  # 0 is no clipping there


def adamw(draft: Draft, name: str, **knobs: float) -> None:
    for beta in ("beta1", "beta2"):
        if knobs[beta] >= 1:
            raise ValueError(f"adam {beta}: got {knobs[beta]}, wanted less than 1")
    draft.knobs["policy.Sharded.optimizer"] = f"@optimizer.{name}"
    draft.knobs |= {f"optimizer.{name}.{knob}": float(value) for knob, value in knobs.items()}
    if knobs["weight_decay"]:
        draft.note(DIFFERS, "weight_decay", "on matrices alone here, not on norms and biases")


def schedule(draft: Draft, warmup: int, total: int, final: float | None) -> None:
    name = "constant" if final is None else "linear_decay"
    draft.knobs["policy.Sharded.schedule"] = f"@optimizer.{name}"
    draft.knobs[f"optimizer.{name}.warmup"] = warmup
    if final is not None:
        draft.knobs |= {"optimizer.linear_decay.total": total, "optimizer.linear_decay.final": final}


def trl_device(key: Reader, draft: Draft) -> None:
    """Precision, recomputation, compilation, sharding: files of scale/."""
    half = key("fp16", bool, False)
    if key("bf16", bool, not half) and half:
        raise ValueError("got bf16 and fp16, wanted one of them")
    wanted = {"fp16": half, "bf16": key("bf16", bool, not half), "compiled": key("torch_compile", bool, False)}
    wanted["checkpointed"] = key("gradient_checkpointing", bool, True)
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
            LEFT, "fsdp", "hybrid_shard_zero2: scale/hybrid_shard.gin with scale.Scale.reshard_after_forward=False"
        )
    draft.includes += [f"scale/{name}.gin" for name, there in wanted.items() if there]
    draft.note(DIFFERS, "bf16, fp16", "what trains is kept in float32, gradients are reduced in float32")


# -- NeMo-RL

NEMO_LEFT = {
    r"grpo\.async_grpo\..*": "a step samples, then trains",
    r"grpo\.reward_scaling\..*": "weigh the parts of the reward: combine.combine.weights",
    r"grpo\.max_num_epochs": "STEPS says how long; max_num_steps has to be given",
    r"grpo\.val_(batch_size|at_start|at_end)": "evaluated before and after; local_sampler.LocalSampler.max_rows",
    r"grpo\.batch_multiplier": "dynamic sampling samples `prompts` problems at a time",
    r"grpo\.max_rollout_turns": "one turn",
    r"grpo\.(seq_logprob_error_.*|skip_reference_.*|calculate_advantages_on_gpu|adv_estimator\.minus_baseline)": (
        "there is no such thing here"
    ),
    r"loss_fn\.(use_importance_sampling_correction|truncated_importance_sampling.*)": (
        "sampler and trainer are one module here; the ratio is to the trainer's own log-probs"
    ),
    r"loss_fn\.kl_(input|output)_clamp_value": "x is capped before exp, its value is not",
    r"policy\.generation\.(vllm_.*|colocated\..*|backend|mcore_.*|sglang_.*|stop_token_ids|top_p|top_k)": (
        "the trainer's own module samples here, from the whole distribution, to the tokenizer's and model's ends"
    ),
    r"policy\.megatron_cfg\..*": "FSDP2 and tensor parallelism: the files of scale/",
    r"policy\.(dynamic_batching|sequence_packing)\..*": "rows are sorted by length, cut to the longest: micro_tokens",
    r"policy\.(logprob_(batch|chunk)_size|generation_batch_size|make_sequence_.*)": "train.train.micro_tokens",
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
    nemo_optimizer(key, draft)
    draft.knobs["train.train.old_logp"] = "@algorithm.recomputed"
    draft.macros["SEED"] = key.count("grpo.seed", 42, 0)
    draft.knobs["loop.Cadence.eval_every"] = key.count("grpo.val_period", 10, 0)
    draft.knobs["loop.Cadence.save_every"] = key.count("checkpointing.save_period", 10)
    draft.knobs["loop.Cadence.keep_best"] = key.count("checkpointing.keep_top_k", 3, 0)
    if "OpenMathInstruct-2" in (key.values.get("data.dataset_name"), key.values.get("data.train.dataset_name")):
        draft.includes.append("task/openmath.gin")
        key.taken |= {"data.dataset_name", "data.train.dataset_name"}
        draft.knobs["train.train.eval_problems"] = min(500, key.count("grpo.max_val_samples", 256))
    else:
        draft.includes.append("task/rows.gin")
        draft.knobs["train.train.eval_problems"] = min(256, key.count("grpo.max_val_samples", 256))
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
    draft.knobs |= {"train.train.prompts": prompts, "train.train.group_size": group, "train.train.minibatches": parts}
    draft.knobs |= {"local_sampler.LocalSampler.max_new_tokens": "%MAX_NEW_TOKENS"}
    draft.knobs["train.train.micro_tokens"] = micro * total
    draft.note(
        DIFFERS,
        "policy.max_total_sequence_length",
        f"{total} tokens of prompt and completion there; here {longest} new tokens, and a prompt that leaves no room "
        "for them in the model's positions is refused",
    )
    if key("grpo.use_dynamic_sampling", bool, False):
        draft.knobs["train.train.collect"] = "@collect.dynamic"
        draft.knobs["collect.dynamic.max_gen_batches"] = key.count("grpo.dynamic_sampling_max_gen_batches", 10)
    key.taken.add("grpo.dynamic_sampling_max_gen_batches")
    if key("grpo.overlong_filtering", bool, False):
        draft.knobs["train.train.filters"] = ["@filters.finished"]
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
        draft.knobs["credit.outcome.advantage"] = "@advantage.leave_one_out" if others else "@advantage.centered"
    elif not others:
        normalized(draft, 1e-6)
    else:
        draft.knobs["credit.outcome.advantage"] = "@advantage.leave_one_out_normalized"
        draft.knobs |= {f"advantage.leave_one_out_normalized.{k}": v for k, v in (("eps", 1e-6), ("ddof", 1))}
        draft.note(
            DIFFERS,
            f"{place}normalize_rewards",
            "eps 1e-6 and ddof 1 as there; where the others' std is smaller than the group's, the group's divides: one "
            "good sample among equal ones is not blown up",
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
    for knob, name in (("cpu_offload", "offload"), ("activation_checkpointing", "checkpointed")):
        if key(f"policy.dtensor_cfg.{knob}", bool, False):
            draft.includes.append(f"scale/{name}.gin")
    draft.knobs["scale.Scale.tensor"] = key.count("policy.dtensor_cfg.tensor_parallel_size", 1)
    draft.knobs["train.train.temperature"] = key.positive("policy.generation.temperature", 1.0, zero=False)
    stops = key("policy.generation.stop_strings", list, [])
    draft.knobs["local_sampler.LocalSampler.stop"] = [Text(stop) for stop in stops if stop]
    lora(key, draft)


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
    stages = key("policy.scheduler", list, [])
    warm, odd = 0, []
    for stage in stages:
        name = str(stage.get("name", "")).rpartition(".")[2] if isinstance(stage, Mapping) else str(stage)
        kwargs = stage.get("kwargs", {}) if isinstance(stage, Mapping) else {}
        if name == "LinearLR" and isinstance(kwargs, Mapping) and isinstance(kwargs.get("total_iters"), int):
            warm = max(0, kwargs["total_iters"])
        elif name not in ("ConstantLR", ""):
            odd.append(name)
    if odd:
        draft.note(LEFT, "policy.scheduler", f"{odd}: constant after the warm-up")
    if warm:
        draft.note(
            DIFFERS, "policy.scheduler", f"from its start_factor there; from 1/{warm + 1} to 1 in {warm} updates here"
        )
    schedule(draft, warm, 0, None)
    draft.knobs["policy.Sharded.max_grad_norm"] = key.positive("policy.max_grad_norm", 1.0, zero=True) or 1e9


# -- files in and out


def read(path: Path) -> Mapping[str, Any]:
    """The mapping in a JSON, YAML or Python file. Raises ValueError naming what was got instead."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"got {path}, which cannot be read ({error}), wanted a configuration") from error
    config = parsed(text, path)
    if not isinstance(config, Mapping) or not config:
        raise ValueError(f"{path}: got {type(config).__name__}, wanted keys and values")
    return config


def parsed(text: str, path: Path) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix == ".py":
            return python(text)
        try:
            import yaml
        except ImportError as error:
            raise ValueError(f"got {path} without PyYAML, wanted it (pip install pyyaml), or JSON") from error
        return yaml.safe_load(text)
    except ValueError as error:
        raise ValueError(f"{path}: got {error}, wanted JSON, YAML or Python literals") from error
    except Exception as error:  # YAML's own errors have no common ancestor but this
        raise ValueError(f"{path}: got {' '.join(str(error).split())[:200]}, wanted JSON or YAML") from error


def python(text: str) -> Any:
    """A dict literal, or the keywords of a call, alone or assigned to a name."""
    try:
        body = ast.parse(text).body
        value = next(node.value for node in reversed(body) if isinstance(node, ast.Expr | ast.Assign))
        if isinstance(value, ast.Call):
            return {word.arg: ast.literal_eval(word.value) for word in value.keywords}
        return ast.literal_eval(value)
    except (SyntaxError, StopIteration, RecursionError, TypeError) as error:
        raise ValueError(f"no literals ({error})") from error


def kind_of(config: Mapping[str, Any]) -> str:
    """nemo_rl or trl, by the keys. Raises ValueError when they are neither's."""
    if isinstance(config.get("grpo"), Mapping):
        return "nemo_rl"
    if {"actor_rollout_ref", "algorithm"} & config.keys():
        raise ValueError(
            "got a configuration of verl, wanted NeMo-RL's or TRL's; docs/from_verl.md has the knobs by hand"
        )
    known = {"learning_rate", "num_generations", "per_device_train_batch_size", "loss_type", "max_completion_length"}
    if known & config.keys():
        return "trl"
    got = ", ".join(sorted(map(str, config))[:8])
    raise ValueError(f"got the keys {got}, wanted `grpo` and `policy` (NeMo-RL) or fields of a GRPOConfig (TRL)")


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--kind", choices=("nemo_rl", "trl"), help="whose it is (default: by its keys)")
    parser.add_argument("--world", type=int, default=1, metavar="N", help="TRL: processes of the original (default 1)")
    parser.add_argument("--rows", type=int, metavar="N", help="TRL: training rows, where max_steps is not given")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the gin file (default: standard output)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the gin file; returns the exit code."""
    args = flags().parse_args(argv)
    try:
        if args.world < 1 or (args.rows is not None and args.rows < 1):
            raise ValueError(f"got --world {args.world} --rows {args.rows}, wanted numbers from 1")
        if args.out is not None and args.out.exists():
            raise ValueError(f"--out: got {args.out}, which exists; wanted a free name")
        config = read(args.config)
        kind = args.kind or kind_of(config)
        made: dict[str, Callable[[], Draft]] = {
            "nemo_rl": lambda: from_nemo_rl(config),
            "trl": lambda: from_trl(config, args.world, args.rows),
        }
        draft = made[kind]()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = draft.text(args.config.name)
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text, encoding="utf-8")
    print(*draft.listed(), sep="\n", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
