"""A step token by token: one HTML file with its own style and script, which opens without a network.

Each sampled token lies on the colour of its learning signal; the figures behind it come up under the pointer and under
the keyboard's focus. What a model wrote is escaped, what cannot be seen (white space, control characters, marks that
turn the writing direction) is drawn, and the page's own policy lets no script run but the one that came with it.
"""

import math
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from markupsafe import Markup

from grpo_fn.analysis.html.page import escape_visibly, printable, source, template
from grpo_fn.analysis.token_report import ReportRow, Sums, Token, TokenReport, signal_size, turn_spans
from grpo_fn.core.problem import Turn

SCRIPT = source("token_page.js")
TITLES = {"kl": "KL to the reference, nats", "adv": "advantage", "logp": "log-prob, nats", "entropy": "entropy, nats"}
FOLDED = 400  # an observation of more characters is folded when the page opens
CLIPS = {"clip_low": "at the lower bound", "clip_high": "at the upper bound"}


def token_page(shown: TokenReport, *, title: str, note: str) -> str:
    """The page; `note` is where the figures come from. It can be encoded in UTF-8 whatever the texts hold."""
    longest = max(map(finite_influence, shown.rows), default=0.0)
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
    first = max(range(len(row.tokens)), key=lambda i: signal_size(row.tokens[i].signal or 0.0), default=None)
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


def finite_influence(row: ReportRow) -> float:
    """The row's sum of |dlogp| over those that are finite."""
    return math.fsum(abs(x.signal) for x in row.tokens if x.signal is not None and math.isfinite(x.signal))


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
