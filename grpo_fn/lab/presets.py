"""What every preset would have made of a stored step: learning signals side by side, and whose rows moved the weights.

A view is one algorithm's opinion of a step: its objective, with the batch and the totals that its own credit, filters
and marks make of the same rollout. All views look at the same rows, `[B, T]`, and the same scores.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from markupsafe import Markup
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedTokenizerBase

from grpo_fn.algo.credit import ScoredStep, token_advantages
from grpo_fn.algo.objective import Objective, objective_value
from grpo_fn.algo.step import UNMOVED, Algorithm, Experience, learning_rows
from grpo_fn.config import freeze, load_config
from grpo_fn.config.parse import GIN_FOLDER
from grpo_fn.core import prng
from grpo_fn.core.batch import by_group, count
from grpo_fn.core.types import Batch, Gains, Groups, Rollout, Scores, Totals
from grpo_fn.lab import token_page
from grpo_fn.lab.html_page import bars, colored_tokens, html_page, html_section, matrix
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.model import hf
from grpo_fn.shell.policy.functional import FunctionalPolicy
from grpo_fn.trainer.checks.validate import check_parts
from grpo_fn.trainer.model_source import check_fits, copy_checkpoint_weights, locate
from grpo_fn.trainer.prepare import SAMPLING

LARGEST = 2**29  # entries of the table of row gradients
MICRO_TOKENS = 4096  # padded tokens in one forward pass: the logits are dense here
SHOWN = 6  # rollouts on the page, of those that moved the weights most and least and of those that views disagree on
MINE = "this run"


# -- learning signals side by side


class View(NamedTuple):
    """One algorithm's opinion of a step."""

    objective: Objective
    batch: Batch
    totals: Totals


def view(
    algo: Algorithm,
    groups: Groups,
    logp_old: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"],
    logp_teacher: Float[Tensor, "B T"],
    energy: Float[Tensor, "B T"] | None,
    gains: Gains,
    key: Tensor,
    *,
    steps: int,
) -> View:
    """The algorithm's opinion of a scored rollout, as `grpo_step` forms it with one minibatch after `steps` others."""
    rows = {"logp_old": logp_old, "logp_ref": logp_ref, "logp_teacher": logp_teacher, "energy": energy}
    scored = ScoredStep(groups, {}, algo.needs, gains, steps, results=rows)
    batch = learning_rows(scored, token_advantages(scored, algo.credit), algo, own_pass=False, key=key)
    return View(algo.objective, batch, count(batch))


def signals(scores: Scores, views: Mapping[str, View], gains: Gains) -> Float[Tensor, "K B T"]:
    """d objective_k / d logp of every view k, in one vmapped call: the k-th is the gradient of the k-th unit mixture.

    f(w) = sum_k w_k objective_k,   signal_k = grad_logp f(e_k)
    """
    losses = [
        partial(objective_value, v.objective, batch=v.batch, totals=v.totals, gains=gains) for v in views.values()
    ]

    def mixture(scores: Scores, w: Tensor) -> Tensor:
        return sum(share * loss(scores)[0] for share, loss in zip(w, losses, strict=True))

    return vmap(grad(mixture), in_dims=(None, 0))(scores, torch.eye(len(losses)).to(scores.logp)).logp


def cosines(signal: Float[Tensor, "K B T"]) -> Float[Tensor, "K K"]:
    """Cosine similarity of each pair of signals; 0 where one of them is all zero."""
    unit = of_norm_one(signal).flatten(1)
    return unit @ unit.T


def nonzero_share(signal: Float[Tensor, "K B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "K"]:
    """The share of the sampled tokens on which each signal is not zero."""
    return ((signal != 0) & mask).sum((1, 2)).double() / mask.sum().clamp(min=1)


def disagreement(signal: Float[Tensor, "K B T"]) -> Float[Tensor, "B T"]:
    """How far apart the views are on each token: the standard deviation over the views of their signals.

    Each is scaled to norm 1 over the step first: a view that is louder everywhere does not disagree.
    """
    return of_norm_one(signal).std(0, correction=0)


def of_norm_one(signal: Float[Tensor, "K B T"]) -> Float[Tensor, "K B T"]:
    """Each signal divided by its norm over the step, in float64; one that is all zero stays so."""
    flat = signal.flatten(1).double()
    largest = flat.abs().amax(1, keepdim=True)  # first: the squares of small numbers vanish
    flat = flat / torch.where(largest > 0, largest, 1.0)
    norm = flat.norm(dim=1, keepdim=True)
    return (flat / torch.where(norm > 0, norm, 1.0)).reshape(signal.shape)


# -- whose rows weigh in a step


def row_gradients(
    logp: Callable[[Mapping[str, Tensor], Tensor, Tensor], Float[Tensor, "T"]],
    params: Mapping[str, Tensor],
    batch: Batch,
    signal: Float[Tensor, "B T"],
) -> Float[Tensor, "B D"]:
    """The gradient that each row alone sends to `params`, flattened: vmap of grad over rows. They add up to the step's.

        g_b = grad_theta sum_t signal_bt logp_bt(theta)

    `logp(params, tokens [T], mask [T])` is the log-prob of one row, 0 where ~mask.
    """

    def pulled(params: Mapping[str, Tensor], tokens: Tensor, mask: Tensor, signal: Tensor) -> Tensor:
        return (logp(params, tokens, mask) * signal).sum()

    grads = vmap(grad(pulled), in_dims=(None, 0, 0, 0))(dict(params), batch.tokens, batch.mask, signal)
    return torch.cat([g.flatten(1) for g in grads.values()], dim=1)


def influence(gradients: Float[Tensor, "B D"]) -> Float[Tensor, "B"]:
    """g_b . G / |G|^2 with G = sum_b g_b: each row's share of the step along its direction. They add up to 1.

    Negative rows were outvoted. All zero when the step goes nowhere.
    """
    g = gradients.double()
    whole = g.sum(0)
    size = whole @ whole
    return g @ whole / size if size > 0 else torch.zeros(len(g), dtype=g.dtype)


class Noise(NamedTuple):
    """How much a step's direction would change with other prompts."""

    variance: float  # tr Sigma, of the gradient that one group estimates
    signal: float  # |G|^2, unbiased; can come out negative when noise drowns it
    scale: float  # tr Sigma / |G|^2, in groups; inf when the signal is not above 0


def noise_scale(gradients: Float[Tensor, "B D"], group: Int[Tensor, "B"]) -> Noise:
    """The simple gradient noise scale B = tr Sigma / |G|^2 (McCandlish et al. 2018, arXiv:1812.06162, eq. 2.9).

    In groups: the number of prompts at which noise and signal of a step are equally large. Rows of a group share a
    baseline and are no independent samples, so groups are what is counted. With n groups of summed gradients h_p,
    each n h_p estimates G; both figures are the unbiased ones. Raises ValueError for fewer than two groups.
    """
    sums = torch.zeros(int(group.max()) + 1, gradients.shape[1], dtype=torch.float64)
    sums = sums.index_add(0, group, gradients.double())
    n = len(sums)
    if n < 2:
        raise ValueError(f"got {n} group, wanted at least two to compare")
    estimates = n * sums
    mean = estimates.mean(0)
    variance = ((estimates - mean) ** 2).sum() / (n - 1)
    signal = mean @ mean - variance / n
    scale = float(variance / signal) if signal > 0 else float("inf")
    return Noise(float(variance), float(signal), scale)


# -- a stored step under every preset


class RowShares(NamedTuple):
    """What each rollout did to some of the parameters."""

    parameters: int
    influence: Tensor  # [B]
    noise: Noise


class StepViews(NamedTuple):
    """What the lens shows."""

    groups: Groups
    scores: Scores
    own: View
    minibatches: int  # of the run
    names: list[str]
    signal: Tensor  # [K B T], the first one is the run's own
    rows: RowShares | None
    tokenizer: PreTrainedTokenizerBase
    refused: Mapping[str, str]  # presets left out, and why
    weights: str  # that the scores are of; empty: the stored log-probs


def view_step(
    run: Path, step: int, *, policy: str, on_policy: bool, reference: str | None, parameters: str | None
) -> StepViews:
    """Read the step, score it, and show it to every preset. Raises ValueError for what is not there or does not fit."""
    config, groups = stored_groups(run, step)
    presets, refused = fitting_presets([config], [*groups.reward.parts])
    algorithms = {MINE: algorithm([config], None), **presets}
    knobs = load_config([config], []).root.knobs
    temperature, seed = knobs["sampling"].knobs["temperature"], knobs["seed"]
    logp_old = groups.rollout.logp_sampled
    model, tokenizer = load_policy(policy)
    oracle = FunctionalPolicy(model, temperature=temperature)
    scores = Scores(logp_old, torch.zeros_like(logp_old)) if on_policy else token_scores(oracle, groups.rollout)
    energy = token_energies(oracle, groups.rollout)
    logp_ref = logp_old
    if reference is not None:
        logp_ref = token_scores(
            FunctionalPolicy(load_policy(reference)[0], temperature=temperature), groups.rollout
        ).logp
    key = prng.fold_in(prng.key(seed, device="cpu"), SAMPLING)
    views = {
        name: view(algo, groups, logp_old, logp_ref, logp_old, energy, UNMOVED, key, steps=step - 1)
        for name, algo in algorithms.items()
    }
    signal, own = signals(scores, views, UNMOVED), views[MINE]
    rows = None if on_policy else row_shares(oracle, own.batch, signal[0], groups, parameters)
    parts, weights = algorithms[MINE].minibatches, "" if on_policy else policy
    return StepViews(groups, scores, own, parts, [*views], signal, rows, tokenizer, refused, weights)


def stored_groups(run: Path, step: int) -> tuple[str, Groups]:
    """The run's configuration and the groups of a step."""
    config, root = run / "config.gin", run / "rollouts"
    if not config.is_file():
        raise ValueError(f"got {run} without config.gin, wanted a run folder")
    steps = rollout_store.rollout_steps(root) if root.is_dir() else []
    if step not in steps:
        raise ValueError(f"got --step {step}, wanted one whose rollout is stored: {steps or 'none is'}")
    return str(config), rollout_store.groups_from_rows(rollout_store.load_rollouts(root / f"step_{step:06d}.jsonl.gz"))


def preset_names() -> list[str]:
    """The presets there are."""
    return sorted(path.stem for path in (GIN_FOLDER / "algo").glob("*.gin"))


def algorithm(config_files: list[str], preset: str | None) -> Algorithm:
    """The algorithm of a configuration, with a preset laid over it unless that is None."""
    over = [] if preset is None else [f"algo/{preset}.gin"]
    config = load_config([*config_files, *over], [])
    return freeze(config.root.knobs["algorithm"], {})


def fitting_presets(config_files: list[str], parts: list[str]) -> tuple[dict[str, Algorithm], dict[str, str]]:
    """Every preset laid over a configuration; and why not, of those that read other parts of the reward."""
    fitting, refused = {}, {}
    for name in preset_names():
        algo = algorithm(config_files, name)
        try:
            check_parts(algo.credit, parts)
            fitting[name] = algo
        except ValueError as error:
            refused[name] = str(error)
    return fitting, refused


def load_policy(name: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A model in float32 with plain attention, which torch.func can differentiate row by row, and its tokenizer."""
    found = locate(name, warn=partial(print, file=sys.stderr))
    if found.checkpoint is not None:
        check_fits(found.checkpoint, found.source.config())
    folder = found.source.folder()
    model = hf.load_model(folder, dtype=torch.float32, device=torch.device("cpu"), attention="eager").eval()
    if found.checkpoint is not None:
        copy_checkpoint_weights(model, found.checkpoint)
    return model, hf.load_tokenizer(folder)


def rows_at_once(rollout: Rollout | Batch) -> int:
    """How many rows of the rollout have MICRO_TOKENS tokens."""
    return max(1, MICRO_TOKENS // rollout.tokens.shape[1])


@torch.no_grad()
def token_scores(oracle: FunctionalPolicy, rollout: Rollout) -> Scores:
    """The scores of the rollout's tokens, some rows at a time."""
    size = rows_at_once(rollout)
    rows = zip(rollout.tokens.split(size), rollout.mask.split(size), strict=True)
    parts = [oracle.scores(oracle.params, tokens, mask) for tokens, mask in rows]
    return Scores(*(torch.cat(field) for field in zip(*parts, strict=True)))


def token_energies(oracle: FunctionalPolicy, rollout: Rollout) -> Tensor:
    """The energies of the rollout's tokens, some rows at a time."""
    size = rows_at_once(rollout)
    rows = zip(rollout.tokens.split(size), rollout.mask.split(size), strict=True)
    return torch.cat([oracle.energy(tokens, mask) for tokens, mask in rows])


def row_shares(
    oracle: FunctionalPolicy, batch: Batch, signal: Tensor, groups: Groups, pattern: str | None
) -> RowShares:
    """Each rollout's gradient on the chosen parameters, what share of the step it is, and how noisy the step is."""
    chosen = chosen_parameters(oracle.params, pattern or last_layer(oracle.params))
    size = sum(p.numel() for p in chosen.values())
    if size * len(batch.tokens) > LARGEST:
        raise ValueError(
            f"--parameters: got {size:,} parameters for {len(batch.tokens)} rollouts, wanted at most "
            f"{LARGEST // len(batch.tokens):,}: name fewer, such as 'layers.0.input_layernorm'"
        )

    def logp(params: Mapping[str, Tensor], tokens: Tensor, mask: Tensor) -> Tensor:
        whole = {**oracle.params, **params}
        out = torch.func.functional_call(oracle.model, whole, (), {"input_ids": tokens[None], "use_cache": False})
        logprobs = (out.logits[0, :-1].float() / oracle.temperature).log_softmax(-1)
        taken = logprobs.gather(-1, tokens[1:, None])[:, 0]
        return torch.where(mask, nn.functional.pad(taken, (1, 0)), 0.0)

    begins, width = range(0, len(batch.tokens), rows_at_once(batch)), rows_at_once(batch)
    parts = [tree_map_only(Tensor, lambda x, begin=begin: x[begin : begin + width], batch) for begin in begins]
    gradients = torch.cat(
        [row_gradients(logp, chosen, part, s) for part, s in zip(parts, signal.split(width), strict=True)]
    )
    prompts = len(groups.problems)
    group = torch.arange(prompts).repeat_interleave(len(batch.tokens) // prompts)
    return RowShares(size, influence(gradients), noise_scale(gradients, group))


def chosen_parameters(params: Mapping[str, Tensor], pattern: str) -> dict[str, Tensor]:
    """The parameters whose name the pattern is found in. Raises ValueError when there is none."""
    chosen = {name: p for name, p in params.items() if re.search(pattern, name)}
    if not chosen:
        raise ValueError(f"--parameters: got {pattern!r}, wanted part of a name such as {next(iter(params))}")
    return chosen


def last_layer(params: Mapping[str, Tensor]) -> str:
    """A pattern for the parameters of the last transformer block."""
    blocks = [int(found[1]) for name in params if (found := re.search(r"\.(\d+)\.", name))]
    return rf"\.{max(blocks)}\." if blocks else "."


# -- what is shown


def figure_lines(seen: StepViews) -> list[str]:
    """The figures, for a terminal."""
    share, cosine = nonzero_share(seen.signal, seen.groups.rollout.mask), cosines(seen.signal)
    width = max(map(len, seen.names))
    lines = [f"{'':{width}}  tokens moved  cosine with {MINE}"]
    lines += [
        f"{n:{width}}  {float(m):12.3f}  {float(c):.3f}" for n, m, c in zip(seen.names, share, cosine[0], strict=True)
    ]
    lines += [f"{name}: left out, {why}" for name, why in seen.refused.items()]
    if seen.rows is None:
        return lines
    top = seen.rows.influence.argsort(descending=True)[:5].tolist()
    rows = [f"row {b}: {float(seen.rows.influence[b]):+.3f} of the step, reward {row_reward(seen, b):.2f}" for b in top]
    return [*lines, f"{noise_text(seen.rows.noise)} on {seen.rows.parameters:,} parameters", *rows]


def noise_text(noise: Noise) -> str:
    """The noise of a step in words."""
    return f"gradient noise scale {noise.scale:.3g} groups (tr Sigma {noise.variance:.3g}, |G|^2 {noise.signal:.3g})"


def row_reward(seen: StepViews, b: int) -> float:
    """Of row b."""
    return float(seen.groups.reward.value.flatten()[b])


def lens_page(seen: StepViews, title: str) -> str:
    """The figures, the rows that moved the weights, and the tokens on which the presets disagree."""
    sections = [
        html_section(
            "Do they point the same way?",
            "Cosine similarity of the learning signals, d objective / d log-prob of every token, over the whole step. "
            "0 where a signal is all zero.",
            matrix(seen.names, cosines(seen.signal).tolist()),
        ),
        html_section(
            "How much do they move?",
            "The share of the sampled tokens whose signal is not zero: what clips, filters and groups without signal "
            "take away." + "".join(f" {name} is left out: {why}." for name, why in seen.refused.items()),
            bars(seen.names, nonzero_share(seen.signal, seen.groups.rollout.mask).tolist(), digits=3),
        ),
        *influence_sections(seen),
        *disagreement_sections(seen),
    ]
    return html_page(title, sections)


def own_signal_page(seen: StepViews, title: str) -> str:
    """The run's own signal, token by token."""
    batch, objective = seen.own.batch, seen.own.objective
    make = token_page.signal_of_step if seen.weights else token_page.signal_as_sampled
    signal, figures = make(batch, seen.scores, objective, UNMOVED, minibatches=seen.minibatches)
    experience = Experience(seen.groups, by_group(batch.adv, len(seen.groups.problems)), batch)
    by = f"the weights of {seen.weights}" if seen.weights else "the stored log-probs"
    note = f"Sampled in that step, seen with {by}."
    return token_page.signal_page(experience, signal, figures, seen.tokenizer, title=title, note=note)


def influence_sections(seen: StepViews) -> list[str]:
    """Which rollouts moved the weights."""
    if seen.rows is None:
        return []
    order = seen.rows.influence.argsort(descending=True).tolist()
    ends = list(dict.fromkeys([*order[:SHOWN], *order[-SHOWN:]]))
    size = len(order) // len(seen.groups.problems)
    names = [f"row {b}, prompt {b // size}, reward {row_reward(seen, b):.2f}" for b in ends]
    note = (
        f"Each row's share of the gradient of {MINE} along its own direction, on {seen.rows.parameters:,} parameters; "
        f"all rows add up to 1, negative ones were outvoted. The first and the last {SHOWN}. The "
        f"{noise_text(seen.rows.noise)}."
    )
    chart = bars(names, [float(seen.rows.influence[b]) for b in ends], digits=4)
    return [html_section("Which rollouts moved the weights?", note, chart)]


def disagreement_sections(seen: StepViews) -> list[str]:
    """The rollouts on which the presets differ most, each seen by the two that differ most on it."""
    unit_signal = of_norm_one(seen.signal)
    apart = disagreement(seen.signal).masked_fill(~seen.groups.rollout.mask, 0.0)
    sections = []
    for b in apart.sum(-1).argsort(descending=True)[:SHOWN].tolist():
        signal = unit_signal[:, b]  # [K T]
        pair = divmod(int(torch.cdist(signal, signal).argmax()), len(seen.names))
        unit = float(signal.abs().max())
        parts = [Markup("<p><b>{}</b></p>").format(seen.names[i]) + row_tokens(seen, b, signal[i], unit) for i in pair]
        note = (
            f"Reward {row_reward(seen, b):.2f}. Blue, line above: the update pushes the token up; red, line below: "
            "down. Under the pointer is dlogp, negative for up; each preset's signal is scaled to norm 1 over the step."
        )
        sections.append(html_section(f"Where they disagree: row {b}", note, *parts))
    return sections


def row_tokens(seen: StepViews, b: int, values: Tensor, unit: float) -> str:
    """A row's tokens with a preset's signal on them."""
    tokens, mask = seen.groups.rollout.tokens[b], seen.groups.rollout.mask[b]
    end = int(mask.nonzero().max()) + 1
    texts = [seen.tokenizer.decode([token]) for token in tokens[:end].tolist()]
    shown = [float(x) if sampled else None for x, sampled in zip(values[:end], mask[:end], strict=True)]
    return colored_tokens(texts, shown, unit=unit)
