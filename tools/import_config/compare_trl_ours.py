"""Our side of compare_trl.py: the gradients of an imported configuration, and what its notes say differs, undone.

A note of the importer that names a difference of the loss has a *repair* here: TRL's own form of that part. A gradient
that differs counts as named only where the repairs of the notes that were written make it equal.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compare_trl_cases import PLACE, Case
from import_draft import Draft
from torch import Tensor, nn
from torch.func import grad_and_value
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_fn.algo.advantage import group_normalized
from grpo_fn.algo.credit import first_token, outcome, row_whitened
from grpo_fn.algo.kl import k3
from grpo_fn.algo.losses import log_ratio
from grpo_fn.algo.needs import ScoredStep, token_advantages
from grpo_fn.algo.step import UNMOVED, Algorithm, from_trainer, learning_rows
from grpo_fn.algo.weighted_losses import vespo
from grpo_fn.config import freeze, load_config
from grpo_fn.core import masked, prng
from grpo_fn.core.batch import count, outcome_reward
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch, Groups, Rollout, Scores
from grpo_fn.shell.model import hf, tiny_model
from grpo_fn.shell.policy.functional import FunctionalPolicy

PROMPTS, GROUP, LONGEST, FIRST = 8, 4, 8, 100  # FIRST: the token that opens row 0; each row has its own
Grads = dict[str, Tensor]
Update = Mapping[str, Any]  # of TRL: "params", "grads", "micro"
REPAIRS = {  # a repair, and the words of the note that calls for it
    "own rows": "shuffles completions into its minibatches",
    "split groups": "would split groups",
    "unscored rows": "a row whose reward is None",
    "windows": "divides by the tokens of each optimizer step here",
    "device means": "bnpo is the mean over each device's own tokens",
    "batch std": "the std of each generation batch there",
    "row KL": "a KL is weighed with its row's ratio there",
    "entropy means": "entropy_coef: a mean over the tokens of each micro-batch there",
    "adaptive entropy": "controllers.adaptive_entropy holds the entropy at a target",
    "entropy quantile": "there is no mask by entropy",
    "normalised parts": "the reward functions are not in this file",
    "row products": "bounds exp of the sum of a row's log-ratios there",
    "lower bound": "a small weight stays small",
    "vespo weights": "vespo: a row's weight is to the sampler here",
}


def called_for(draft: Draft) -> set[str]:
    """The repairs that the notes of an import call for."""
    text = "\n".join(draft.listed())
    return {name for name, words in REPAIRS.items() if words in text}


def samples(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A small model in float64, and rows of every length with another engine's log-probs and rewards."""
    draw = torch.Generator().manual_seed(0)
    tokenizer = tiny_model.byte_tokenizer(chat=False)
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=259,
        **{"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "max_position_embeddings": 64},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.3},
        **{"bos_token_id": None, "eos_token_id": end, "pad_token_id": end},
    )
    model = Qwen2ForCausalLM(config).double().eval()
    hf.export(model, tokenizer, folder / "model")
    prompts = [f"p{number}:" for number in range(PROMPTS)]
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    start, count = len(prompt_ids[0]), PROMPTS * GROUP
    tokens = torch.full((count, start + LONGEST), end)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for b in range(count):
        length = 2 + b * 5 % (LONGEST - 1)
        ids = [FIRST + b, *torch.randint(0, 256, (length - 1,), generator=draw).tolist()]
        ids = ids if length == LONGEST and b % 3 else [*ids[:-1], end]
        tokens[b, : start + length] = torch.tensor([*prompt_ids[b // GROUP], *ids])
        mask[b, start : start + length] = True
    policy = FunctionalPolicy(model, temperature=1.0)
    exact = scores_under(policy, policy.params, tokens, mask)
    noise = 0.2 * torch.randn(exact.shape, generator=draw, dtype=torch.float64)
    logps = (exact + noise).clamp(max=-1e-3).float().double()  # as another engine may have had them, of float32
    rewards = [round(float(x), 3) for x in torch.rand(count, generator=draw)]
    rewards[: 2 * GROUP] = [1.0, 0.0, 0.0, 1.0, *[0.5] * GROUP]  # in the second group nothing to learn from
    reference = {name: p + 0.05 * torch.randn(p.shape, generator=draw) for name, p in model.state_dict().items()}
    reference["lm_head.weight"] = reference["model.embed_tokens.weight"]
    return model, {
        **{"model": str(folder / "model"), "prompts": prompts, "prompt_ids": prompt_ids, "first_token": FIRST},
        "rows": [
            {"completion": t[m].tolist(), "logps": x[m].tolist()} for t, m, x in zip(tokens, mask, logps, strict=True)
        ],
        **{"tokens": tokens, "mask": mask, "logps": logps, "rewards": rewards},
        "rewards_with_none": [None if b % 5 == 2 else value for b, value in enumerate(rewards)],
        "truncated": torch.stack([row[keep][-1] != end for row, keep in zip(tokens, mask, strict=True)]),
        "reference": {name: p.detach() for name, p in reference.items()},
    }


@dataclass(frozen=True)
class Imported:
    """An imported configuration on the shared samples."""

    case: Case
    algo: Algorithm
    policy: FunctionalPolicy
    groups: Groups
    old: Tensor  # logp_old, [B, T]
    ref: Tensor
    group_rows: int  # rows of a generation batch of TRL
    accumulate: int

    @property
    def updates(self) -> int:
        """Optimizer steps that a step of ours makes."""
        return self.algo.minibatches * self.algo.epochs


def imported(case: Case, draft: Draft, shared: Mapping[str, Any], model: nn.Module, folder: Any) -> Imported:
    """The draft as the program would read it, with the samples of a step."""
    path = folder / "made.gin"
    path.write_text(draft.text("x"), encoding="utf-8")
    given = [f"{macro}=m" for macro in ("MODEL", "DATA") if macro not in draft.macros]
    root = load_config([str(path)], given).root
    algo = freeze(root.knobs["algorithm"], {})
    policy = FunctionalPolicy(model, temperature=draft.knobs["sections.Sampling.temperature"])
    size = algo.prompts * algo.group_size
    tokens, mask, noise = (shared[name][:size] for name in ("tokens", "mask", "logps"))
    start = scores_under(policy, policy.params, tokens, mask)
    rollout = Rollout(
        tokens=tokens,
        mask=mask,
        logp_sampled=torch.where(mask, noise, 0.0) if case.config.get("use_vllm") else start,
        truncated=shared["truncated"][:size],
        text=("",) * size,
    )
    values = shared["rewards_with_none" if case.unscored else "rewards"][:size]
    value = torch.tensor([0.0 if v is None else v for v in values], dtype=torch.float64).view(-1, algo.group_size)
    valid = torch.tensor([v is not None for v in values]).view(-1, algo.group_size)
    problems = tuple(Problem(p, "", "", {}) for p in range(algo.prompts))
    device, accumulate = case.config["per_device_train_batch_size"], case.config["gradient_accumulation_steps"]
    rounds = case.config.get("steps_per_generation", accumulate)
    return Imported(
        case,
        algo,
        policy,
        Groups(problems, rollout, outcome_reward(value, valid, {})),
        start if algo.old_logp is from_trainer else rollout.logp_sampled,
        scores_under(policy, shared["reference"], tokens, mask),
        case.config.get("generation_batch_size", device * rounds),
        accumulate,
    )


def scores_under(policy: FunctionalPolicy, params: Grads, tokens: Tensor, mask: Tensor) -> Tensor:
    """Log-probs, [B, T], without gradients."""
    with torch.no_grad():
        return policy.scores({name: params[name] for name in policy.params}, tokens, mask).logp


def gradients(made: Imported, updates: list[Update], repairs: set[str]) -> Iterator[Grads]:
    """Of each update, at TRL's parameters before it: the gradient of our objective with these repairs."""
    batch = whole_batch(made, repairs)
    parts = made.algo.minibatches
    for number, update in enumerate(updates):
        rows = torch.arange(len(batch.mask)).chunk(parts)[number % parts].chunk(made.accumulate if parts == 1 else 1)
        if repairs & {"own rows", "split groups"} or (repairs and parts == 1):
            rows = [torch.tensor(micro) for micro in update["micro"]]
        mini = taken(batch, torch.cat(rows))
        made.policy.params = {name: update["params"][name] for name in made.policy.params}
        made.policy.grads = {name: torch.zeros_like(p) for name, p in made.policy.params.items()}
        for place, own in enumerate(rows):
            micro = taken(batch, own)
            scores, pullback = made.policy.vjp(micro)
            loss = partial(objective(made, batch, place, repairs), batch=micro, totals=count(mini), gains=UNMOVED)
            pullback(grad_and_value(loss, has_aux=True)(scores)[0])
        yield made.policy.grads


def taken(batch: Batch, rows: Tensor) -> Batch:
    return Batch(*(x[rows] for x in batch))


def whole_batch(made: Imported, repairs: set[str]) -> Batch:
    """The rows of a step with their advantages."""
    algo, groups = made.algo, made.groups
    if "normalised parts" in repairs and made.case.config.get("multi_objective_aggregation") == "normalize_then_sum":
        compare = partial(outcome, advantage=partial(group_normalized, eps=1e-4, ddof=1))
        algo = replace(algo, credit=partial(row_whitened_sample_std, credit=compare))
    size, pieces = made.group_rows // algo.group_size if "batch std" in repairs else len(groups.problems), []
    for first in range(0, len(groups.problems), size):
        piece, rows = (slice(first * n, (first + size) * n) for n in (1, algo.group_size))
        part = Groups(
            groups.problems[piece],
            Rollout(*(x[rows] for x in groups.rollout)),
            outcome_reward(groups.reward.value[piece], groups.reward.valid[piece], {}),
        )
        passes = {"logp_old": made.old[rows], "logp_ref": made.ref[rows]}  # no credit of an import reads an energy
        scored = ScoredStep(part, {}, algo.needs, UNMOVED, 0, results=passes)
        adv = token_advantages(scored, algo.credit)
        batch = learning_rows(scored, adv, algo, own_pass=False, key=prng.key(0, device="cpu"))
        if "unscored rows" in repairs:
            keep = torch.stack([torch.ones_like(part.reward.valid), *(f(part.rollout, adv) for f in algo.filters)])
            lost = ~part.reward.valid.flatten()[:, None]
            mask = part.rollout.mask & keep.all(0).flatten()[:, None]
            batch = batch._replace(mask=mask, adv=torch.where(lost, 0.0, batch.adv))
        pieces.append(batch)
    return Batch(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def row_whitened_sample_std(scored: ScoredStep, *, credit: Any) -> Tensor:
    """TRL's last step of normalize_then_sum: as `credit.row_whitened`, n - 1 in the std and eps 1e-4."""
    valid, n = scored.reward.valid, int(scored.reward.valid.sum())
    plain = row_whitened(scored, credit=credit, eps=0.0)
    std = first_token(credit(scored), scored.mask)[valid].std(correction=0)
    return plain * (std / (std * (n / (n - 1)) ** 0.5 + 1e-4))


def objective(made: Imported, batch: Batch, place: int, repairs: set[str]) -> Callable[..., Any]:
    """The imported objective, with TRL's form of every part that the repairs name."""
    knobs, config = dict(made.algo.objective.keywords), made.case.config
    rounds = made.group_rows // config["per_device_train_batch_size"]
    if "device means" in repairs:
        knobs["loss_aggregation"] = lambda batch, totals: batch.mask / batch.mask.sum().clamp(min=1) / made.accumulate
    if "windows" in repairs:
        first = place // rounds * made.group_rows if rounds < made.accumulate else 0
        tokens = batch.mask[first : first + made.group_rows].sum() * made.accumulate / rounds
        knobs["loss_aggregation"] = lambda batch, totals: batch.mask / tokens
    if "row KL" in repairs:
        knobs["kl"] = row_kl
    low, high = config.get(f"{PLACE}clip_min"), config.get(f"{PLACE}cap", config.get(f"{PLACE}clip_max", 3.0))
    bounds = (-torch.inf if low is None else low, torch.inf if high is None else high)
    kind = config.get(f"{PLACE}mode", "sequence_mask")
    if repairs & {"row products", "lower bound"}:
        own = bounds if "lower bound" in repairs or kind.endswith("mask") else (-torch.inf, bounds[1])
        weight = partial(trl_weight, kind=kind, bounds=own, product="row products" in repairs)
        base = made.algo.objective.keywords["importance_correction"]
        masks = getattr(base, "keywords", {}).get("mask")
        knobs["importance_correction"] = weight if masks is None else partial(product_of, weight=weight, mask=masks)
    if "vespo weights" in repairs:
        corrected = config.get(f"{PLACE}correction", True)
        weight = partial(trl_weight, kind=kind, bounds=bounds, product=True) if corrected else None
        knobs["token_loss"] = partial(trl_vespo, weight=weight, knobs=knobs["token_loss"].keywords)
    share = config.get("top_entropy_quantile", 1.0) if "entropy quantile" in repairs else 1.0
    bonus = knobs["entropy_bonus"]
    by_device = "entropy means" in repairs or (share < 1 and bonus)
    if by_device or "adaptive entropy" in repairs:
        knobs["entropy_bonus"] = 0.0
    knobs["importance_correction"] = partial(outside_selected, correction=knobs["importance_correction"])

    def found(scores: Scores, *, batch: Batch, totals: Any, gains: Any) -> Any:
        chosen = batch.mask
        if share < 1:
            values = scores.entropy.detach()
            least = torch.quantile(values[batch.mask].float(), 1 - share) if batch.mask.any() else 0.0
            chosen = batch.mask & (values >= least)
            batch = batch._replace(selected=~chosen)
        value, seen = made.algo.objective.func(scores, batch=batch, totals=totals, gains=gains, **knobs)
        if by_device and "adaptive entropy" not in repairs:
            mean = torch.where(chosen, scores.entropy, 0.0).sum() / chosen.sum().clamp(min=1)
            value = value - bonus * mean / made.accumulate
        return value, seen

    return found


def outside_selected(logp: Tensor, row: Batch, *, correction: Callable[..., Tensor] | None) -> Tensor:
    """A correction where a token is not selected, else 0."""
    weight = torch.ones_like(logp) if correction is None else correction(logp, row)
    return torch.where(row.selected, 0.0, weight)


def trl_weight(logp: Tensor, row: Batch, *, kind: str, bounds: tuple[float, float], product: bool) -> Tensor:
    """TRL's weight of the sampler: of tokens, or exp of the sum over a row (else its mean); clamped or masked."""
    log_w = log_ratio(row.logp_old, row.logp_sampled, row.mask).detach()
    whole = log_w.sum() if product else masked.mean(log_w, row.mask, dim=-1)
    w = (whole.expand_as(log_w) if kind.startswith("sequence") else log_w).exp()
    if kind.endswith("truncate"):
        return w.clamp(*bounds)
    return torch.where((w >= bounds[0]) & (w <= bounds[1]), w, 0.0)


def product_of(logp: Tensor, row: Batch, *, weight: Any, mask: Any) -> Tensor:
    return torch.where(mask(logp, row) == 0, 0.0, weight(logp, row))


def row_kl(logp: Tensor, row: Batch) -> Tensor:
    """k3 times the row's ratio, exp of the mean log-ratio."""
    mean = masked.mean(log_ratio(logp, row.logp_old, row.mask), row.mask, dim=-1)
    return mean.exp() * k3(logp, row)


def trl_vespo(logp: Tensor, row: Batch, *, weight: Any, knobs: Mapping[str, float]) -> Any:
    """VESPO around the old policy, the sampler's bounded weights of tokens multiplied in."""
    stand_in = row.logp_old
    if weight is not None:
        log_w = weight(logp, row).log().clamp(-18.420680743952367, 20.0)
        stand_in = row.logp_old - torch.where(row.mask, log_w, 0.0)
    return vespo(logp, row._replace(logp_sampled=stand_in), **knobs)


def distance(ours: Grads, theirs: Grads) -> float:
    """|ours - theirs| / |theirs| over all parameters; 0 where both are 0."""
    gaps = [ours[name] - theirs[name] for name in theirs]
    gap, size = (float(torch.cat([x.flatten() for x in values]).norm()) for values in (gaps, theirs.values()))
    return gap / size if size else gap
