"""The YAML of a NeMo-RL GRPO run as a gin file (tools/import_config, docs/migrating/from_nemo_rl.md)."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from import_draft import (
    DIFFERS,
    LARGEST,
    Draft,
    Number,
    Reader,
    Text,
    bounded,
    clipped,
    correct,
    corrected,
    normalized,
    penalty,
    token_loss,
    weigh,
)
from nemo_rl_options import NEMO_LEFT, NEMO_QUIET
from nemo_rl_program import nemo_engine, nemo_optimizer, nemo_policy
from nemo_rl_yaml import interpolated

KL_TYPES = {"k1": "k1_ratio", "k2": "k2", "k3": "k3_ratio"}
ESTIMATORS = ("grpo", "gdpo", "reinforce_plus_plus", "opd")


def from_nemo_rl(config: Mapping[str, Any], rows: int | None = None) -> Draft:
    """The YAML of a NeMo-RL GRPO run. Raises ValueError for what is refused there, and for Megatron alone."""
    if "distillation" in config:
        raise ValueError(
            "distillation: got NeMo-RL's distillation of a teacher's top logits, wanted its GRPO with adv_estimator "
            "opd; algo/opd.gin has the reverse KL of the sampled token (docs/algorithms/distillation.md)"
        )
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
    if beta and sampled:
        draft.note(
            DIFFERS,
            "loss_fn.use_on_policy_kl_approximation",
            "weighed with the ratio to the sampler there, to the old policy here",
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
    if name == "opd":
        nemo_teacher(key, draft)
        return
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


def nemo_teacher(key: Reader, draft: Draft) -> None:
    """On-policy distillation: the gap to a teacher is the advantage, rewards are measured only."""
    place = "on_policy_distillation.teacher_model_by_agent_name."
    named = sorted({key(name, str, "") for name in key.values if name.startswith(place)})
    key.taken.add("on_policy_distillation.enabled")
    if len(named) != 1 or not named[0]:
        raise ValueError(
            f"{place[:-1]}: got {named} with adv_estimator opd, wanted one model; several are sections.Teacher.models "
            "(docs/algorithms/distillation.md)"
        )
    draft.includes.append("scale/teacher.gin")
    draft.macros["TEACHER"] = Text(named[0])
    draft.knobs |= {"step.Algorithm.credit": "@distillation.teacher_gap", "distillation.teacher_gap.coef": 1.0}


def nemo_whitened(draft: Draft, centered: bool) -> None:
    """REINFORCE++, with or without a prompt's mean as the baseline."""
    draft.knobs |= {"step.Algorithm.credit": "@credit.token_whitened", "credit.token_whitened.eps": 1e-8}
    if centered:
        draft.knobs["credit.token_whitened.credit"] = "@credit.outcome"
        draft.knobs["credit.outcome.advantage"] = "@advantage.mean_centered"
    else:
        draft.knobs |= {"credit.token_whitened.credit": "@credit.reward_to_go", "credit.reward_to_go.beta": 0.0}
