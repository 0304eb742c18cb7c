"""A GRPOConfig of TRL as a gin file (tools/import_config, docs/migrating/from_trl.md)."""

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

from import_draft import (
    DIFFERS,
    LEFT,
    Draft,
    Number,
    Reader,
    Text,
    bounded,
    clipped,
    colocated,
    correct,
    corrected,
    normalized,
    penalty,
    token_loss,
    weigh,
)
from trl_options import TRL_LEFT, TRL_QUIET
from trl_program import per_step, trl_device, trl_evaluation, trl_model, trl_optimizer

PROMPT_TOKENS = 512  # a prompt's length, for the size of micro-batches, where the original does not bound it

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
TEACHERS = {  # options by which TRL's configurations of distillation differ from a GRPOConfig
    *("teacher_model_name_or_path", "teacher_model_revision", "teacher_model_init_kwargs", "use_teacher_server"),
    *("lmbda", "seq_kd", "distillation_objective", "iw_opd_gamma", "iw_opd_epsilon", "loss_top_k", "loss_add_tail"),
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
    if taught := sorted(TEACHERS & config.keys()):
        raise ValueError(
            f"got {', '.join(taught)}, of a DistillationConfig, GKDConfig or IWOPDConfig, wanted a GRPOConfig; "
            "algo/opd.gin and algo/iw_opd.gin with scale/teacher.gin learn from a teacher (docs/migrating/from_trl.md)"
        )
    key, draft = Reader(config), Draft()
    batches = trl_batches(key, draft, world, rows)
    updates = batches.updates
    trl_loss(key, draft, batches, world)
    trl_engine(key, draft)
    trl_advantage(key, draft, batches)
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
    draft.note(
        DIFFERS,
        "rewards of None",
        "a row whose reward is None is left out of the loss here; there it has no advantage, but a KL, an entropy and "
        "its tokens in every denominator",
    )
    key.rest(draft, TRL_LEFT, TRL_QUIET)
    return draft


class Batches(NamedTuple):
    """Optimizer steps of the whole run, and completions there: sampled at a time, of one step, of its micro-batches."""

    updates: int
    sampled: int
    update: int
    micro: int  # of all processes


def trl_batches(key: Reader, draft: Draft, world: int, rows: int | None) -> Batches:
    """Prompts, minibatches and steps.

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
    epochs = key.count("num_iterations", 1)
    if sampled < update and epochs > 1:
        raise ValueError(
            f"num_iterations: got {epochs} with {sampled} completions sampled at a time and {update} an optimizer "
            "step, which has the same ones several times there; wanted whole optimizer steps of what is sampled"
        )
    prompts, wanted = max(sampled, update) // group, max(1, sampled // update)
    parts = max(n for n in range(1, wanted + 1) if prompts % n == 0)
    if parts != wanted:
        draft.note(
            DIFFERS,
            "gradient_accumulation_steps",
            f"{wanted} optimizer steps for {prompts} prompts would split groups; minibatches are whole groups: {parts}",
        )
    elif parts > 1:
        draft.note(DIFFERS, "steps_per_generation", "TRL shuffles completions into its minibatches; whole groups here")
    longest = key.count("max_completion_length", 512)
    asked = key.count("max_prompt_length", PROMPT_TOKENS)
    draft.macros |= {"STEPS": trl_steps(key, prompts, parts * epochs, rows), "MAX_NEW_TOKENS": longest}
    draft.knobs |= {"train.train.model": "%MODEL", "sections.Evaluation.problems": 256}
    draft.knobs |= {
        "step.Algorithm.prompts": prompts,
        "step.Algorithm.group_size": group,
        "step.Algorithm.epochs": epochs,
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
    return Batches(draft.macros["STEPS"] * parts * epochs, sampled, update, at_once)


def trl_steps(key: Reader, prompts: int, updates: int, rows: int | None) -> int:
    """Steps of ours, with so many optimizer steps each."""
    given, epochs = key("max_steps", int, -1), key.positive("num_train_epochs", 3.0, zero=False)
    if given > 0:
        return ceil(given / updates)
    if rows is None:
        raise ValueError(f"max_steps: got none, with num_train_epochs {epochs:g}; wanted --rows, the training rows")
    return ceil(epochs * rows / prompts)


def trl_loss(key: Reader, draft: Draft, batches: Batches, world: int) -> None:
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
    elif delta is not None and 1 < delta < 1 + high:  # there it bounds good tokens alone, and the clip the bad ones
        clipped(draft, level, low, round(delta - 1, 12), round(1 + high, 12), "delta")
    else:
        clipped(draft, level, low, high, delta, "delta")
    weigh(draft, WEIGHTS[kind])
    if kind == "luspo":
        draft.knobs["aggregation.constant_length_over_samples.max_length"] = 1
    if kind == "bnpo":
        draft.note(
            DIFFERS, "loss_type", "bnpo is the mean over each device's own tokens of a micro-batch; here of a step"
        )
    if kind in ("dapo", "cispo", "vespo") and batches.sampled != batches.update:
        draft.note(
            DIFFERS,
            "loss_type",
            f"{kind} divides by the tokens of each optimizer step here; there by those of the generation batch, times "
            f"{batches.update / batches.sampled:g}",
        )
    beta = key.positive("beta", 0.0, zero=True)
    unbiased = key("use_bias_correction_kl", bool, True)
    penalty(draft, beta, "k3_ratio" if unbiased else "k3")
    if beta and unbiased and level:
        draft.note(DIFFERS, "use_bias_correction_kl", "a KL is weighed with its row's ratio there, its token's here")
    bonus = float(key("entropy_coef", Number, 0.0))
    draft.knobs["objective.policy_objective.entropy_bonus"] = bonus
    if bonus and (WEIGHTS[kind] != "token_mean" or batches.update > batches.micro or world > 1):
        draft.note(
            DIFFERS,
            "entropy_coef",
            "a mean over the tokens of each micro-batch there, whatever the loss is; weighed as the loss is here",
        )


def trl_engine(key: Reader, draft: Draft) -> None:
    """vLLM in the processes or on a server, and what its samples are worth to the trainer."""
    weight, mask, name = None, None, "off_policy_mask_threshold"
    if key(name, Number, None) is not None:
        mask = corrected(draft, "off_policy_sequence_mask", delta=key.positive(name, 0.5, zero=True))
    if key("use_vllm", bool, False):
        key.choice("vllm_mode", "colocate", {"server": trl_server, "colocate": trl_colocated})(key, draft)
        weight = trl_weight(key, draft)
        if draft.knobs["objective.policy_objective.token_loss"] == "@weighted_losses.vespo":
            trl_vespo(draft, weight)
            weight = None
        draft.knobs["step.Algorithm.old_logp"] = "@step.from_trainer"  # of the trainer, corrected or not
    correct(draft, weight, mask)


def trl_vespo(draft: Draft, weight: str | None) -> None:
    """VESPO's row weight is to the sampler, so no correction multiplies it. Raises ValueError as TRL does."""
    if weight not in (None, "@importance.truncated_weight", "@importance.masked_weight"):
        raise ValueError("vllm_importance_sampling_mode: got a sequence's with loss_type vespo, wanted a token's")
    bounds = "to the old policy" if weight is None else "times the sampler's bounded weights"
    for knob in [knob for knob in draft.knobs if weight and knob.startswith(f"{weight[1:]}.")]:
        del draft.knobs[knob]
    draft.note(DIFFERS, "loss_type", f"vespo: a row's weight is to the sampler here, without bounds; {bounds} there")


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

    A clip_max that is given as None is no bound. Raises ValueError for a truncation without one, as TRL does.
    """
    place = "vllm_importance_sampling_"
    if not key(f"{place}correction", bool, True):
        return None
    kind, sequence = key.choice(f"{place}mode", "sequence_mask", CORRECTIONS)
    open_end = f"{place}clip_max" in key.values and key.values[f"{place}clip_max"] is None
    cap = key.positive(f"{place}cap", UNBOUNDED if open_end else 3.0, zero=False)
    low, high = key.positive(f"{place}clip_min", 0.0, zero=True), key.positive(f"{place}clip_max", cap, zero=False)
    if kind == "truncated_weight" and high == UNBOUNDED and not low:
        raise ValueError(f"{place}clip_max: got None without a clip_min, wanted one of them")
    return bounded(draft, kind, low, high, f"{place}clip_max", sequence=sequence)


def trl_advantage(key: Reader, draft: Draft, batches: Batches) -> None:
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
        if batches.sampled < batches.update:
            draft.note(DIFFERS, "scale_rewards", "the std of each generation batch there, of the whole step here")
    else:
        raise ValueError(f"scale_rewards: got {value!r}, wanted group, batch, none, true or false")
