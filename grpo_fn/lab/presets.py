"""The learning signals of all presets for a stored step, side by side.

A view is one algorithm's opinion of a step: its objective, with the batch and the totals that its own credit, filters
and marks make of the same rollout. All views look at the same rows, `[B, T]`, and the same scores.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from markupsafe import Markup
from torch import Tensor, nn
from torch.func import grad, vmap
from transformers import PreTrainedTokenizerBase

from grpo_fn.algo.credit import ScoredStep, token_advantages
from grpo_fn.algo.objective import Objective, objective_value
from grpo_fn.algo.step import UNMOVED, Algorithm, Experience, learning_rows
from grpo_fn.config import freeze, load_config
from grpo_fn.config.parse import GIN_FOLDER
from grpo_fn.core import prng
from grpo_fn.core.batch import by_group, count
from grpo_fn.core.types import Batch, Groups, Rollout, Scores, Totals
from grpo_fn.lab import token_page
from grpo_fn.lab.html_page import colored_tokens, html_page, html_section, html_table, matrix
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.model import hf
from grpo_fn.shell.policy.fsdp import FunctionalPolicy
from grpo_fn.trainer.model_source import check_fits, load_located_model, locate
from grpo_fn.trainer.prepare import SAMPLING
from grpo_fn.trainer.validate import check_parts

MICRO_TOKENS = 4096  # padded tokens in one forward pass: the logits are dense here
SHOWN = 6  # rollouts on the page, those that the presets disagree on most
OWN = "this run"


# -- learning signals side by side


class View(NamedTuple):
    """One algorithm's opinion of a step."""

    objective: Objective
    batch: Batch
    totals: Totals


def view(
    algo: Algorithm, groups: Groups, passes: Mapping[str, Float[Tensor, "B T"] | None], key: Tensor, *, steps: int
) -> View:
    """The algorithm's opinion of a scored rollout, as `grpo_step` forms it with one minibatch after `steps` others.

    `passes` are the log-probs and energies of the rows by the names of `credit.PASSES`.
    """
    scored = ScoredStep(groups, {}, algo.needs, UNMOVED, steps, results=dict(passes))
    batch = learning_rows(scored, token_advantages(scored, algo.credit), algo, own_pass=False, key=key)
    return View(algo.objective, batch, count(batch))


def signals(scores: Scores, views: Mapping[str, View]) -> Float[Tensor, "K B T"]:
    """d objective_k / d logp of every view k, in one vmapped call: the k-th is the gradient of the k-th unit mixture.

    f(w) = sum_k w_k objective_k,   signal_k = grad_logp f(e_k)
    """
    losses = [
        partial(objective_value, v.objective, batch=v.batch, totals=v.totals, gains=UNMOVED) for v in views.values()
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
    """The disagreement of the views at each token: the standard deviation of their signals.

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


# -- a stored step under every preset


class StepViews(NamedTuple):
    """The content of the lens."""

    groups: Groups
    scores: Scores
    own: View
    minibatches: int  # of the run
    names: list[str]
    signal: Tensor  # [K B T], the first one is the run's own
    tokenizer: PreTrainedTokenizerBase
    refused: Mapping[str, str]  # presets left out, and why
    weights: str  # that the scores are of; empty: the stored log-probs


def view_step(run: Path, step: int, *, policy: str, on_policy: bool, reference: str | None) -> StepViews:
    """Read the step, score it, and show it to every preset. Raises ValueError for what is not there or does not fit."""
    config, groups = stored_groups(run, step)
    own_algorithm, algorithms, refused = algorithm(config), {}, {}
    for name in preset_names():
        preset = algorithm(config, f"algo/{name}.gin")
        try:
            check_parts(preset.credit, [*groups.reward.parts])
            algorithms[name] = preset
        except ValueError as error:  # it reads other parts of the reward
            refused[name] = str(error)
    knobs = load_config([config], []).root.knobs
    temperature, seed = knobs["sampling"].knobs["temperature"], knobs["seed"]
    logp_old = groups.rollout.logp_sampled
    model, tokenizer = load_policy(policy)
    oracle = FunctionalPolicy(model, temperature=temperature)
    scores = Scores(logp_old, torch.zeros_like(logp_old)) if on_policy else token_scores(oracle, groups.rollout)
    (energy,) = in_parts(groups.rollout, lambda tokens, mask: (oracle.energy(tokens, mask),))
    passes = {"logp_old": logp_old, "logp_ref": logp_old, "logp_teacher": logp_old, "energy": energy}
    if reference is not None:
        frozen = FunctionalPolicy(load_policy(reference)[0], temperature=temperature)
        passes["logp_ref"] = token_scores(frozen, groups.rollout).logp
    key = prng.fold_in(prng.key(seed, device="cpu"), SAMPLING)
    views = {
        name: view(algo, groups, passes, key, steps=step - 1)
        for name, algo in {OWN: own_algorithm, **algorithms}.items()
    }
    signal, own = signals(scores, views), views[OWN]
    weights = "" if on_policy else policy
    return StepViews(groups, scores, own, own_algorithm.minibatches, [*views], signal, tokenizer, refused, weights)


def stored_groups(run: Path, step: int) -> tuple[str, Groups]:
    """The run's configuration and the groups of a step."""
    config, root = run / "config.gin", run / "rollouts"
    if not config.is_file():
        raise ValueError(f"got {run} without config.gin, expected a run folder")
    steps = rollout_store.rollout_steps(root)
    if step not in steps:
        raise ValueError(f"got --step {step}, expected one whose rollout is stored: {steps or 'none is'}")
    return str(config), rollout_store.groups_from_rows(rollout_store.load_rows(root / f"step_{step:06d}.jsonl.gz"))


def preset_names() -> list[str]:
    """The presets there are."""
    return sorted(path.stem for path in (GIN_FOLDER / "algo").glob("*.gin"))


def algorithm(config_file: str, *presets: str) -> Algorithm:
    """The algorithm of a configuration, with presets laid over it."""
    return freeze(load_config([config_file, *presets], []).root.knobs["algorithm"], {})


def load_policy(name: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A model in float32, and its tokenizer."""
    located = locate(name, warn=partial(print, file=sys.stderr))
    if located.checkpoint is not None:
        check_fits(located.checkpoint, located.source.config())
    folder = located.source.folder()
    load = partial(hf.load_model, folder, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa")
    return load_located_model(located, load).eval(), hf.load_tokenizer(folder)


def in_parts(rollout: Rollout, score: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """The score of (tokens, mask) of the rollout, some rows at a time."""
    size = max(1, MICRO_TOKENS // rollout.tokens.shape[1])
    with torch.no_grad():
        parts = [score(*rows) for rows in zip(rollout.tokens.split(size), rollout.mask.split(size), strict=True)]
    return [torch.cat(field) for field in zip(*parts, strict=True)]


def token_scores(oracle: FunctionalPolicy, rollout: Rollout) -> Scores:
    """The scores of the rollout's tokens."""
    return Scores(*in_parts(rollout, partial(oracle.scores, oracle.params)))


# -- what is shown


def figure_lines(views: StepViews) -> list[str]:
    """The figures, for a terminal."""
    share, cosine = nonzero_share(views.signal, views.groups.rollout.mask), cosines(views.signal)
    width = max(map(len, views.names))
    lines = [f"{'':{width}}  tokens moved  cosine with {OWN}"]
    lines += [
        f"{n:{width}}  {float(m):12.3f}  {float(c):.3f}" for n, m, c in zip(views.names, share, cosine[0], strict=True)
    ]
    return lines + [f"{name}: left out, {why}" for name, why in views.refused.items()]


def lens_page(views: StepViews, title: str) -> str:
    """The figures, and the tokens on which the presets disagree."""
    shares = nonzero_share(views.signal, views.groups.rollout.mask).tolist()
    sections = [
        html_section(
            "Do they point the same way?",
            "Cosine similarity of the learning signals, d objective / d log-prob of every token, over the whole step. "
            "0 where a signal is all zero.",
            matrix(views.names, cosines(views.signal).tolist()),
        ),
        html_section(
            "How much do they move?",
            "The share of the sampled tokens whose signal is not zero: what clips, filters and groups without signal "
            "take away." + "".join(f" {name} is left out: {why}." for name, why in views.refused.items()),
            html_table(
                ["preset", "share"], [[name, f"{share:.3f}"] for name, share in zip(views.names, shares, strict=True)]
            ),
        ),
        *disagreement_sections(views),
    ]
    return html_page(title, sections)


def own_signal_page(views: StepViews, title: str) -> str:
    """The run's own signal, token by token."""
    batch, objective = views.own.batch, views.own.objective
    if views.weights:
        signal, figures = token_page.signal_of_step(
            batch, views.scores, objective, UNMOVED, minibatches=views.minibatches
        )
    else:
        signal, figures = token_page.signal_as_sampled(batch, objective, UNMOVED, minibatches=views.minibatches)
    experience = Experience(views.groups, by_group(batch.adv, len(views.groups.problems)), batch)
    by = f"the weights of {views.weights}" if views.weights else "the stored log-probs"
    note = f"Sampled in that step, seen with {by}."
    return token_page.signal_page(experience, signal, figures, views.tokenizer, title=title, note=note)


def disagreement_sections(views: StepViews) -> list[str]:
    """The rollouts on which the presets differ most, each seen by the two that differ most on it."""
    unit_signal = of_norm_one(views.signal)
    apart = disagreement(views.signal).masked_fill(~views.groups.rollout.mask, 0.0)
    sections = []
    for b in apart.sum(-1).argsort(descending=True)[:SHOWN].tolist():
        signal = unit_signal[:, b]  # [K T]
        pair = divmod(int(torch.cdist(signal, signal).argmax()), len(views.names))
        unit = float(signal.abs().max())
        parts = [
            Markup("<p><b>{}</b></p>").format(views.names[i]) + row_tokens(views, b, signal[i], unit) for i in pair
        ]
        reward = float(views.groups.reward.value.flatten()[b])
        note = (
            f"Reward {reward:.2f}. Blue, line above: the update pushes the token up; red, line below: "
            "down. Under the pointer is dlogp, negative for up; each preset's signal is scaled to norm 1 over the step."
        )
        sections.append(html_section(f"Where they disagree: row {b}", note, *parts))
    return sections


def row_tokens(views: StepViews, b: int, values: Tensor, unit: float) -> str:
    """A row's tokens with a preset's signal on them."""
    tokens, mask = views.groups.rollout.tokens[b], views.groups.rollout.mask[b]
    end = int(mask.nonzero().max()) + 1
    texts = [views.tokenizer.decode([token]) for token in tokens[:end].tolist()]
    shown = [float(x) if sampled else None for x, sampled in zip(values[:end], mask[:end], strict=True)]
    return colored_tokens(texts, shown, unit=unit)
