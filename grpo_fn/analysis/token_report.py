"""What a step teaches each sampled token: the learning signal beside the figures it comes from, as plain lists.

The learning signal is dlogp = d objective / d logp of a token, and the objective is minimised: where dlogp is negative
the update pushes the token's probability up, where it is positive down. It is the signal given to the policy, not what
the policy does: the parameters are shared, so a token may well move because of others.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from einops import repeat
from jaxtyping import Float
from torch import Tensor
from torch.func import grad_and_value

from grpo_fn.algo import metrics
from grpo_fn.algo.objective import Objective, objective_value
from grpo_fn.algo.step import Experience
from grpo_fn.analysis.html.page import diverging_color
from grpo_fn.core.batch import count
from grpo_fn.core.batch import minibatches as parted
from grpo_fn.core.problem import Turn
from grpo_fn.core.types import Batch, Gains, Scores, Totals

Decode = Callable[[Sequence[int]], str]
FRAGMENTS = 8  # tokens that may share one character before they are shown as they are; no character has more bytes


class Token(NamedTuple):
    """One token after the prompt."""

    id: int
    text: str  # empty where the token is a part of the character that a later one ends
    special: bool
    sampled: bool  # by the policy; False in an observation
    signal: float | None  # dlogp; None where the policy sampled nothing, or the loss leaves the row out
    figures: dict[str, float]  # logp, adv and the objective's diagnostics by name; none where there is no signal


class ReportRow(NamedTuple):
    """One sample and what the step made of it."""

    prompt: int  # p
    sample: int  # g
    uid: int
    question: str  # all before the first sampled token, decoded
    tokens: list[Token]  # from the first sampled token to the last
    reward: float
    parts: dict[str, float]
    valid: bool
    truncated: bool
    learns: bool  # False where a filter, or a reward that could not be scored, leaves the row out
    adv: float
    influence: float  # sum |dlogp| over the row; inf where one of them is not finite
    turns: tuple[Turn, ...]  # of an episode; () where the row is none


class Sums(NamedTuple):
    """Over the whole step, rows that are not shown included; sums of signals over the finite ones."""

    rows: int
    learning: int  # rows that the loss does not leave out
    sampled: int  # tokens
    moved: int  # tokens whose signal is not 0
    clipped: int  # tokens
    odd: int  # tokens whose signal is not finite
    up: float  # sum of |dlogp| where it is negative
    down: float  # sum of |dlogp| where it is positive
    largest: float  # |dlogp|
    means: dict[str, float]  # of each diagnostic over the tokens that learn, if there are any
    reward: float | None  # mean of the valid ones, if there are any


class TokenReport(NamedTuple):
    """A step to look at: its rows, most influential first, and what the whole of it adds up to."""

    rows: list[ReportRow]
    sums: Sums


def signal_of(
    batch: Batch, scores: Scores, objective: Objective, totals: Totals, gains: Gains
) -> tuple[Scores, dict[str, Float[Tensor, "B T"]]]:
    """d objective / d scores, and the objective's diagnostics of every token, "logp" and "adv" among them."""
    loss = partial(objective_value, objective, batch=batch, totals=totals, gains=gains)
    signal, (_, diagnostics) = grad_and_value(loss, has_aux=True)(scores)
    figures = metrics.of_tokens(scores, batch, diagnostics)
    return signal, {"logp": scores.logp, **figures, "adv": batch.adv}


def signal_of_step(
    batch: Batch, scores: Scores, objective: Objective, gains: Gains, *, minibatches: int
) -> tuple[Scores, dict[str, Float[Tensor, "B T"]]]:
    """`signal_of` with the denominators that each token had: those of its minibatch."""
    batches = parted(batch, minibatches)
    policies = [Scores(*fields) for fields in zip(*(x.chunk(minibatches) for x in scores), strict=True)]
    signals, seen = zip(
        *(signal_of(b, s, objective, count(b), gains) for b, s in zip(batches, policies, strict=True)), strict=True
    )
    joined = Scores(*(torch.cat(field) for field in zip(*signals, strict=True)))
    return joined, {name: torch.cat([one[name] for one in seen]) for name in seen[0]}


def as_sampled(
    batch: Batch, objective: Objective, gains: Gains, *, minibatches: int
) -> tuple[Scores, dict[str, Float[Tensor, "B T"]]]:
    """`signal_of_step` as the step begins: from the stored log-probs, where logp = logp_old and nothing is clipped yet.

    The policy's entropy is not among what is stored, so there is no diagnostic "entropy".
    """
    scores = Scores(batch.logp_old, torch.zeros_like(batch.logp_old))
    signal, seen = signal_of_step(batch, scores, objective, gains, minibatches=minibatches)
    return signal, {name: x for name, x in seen.items() if name != "entropy"}


def token_report(
    experience: Experience,
    signal: Scores,
    diagnostics: Mapping[str, Float[Tensor, "B T"]],
    decode: Decode,
    special: Collection[int],
    *,
    rows: int,
) -> TokenReport:
    """The `rows` most influential rows of the step, and the sums over all of it.

    `decode` turns token ids into text and keeps special tokens, whose ids are `special`.
    """
    batch = experience.batch
    mask = batch.mask.cpu()
    dlogp = torch.where(mask, signal.logp.detach().cpu().double(), 0.0)
    influence = dlogp.abs().nan_to_num(nan=math.inf, posinf=math.inf).sum(-1)
    order = influence.argsort(descending=True, stable=True)[:rows].tolist()
    seen = {name: x.detach().cpu().double() for name, x in diagnostics.items()}
    return TokenReport(
        [row(experience, b, dlogp, seen, float(influence[b]), decode, special) for b in order],
        sums(experience, dlogp, seen),
    )


def row(
    experience: Experience,
    b: int,
    dlogp: Float[Tensor, "B T"],
    seen: Mapping[str, Float[Tensor, "B T"]],
    influence: float,
    decode: Decode,
    special: Collection[int],
) -> ReportRow:
    """Row b of the step."""
    problems, rollout, reward = experience.groups
    p, g = divmod(b, reward.value.shape[1])
    sampled = rollout.mask[b].nonzero().flatten()
    start, end = int(sampled[0]), int(sampled[-1]) + 1
    ids = rollout.tokens[b, :end].tolist()
    learns = experience.batch.mask[b, start:end].tolist()
    written = rollout.mask[b, start:end].tolist()
    columns = {name: x[b, start:end].tolist() for name, x in seen.items()}
    texts, signals = token_texts(ids, start, decode), dlogp[b, start:end].tolist()
    tokens = []
    for i, (token, text, x) in enumerate(zip(ids[start:], texts, signals, strict=True)):
        figures = {name: column[i] for name, column in columns.items()} if learns[i] else {}
        tokens.append(Token(token, text, token in special, written[i], x if learns[i] else None, figures))
    return ReportRow(
        prompt=p,
        sample=g,
        uid=problems[p].uid,
        question=decode(ids[:start]),
        tokens=tokens,
        reward=float(reward.value[p, g]),
        parts={name: float(x[p, g]) for name, x in reward.parts.items()},
        valid=bool(reward.valid[p, g]),
        truncated=bool(rollout.truncated[b]),
        learns=any(learns),
        adv=float(experience.adv[p, g, start]),  # that of its first sampled token, as `step.sample_advantages` has it
        influence=influence,
        turns=rollout.turns[b] if rollout.turns else (),
    )


def turn_spans(row: ReportRow) -> list[tuple[Turn, slice, slice]]:
    """The turns of an episode, each with the places in `row.tokens` of what was sampled and of what was observed."""
    spans, start = [], 0
    for turn in row.turns:
        end = behind = start + turn.length
        while behind < len(row.tokens) and not row.tokens[behind].sampled:
            behind += 1
        spans.append((turn, slice(start, end), slice(end, behind)))
        start = behind
    return spans


def token_texts(ids: Sequence[int], start: int, decode: Decode) -> list[str]:
    """What each of ids[start:] adds to the text of those before it, so that the pieces joined are the text.

    Decoded with the piece before: alone, many a token loses its space. Bytes that make a character only together are
    shown with the last of them.
    """
    found, before, read = [], max(0, start - 1), start
    for i in range(start, len(ids)):
        known, whole = decode(ids[before:read]), decode(ids[before : i + 1])
        if whole.endswith("\ufffd") and i + 1 - read < FRAGMENTS and i + 1 < len(ids):
            found.append("")
            continue
        new = whole[len(known) :] if whole.startswith(known) else ""  # bytes that fit nothing may share one \ufffd
        found.append(new or decode(ids[read : i + 1]))
        before, read = read, i + 1
    return found


def sums(experience: Experience, dlogp: Float[Tensor, "B T"], seen: Mapping[str, Float[Tensor, "B T"]]) -> Sums:
    """What the step adds up to."""
    mask, reward = experience.batch.mask.cpu(), experience.groups.reward
    finite = torch.where(dlogp.isfinite(), dlogp, 0.0)
    clips = [x for name, x in seen.items() if name.startswith("clip_")]
    clipped = torch.stack(clips).sum(0) > 0 if clips else torch.zeros_like(mask)
    return Sums(
        rows=len(mask),
        learning=int(mask.any(-1).sum()),
        sampled=int(experience.groups.rollout.mask.sum()),
        moved=int((dlogp != 0).sum()),
        clipped=int((clipped & mask).sum()),
        odd=int((~dlogp.isfinite()).sum()),
        up=float(-finite.clamp(max=0).sum()),
        down=float(finite.clamp(min=0).sum()),
        largest=float(finite.abs().max()),
        means={name: float(x[mask].mean()) for name, x in seen.items() if mask.any()},
        reward=float(reward.value[reward.valid].double().mean()) if reward.valid.any() else None,
    )


def strongest_tokens(shown: TokenReport, *, count: int) -> list[dict[str, str]]:
    """The tokens with the largest |dlogp| of the rows shown, for a table; what is not finite comes first."""
    found = [
        (row, i, token) for row in shown.rows for i, token in enumerate(row.tokens) if token.signal not in (None, 0.0)
    ]
    found.sort(key=lambda each: -signal_size(each[2].signal))
    return [
        {
            "token": f"[{token.text}]",
            "pushed": "up" if token.signal < 0 else "down" if token.signal > 0 else "?",
            "dlogp": f"{token.signal:+.3g}",
            **{name: f"{x:.3g}" for name, x in token.figures.items()},
            "reward": f"{row.reward:.2f}",
            "where": f"prompt {row.prompt}, sample {row.sample}, token {i}",
            "before it": "".join(t.text for t in row.tokens[max(0, i - 12) : i]),
        }
        for row, i, token in found[:count]
    ]


def signal_size(signal: float) -> float:
    """|signal|, infinite where it is no number."""
    return math.inf if math.isnan(signal) else abs(signal)


def signal_strip(shown: TokenReport, *, columns: int, cell: int) -> Float[Tensor, "3 h w"]:
    """The signal as a picture: a line for each row shown, a square for each of its first `columns` tokens.

    Blue is pushed up, red down, white neither; the strongest token of the step has the full colour.
    """
    lines = [row.tokens[:columns] for row in shown.rows]
    values = torch.zeros(len(lines), max(len(line) for line in lines))
    unit = shown.sums.largest or 1.0
    for value, line in zip(values, lines, strict=True):
        value[: len(line)] = torch.tensor([-(token.signal or 0.0) / unit for token in line]).nan_to_num(nan=0.0)
    return heat_map(values, cell=cell)


# -- a picture of coloured squares, for TensorBoard


def heat_map(values: Float[Tensor, "H W"], *, cell: int) -> Float[Tensor, "3 h w"]:
    """The numbers as squares of `cell` pixels on their colours, for a picture; channels from 0 to 1."""
    pixels = torch.tensor([[diverging_color(x) for x in row] for row in values.tolist()]) / 255
    return repeat(pixels, "h w c -> c (h i) (w j)", i=cell, j=cell)
