"""A step token by token: one HTML file with its own style and script, which opens without a network.

Each sampled token lies on the colour of its learning signal; the figures behind it come up under the pointer and under
the keyboard's focus. What a model wrote is escaped, what cannot be seen (white space, control characters, marks that
turn the writing direction) is drawn, and the page's own policy lets no script run but the one that came with it.
"""

import math
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from grpo_fn.analysis.html.escape import plain, visible
from grpo_fn.analysis.html.token_page_assets import SCRIPT, STYLE
from grpo_fn.analysis.token_report import Row, Shown, Sums, Token, size

LEGEND = (-1.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0)  # of the step's largest
CONTENT = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; base-uri 'none'; form-action 'none'"
NAMES = {"kl": "KL to the reference", "adv": "advantage", "logp": "log-prob", "entropy": "entropy"}
IN_NATS = ("kl", "logp", "entropy")
CLIPS = {"clip_low": "at the lower bound", "clip_high": "at the upper bound"}


class Scale(NamedTuple):
    """What a row is seen beside."""

    token: float  # the largest |dlogp| of the step
    step: float  # sum of |dlogp| over the step
    row: float  # the largest such sum over a row that is shown


def document(shown: Shown, *, title: str, said: str) -> str:
    """The page; `said` is where the figures come from. It can be encoded in UTF-8 whatever the texts hold."""
    scale = Scale(shown.sums.largest, shown.sums.up + shown.sums.down, max(map(finite, shown.rows), default=0.0))
    rows = "\n".join(article(k, row, scale) for k, row in enumerate(shown.rows, 1))
    digest = b64encode(sha256(SCRIPT.encode()).digest()).decode()
    head = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT.format(digest)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{plain(title)}</title><style>{STYLE}</style></head>",
    ]
    body = [
        f'<body><h1>{plain(title)}</h1>\n<p class="said">{plain(said)}</p>',
        sums(shown.sums, len(shown.rows)),
        legend(shown.sums.largest),
        controls(),
        f'<main id="rows">\n{rows}\n</main><div id="tip" role="tooltip" hidden></div>',
        f"<script>{SCRIPT}</script></body></html>\n",
    ]
    return "\n".join([*head, *body])


def sums(sums: Sums, there: int) -> str:
    """What the step adds up to, as cards."""
    kl, entropy = (sums.means.get(name) for name in ("kl", "entropy"))
    cards = [
        ("rows", f"{sums.rows}", f"{there} shown, {sums.rows - sums.learning} left out"),
        ("sampled tokens", f"{sums.sampled:,}", f"{sums.moved:,} with a signal"),
        ("Σ|dlogp|", figure(sums.up + sums.down), f"largest {figure(sums.largest)}"),
        ("pushed up", figure(sums.up), "Σ of dlogp &lt; 0"),
        ("pushed down", figure(sums.down), "Σ of dlogp &gt; 0"),
        ("clipped tokens", f"{sums.clipped:,}", f"{share(sums.clipped, sums.sampled)} of the sampled"),
        ("mean reward", figure(sums.reward), "of what could be scored"),
        ("mean KL", figure(kl), "to the reference, nats"),
        ("mean entropy", figure(entropy), "nats" if entropy is not None else "not among what is stored"),
        *([("not finite", f"{sums.odd:,}", "signals; in no sum here")] if sums.odd else []),
    ]
    lines = [f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in cards]
    return f'<dl class="sums">{"".join(lines)}</dl>'


def legend(largest: float) -> str:
    """The colours and the numbers that they stand for."""
    swatches = [
        f'<span class="t {"u" if x < 0 else "d" if x else "zero"}" style="--s:{abs(x)}">{signed(x * largest)}</span>'
        for x in LEGEND
    ]
    return (
        f'<div class="legend" id="legend"><div class="scale">{"".join(swatches)}</div><p>'
        "dlogp = d objective / d log-prob of a sampled token. "
        '<span class="t u" style="--s:.6">Blue, line above</span>: the update pushes its probability up. '
        '<span class="t d" style="--s:.6">Red, line below</span>: down. The stronger the colour, the larger it is '
        'beside the largest of the step. <span class="t clip">Dotted</span>: clipped. '
        '<span class="t odd">Framed</span>: not finite. <span class="x">Grey</span>: the prompt, or left out of the '
        "loss. Rows come by influence, Σ|dlogp|. Point at a token for its figures, or use the keyboard: Tab goes from "
        "row to row to the strongest token, arrow keys, Home and End go on from there, / to the filter, Esc closes."
        "</p></div>"
    )


def controls() -> str:
    """The filter and the switches; hidden where no script runs."""
    return (
        '<div class="bar" hidden><input type="search" id="filter" aria-label="Filter rows" '
        'placeholder="Filter: words of a prompt, answer or summary">'
        '<label><input type="checkbox" id="group">Group by prompt</label>'
        '<label><input type="checkbox" id="by-row">Colours relative to each row</label>'
        '<output id="found" for="filter"></output></div>'
    )


def article(rank: int, row: Row, scale: Scale) -> str:
    """One sample: its summary line, its prompt, its tokens."""
    signals = [token.signal for token in row.tokens if token.signal is not None]
    strongest = max((x for x in map(abs, signals) if math.isfinite(x)), default=0.0)
    louder = scale.token / strongest if strongest else 1.0
    first = max(range(len(row.tokens)), key=lambda i: size(row.tokens[i].signal or 0.0), default=None)
    spans = "".join(span(i, token, scale.token, first=i == first) for i, token in enumerate(row.tokens))
    influence = f"{row.influence:.6g}".replace("inf", "Infinity")  # as a script reads it
    attributes = (
        f'data-prompt="{row.prompt}" data-influence="{influence}" data-count="{len(row.tokens)}" '
        f'data-sample="{plain(rewarded(row))}"'
    )
    return (
        f'<article class="row" style="--row:{louder:.4g}" {attributes}>'
        f"<header>{summary(rank, row, signals, scale)}</header>"
        f'<div class="prompt">{visible(row.question)}</div>{columns(row.tokens)}<div class="tokens">{spans}</div>'
        "</article>"
    )


def summary(rank: int, row: Row, signals: Sequence[float], scale: Scale) -> str:
    """The row in one line."""
    up, down = math.fsum(-x for x in signals if -math.inf < x < 0), math.fsum(x for x in signals if 0 < x < math.inf)
    clipped = {name: sum(token.figures.get(name, 0.0) > 0 for token in row.tokens) for name in CLIPS}
    means = [
        f"{title} {figure(sum(there) / len(there))}"
        for title, name in (("KL", "kl"), ("entropy", "entropy"))
        if (there := [token.figures[name] for token in row.tokens if name in token.figures])
    ]
    said = [
        f'<span class="who">#{rank} <b>prompt {row.prompt}, sample {row.sample}</b></span>',
        f"<span>reward <b>{plain(rewarded(row))}</b></span>",
        f"<span>advantage <b>{signed(row.adv)}</b></span>",
        f"<span>{weight(up, down, scale.row)}Σ|dlogp| <b>{figure(row.influence)}</b> = {share(up + down, scale.step)} "
        f"of the step (up {figure(up)}, down {figure(down)})</span>",
        f"<span>{len(row.tokens)} tokens, {sum(x != 0 for x in signals)} moved</span>",
        f"<span>clipped {sum(clipped.values())} ({clipped['clip_low']} low, {clipped['clip_high']} high)</span>",
        f"<span>mean {', '.join(means)}</span>" if means else "",
        *(['<span class="out">truncated</span>'] if row.truncated else []),
        *([] if row.learns else ['<span class="out">left out of the loss</span>']),
    ]
    return " ".join(said)


def rewarded(row: Row) -> str:
    """The sample's reward and what it is made of."""
    parts = ", ".join(f"{name} {x:.2f}" for name, x in row.parts.items())
    value = f"{row.reward:.2f}" if row.valid else "none"
    return f"{value} ({parts})" if parts else value


def finite(row: Row) -> float:
    """The row's sum of |dlogp| over those that are finite."""
    return math.fsum(abs(x.signal) for x in row.tokens if x.signal is not None and math.isfinite(x.signal))


def weight(up: float, down: float, longest: float) -> str:
    """The row's influence as a bar: what it pushes up, then what it pushes down; that of the longest row is full."""
    widths = [100 * x / longest if longest else 0.0 for x in (up, down)]
    bars = "".join(f'<i style="width:{w:.1f}%"></i>' for w in widths)
    return f'<span class="weight">{bars}</span>'


def columns(tokens: Sequence[Token]) -> str:
    """The figures of every token that can be pointed at, column by column, for the tooltip."""
    there = [token for token in tokens if token.signal is not None]
    names = list(dict.fromkeys(name for token in there for name in token.figures if name not in CLIPS))
    largest = [("dlogp", [f"{pushed(t.signal)}" for t in there]), ("clipped", [clipped(t) for t in there])]
    rest = [(name, [figure(t.figures.get(name)) for t in there]) for name in names]
    ids = [("token id", [str(t.id) for t in there])]
    return "".join(
        f'<i class="column" hidden data-name="{plain(titled(name))}" data-values="{plain(" ".join(values))}"></i>'
        for name, values in [*largest, *rest, *ids]
        if values
    )


def titled(name: str) -> str:
    """What a diagnostic is called, with its unit."""
    return f"{NAMES.get(name, name)}{', nats' if name in IN_NATS else ''}"


def pushed(signal: float) -> str:
    """The signal and its direction, without a space: no-break spaces stand in."""
    way = "up" if signal < 0 else "down" if signal > 0 else "nowhere" if signal == 0 else "nobody\u00a0knows\u00a0where"
    return f"{signed(signal)},\u00a0pushed\u00a0{way}"


def clipped(token: Token) -> str:
    """Whether the loss cut the token off, and on which side."""
    sides = [said for name, said in CLIPS.items() if token.figures.get(name, 0.0) > 0]
    return (" and ".join(sides) or "no").replace(" ", "\u00a0")


def span(i: int, token: Token, largest: float, *, first: bool) -> str:
    """A token on its colour."""
    text = visible(token.text) if token.text else '<i class="c" data-c="\u2026"></i>'
    if token.special:
        text = f'<span class="special">{text}</span>'
    x = token.signal
    if x is None:
        return f'<span class="t none">{text}</span>'
    kinds = ["t", *(["odd"] if not math.isfinite(x) else ["u"] if x < 0 else ["d"] if x > 0 else [])]
    kinds += ["clip"] if any(token.figures.get(name, 0.0) > 0 for name in CLIPS) else []
    shade = f' style="--s:{min(1.0, abs(x) / largest):.3g}"' if math.isfinite(x) and x and largest else ""
    place = f' data-i="{i + 1}"' + (' tabindex="0" data-first' if first else "")
    return f'<span class="{" ".join(kinds)}"{shade}{place}>{text}</span>'


# -- numbers


def figure(x: float | None) -> str:
    """Three digits of a number; a dash for none."""
    return "–" if x is None else f"{x:.3g}"


def signed(x: float) -> str:
    """Three digits of a number with its sign; zero has none."""
    return "0" if x == 0 else f"{x:+.3g}"


def share(part: float | int, whole: float | int) -> str:
    """As a percentage; of nothing it is 0."""
    return f"{100 * part / whole if whole else 0.0:.1f} %"
