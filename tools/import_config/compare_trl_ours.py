"""Our side of compare_trl.py: the configurations, given samples, and the gradients of an import on them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from importer import Draft
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.utils._pytree import tree_map_only
from transformers import Qwen2Config, Qwen2ForCausalLM

from experiments.tiny import models
from grpo_fn.algo.credit import ScoredStep, token_advantages
from grpo_fn.algo.step import UNMOVED, Algorithm, from_trainer, learning_rows
from grpo_fn.config import freeze, load_config
from grpo_fn.core import prng
from grpo_fn.core.batch import count, outcome_reward
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch, Groups, Rollout
from grpo_fn.shell.model import hf
from grpo_fn.shell.policy.functional import FunctionalPolicy

PROMPTS, GROUP, LONGEST, FIRST = 8, 4, 8, 100  # FIRST: the token that opens row 0; each row has its own
Grads = dict[str, Tensor]
GRIDS = yaml.safe_load(Path(__file__).with_name("compare_trl.yaml").read_text(encoding="utf-8"))
BASE = GRIDS["base"]


class Case(NamedTuple):
    """A configuration, and whether some of its rewards are None."""

    config: dict[str, Any]
    unscored: bool = False

    @property
    def name(self) -> str:
        """What differs from BASE, in a line."""
        own = [f"{key}={value}" for key, value in self.config.items() if BASE.get(key, self) != value]
        return ", ".join([*own, *(["rewards of None"] if self.unscored else [])]) or "as BASE"


def cases_of(grid: dict[str, Any]) -> Iterator[Case]:
    """A case of every combination; what is no list has one value."""
    axes = {key: value if isinstance(value, list) else [value] for key, value in grid.items() if key != "unscored"}
    for values in product(*axes.values()):
        config = BASE | dict(zip(axes, values, strict=True))
        if config["loss_type"] == "cispo":  # whose epsilon_high is the cap itself
            config.setdefault("epsilon_high", 5.0)
        yield Case(config, grid.get("unscored", False))


CASES = [*{case.name: case for grid in GRIDS["grids"] for case in cases_of(grid)}.values()]


def samples(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A small model in float64, and rows of every length with another engine's log-probs and rewards."""
    draw = torch.Generator().manual_seed(0)
    tokenizer = models.byte_tokenizer(chat=False)
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


class Imported(NamedTuple):
    """An imported configuration on the shared samples."""

    algo: Algorithm
    policy: FunctionalPolicy
    batch: Batch  # the rows of a step with their advantages

    @property
    def updates(self) -> int:
        """Optimizer steps that a step of ours makes."""
        return self.algo.minibatches * self.algo.epochs


def imported(case: Case, draft: Draft, shared: Mapping[str, Any], model: nn.Module, folder: Any) -> Imported:
    """The draft as the program would read it, with the samples of a step."""
    path = folder / "made.gin"
    path.write_text(draft.text("x"), encoding="utf-8")
    given = [f"{macro}=m" for macro in ("MODEL", "DATA") if macro not in draft.macros]
    algo = freeze(load_config([str(path)], given).root.knobs["algorithm"], {})
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
    passes = {  # no credit of an import reads an energy
        "logp_old": start if algo.old_logp is from_trainer else rollout.logp_sampled,
        "logp_ref": scores_under(policy, shared["reference"], tokens, mask),
    }
    groups = Groups(problems, rollout, outcome_reward(value, valid, {}))
    scored = ScoredStep(groups, {}, algo.needs, UNMOVED, 0, results=passes)
    adv = token_advantages(scored, algo.credit)
    batch = learning_rows(scored, adv, algo, own_pass=False, key=prng.key(0, device="cpu"))
    return Imported(algo, policy, batch)


def scores_under(policy: FunctionalPolicy, params: Grads, tokens: Tensor, mask: Tensor) -> Tensor:
    """Log-probs, [B, T], without gradients."""
    with torch.no_grad():
        return policy.scores({name: params[name] for name in policy.params}, tokens, mask).logp


def gradients(made: Imported, updates: Sequence[Mapping[str, Any]]) -> Iterator[Grads]:
    """Of each update, at TRL's parameters before it: the gradient of our objective."""
    parts = made.algo.minibatches
    for number, update in enumerate(updates):
        rows = torch.arange(len(made.batch.mask)).chunk(parts)[number % parts]
        batch = tree_map_only(Tensor, lambda x, rows=rows: x[rows], made.batch)
        made.policy.params = {name: update["params"][name] for name in made.policy.params}
        made.policy.grads = {name: torch.zeros_like(p) for name, p in made.policy.params.items()}
        scores, pullback = made.policy.vjp(batch)
        loss = partial(made.algo.objective, batch=batch, totals=count(batch), gains=UNMOVED)
        pullback(grad_and_value(loss, has_aux=True)(scores)[0])
        yield made.policy.grads


def distance(ours: Grads, theirs: Grads) -> float:
    """|ours - theirs| / |theirs| over all parameters; 0 where both are 0."""
    gaps = [ours[name] - theirs[name] for name in theirs]
    gap, size = (float(torch.cat([x.flatten() for x in values]).norm()) for values in (gaps, theirs.values()))
    return gap / size if size else gap
