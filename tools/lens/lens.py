"""The counterfactual lens behind tools/compare_algorithms.py: figures and pages of a stored step under every preset."""

import argparse
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from lens.row_gradients import Noise, influence, noise_scale, row_gradients
from markupsafe import Markup
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedTokenizerBase

from grpo_fn.algo.step import UNMOVED, Experience
from grpo_fn.analysis import compare_algorithms, token_report
from grpo_fn.analysis.html import page, token_page
from grpo_fn.config import load_config
from grpo_fn.core import prng
from grpo_fn.core.batch import by_group
from grpo_fn.core.types import Batch, Groups, Rollout, Scores
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.model import hf
from grpo_fn.shell.policy.functional import FunctionalPolicy
from grpo_fn.trainer import recording
from grpo_fn.trainer.loop import SAMPLING
from grpo_fn.trainer.model_source import check_fits, copy_checkpoint_weights, locate

LARGEST = 2**29  # entries of the table of row gradients
MICRO_TOKENS = 4096  # padded tokens in one forward pass: the logits are dense here
SIGNAL_ROWS = 64  # on the page of the signal
MINE = "this run"


class Rows(NamedTuple):
    """What each rollout did to some of the parameters."""

    parameters: int
    influence: Tensor  # [B]
    noise: Noise


class Seen(NamedTuple):
    """What the lens shows."""

    groups: Groups
    scores: Scores
    mine: compare_algorithms.View
    names: list[str]
    signal: Tensor  # [K B T], the first one is the run's own
    rows: Rows | None
    tokenizer: PreTrainedTokenizerBase
    refused: Mapping[str, str]  # presets left out, and why


def look(args: argparse.Namespace) -> Seen:
    """Read the step, score it, and ask every preset. Raises ValueError for what is not there or does not fit."""
    config, groups = stored(args.run, args.step)
    fitting, refused = recording.fitting([config], [*groups.reward.parts], energy=True)
    algorithms = {MINE: recording.algorithm([config], None), **fitting}
    knobs = load_config([config], []).root.knobs
    temperature, seed = knobs["sampling"].knobs["temperature"], knobs["seed"]
    logp_old = groups.rollout.logp_sampled
    model, tokenizer = opened(args.policy or str(args.run))
    oracle = FunctionalPolicy(model, temperature=temperature)
    scores = Scores(logp_old, torch.zeros_like(logp_old)) if args.on_policy else scored(oracle, groups.rollout)
    energy = energies(oracle, groups.rollout)
    logp_ref = logp_old
    if args.reference is not None:
        logp_ref = scored(FunctionalPolicy(opened(args.reference)[0], temperature=temperature), groups.rollout).logp
    key = prng.fold_in(prng.key(seed, device="cpu"), SAMPLING)
    views = {
        name: compare_algorithms.view(
            s, groups, logp_old, logp_ref, logp_old, energy, UNMOVED, key, steps=args.step - 1
        )
        for name, s in algorithms.items()
    }
    signal = compare_algorithms.signals(scores, views, UNMOVED)
    rows = None if args.on_policy else moved_by(oracle, views[MINE].batch, signal[0], groups, args.parameters)
    return Seen(groups, scores, views[MINE], list(views), signal, rows, tokenizer, refused)


def stored(run: Path, step: int) -> tuple[str, Groups]:
    """The run's configuration and the groups of a step."""
    config, root = run / "config.gin", run / "rollouts"
    if not config.is_file():
        raise ValueError(f"got {run} without config.gin, wanted a run folder")
    there = rollout_store.rollout_steps(root) if root.is_dir() else []
    if step not in there:
        raise ValueError(f"got --step {step}, wanted one whose rollout is stored: {there or 'none is'}")
    return str(config), rollout_store.groups_from_rows(rollout_store.load_rollouts(root / f"step_{step:06d}.jsonl.gz"))


def opened(name: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A model in float32 with plain attention, which torch.func can differentiate row by row, and its tokenizer."""
    found = locate(name, warn=partial(print, file=sys.stderr))
    if found.checkpoint is not None:
        check_fits(found.checkpoint, found.source.config())
    folder = found.source.folder()
    model = hf.load_model(folder, dtype=torch.float32, device=torch.device("cpu"), attention="eager").eval()
    if found.checkpoint is not None:
        copy_checkpoint_weights(model, found.checkpoint)
    return model, hf.load_tokenizer(folder)


@torch.no_grad()
def scored(oracle: FunctionalPolicy, rollout: Rollout) -> Scores:
    """The scores of the rollout's tokens, some rows at a time."""
    at_once = max(1, MICRO_TOKENS // rollout.tokens.shape[1])
    parts = [
        oracle.scores(oracle.params, tokens, mask)
        for tokens, mask in zip(rollout.tokens.split(at_once), rollout.mask.split(at_once), strict=True)
    ]
    return Scores(*(torch.cat(field) for field in zip(*parts, strict=True)))


def energies(oracle: FunctionalPolicy, rollout: Rollout) -> Tensor:
    """The energies of the rollout's tokens, some rows at a time."""
    at_once = max(1, MICRO_TOKENS // rollout.tokens.shape[1])
    rows = zip(rollout.tokens.split(at_once), rollout.mask.split(at_once), strict=True)
    return torch.cat([oracle.energy(tokens, mask) for tokens, mask in rows])


def moved_by(oracle: FunctionalPolicy, batch: Batch, signal: Tensor, groups: Groups, pattern: str | None) -> Rows:
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
        return torch.where(mask, torch.nn.functional.pad(taken, (1, 0)), 0.0)

    at_once = max(1, MICRO_TOKENS // batch.tokens.shape[1])
    begins = range(0, len(batch.tokens), at_once)
    parts = [tree_map_only(Tensor, lambda x, begin=begin: x[begin : begin + at_once], batch) for begin in begins]
    gradients = torch.cat(
        [row_gradients(logp, chosen, part, s) for part, s in zip(parts, signal.split(at_once), strict=True)]
    )
    prompts = len(groups.problems)
    group = torch.arange(prompts).repeat_interleave(len(batch.tokens) // prompts)
    return Rows(size, influence(gradients), noise_scale(gradients, group))


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


def lines(seen: Seen) -> list[str]:
    """The figures, for a terminal."""
    mask = seen.groups.rollout.mask
    share, cosine = compare_algorithms.nonzero_share(seen.signal, mask), compare_algorithms.cosines(seen.signal)
    width = max(map(len, seen.names))
    said = [f"{'':{width}}  tokens moved  cosine with {MINE}"]
    said += [
        f"{n:{width}}  {float(m):12.3f}  {float(c):.3f}" for n, m, c in zip(seen.names, share, cosine[0], strict=True)
    ]
    said += [f"{name}: left out, {why}" for name, why in seen.refused.items()]
    if seen.rows is None:
        return said
    noise = seen.rows.noise
    said.append(
        f"gradient noise scale {noise.scale:.3g} groups (tr Sigma {noise.variance:.3g}, |G|^2 {noise.signal:.3g}) on "
        f"{seen.rows.parameters:,} parameters"
    )
    top = seen.rows.influence.argsort(descending=True)[:5].tolist()
    said += [f"row {b}: {float(seen.rows.influence[b]):+.3f} of the step, reward {reward(seen, b):.2f}" for b in top]
    return said


def reward(seen: Seen, b: int) -> float:
    """Of row b."""
    return float(seen.groups.reward.value.flatten()[b])


def document(seen: Seen, title: str, show: int) -> str:
    """The page."""
    mask, names = seen.groups.rollout.mask, seen.names
    apart = compare_algorithms.disagreement(seen.signal).masked_fill(~mask, 0.0)
    sections = [
        page.html_section(
            "Do they point the same way?",
            "Cosine similarity of the learning signals, d objective / d log-prob of every token, over the whole step. "
            "0 where a signal is all zero.",
            page.matrix(names, compare_algorithms.cosines(seen.signal).tolist()),
        ),
        page.html_section(
            "How much do they move?",
            "The share of the sampled tokens whose signal is not zero: what clips, filters and groups without signal "
            "take away." + "".join(f" {name} is left out: {why}." for name, why in seen.refused.items()),
            page.bars(names, compare_algorithms.nonzero_share(seen.signal, mask).tolist(), digits=3),
        ),
        *influence_sections(seen, show),
        *disagreement_sections(seen, apart, show),
    ]
    return page.html_page(title, sections)


def signal_document(seen: Seen, title: str, args: argparse.Namespace) -> str:
    """The run's own signal, token by token."""
    view, tokenizer = seen.mine, seen.tokenizer
    signal, figures = token_report.signal_of(view.batch, seen.scores, view.objective, view.totals, UNMOVED)
    if args.on_policy:
        figures.pop("entropy")  # of what is stored it is not known
    experience = Experience(seen.groups, by_group(view.batch.adv, len(seen.groups.problems)), view.batch)
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    found = token_report.token_report(
        experience, signal, figures, decode, set(tokenizer.all_special_ids), rows=SIGNAL_ROWS
    )
    by = "the stored log-probs" if args.on_policy else f"the weights of {args.policy or args.run}"
    return token_page.token_page(found, title=title, note=f"Sampled in that step, seen with {by}.")


def influence_sections(seen: Seen, show: int) -> list[str]:
    """Which rollouts moved the weights."""
    if seen.rows is None:
        return []
    order = seen.rows.influence.argsort(descending=True).tolist()
    ends = list(dict.fromkeys([*order[:show], *order[-show:]]))
    noise = seen.rows.noise
    names = [f"row {b}, prompt {b // size(seen)}, reward {reward(seen, b):.2f}" for b in ends]
    return [
        page.html_section(
            "Which rollouts moved the weights?",
            f"Each row's share of the gradient of {MINE} along its own direction, on {seen.rows.parameters:,} "
            "parameters; all rows add up to 1, negative ones were outvoted. The first and the last "
            f"{show}. Gradient noise scale: {noise.scale:.3g} groups, tr Sigma {noise.variance:.3g}, "
            f"|G|^2 {noise.signal:.3g}.",
            page.bars(names, [float(seen.rows.influence[b]) for b in ends], digits=4),
        )
    ]


def disagreement_sections(seen: Seen, apart: Tensor, show: int) -> list[str]:
    """The rollouts on which the presets differ most, each seen by the two that differ most on it."""
    unit_signal = compare_algorithms.of_norm_one(seen.signal)
    worst = apart.sum(-1).argsort(descending=True)[:show].tolist()
    sections = []
    for b in worst:
        mine = unit_signal[:, b]  # [K T]
        k = int(torch.cdist(mine, mine).argmax())
        pair = divmod(k, len(seen.names))
        unit = float(mine.abs().max())
        parts = [Markup("<p><b>{}</b></p>").format(seen.names[i]) + token_view(seen, b, mine[i], unit) for i in pair]
        said = (
            f"Reward {reward(seen, b):.2f}. Blue, line above: the update pushes the token up; red, line below: down. "
            "Under the pointer is dlogp, negative for up; each preset's signal is scaled to norm 1 over the step."
        )
        sections.append(page.html_section(f"Where they disagree: row {b}", said, *parts))
    return sections


def token_view(seen: Seen, b: int, values: Tensor, unit: float) -> str:
    """A row's tokens with a preset's signal on them."""
    tokens, mask = seen.groups.rollout.tokens[b], seen.groups.rollout.mask[b]
    end = int(mask.nonzero().max()) + 1
    texts = [seen.tokenizer.decode([token]) for token in tokens[:end].tolist()]
    shown = [float(x) if sampled else None for x, sampled in zip(values[:end], mask[:end], strict=True)]
    return page.colored_tokens(texts, shown, unit=unit)


def size(seen: Seen) -> int:
    """Samples of a prompt."""
    return len(seen.groups.rollout.text) // len(seen.groups.problems)
