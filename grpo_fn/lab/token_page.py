"""The learning signal of each sampled token, with the numbers behind it, as plain lists.

The learning signal is dlogp = d objective / d logp of a token, and the objective is minimised: where dlogp is negative
the update pushes the token's probability up, where it is positive down. It is the signal given to the policy, not what
the policy does: the parameters are shared, so a token may well move because of others.
"""

import math
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from markupsafe import Markup
from torch import Tensor
from torch.func import grad_and_value
from transformers import PreTrainedTokenizerBase

from grpo_fn.algo import metrics
from grpo_fn.algo.objective import Objective, objective_value
from grpo_fn.algo.step import Experience
from grpo_fn.core.batch import count
from grpo_fn.core.batch import minibatches as parted
from grpo_fn.core.problem import Turn
from grpo_fn.core.types import Batch, Gains, Scores
from grpo_fn.lab.html_page import escape_visibly, printable, source, template

Decode = Callable[[Sequence[int]], str]
SCRIPT = source("token_page.js")
TITLES = {"kl": "KL to the reference, nats", "adv": "advantage", "logp": "log-prob, nats", "entropy": "entropy, nats"}
FOLDED = 400  # an observation of more characters is folded when the page opens
CLIPS = {"clip_low": "at the lower bound", "clip_high": "at the upper bound"}
PAGE_ROWS = 64
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


def signal_of_step(
    batch: Batch, scores: Scores, objective: Objective, gains: Gains, *, minibatches: int
) -> tuple[Scores, dict[str, Float[Tensor, "B T"]]]:
    """d objective / d scores of each token, with the denominators of its minibatch.

    Beside it the objective's diagnostics of every token, "logp" and "adv" among them.
    """
    signals, figures = [], []
    policies = [Scores(*fields) for fields in zip(*(x.chunk(minibatches) for x in scores), strict=True)]
    for part, part_scores in zip(parted(batch, minibatches), policies, strict=True):
        loss = partial(objective_value, objective, batch=part, totals=count(part), gains=gains)
        signal, (_, diagnostics) = grad_and_value(loss, has_aux=True)(part_scores)
        signals.append(signal)
        named = metrics.of_tokens(part_scores, part, diagnostics)
        figures.append({"logp": part_scores.logp, **named, "adv": part.adv})
    joined = Scores(*(torch.cat(field) for field in zip(*signals, strict=True)))
    return joined, {name: torch.cat([part[name] for part in figures]) for name in figures[0]}


def signal_as_sampled(
    batch: Batch, objective: Objective, gains: Gains, *, minibatches: int
) -> tuple[Scores, dict[str, Float[Tensor, "B T"]]]:
    """`signal_of_step` as the step begins, from the stored log-probs: every ratio is 1, nothing is clipped.

    The policy's entropy is not among what is stored, so there is no diagnostic "entropy".
    """
    stored = Scores(batch.logp_old, torch.zeros_like(batch.logp_old))
    signal, figures = signal_of_step(batch, stored, objective, gains, minibatches=minibatches)
    return signal, {name: x for name, x in figures.items() if name != "entropy"}


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
    """The piece of text that each of ids[start:] adds; the joined pieces are the text.

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


# -- the page


def signal_page(
    experience: Experience,
    signal: Scores,
    diagnostics: Mapping[str, Float[Tensor, "B T"]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    title: str,
    note: str,
) -> str:
    """The page of a step's most influential rows, PAGE_ROWS of them."""
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    shown = token_report(experience, signal, diagnostics, decode, {*tokenizer.all_special_ids}, rows=PAGE_ROWS)
    return token_page(shown, title=title, note=note)


def token_page(shown: TokenReport, *, title: str, note: str) -> str:
    """The page; `note` is where the figures come from. It can be encoded in UTF-8 whatever the texts hold."""
    finite = [
        [abs(t.signal) for t in row.tokens if t.signal is not None and math.isfinite(t.signal)] for row in shown.rows
    ]
    longest = max(map(math.fsum, finite), default=0.0)  # the largest sum of |dlogp| over a row
    return template("token_page.html.j2").render(
        title=printable(title),
        note=printable(note),
        colors=source("colors.css"),
        style=source("token_page.css"),
        script=SCRIPT,
        digest=b64encode(sha256(SCRIPT.encode()).digest()).decode(),
        cards=summary_cards(shown.sums, len(shown.rows)),
        largest=shown.sums.largest,
        rows=[article(row, shown.sums, longest) for row in shown.rows],
        figure=figure,
        signed=signed_number,
        visible=escape_visibly,
    )


def summary_cards(sums: Sums, there: int) -> list[tuple[str, str, str]]:
    """What the step adds up to: (name, value, note)."""
    kl, entropy = (sums.means.get(name) for name in ("kl", "entropy"))
    return [
        ("rows", f"{sums.rows}", f"{there} shown, {sums.rows - sums.learning} left out"),
        ("sampled tokens", f"{sums.sampled:,}", f"{sums.moved:,} with a signal"),
        ("Σ|dlogp|", figure(sums.up + sums.down), f"largest {figure(sums.largest)}"),
        ("pushed up", figure(sums.up), "Σ of dlogp < 0"),
        ("pushed down", figure(sums.down), "Σ of dlogp > 0"),
        ("clipped tokens", f"{sums.clipped:,}", f"{percentage(sums.clipped, sums.sampled)} of the sampled"),
        ("mean reward", figure(sums.reward), "of what could be scored"),
        ("mean KL", figure(kl), "to the reference, nats"),
        ("mean entropy", figure(entropy), "nats" if entropy is not None else "not among what is stored"),
        *([("not finite", f"{sums.odd:,}", "signals; in no sum here")] if sums.odd else []),
    ]


def article(row: ReportRow, sums: Sums, longest: float) -> dict[str, Any]:
    """One sample, as the template shows it; `longest` is the largest sum of |dlogp| over a row that is shown."""
    signals = [token.signal for token in row.tokens if token.signal is not None]
    strongest = max((x for x in map(abs, signals) if math.isfinite(x)), default=0.0)
    sizes = [abs(token.signal or 0.0) for token in row.tokens]
    first = max(range(len(sizes)), key=lambda i: math.inf if math.isnan(sizes[i]) else sizes[i], default=None)
    up, down = math.fsum(-x for x in signals if -math.inf < x < 0), math.fsum(x for x in signals if 0 < x < math.inf)
    means = [
        f"{title} {figure(sum(there) / len(there))}"
        for title, name in (("KL", "kl"), ("entropy", "entropy"))
        if (there := [token.figures[name] for token in row.tokens if name in token.figures])
    ]
    spans = [span(i, token, sums.largest, first=i == first) for i, token in enumerate(row.tokens)]
    return {
        "row": row,
        "louder": f"{sums.largest / strongest if strongest else 1.0:.4g}",
        "influence": f"{row.influence:.6g}".replace("inf", "Infinity"),  # as a script reads it
        "reward": reward_cell(row),
        "up": up,
        "down": down,
        "widths": [f"{100 * x / longest if longest else 0.0:.1f}" for x in (up, down)],
        "share": percentage(up + down, sums.up + sums.down),
        "moved": sum(x != 0 for x in signals),
        "low": sum(token.figures.get("clip_low", 0.0) > 0 for token in row.tokens),
        "high": sum(token.figures.get("clip_high", 0.0) > 0 for token in row.tokens),
        "means": ", ".join(means),
        "columns": tooltip_columns(row.tokens),
        "tokens": spans,
        "turns": [turn_section(turn, spans[wrote], spans[read]) for turn, wrote, read in turn_spans(row)],
    }


def turn_section(turn: Turn, wrote: Sequence[dict[str, Any]], read: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A turn of an episode, as the template shows it: its facts, its tokens, and the observation behind them."""
    calls = f"{turn.calls} tool call{'s' * (turn.calls != 1)}"
    size = f"{len(read)} token{'s' * (len(read) != 1)}" if read else "not read: the episode was over"
    return {
        "reward": "none" if turn.reward is None else signed_number(turn.reward),
        "calls": calls if turn.calls else "",
        "error": printable(turn.error),
        "limit": turn.limit.replace("_", " "),
        "tokens": wrote,
        "observed": f"{f'answer to {calls}' if turn.calls else 'observation'}, {size}",
        "read": read,
        "unread": "" if read else turn.observation,
        "open": len(turn.observation) <= FOLDED,
    }


def reward_cell(row: ReportRow) -> str:
    """The sample's reward and what it is made of."""
    parts = ", ".join(f"{name} {x:.2f}" for name, x in row.parts.items())
    value = f"{row.reward:.2f}" if row.valid else "none"
    return printable(f"{value} ({parts})" if parts else value)


def tooltip_columns(tokens: Sequence[Token]) -> list[tuple[str, list[str]]]:
    """The figures of every token that can be pointed at, column by column, for the tooltip."""
    there = [token for token in tokens if token.signal is not None]
    names = list(dict.fromkeys(name for token in there for name in token.figures if name not in CLIPS))
    found = [("dlogp", [direction_label(t.signal) for t in there]), ("clipped", [clip_label(t) for t in there])]
    found += [(TITLES.get(name, name), [figure(t.figures.get(name)) for t in there]) for name in names]
    found += [("token id", [str(t.id) for t in there])]
    return found if there else []


def direction_label(signal: float) -> str:
    """The signal and its direction, without a space: no-break spaces stand in."""
    way = "up" if signal < 0 else "down" if signal > 0 else "nowhere" if signal == 0 else "not\u00a0a\u00a0number"
    return f"{signed_number(signal)},\u00a0pushed\u00a0{way}"


def clip_label(token: Token) -> str:
    """Whether the loss cut the token off, and on which side."""
    sides = [note for name, note in CLIPS.items() if token.figures.get(name, 0.0) > 0]
    return (" and ".join(sides) or "no").replace(" ", "\u00a0")


def span(i: int, token: Token, largest: float, *, first: bool) -> dict[str, Any]:
    """A token on its colour, as the template shows it."""
    text, x = escape_visibly(token.text) or Markup('<i class="c" data-c="\u2026"></i>'), token.signal
    kinds = [] if x is None else ["odd"] if not math.isfinite(x) else ["u"] if x < 0 else ["d"] if x > 0 else []
    kinds += ["clip"] if x is not None and any(token.figures.get(name, 0.0) > 0 for name in CLIPS) else []
    return {
        "kinds": "t none" if x is None else " ".join(["t", *kinds]),
        "shade": f"{min(1.0, abs(x) / largest):.3g}" if x and math.isfinite(x) and largest else "",
        "place": None if x is None else i + 1,
        "first": first and x is not None,
        "special": token.special,
        "text": text,
    }


# -- numbers


def figure(x: float | None) -> str:
    """Three digits of a number; a dash for none."""
    return "–" if x is None else f"{x:.3g}"


def signed_number(x: float) -> str:
    """Three digits of a number with its sign; zero has none."""
    return "0" if x == 0 else f"{x:+.3g}"


def percentage(part: float | int, whole: float | int) -> str:
    """As a percentage; of nothing it is 0."""
    return f"{100 * part / whole if whole else 0.0:.1f} %"
